"""Language models like Llama and Gemma: grouped attention with rotary positions, gated MLPs or mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from models.common import (
    Array,
    Layout,
    Program,
    Tree,
    attention,
    bf16,
    cross_entropy,
    i32,
    in_type,
    layers_of,
    names,
    rms_norm,
    rotary,
    stacked,
    training,
    types,
)
from models.kernels import Attention, written_out


@dataclass(frozen=True)
class Llama:
    """Sizes of a model.

    Attributes:
        tied: the embedding is the last product's weights, too.
        experts, chosen: a mixture of so many experts, of which each token takes some; 0 where MLPs are dense.
        capacity: the tokens that an expert takes of a sequence, over their mean; 0 where tokens are sorted by expert,
            and only those beyond twice the mean are dropped.
        scanned, checkpointed: layers are a loop; their activations are computed again.
        attention: that of whole sequences.
    """

    layers: int
    d: int
    heads: int
    kv_heads: int
    width: int
    ffn: int
    vocabulary: int
    tied: bool = False
    experts: int = 0
    chosen: int = 0
    capacity: float = 0.0
    scanned: bool = True
    checkpointed: bool = True
    attention: Attention = written_out

    def weights(self) -> Tree:
        d, ffn = self.d, self.ffn
        projected = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}
        layer = {
            "attention_norm": Array((d,), (None,)),
            "mlp_norm": Array((d,), (None,)),
            **{name: Array((d, heads * self.width), ("embed", "heads")) for name, heads in projected.items()},
            "o": Array((self.heads * self.width, d), ("heads", "embed")),
        }
        if self.experts:
            layer["router"] = Array((d, self.experts), ("embed", None))
        of, expert = ((self.experts,), ("expert",)) if self.experts else ((), ())
        layer |= {name: Array((*of, d, ffn), (*expert, "embed", "mlp")) for name in ("gate", "up")}
        layer["down"] = Array((*of, ffn, d), (*expert, "mlp", "embed"))
        found = {
            "embedding": Array((self.vocabulary, d), ("vocabulary", "embed")),
            "norm": Array((d,), (None,)),
            "layers": stacked(self.layers, layer),
        }
        return found if self.tied else found | {"out": Array((d, self.vocabulary), ("embed", "vocabulary"))}

    def heads_of(self, h: jax.Array, weights: Tree) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values: (batch, sequence, heads, width)."""
        return tuple(  # type: ignore[return-value]
            (h @ weights[name]).reshape(*h.shape[:2], heads, self.width)
            for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
        )

    def mlp(self, h: jax.Array, weights: Tree, layout: Layout) -> jax.Array:
        if not self.experts:
            inner = layout(jax.nn.silu(h @ weights["gate"]) * (h @ weights["up"]), "batch", "seq", "mlp")
            return inner @ weights["down"]
        return (_by_capacity if self.capacity else _by_sorting)(self, h, weights, layout)

    def layer(self, x: jax.Array, weights: Tree, layout: Layout) -> jax.Array:
        weights = jax.tree.map(lambda w: w.astype(x.dtype), weights)
        q, k, v = self.heads_of(rms_norm(x, weights["attention_norm"]), weights)
        found = self.attention(rotary(q), rotary(k), v, layout)
        x = layout(x + found.reshape(*x.shape[:2], -1) @ weights["o"], "batch", "seq", None)
        return layout(x + self.mlp(rms_norm(x, weights["mlp_norm"]), weights, layout), "batch", "seq", None)

    def logits(self, x: jax.Array, weights: Tree, layout: Layout) -> jax.Array:
        out = weights["embedding"].T if self.tied else weights["out"]
        return layout(rms_norm(x, weights["norm"]) @ out.astype(x.dtype), "batch", "seq", "vocabulary")

    def loss(self, weights: Tree, tokens: jax.Array, targets: jax.Array, *, layout: Layout) -> jax.Array:
        x = layout(weights["embedding"].astype(bf16)[tokens], "batch", "seq", None)
        layer = partial(self.layer, layout=layout)
        x = layers_of(layer, x, weights["layers"], self.scanned, self.checkpointed)
        return cross_entropy(self.logits(x, weights, layout), targets)


def trained(model: Llama, layout: Layout, batch: int, sequence: int) -> Program:
    """A training step in bfloat16 over float32 weights, on `batch` sequences."""
    tokens = Array((batch, sequence), ("batch", "seq"), i32)
    return training(partial(model.loss, layout=layout), model.weights(), (tokens, tokens))


def _routed(model: Llama, h: jax.Array, weights: Tree) -> tuple[jax.Array, jax.Array]:
    """The experts that each token takes, and their shares: (batch, sequence, chosen)."""
    scores = jax.nn.softmax((h @ weights["router"]).astype(jnp.float32), -1)
    shares, experts = jax.lax.top_k(scores, model.chosen)
    return experts, shares / shares.sum(-1, keepdims=True)


def _experts(h: jax.Array, weights: Tree, layout: Layout) -> jax.Array:
    """What experts make of their tokens: (batch, experts, tokens, d)."""
    gate, up = (jnp.einsum("becd,edf->becf", h, weights[name]) for name in ("gate", "up"))
    inner = layout(jax.nn.silu(gate) * up, "tokens", "expert", None, "mlp")
    return jnp.einsum("becf,efd->becd", inner, weights["down"])


def _by_capacity(model: Llama, h: jax.Array, weights: Tree, layout: Layout) -> jax.Array:
    """As in GShard and Switch: a product sends each token to its place at an expert."""
    experts, shares = _routed(model, h, weights)
    places = int(model.capacity * h.shape[1] * model.chosen / model.experts)
    taken = jax.nn.one_hot(experts, model.experts, dtype=jnp.int32)
    order = jnp.cumsum(taken.reshape(h.shape[0], -1, model.experts), 1).reshape(taken.shape) * taken - 1
    at = jax.nn.one_hot(order, places, dtype=h.dtype)  # zeros where it is not taken, or beyond the places
    combine = jnp.einsum("bsxec,bsx->bsec", at, shares.astype(h.dtype))
    sent = layout(jnp.einsum("bsec,bsd->becd", (combine > 0).astype(h.dtype), h), "tokens", "expert", None, None)
    made = layout(_experts(sent, weights, layout), "tokens", "expert", None, None)
    return jnp.einsum("bsec,becd->bsd", combine, made)


def _by_sorting(model: Llama, h: jax.Array, weights: Tree, layout: Layout) -> jax.Array:
    """Tokens of a sequence are sorted by expert, gathered, and scattered back."""
    experts, shares = _routed(model, h, weights)
    length, places = h.shape[1], 2 * h.shape[1] * model.chosen // model.experts

    def of_sequence(h: jax.Array, experts: jax.Array) -> tuple[jax.Array, jax.Array]:
        flat = experts.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        first = jnp.searchsorted(flat[order], jnp.arange(model.experts))
        place = jnp.arange(flat.size) - first[flat[order]]
        slot = jnp.where(place < places, flat[order] * places + place, model.experts * places)
        token = jnp.full(model.experts * places + 1, length, jnp.int32).at[slot].set(order // model.chosen)[:-1]
        back = jnp.zeros(flat.size, jnp.int32).at[order].set(slot)
        return jnp.take(h, token, axis=0, mode="fill", fill_value=0), back

    sent, back = jax.vmap(of_sequence)(h, experts)
    sent = layout(sent.reshape(h.shape[0], model.experts, places, -1), "tokens", "expert", None, None)
    made = layout(_experts(sent, weights, layout), "tokens", "expert", None, None)
    flat = made.reshape(h.shape[0], -1, h.shape[-1])
    found = jax.vmap(lambda made, back: jnp.take(made, back, axis=0, mode="fill", fill_value=0))(flat, back)
    return jnp.einsum("bsxd,bsx->bsd", found.reshape(*experts.shape, -1), shares.astype(h.dtype))


# Serving.


def _cache(model: Llama, batch: int, sequence: int) -> Array:
    shape = (model.layers, batch, sequence, model.kv_heads, model.width)
    return Array(shape, (None, "batch", "cache", "kv_heads", None), bf16)


def prefilled(model: Llama, layout: Layout, batch: int, sequence: int) -> Program:
    """`(weights, tokens) -> (logits of the last token, keys, values)`, weights in bfloat16."""

    def prefill(weights: Tree, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        def layer(x: jax.Array, weights: Tree) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            q, k, v = model.heads_of(rms_norm(x, weights["attention_norm"]), weights)
            k = rotary(k)
            found = model.attention(rotary(q), k, v, layout)
            x = layout(x + found.reshape(*x.shape[:2], -1) @ weights["o"], "batch", "seq", None)
            x = layout(x + model.mlp(rms_norm(x, weights["mlp_norm"]), weights, layout), "batch", "seq", None)
            return x, (k, v)

        x = layout(weights["embedding"][tokens], "batch", "seq", None)
        x, (keys, values) = jax.lax.scan(layer, x, weights["layers"])
        return model.logits(x[:, -1:], weights, layout), keys, values

    tokens, cache = Array((batch, sequence), ("batch", "seq"), i32), _cache(model, batch, sequence)
    weights = in_type(bf16, model.weights())
    results = (("batch", None, "vocabulary"), cache.names, cache.names)
    return Program(prefill, (types(weights), tokens.type), (names(weights), tokens.names), results)


def decoded(model: Llama, layout: Layout, batch: int, sequence: int) -> Program:
    """`(weights, keys, values, position, tokens) -> (keys, values, next tokens)`: one token for each sequence."""

    def decode(
        weights: Tree, keys: jax.Array, values: jax.Array, position: jax.Array, tokens: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        def layer(x: jax.Array, given: tuple[Tree, jax.Array, jax.Array]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            weights, keys, values = given
            q, k, v = model.heads_of(rms_norm(x, weights["attention_norm"]), weights)
            keys = jax.lax.dynamic_update_slice_in_dim(keys, rotary(k, position), position, 1)
            values = jax.lax.dynamic_update_slice_in_dim(values, v, position, 1)
            found = attention(rotary(q, position), keys, values, jnp.arange(sequence) <= position)
            x = layout(x + found.reshape(*x.shape[:2], -1) @ weights["o"], "batch", None, None)
            x = layout(x + model.mlp(rms_norm(x, weights["mlp_norm"]), weights, layout), "batch", None, None)
            return x, (keys, values)

        x = layout(weights["embedding"][tokens][:, None], "batch", None, None)
        x, (keys, values) = jax.lax.scan(layer, x, (weights["layers"], keys, values))
        return keys, values, jnp.argmax(model.logits(x, weights, layout)[:, 0], -1).astype(jnp.int32)

    cache, tokens = _cache(model, batch, sequence), Array((batch,), ("batch",), i32)
    weights = in_type(bf16, model.weights())
    given = (weights, cache, cache, Array((), (), i32), tokens)
    named = tuple(map(names, given))
    return Program(decode, tuple(map(types, given)), named, (cache.names, cache.names, tokens.names), (1, 2))
