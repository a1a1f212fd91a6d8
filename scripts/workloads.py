"""Small models of the usual parallel layouts, for the benchmarks: each an ordinary function with boundary shardings.

A workload's specifications name what a dimension means ("batch", "tensor", "expert", "sequence", "weights"); a
`Layout` says which mesh axes stand for that, so that one model serves all meshes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

Tree = Any
Layout = Mapping[str, tuple[str, ...]]
"""Mesh axes by meaning; a meaning that is missing is not sharded."""

Keep = Callable[[jax.Array], jax.Array]

RATE = 0.1


@dataclass(frozen=True)
class Workload:
    """A function of `arguments` (shapes and dtypes) and the meanings of their and its results' dimensions.

    `loss` is called with the arguments and `keep`, which keeps activations split as their users wish it.
    Specifications are trees of tuples with one meaning (or None) per dimension.
    """

    name: str
    loss: Callable[..., jax.Array]
    arguments: Tree
    arguments_spec: Tree
    results_spec: Tree
    layouts: Mapping[str, Layout]
    kept: Dims | None = None
    """The meanings of the dimensions of activations, where the user constrains them."""
    trained: Callable[[Callable[..., jax.Array]], Callable[..., tuple[Tree, jax.Array]]] | None = None
    """From a loss to a step; gradient descent where nothing else is said."""
    donated: tuple[int, ...] = ()
    """The arguments whose memory the results may take over."""

    def step(self, mesh: jax.sharding.Mesh, name: str) -> Callable[..., tuple[Tree, jax.Array]]:
        """A training step on a mesh of `layouts`: (weights, *batch) -> (weights, loss)."""
        if self.kept is None:
            return self.plain_step()
        sharding = NamedSharding(mesh, specs(self.kept, self.layouts[name]))
        return self._trained(partial(jax.lax.with_sharding_constraint, shardings=sharding))

    def plain_step(self) -> Callable[..., tuple[Tree, jax.Array]]:
        """The step for one device."""
        return self._trained(lambda x: x)

    def _trained(self, keep: Keep) -> Callable[..., tuple[Tree, jax.Array]]:
        return (self.trained or train)(partial(self.loss, keep=keep))

    def shardings(self, mesh: str) -> tuple[Tree, Tree]:
        """The PartitionSpecs of arguments and results on one of the meshes of `layouts`."""
        layout = self.layouts[mesh]
        return specs(self.arguments_spec, layout), specs(self.results_spec, layout)


class Dims(tuple):
    """The meanings of one array's dimensions: a leaf of a specification tree."""


def dims(*meanings: str | None) -> Dims:
    return Dims(meanings)


def specs(tree: Tree, layout: Layout) -> Tree:
    return jax.tree.map(
        lambda d: P(*(layout.get(m) if m else None for m in d)), tree, is_leaf=lambda x: isinstance(x, Dims)
    )


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def train(loss: Callable[..., jax.Array]) -> Callable[..., tuple[Tree, jax.Array]]:
    """A step of plain gradient descent: (weights, *batch) -> (weights, loss)."""

    def step(weights: Tree, *batch: jax.Array) -> tuple[Tree, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(weights, *batch)
        return jax.tree.map(lambda w, g: w - RATE * g, weights, gradients), value

    return step


# --- a multilayer perceptron, Megatron's way --------------------------------------------------------------------------


def mlp_loss(weights: Tree, x: jax.Array, y: jax.Array, keep: Keep) -> jax.Array:
    for layer in weights:
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
    return jnp.mean((x - y) ** 2)


def mlp() -> Workload:
    layer = {"up": f32(128, 512), "down": f32(512, 128)}
    spec = {"up": dims(None, "tensor"), "down": dims("tensor", None)}
    batch = dims("batch", None)
    return Workload(
        "mlp",
        mlp_loss,
        ([layer] * 3, f32(64, 128), f32(64, 128)),
        ([spec] * 3, batch, batch),
        ([spec] * 3, dims()),
        {
            "8": {"tensor": ("a",)},
            "2x4": {"batch": ("a",), "tensor": ("b",)},
            "2x2x2": {"batch": ("a",), "tensor": ("b", "c")},
        },
    )


# --- a transformer ----------------------------------------------------------------------------------------------------


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def attention(x: jax.Array, layer: Tree, causal: bool = True) -> jax.Array:
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, layer[name]) for name in ("q", "k", "v"))
    scores = jnp.einsum("bshk,bthk->bhst", q, k) / q.shape[-1] ** 0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool)), scores, -1e9)
    weights = jax.nn.softmax(scores)
    return jnp.einsum("bhst,bthk,hkd->bsd", weights, v, layer["out"])


def feed_forward(x: jax.Array, layer: Tree) -> jax.Array:
    return jax.nn.gelu(x @ layer["up"]) @ layer["down"]


def transformer_loss(weights: Tree, tokens: jax.Array, targets: jax.Array, keep: Keep) -> jax.Array:
    x = keep(weights["embedding"][tokens])
    for layer in weights["layers"]:
        x = keep(x + attention(norm(x, layer["norm1"]), layer))
        x = keep(x + feed_forward(norm(x, layer["norm2"]), layer))
    logits = norm(x, weights["norm"]) @ weights["unembedding"]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    return -jnp.mean(chosen)


def transformer_weights(layers: int, d: int, heads: int, vocabulary: int) -> Tree:
    head = f32(d, heads, d // heads)
    layer = {
        "norm1": f32(d),
        "norm2": f32(d),
        "q": head,
        "k": head,
        "v": head,
        "out": f32(heads, d // heads, d),
        "up": f32(d, 4 * d),
        "down": f32(4 * d, d),
    }
    return {
        "embedding": f32(vocabulary, d),
        "unembedding": f32(d, vocabulary),
        "norm": f32(d),
        "layers": [layer] * layers,
    }


def transformer_spec(layers: int) -> Tree:
    """Megatron's layout over "tensor"; each weight's other dimension over "weights" (ZeRO-3, if the layout has it)."""
    head = dims("weights", "tensor", None)
    layer = {
        "norm1": dims(None),
        "norm2": dims(None),
        "q": head,
        "k": head,
        "v": head,
        "out": dims("tensor", None, "weights"),
        "up": dims("weights", "tensor"),
        "down": dims("tensor", "weights"),
    }
    return {
        "embedding": dims("tensor", "weights"),
        "unembedding": dims("weights", "tensor"),
        "norm": dims(None),
        "layers": [layer] * layers,
    }


def transformer(name: str, layouts: Mapping[str, Layout], kept: Dims | None = None, layers: int = 2) -> Workload:
    weights, spec = transformer_weights(layers, 64, 8, 256), transformer_spec(layers)
    tokens = dims("batch", None)
    return Workload(
        name,
        transformer_loss,
        (weights, i32(16, 32), i32(16, 32)),
        (spec, tokens, tokens),
        (spec, dims()),
        layouts,
        kept,
    )


def megatron() -> Workload:
    return transformer(
        "transformer",
        {
            "8": {"batch": ("a",)},
            "2x4": {"batch": ("a",), "tensor": ("b",)},
            "2x2x2": {"batch": ("a", "c"), "tensor": ("b",)},
        },
    )


def fsdp() -> Workload:
    return transformer(
        "fsdp",
        {
            "8": {"batch": ("a",), "weights": ("a",)},
            "2x4": {"batch": ("a", "b"), "weights": ("b",)},
            "2x2x2": {"batch": ("a", "b"), "weights": ("a", "b"), "tensor": ("c",)},
        },
        kept=dims("batch"),
    )


# --- a mixture of experts, every token to its best expert -------------------------------------------------------------


def moe_loss(weights: Tree, x: jax.Array, y: jax.Array, keep: Keep) -> jax.Array:
    """Dispatch and combine by one-hot products with a fixed capacity; groups of tokens are batched."""
    experts, capacity = weights["up"].shape[0], 2 * x.shape[1] // weights["up"].shape[0]
    gates = jax.nn.softmax(jnp.einsum("gtd,de->gte", x, weights["router"]))
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), experts)
    position = jnp.cumsum(chosen, axis=1) * chosen - 1
    slots = jax.nn.one_hot(position, capacity) * chosen[..., None]
    sent = jnp.einsum("gtec,gtd->egcd", slots, x)
    hidden = jax.nn.relu(jnp.einsum("egcd,edf->egcf", sent, weights["up"]))
    back = jnp.einsum("egcf,efd->egcd", hidden, weights["down"])
    out = jnp.einsum("gtec,egcd->gtd", slots * gates[..., None], back)
    return jnp.mean((x + out - y) ** 2)


def moe() -> Workload:
    weights = {"router": f32(64, 8), "up": f32(8, 64, 128), "down": f32(8, 128, 64)}
    spec = {"router": dims(None, None), "up": dims("expert", None, "tensor"), "down": dims("expert", "tensor", None)}
    tokens = dims("batch", None, None)
    return Workload(
        "moe",
        moe_loss,
        (weights, f32(16, 64, 64), f32(16, 64, 64)),
        (spec, tokens, tokens),
        (spec, dims()),
        {
            "8": {"batch": ("a",), "expert": ("a",)},
            "2x4": {"batch": ("a", "b"), "expert": ("b",)},
            "2x2x2": {"batch": ("a", "b"), "expert": ("b",), "tensor": ("c",)},
        },
    )


# --- attention with sequences split over devices ----------------------------------------------------------------------


def sequence_loss(weights: Tree, x: jax.Array, y: jax.Array, keep: Keep) -> jax.Array:
    for layer in weights:
        x = x + attention(norm(x, layer["norm1"]), layer)
        x = x + feed_forward(norm(x, layer["norm2"]), layer)
    return jnp.mean((x - y) ** 2)


def sequence_parallel() -> Workload:
    layer = transformer_weights(1, 64, 8, 8)["layers"][0]
    spec = transformer_spec(1)["layers"][0]
    tokens = dims("batch", "sequence", None)
    return Workload(
        "sequence",
        sequence_loss,
        ([layer] * 2, f32(8, 64, 64), f32(8, 64, 64)),
        ([spec] * 2, tokens, tokens),
        ([spec] * 2, dims()),
        {
            "8": {"sequence": ("a",)},
            "2x4": {"batch": ("a",), "sequence": ("b",)},
            "2x2x2": {"batch": ("a",), "sequence": ("b",), "tensor": ("c",)},
        },
    )


# --- a convolutional network ------------------------------------------------------------------------------------------


def conv(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def conv_loss(weights: Tree, images: jax.Array, labels: jax.Array, keep: Keep) -> jax.Array:
    x = images
    for stage in weights["stages"]:
        x = jax.nn.relu(conv(x, stage["wide"], 1))
        x = jax.nn.relu(conv(x, stage["deep"], 2))
    logits = jnp.mean(x, axis=(1, 2)) @ weights["head"]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1)
    return -jnp.mean(chosen)


def conv_net() -> Workload:
    def stage(inputs: int, outputs: int) -> Tree:
        return {"wide": f32(3, 3, inputs, outputs), "deep": f32(3, 3, outputs, outputs)}

    spec = {"wide": dims(None, None, None, "tensor"), "deep": dims(None, None, "tensor", None)}
    weights = {"stages": [stage(8, 32), stage(32, 64)], "head": f32(64, 16)}
    weights_spec = {"stages": [spec] * 2, "head": dims(None, None)}
    return Workload(
        "conv",
        conv_loss,
        (weights, f32(16, 16, 16, 8), i32(16)),
        (weights_spec, dims("batch", None, None, None), dims("batch")),
        (weights_spec, dims()),
        {
            "8": {"batch": ("a",)},
            "2x4": {"batch": ("a",), "tensor": ("b",)},
            "2x2x2": {"batch": ("a", "b"), "tensor": ("c",)},
        },
    )


# --- what takes memory: graphs, stacked layers, normalised convolutions -----------------------------------------------


def graph_loss(
    weights: Tree, nodes: jax.Array, senders: jax.Array, receivers: jax.Array, targets: jax.Array, keep: Keep
) -> jax.Array:
    x = nodes @ weights["embed"]
    for layer in weights["layers"]:
        ends = jnp.concatenate([x[senders], x[receivers]], axis=-1)
        messages = jax.nn.relu(ends @ layer["edge"]) @ layer["message"]
        received = jax.ops.segment_sum(messages, receivers, num_segments=nodes.shape[0])
        x = x + jax.nn.relu(jnp.concatenate([x, received], axis=-1) @ layer["node"])
    return jnp.mean((x @ weights["head"] - targets) ** 2)


def graph_network(nodes: int = 8192, edges: int = 65536, d: int = 128) -> Workload:
    layer = {"edge": f32(2 * d, d), "message": f32(d, d), "node": f32(2 * d, d)}
    weights = {"embed": f32(32, d), "layers": [layer] * 2, "head": f32(d, 8)}
    spec = jax.tree.map(lambda leaf: dims(*(None,) * len(leaf.shape)), weights)
    per_node, per_edge = dims("node", None), dims("edge")
    return Workload(
        "graph",
        graph_loss,
        (weights, f32(nodes, 32), i32(edges), i32(edges), f32(nodes, 8)),
        (spec, per_node, per_edge, per_edge, per_node),
        (spec, dims()),
        {
            "8": {"edge": ("a",)},
            "2x4": {"edge": ("a", "b"), "node": ("a", "b")},
            "2x2x2": {"edge": ("a", "b", "c"), "node": ("a", "b")},
        },
    )


def stack_loss(weights: Tree, x: jax.Array, y: jax.Array, keep: Keep) -> jax.Array:
    def block(x: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
        return x + feed_forward(x, layer), None

    return jnp.mean((jax.lax.scan(block, x, weights)[0] - y) ** 2)


def stacked_layers(layers: int = 8, rows: int = 1024, d: int = 512) -> Workload:
    spec = {"up": dims("layer", "weights", "tensor"), "down": dims("layer", "tensor", "weights")}
    batch = dims("batch", None)
    return Workload(
        "stack",
        stack_loss,
        ({"up": f32(layers, d, 4 * d), "down": f32(layers, 4 * d, d)}, f32(rows, d), f32(rows, d)),
        (spec, batch, batch),
        (spec, dims()),
        {
            "8": {"batch": ("a",), "weights": ("a",)},
            "2x4": {"batch": ("a",), "tensor": ("b",)},
            "2x2x2": {"batch": ("a", "b"), "layer": ("a", "b"), "tensor": ("c",)},
        },
    )


def batch_norm(x: jax.Array, layer: Tree) -> jax.Array:
    mean, variance = jnp.mean(x, axis=(0, 1, 2)), jnp.var(x, axis=(0, 1, 2))
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * layer["scale"] + layer["shift"]


def resnet_loss(weights: Tree, images: jax.Array, labels: jax.Array, keep: Keep) -> jax.Array:
    x = conv(images, weights["stem"], 1)
    for block in weights["blocks"]:
        inner = jax.nn.relu(batch_norm(conv(x, block["first"], 1), block["norm1"]))
        x = jax.nn.relu(x + batch_norm(conv(inner, block["second"], 1), block["norm2"]))
    logits = jnp.mean(x, axis=(1, 2)) @ weights["head"]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1)
    return -jnp.mean(chosen)


def resnet(images: int = 64, size: int = 16, channels: int = 64) -> Workload:
    norm, kernel = {"scale": f32(channels), "shift": f32(channels)}, f32(3, 3, channels, channels)
    block = {"first": kernel, "norm1": norm, "second": kernel, "norm2": norm}
    weights = {"stem": f32(3, 3, 3, channels), "blocks": [block] * 2, "head": f32(channels, 16)}
    spec = jax.tree.map(lambda leaf: dims(*(None,) * len(leaf.shape)), weights)
    every = {"8": {"batch": ("a",)}, "2x4": {"batch": ("a", "b")}, "2x2x2": {"batch": ("a", "b", "c")}}
    batch = dims("batch", None, None, None)
    return Workload(
        "resnet",
        resnet_loss,
        (weights, f32(images, size, size, 3), i32(images)),
        (spec, batch, dims("batch")),
        (spec, dims()),
        every,
    )


# --- images that are split over their rows ----------------------------------------------------------------------------


def vision_loss(weights: Tree, images: jax.Array, labels: jax.Array, keep: Keep) -> jax.Array:
    """Patches of 4 x 4 pixels and a class token before them, so that the tokens are one more than the patches."""
    count, rows, columns, channels = images.shape
    patches = images.reshape(count, rows // 4, 4, columns // 4, 4, channels).swapaxes(2, 3)
    x = patches.reshape(count, -1, 16 * channels) @ weights["patch"]
    first = jnp.broadcast_to(weights["class"], (count, 1, x.shape[-1]))
    x = keep(jnp.concatenate([first, x], axis=1) + weights["position"])
    for layer in weights["layers"]:
        x = keep(x + attention(norm(x, layer["norm1"]), layer, causal=False))
        x = keep(x + feed_forward(norm(x, layer["norm2"]), layer))
    logits = norm(x[:, 0], weights["norm"]) @ weights["head"]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1)
    return -jnp.mean(chosen)


def vision_transformer(d: int = 64, layers: int = 2) -> Workload:
    """65 tokens, which no mesh divides."""
    weights = {
        "patch": f32(48, d),
        "class": f32(1, 1, d),
        "position": f32(1, 65, d),
        "layers": transformer_weights(layers, d, 8, 8)["layers"],
        "norm": f32(d),
        "head": f32(d, 16),
    }
    spec = jax.tree.map(lambda leaf: dims(*(None,) * len(leaf.shape)), weights)
    return Workload(
        "vit",
        vision_loss,
        (weights, f32(8, 32, 32, 3), i32(8)),
        (spec, dims("batch", "rows", None, None), dims("batch")),
        (spec, dims()),
        {"8": {"rows": ("a",)}, "2x4": {"batch": ("a",), "rows": ("b",)}},
        kept=dims("batch", "rows", None),
    )


def upsampled(x: jax.Array) -> jax.Array:
    return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)


def pooled(x: jax.Array) -> jax.Array:
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def unet_loss(weights: Tree, images: jax.Array, targets: jax.Array, keep: Keep) -> jax.Array:
    x, skipped = images, []
    for stage in weights["down"]:
        x = jax.nn.relu(conv(jax.nn.relu(conv(x, stage["first"], 1)), stage["second"], 1))
        skipped.append(x)
        x = pooled(x)
    x = jax.nn.relu(conv(x, weights["middle"], 1))
    for stage in weights["up"]:
        x = jnp.concatenate([upsampled(x), skipped.pop()], axis=-1)
        x = jax.nn.relu(conv(jax.nn.relu(conv(x, stage["first"], 1)), stage["second"], 1))
    return jnp.mean((conv(x, weights["head"], 1) - targets) ** 2)


def unet() -> Workload:
    """Two levels of pooling: images of 64 rows are pooled to 16."""

    def stage(inputs: int, outputs: int) -> Tree:
        return {"first": f32(3, 3, inputs, outputs), "second": f32(3, 3, outputs, outputs)}

    weights = {
        "down": [stage(4, 8), stage(8, 16)],
        "middle": f32(3, 3, 16, 32),
        "up": [stage(48, 16), stage(24, 8)],
        "head": f32(1, 1, 8, 4),
    }
    spec = jax.tree.map(lambda leaf: dims(*(None,) * len(leaf.shape)), weights)
    images = dims("batch", "rows", "columns", None)
    return Workload(
        "unet",
        unet_loss,
        (weights, f32(4, 64, 32, 4), f32(4, 64, 32, 4)),
        (spec, images, images),
        (spec, dims()),
        {"8": {"rows": ("a",)}, "2x4": {"rows": ("b",), "columns": ("a",)}},
    )


MESHES: Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "8": ((8,), ("a",)),
    "2x4": ((2, 4), ("a", "b")),
    "2x2x2": ((2, 2, 2), ("a", "b", "c")),
}
"""The meshes by name: sizes and axis names."""

WORKLOADS: tuple[Callable[[], Workload], ...] = (mlp, megatron, moe, fsdp, sequence_parallel, conv_net)

MEMORY_WORKLOADS: tuple[Callable[[], Workload], ...] = (graph_network, stacked_layers, resnet)
"""Larger ones: what a compiler does with memory shows only where values do not fit into caches."""

IMAGE_WORKLOADS: tuple[Callable[[], Workload], ...] = (vision_transformer, unet)
"""Those whose data are split in space, for the meshes that their layouts name."""
