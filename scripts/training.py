"""Training steps of the usual models, with gradients and AdamW, in the usual parallel layouts.

Only the weights, what the optimizer keeps of them, and the batch are annotated: nothing is said of activations. A
`Model` says what its batch's dimensions mean and how Megatron would split its weights ("tensor"); each name in
`LAYOUTS` is a way to place that on meshes, and "weights" is a further dimension of each weight, chosen by its size
or place, as fully sharded data parallelism does it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from workloads import Dims, Layout, Workload, conv, dims, f32, graph_loss, i32, norm

Tree = Any
Loss = Callable[..., jax.Array]

OPTIMIZER = optax.adamw(1e-3, weight_decay=0.01)
_SHARDS = 8
"""By what a dimension of a weight must divide to be split on every mesh."""


@dataclass(frozen=True)
class Model:
    """A loss of (weights, *batch), the shapes of both, and the meanings of their dimensions."""

    name: str
    loss: Loss
    weights: Tree
    tensor: Tree
    batch: tuple[jax.ShapeDtypeStruct, ...]
    batch_spec: tuple[Dims, ...]


def train(loss: Loss) -> Callable[..., tuple[Tree, jax.Array]]:
    """A step of AdamW: (state, *batch) -> (state, loss)."""

    def step(state: Tree, *batch: jax.Array) -> tuple[Tree, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(state["weights"], *batch)
        updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["weights"])
        return {"weights": optax.apply_updates(state["weights"], updates), "optimizer": optimizer}, value

    return step


# --- layouts ----------------------------------------------------------------------------------------------------------


def _data(*meanings: str) -> Mapping[str, Layout]:
    """All axes of a mesh for the batch and for each of the other meanings."""
    axes = {"8": ("a",), "2x4": ("a", "b"), "2x2x2": ("a", "b", "c")}
    return {name: dict.fromkeys(("batch", *meanings), found) for name, found in axes.items()}


_TENSOR: Mapping[str, Layout] = {
    "8": {"tensor": ("a",)},
    "2x4": {"batch": ("a",), "tensor": ("b",)},
    "2x2x2": {"batch": ("a",), "tensor": ("b", "c")},
}
_BOTH: Mapping[str, Layout] = {
    "2x4": {"batch": ("a",), "weights": ("a",), "tensor": ("b",)},
    "2x2x2": {"batch": ("a", "b"), "weights": ("a", "b"), "tensor": ("c",)},
}
_SEQUENCE: Mapping[str, Layout] = {
    "8": {"sequence": ("a",)},
    "2x4": {"batch": ("a",), "sequence": ("b",)},
    "2x2x2": {"batch": ("a",), "sequence": ("b", "c")},
}
_EXPERT: Mapping[str, Layout] = {
    "8": {"batch": ("a",), "tensor": ("a",)},
    "2x4": {"batch": ("a", "b"), "tensor": ("b",)},
    "2x2x2": {"batch": ("a", "b", "c"), "tensor": ("b", "c")},
}

LAYOUTS: Mapping[str, tuple[Mapping[str, Layout], str]] = {
    "data": (_data(), ""),
    "fsdp": (_data("weights"), "largest"),
    "fsdp-first": (_data("weights"), "first"),
    "fsdp-last": (_data("weights"), "last"),
    "megatron": (_TENSOR, ""),
    "megatron+fsdp": (_BOTH, "largest"),
    "sequence": (_SEQUENCE, ""),
    "expert": (_EXPERT, ""),
}
"""By name: the mesh axes of each meaning per mesh, and which further dimension of a weight is split over "weights"."""


def spread(weights: Tree, spec: Tree, which: str) -> Tree:
    """Adds "weights" to the largest, first or last dimension of each weight that divides and has no meaning yet."""

    def added(leaf: jax.ShapeDtypeStruct, given: Dims) -> Dims:
        free = [i for i, n in enumerate(leaf.shape) if given[i] is None and n % _SHARDS == 0]
        if not free:
            return given
        taken = {"largest": max(free, key=lambda i: leaf.shape[i]), "first": free[0], "last": free[-1]}[which]
        return dims(*("weights" if i == taken else meaning for i, meaning in enumerate(given)))

    return jax.tree.map(added, weights, spec)


def workload(model: Model, how: str) -> Workload:
    """A model's training step in one of `LAYOUTS`."""
    layouts, which = LAYOUTS[how]
    spec = spread(model.weights, model.tensor, which) if which else model.tensor
    optimizer = jax.eval_shape(OPTIMIZER.init, model.weights)
    kept = optax.tree_utils.tree_map_params(
        OPTIMIZER, lambda _, given: given, optimizer, spec, transform_non_params=lambda _: dims()
    )
    state, state_spec = {"weights": model.weights, "optimizer": optimizer}, {"weights": spec, "optimizer": kept}
    return Workload(
        f"{model.name}/{how}",
        lambda *args, keep: model.loss(*args),
        (state, *model.batch),
        (state_spec, *model.batch_spec),
        (state_spec, dims()),
        layouts,
        trained=train,
        donated=(0,),
    )


def nowhere(weights: Tree) -> Tree:
    return jax.tree.map(lambda leaf: dims(*(None,) * len(leaf.shape)), weights)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Per element of `labels`."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)


# --- transformers -----------------------------------------------------------------------------------------------------

HEADS, VOCABULARY, SEQUENCE, BATCH = 8, 512, 64, 16
TOKENS = i32(BATCH, SEQUENCE)
TOKENS_SPEC = dims("batch", "sequence")


def layer_norm(x: jax.Array, weights: Tree) -> jax.Array:
    mean, variance = jnp.mean(x, axis=-1, keepdims=True), jnp.var(x, axis=-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * weights["scale"] + weights["bias"]


def mixed(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | float = 0.0) -> jax.Array:
    """Attention of heads: queries [b, s, h, k], keys and values [b, t, h, k]; bias [.., h, s, t] or [s, t]."""
    scores = jnp.einsum("bshk,bthk->bhst", q, k) / math.sqrt(q.shape[-1]) + bias
    return jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(scores), v)


def causal(length: int) -> jax.Array:
    return jnp.where(jnp.tril(jnp.ones((length, length), bool)), 0.0, -1e9)


def fused_attention(x: jax.Array, layer: Tree, bias: jax.Array | float) -> jax.Array:
    """Attention whose queries, keys and values come from one product."""
    q, k, v = jnp.moveaxis(jnp.einsum("bsd,dnhk->bsnhk", x, layer["qkv"]), 2, 0)
    return jnp.einsum("bshk,hkd->bsd", mixed(q, k, v, bias), layer["out"])


def biased_feed_forward(x: jax.Array, layer: Tree) -> jax.Array:
    return jax.nn.gelu(x @ layer["up"] + layer["up_bias"]) @ layer["down"] + layer["down_bias"]


def fused_block(x: jax.Array, layer: Tree, bias: jax.Array | float) -> jax.Array:
    x = x + fused_attention(layer_norm(x, layer["norm1"]), layer, bias)
    return x + biased_feed_forward(layer_norm(x, layer["norm2"]), layer)


def norm_weights(d: int) -> Tree:
    return {"scale": f32(d), "bias": f32(d)}


def fused_layer(d: int, heads: int) -> tuple[Tree, Tree]:
    """A layer's weights, and Megatron's layout of them."""
    weights = {
        "norm1": norm_weights(d),
        "norm2": norm_weights(d),
        "qkv": f32(d, 3, heads, d // heads),
        "out": f32(heads, d // heads, d),
        "up": f32(d, 4 * d),
        "up_bias": f32(4 * d),
        "down": f32(4 * d, d),
        "down_bias": f32(d),
    }
    spec = nowhere(weights) | {
        "qkv": dims(None, None, "tensor", None),
        "out": dims("tensor", None, None),
        "up": dims(None, "tensor"),
        "up_bias": dims("tensor"),
        "down": dims("tensor", None),
    }
    return weights, spec


def gpt_loss(weights: Tree, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """Learned positions; the embedding is also the last layer."""
    x = weights["embedding"][tokens] + weights["position"]
    for layer in weights["layers"]:
        x = fused_block(x, layer, causal(x.shape[1]))
    logits = layer_norm(x, weights["norm"]) @ weights["embedding"].T
    return jnp.mean(cross_entropy(logits, targets))


def gpt(scale: int = 1, layers: int = 2) -> Model:
    d = 128 * scale
    layer, spec = fused_layer(d, HEADS)
    weights = {
        "embedding": f32(VOCABULARY, d),
        "position": f32(SEQUENCE, d),
        "layers": [layer] * layers,
        "norm": norm_weights(d),
    }
    tensor = nowhere(weights) | {"embedding": dims("tensor", None), "layers": [spec] * layers}
    return Model("gpt", gpt_loss, weights, tensor, (TOKENS, TOKENS), (TOKENS_SPEC, TOKENS_SPEC))


def bert_loss(weights: Tree, tokens: jax.Array, masked: jax.Array, segments: jax.Array) -> jax.Array:
    """Words that are masked out are guessed from those on both sides, in bfloat16."""
    seen = jnp.where(masked > 0, 1, tokens)
    x = weights["embedding"][seen] + weights["position"] + weights["segment"][segments]
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights["layers"])
    x = layer_norm(x, weights["norm"]).astype(jnp.bfloat16)
    for layer in low:
        x = fused_block(x, layer, 0.0)
    hidden = layer_norm(jax.nn.gelu(x.astype(jnp.float32) @ weights["guess"]), weights["guess_norm"])
    losses = cross_entropy(hidden @ weights["embedding"].T, tokens) * masked
    return jnp.sum(losses) / (jnp.sum(masked) + 1.0)


def bert(scale: int = 1, layers: int = 2) -> Model:
    d = 128 * scale
    layer, spec = fused_layer(d, HEADS)
    weights = {
        "embedding": f32(VOCABULARY, d),
        "position": f32(SEQUENCE, d),
        "segment": f32(16, d),
        "norm": norm_weights(d),
        "layers": [layer] * layers,
        "guess": f32(d, d),
        "guess_norm": norm_weights(d),
    }
    tensor = nowhere(weights) | {"embedding": dims("tensor", None), "layers": [spec] * layers}
    return Model("bert", bert_loss, weights, tensor, (TOKENS, TOKENS, TOKENS), (TOKENS_SPEC,) * 3)


def rotated(x: jax.Array) -> jax.Array:
    """Rotary positions of [b, s, h, k]."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] * 10000.0 ** (-jnp.arange(half) / half)
    one, other = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [one * jnp.cos(angle) - other * jnp.sin(angle), one * jnp.sin(angle) + other * jnp.cos(angle)], axis=-1
    )


def projected(x: jax.Array, weight: jax.Array) -> jax.Array:
    """[b, s, d] into heads."""
    return jnp.einsum("bsd,dhk->bshk", x, weight)


def gated_feed_forward(x: jax.Array, layer: Tree) -> jax.Array:
    return (jax.nn.silu(x @ layer["gate"]) * (x @ layer["up"])) @ layer["down"]


def rotary_block(x: jax.Array, layer: Tree) -> jax.Array:
    y = norm(x, layer["norm1"])
    q, k, v = (projected(y, layer[name]) for name in ("q", "k", "v"))
    x = x + jnp.einsum("bshk,hkd->bsd", mixed(rotated(q), rotated(k), v, causal(x.shape[1])), layer["out"])
    return x + gated_feed_forward(norm(x, layer["norm2"]), layer)


def rotary_loss(weights: Tree, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    x = weights["embedding"][tokens]
    for layer in weights["layers"]:
        x = rotary_block(x, layer)
    return jnp.mean(cross_entropy(norm(x, weights["norm"]) @ weights["unembedding"], targets))


def heads_weights(d: int, heads: int) -> tuple[Tree, Tree]:
    """Separate weights of queries, keys and values, and Megatron's layout of them."""
    weights = {name: f32(d, heads, d // heads) for name in ("q", "k", "v")} | {"out": f32(heads, d // heads, d)}
    spec = {name: dims(None, "tensor", None) for name in ("q", "k", "v")} | {"out": dims("tensor", None, None)}
    return weights, spec


def gated_layer(d: int, heads: int) -> tuple[Tree, Tree]:
    attention, attention_spec = heads_weights(d, heads)
    more = {"norm1": f32(d), "norm2": f32(d), "gate": f32(d, 3 * d), "up": f32(d, 3 * d), "down": f32(3 * d, d)}
    split = {"gate": dims(None, "tensor"), "up": dims(None, "tensor"), "down": dims("tensor", None)}
    return attention | more, attention_spec | nowhere(more) | split


def rotary(scale: int = 1, layers: int = 2) -> Model:
    d = 128 * scale
    layer, spec = gated_layer(d, HEADS)
    weights = {
        "embedding": f32(VOCABULARY, d),
        "unembedding": f32(d, VOCABULARY),
        "layers": [layer] * layers,
        "norm": f32(d),
    }
    tensor = nowhere(weights) | {
        "embedding": dims("tensor", None),
        "unembedding": dims(None, "tensor"),
        "layers": [spec] * layers,
    }
    return Model("rotary", rotary_loss, weights, tensor, (TOKENS, TOKENS), (TOKENS_SPEC, TOKENS_SPEC))


def relative_bias(table: jax.Array, length: int, both_sides: bool) -> jax.Array:
    """[h, s, t] from a table [buckets, h] by the distance of positions."""
    distance = jnp.arange(length)[None, :] - jnp.arange(length)[:, None]
    bucket = jnp.clip(distance + table.shape[0] // 2, 0, table.shape[0] - 1)
    bias = jnp.moveaxis(table[bucket], -1, 0)
    return bias if both_sides else bias + causal(length)


def t5_attention(x: jax.Array, other: jax.Array, layer: Tree, bias: jax.Array | float) -> jax.Array:
    q, k, v = projected(x, layer["q"]), projected(other, layer["k"]), projected(other, layer["v"])
    return jnp.einsum("bshk,hkd->bsd", mixed(q, k, v, bias), layer["out"])


def t5_loss(weights: Tree, source: jax.Array, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """Encoder and decoder with relative positions; the decoder also attends to what the encoder made."""
    x, y = weights["embedding"][source], weights["embedding"][tokens]
    bias = relative_bias(weights["encoder_bias"], x.shape[1], True)
    for layer in weights["encoder"]:
        z = norm(x, layer["norm1"])
        x = x + t5_attention(z, z, layer["own"], bias)
        x = x + jax.nn.relu(norm(x, layer["norm2"]) @ layer["up"]) @ layer["down"]
    x = norm(x, weights["encoder_norm"])
    bias = relative_bias(weights["decoder_bias"], y.shape[1], False)
    for layer in weights["decoder"]:
        z = norm(y, layer["norm1"])
        y = y + t5_attention(z, z, layer["own"], bias)
        y = y + t5_attention(norm(y, layer["norm3"]), x, layer["cross"], 0.0)
        y = y + jax.nn.relu(norm(y, layer["norm2"]) @ layer["up"]) @ layer["down"]
    return jnp.mean(cross_entropy(norm(y, weights["decoder_norm"]) @ weights["embedding"].T, targets))


def t5(scale: int = 1, layers: int = 1) -> Model:
    d = 128 * scale
    heads, heads_spec = heads_weights(d, HEADS)
    feed = {"norm1": f32(d), "norm2": f32(d), "up": f32(d, 4 * d), "down": f32(4 * d, d)}
    feed_spec = nowhere(feed) | {"up": dims(None, "tensor"), "down": dims("tensor", None)}
    encoder, encoder_spec = feed | {"own": heads}, feed_spec | {"own": heads_spec}
    decoder = encoder | {"cross": heads, "norm3": f32(d)}
    decoder_spec = encoder_spec | {"cross": heads_spec, "norm3": dims(None)}
    weights = {
        "embedding": f32(VOCABULARY, d),
        "encoder": [encoder] * layers,
        "decoder": [decoder] * layers,
        "encoder_bias": f32(32, HEADS),
        "decoder_bias": f32(32, HEADS),
        "encoder_norm": f32(d),
        "decoder_norm": f32(d),
    }
    tensor = nowhere(weights) | {
        "embedding": dims("tensor", None),
        "encoder": [encoder_spec] * layers,
        "decoder": [decoder_spec] * layers,
        "encoder_bias": dims(None, "tensor"),
        "decoder_bias": dims(None, "tensor"),
    }
    half = i32(BATCH, SEQUENCE // 2)
    return Model("t5", t5_loss, weights, tensor, (TOKENS, half, half), (TOKENS_SPEC,) * 3)


def stack_loss(weights: Tree, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """Layers that are scanned, and computed again in the backward pass."""

    @jax.checkpoint
    def block(x: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
        return rotary_block(x, layer), None

    x = jax.lax.scan(block, weights["embedding"][tokens], weights["layers"])[0]
    return jnp.mean(cross_entropy(norm(x, weights["norm"]) @ weights["embedding"].T, targets))


def stack(scale: int = 1, layers: int = 8) -> Model:
    d = 64 * scale
    layer, spec = gated_layer(d, HEADS)
    weights = {
        "embedding": f32(VOCABULARY, d),
        "layers": jax.tree.map(lambda leaf: f32(layers, *leaf.shape), layer),
        "norm": f32(d),
    }
    tensor = nowhere(weights) | {
        "embedding": dims("tensor", None),
        "layers": jax.tree.map(lambda given: dims(None, *given), spec),
    }
    return Model("scanned", stack_loss, weights, tensor, (TOKENS, TOKENS), (TOKENS_SPEC, TOKENS_SPEC))


# --- images -----------------------------------------------------------------------------------------------------------


def vit_loss(weights: Tree, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Patches of 4 x 4 pixels and a class token, in bfloat16."""
    count, rows, columns, channels = images.shape
    patches = images.reshape(count, rows // 4, 4, columns // 4, 4, channels).swapaxes(2, 3)
    x = patches.reshape(count, -1, 16 * channels) @ weights["patch"]
    first = jnp.broadcast_to(weights["class"], (count, 1, x.shape[-1]))
    x = (jnp.concatenate([first, x], axis=1) + weights["position"]).astype(jnp.bfloat16)
    for layer in jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights["layers"]):
        x = fused_block(x, layer, 0.0)
    return jnp.mean(cross_entropy(layer_norm(x[:, 0], weights["norm"]) @ weights["head"], labels))


def vit(scale: int = 1, layers: int = 2) -> Model:
    d = 128 * scale
    layer, spec = fused_layer(d, HEADS)
    weights = {
        "patch": f32(48, d),
        "class": f32(1, 1, d),
        "position": f32(1, 65, d),
        "layers": [layer] * layers,
        "norm": norm_weights(d),
        "head": f32(d, 16),
    }
    tensor = nowhere(weights) | {"layers": [spec] * layers}
    batch_spec = dims("batch", None, None, None), dims("batch")
    return Model("vit", vit_loss, weights, tensor, (f32(BATCH, 32, 32, 3), i32(BATCH)), batch_spec)


def batch_norm(x: jax.Array, weights: Tree) -> jax.Array:
    mean, variance = jnp.mean(x, axis=(0, 1, 2)), jnp.var(x, axis=(0, 1, 2))
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * weights["scale"] + weights["bias"]


def resnet_loss(weights: Tree, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Two stages of residual blocks; the second has half of the rows and twice the channels."""
    x = jax.nn.relu(batch_norm(conv(images, weights["stem"], 1), weights["norm"]))
    for block in weights["blocks"]:
        stride = 2 if "short" in block else 1
        inner = jax.nn.relu(batch_norm(conv(x, block["first"], stride), block["norm1"]))
        short = conv(x, block["short"], stride) if "short" in block else x
        x = jax.nn.relu(short + batch_norm(conv(inner, block["second"], 1), block["norm2"]))
    return jnp.mean(cross_entropy(jnp.mean(x, axis=(1, 2)) @ weights["head"], labels))


def resnet_block(inputs: int, outputs: int) -> Tree:
    block = {
        "first": f32(3, 3, inputs, outputs),
        "norm1": norm_weights(outputs),
        "second": f32(3, 3, outputs, outputs),
        "norm2": norm_weights(outputs),
    }
    return block if inputs == outputs else block | {"short": f32(1, 1, inputs, outputs)}


def resnet(scale: int = 1) -> Model:
    channels = 64 * scale
    blocks = [resnet_block(channels, channels), resnet_block(channels, 2 * channels)]
    weights = {
        "stem": f32(3, 3, 3, channels),
        "norm": norm_weights(channels),
        "blocks": blocks,
        "head": f32(2 * channels, 16),
    }
    batch_spec = dims("batch", None, None, None), dims("batch")
    return Model("resnet", resnet_loss, weights, nowhere(weights), (f32(32, 16, 16, 3), i32(32)), batch_spec)


# --- experts ----------------------------------------------------------------------------------------------------------


def one_hot_dispatch(x: jax.Array, layer: Tree) -> jax.Array:
    """Every token to its best expert, by one-hot products with a fixed capacity: [groups, tokens, d] to the same."""
    experts, capacity = layer["up"].shape[0], 2 * x.shape[1] // layer["up"].shape[0]
    gates = jax.nn.softmax(jnp.einsum("gtd,de->gte", x, layer["router"]))
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), experts)
    position = jnp.cumsum(chosen, axis=1) * chosen - 1
    slots = jax.nn.one_hot(position, capacity) * chosen[..., None]
    sent = jnp.einsum("gtec,gtd->egcd", slots, x)
    return jnp.einsum("gtec,egcd->gtd", slots * gates[..., None], expert_layer(sent, layer))


def expert_layer(x: jax.Array, layer: Tree) -> jax.Array:
    """Each expert's tokens: [experts, groups, slots, d] to the same."""
    hidden = jax.nn.relu(jnp.einsum("egcd,edf->egcf", x, layer["up"]))
    return jnp.einsum("egcf,efd->egcd", hidden, layer["down"])


def sorting_dispatch(x: jax.Array, layer: Tree) -> jax.Array:
    """As `one_hot_dispatch`, by sorting the tokens of a group by expert."""
    experts, capacity = layer["up"].shape[0], 2 * x.shape[1] // layer["up"].shape[0]
    gates = jax.nn.softmax(jnp.einsum("gtd,de->gte", x, layer["router"]))
    best = jnp.argmax(gates, -1)
    order = jnp.argsort(best, axis=1)
    expert = jnp.take_along_axis(best, order, axis=1)
    counts = jnp.sum(jax.nn.one_hot(best, experts, dtype=jnp.int32), axis=1)
    starts = jnp.cumsum(counts, axis=1) - counts
    place = jnp.arange(x.shape[1]) - jnp.take_along_axis(starts, expert, axis=1)
    sorted_tokens = jnp.take_along_axis(x, order[..., None], axis=1)

    def placed(tokens: jax.Array, expert: jax.Array, place: jax.Array) -> jax.Array:
        return jnp.zeros((experts, capacity, x.shape[-1])).at[expert, place].set(tokens, mode="drop")

    made = expert_layer(jax.vmap(placed, out_axes=1)(sorted_tokens, expert, place), layer)
    back = jax.vmap(lambda y, e, p: y.at[e, p].get(mode="fill", fill_value=0.0), in_axes=(1, 0, 0))(made, expert, place)
    gate = jnp.take_along_axis(jnp.max(gates, -1), order, axis=1)
    return jnp.take_along_axis(back * gate[..., None], jnp.argsort(order, axis=1)[..., None], axis=1)


def moe_loss(weights: Tree, x: jax.Array, y: jax.Array, dispatch: Callable[..., jax.Array]) -> jax.Array:
    for layer in weights["layers"]:
        x = x + dispatch(norm(x, layer["norm"]), layer)
    return jnp.mean((x @ weights["head"] - y) ** 2)


def moe(name: str, dispatch: Callable[..., jax.Array], scale: int = 1, layers: int = 2, experts: int = 8) -> Model:
    d = 64 * scale
    layer = {
        "norm": f32(d),
        "router": f32(d, experts),
        "up": f32(experts, d, 4 * d),
        "down": f32(experts, 4 * d, d),
    }
    weights = {"layers": [layer] * layers, "head": f32(d, d)}
    spec = nowhere(layer) | {"up": dims("tensor", None, None), "down": dims("tensor", None, None)}
    tensor = nowhere(weights) | {"layers": [spec] * layers}
    batch = (f32(16, 32, d),) * 2
    return Model(name, partial(moe_loss, dispatch=dispatch), weights, tensor, batch, (dims("batch", None, None),) * 2)


# --- recurrent and graph networks -------------------------------------------------------------------------------------


def lstm_loss(weights: Tree, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """Layers of cells, scanned over time."""
    x = jnp.swapaxes(weights["embedding"][tokens], 0, 1)
    for layer in weights["layers"]:

        def cell(carried: Tree, now: jax.Array, layer: Tree = layer) -> tuple[Tree, jax.Array]:
            h, c = carried
            gates = jnp.einsum("bd,dng->bng", now, layer["x"]) + jnp.einsum("bd,dng->bng", h, layer["h"])
            i, f, g, o = jnp.moveaxis(gates + layer["bias"], 1, 0)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = jnp.zeros((x.shape[1], layer["h"].shape[0]))
        x = jax.lax.scan(cell, (start, start), x)[1]
    return jnp.mean(cross_entropy(jnp.swapaxes(x, 0, 1) @ weights["head"], targets))


def lstm(scale: int = 1, layers: int = 2) -> Model:
    d = 128 * scale
    layer = {"x": f32(d, 4, d), "h": f32(d, 4, d), "bias": f32(4, d)}
    spec = {"x": dims(None, None, "tensor"), "h": dims(None, None, "tensor"), "bias": dims(None, "tensor")}
    weights = {"embedding": f32(256, d), "layers": [layer] * layers, "head": f32(d, 256)}
    tensor = {
        "embedding": dims("tensor", None),
        "layers": [spec] * layers,
        "head": dims(None, "tensor"),
    }
    return Model("lstm", lstm_loss, weights, tensor, (i32(32, 32), i32(32, 32)), (dims("batch", None),) * 2)


def graph(scale: int = 1, nodes: int = 2048, edges: int = 8192) -> Model:
    """Nodes and edges are the batch."""
    d = 128 * scale
    layer = {"edge": f32(2 * d, d), "message": f32(d, d), "node": f32(2 * d, d)}
    weights = {"embed": f32(32, d), "layers": [layer] * 2, "head": f32(d, 8)}
    batch = f32(nodes, 32), i32(edges), i32(edges), f32(nodes, 8)
    per_node, per_edge = dims("batch", None), dims("batch")
    spec = per_node, per_edge, per_edge, per_node
    return Model("graph", partial(graph_loss, keep=lambda x: x), weights, nowhere(weights), batch, spec)


# --- the rows ---------------------------------------------------------------------------------------------------------

MODELS: tuple[Callable[[int], Model], ...] = (
    gpt,
    rotary,
    bert,
    t5,
    stack,
    vit,
    resnet,
    lambda scale: moe("experts", one_hot_dispatch, scale),
    lambda scale: moe("sorted", sorting_dispatch, scale),
    lstm,
    graph,
)

ROWS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "gpt": {
        "data": ("8",),
        "fsdp": ("8", "2x4"),
        "fsdp-first": ("8",),
        "fsdp-last": ("8",),
        "megatron": ("8", "2x4"),
        "megatron+fsdp": ("2x4", "2x2x2"),
        "sequence": ("8", "2x4"),
    },
    "rotary": {
        "data": ("8",),
        "fsdp": ("8",),
        "fsdp-last": ("2x4",),
        "megatron": ("8",),
        "megatron+fsdp": ("2x4",),
        "sequence": ("8",),
    },
    "bert": {"data": ("8",), "fsdp": ("8",), "megatron+fsdp": ("2x4",)},
    "t5": {"data": ("8",), "fsdp": ("8",), "megatron": ("2x4",), "megatron+fsdp": ("2x4",)},
    "scanned": {"data": ("8",), "fsdp": ("8",), "fsdp-first": ("8",), "megatron+fsdp": ("2x4", "2x2x2")},
    "vit": {"data": ("8",), "fsdp-first": ("8",), "fsdp-last": ("8",), "megatron+fsdp": ("2x4",)},
    "resnet": {"data": ("8",), "fsdp": ("8",), "fsdp-first": ("8",), "fsdp-last": ("2x4",)},
    "experts": {"data": ("8",), "expert": ("8", "2x4"), "fsdp": ("8",)},
    "sorted": {"data": ("8",), "expert": ("8",)},
    "lstm": {"data": ("8",), "fsdp": ("8",), "megatron": ("2x4",)},
    "graph": {"data": ("8", "2x4"), "fsdp": ("8",)},
}
"""The meshes by model and layout that are compared."""

FAST = frozenset(
    (
        ("gpt/fsdp", "8"),
        ("rotary/megatron", "8"),
        ("bert/data", "8"),
        ("scanned/fsdp", "8"),
        ("vit/fsdp-last", "8"),
        ("resnet/fsdp", "8"),
        ("experts/expert", "2x4"),
        ("lstm/megatron", "2x4"),
        ("graph/data", "8"),
    )
)
"""Those that are compared unless all are asked for: one of most models."""


def training_rows(scale: int = 1) -> Iterator[tuple[Workload, str]]:
    """All training steps, each with a mesh of its layouts; widths, as of rows of weights, are `scale` times wider."""
    for model in (make(scale) for make in MODELS):
        for how, meshes in ROWS[model.name].items():
            made = workload(model, how)
            yield from ((made, mesh) for mesh in meshes)
