"""Layers of experts, dropless and by capacity, and decoding with latent attention, as models with experts have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox import gmm

from models.common import Array, Layout, Program, Tree, bf16, i32, in_type, names, rms_norm, types

# Mixtures of experts: tokens sent by products or sorted, at most so many to each expert, or all of them in groups.


class Mixture(Protocol):
    """The experts of a model: how many, and how many of these each token takes."""

    @property
    def experts(self) -> int: ...

    @property
    def chosen(self) -> int: ...


Routing = Callable[[Mixture, jax.Array, Tree, Layout], jax.Array]
"""What a mixture's experts make of tokens (batch, sequence, d): the sum over those that each takes, by their shares."""


def _routed(model: Mixture, h: jax.Array, weights: Tree) -> tuple[jax.Array, jax.Array]:
    """The experts that each token takes, and their shares: (batch, sequence, chosen)."""
    scores = jax.nn.softmax((h @ weights["router"]).astype(jnp.float32), -1)
    shares, experts = jax.lax.top_k(scores, model.chosen)
    return experts, shares / shares.sum(-1, keepdims=True)


def _experts(h: jax.Array, weights: Tree, layout: Layout) -> jax.Array:
    """What experts make of their tokens: (batch, experts, tokens, d)."""
    gate, up = (jnp.einsum("becd,edf->becf", h, weights[name]) for name in ("gate", "up"))
    inner = layout(jax.nn.silu(gate) * up, "tokens", "expert", None, "mlp")
    return jnp.einsum("becf,efd->becd", inner, weights["down"])


@dataclass(frozen=True)
class ByCapacity:
    """As in GShard and Switch: a product sends each token to its place at an expert.

    Attributes:
        capacity: the tokens that an expert takes of a sequence, over their mean.
    """

    capacity: float

    def __call__(self, model: Mixture, h: jax.Array, weights: Tree, layout: Layout) -> jax.Array:
        return self.sent(model, h, *_routed(model, h, weights), weights, layout)

    def sent(
        self, model: Mixture, h: jax.Array, experts: jax.Array, shares: jax.Array, weights: Tree, layout: Layout
    ) -> jax.Array:
        """What is made of tokens whose experts and shares are known."""
        places = int(self.capacity * h.shape[1] * model.chosen / model.experts)
        taken = jax.nn.one_hot(experts, model.experts, dtype=jnp.int32)
        order = jnp.cumsum(taken.reshape(h.shape[0], -1, model.experts), 1).reshape(taken.shape) * taken - 1
        at = jax.nn.one_hot(order, places, dtype=h.dtype)  # zeros where it is not taken, or beyond the places
        combine = jnp.einsum("bsxec,bsx->bsec", at, shares.astype(h.dtype))
        sent = layout(jnp.einsum("bsec,bsd->becd", (combine > 0).astype(h.dtype), h), "tokens", "expert", None, None)
        made = layout(_experts(sent, weights, layout), "tokens", "expert", None, None)
        return jnp.einsum("bsec,becd->bsd", combine, made)


def by_sorting(model: Mixture, h: jax.Array, weights: Tree, layout: Layout) -> jax.Array:
    """Tokens of a sequence are sorted by expert, gathered, and scattered back; those beyond twice the mean of an expert
    are dropped."""
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


Grouped = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""A product of rows, sorted by groups, with the weights of their groups: rows (m, k), weights (groups, k, n), and how
many rows each group has; (m, n). Rows beyond these are anything."""


def megablox(rows: jax.Array, weights: jax.Array, sizes: jax.Array, interpret: bool = False) -> jax.Array:
    """That of JAX's kernels for TPUs, in tiles of 512."""
    m, k, n = rows.shape[0], rows.shape[1], weights.shape[2]
    return gmm(rows, weights, sizes, rows.dtype, (min(512, m), min(512, k), min(512, n)), interpret=interpret)


@dataclass(frozen=True)
class Dropless:
    """All tokens, sorted by their experts, in one grouped product for each of the experts' weights.

    Attributes:
        product: the kernel, or `jax.lax.ragged_dot`.
        mapped: in a `shard_map`, as MaxText has it: each device sorts its own tokens, and where experts are split sends
            them to those that have theirs. Else all tokens are sorted together.
        room: the rows that a device has for tokens that are sent to it, over their mean: MaxText's
            `ragged_buffer_factor`. With as many as devices share the experts none is dropped, whatever tokens choose.
    """

    product: Grouped
    mapped: bool = True
    room: float = 2.0

    def __call__(self, model: Mixture, h: jax.Array, weights: Tree, layout: Layout) -> jax.Array:
        experts, shares = _routed(model, h, weights)
        given = h, experts, shares.astype(h.dtype), *(weights[name] for name in ("gate", "up", "down"))
        if not self.mapped:
            return self._own(model, *given)
        axis = layout.spec(("expert",))[0]
        tokens = layout.spec(("batch", "seq", None))
        run = partial(self._sent, axis) if axis else self._own
        specs = (*(tokens,) * 3, *(layout.spec(("expert", None, None)),) * 3)
        return jax.shard_map(partial(run, model), mesh=layout.mesh, in_specs=specs, out_specs=tokens, check_vma=False)(
            *given
        )

    def _own(
        self, model: Mixture, h: jax.Array, experts: jax.Array, shares: jax.Array, *weights: jax.Array
    ) -> jax.Array:
        """A device has all experts."""
        order = jnp.argsort(experts.reshape(-1), stable=True)
        sizes = jnp.bincount(experts.reshape(-1), length=model.experts).astype(jnp.int32)
        made = self._made(h.reshape(-1, h.shape[-1])[order // model.chosen], sizes, weights)
        return _combined(made, order, shares)

    def _made(self, rows: jax.Array, sizes: jax.Array, weights: tuple[jax.Array, ...]) -> jax.Array:
        gate, up, down = weights
        inner = jax.nn.silu(self.product(rows, gate, sizes)) * self.product(rows, up, sizes)
        return self.product(inner, down, sizes)

    def _sent(
        self, axis: str, model: Mixture, h: jax.Array, experts: jax.Array, shares: jax.Array, *weights: jax.Array
    ) -> jax.Array:
        """A device has some of the experts, tokens for others go to those that have them, and come back."""
        flat, me, parts = experts.reshape(-1), jax.lax.axis_index(axis), jax.lax.axis_size(axis)
        order = jnp.argsort(flat, stable=True)
        rows = h.reshape(-1, h.shape[-1])[order // model.chosen]
        own = jnp.bincount(flat, length=model.experts).astype(jnp.int32)
        counts = jax.lax.all_gather(own, axis).reshape(parts, parts, -1)  # from, to, expert
        there, back = _exchanges(counts.sum(-1), me)
        received = jnp.zeros((int(self.room * rows.shape[0]), h.shape[-1]), h.dtype)
        received = jax.lax.ragged_all_to_all(rows, received, *there, axis_name=axis)
        mine = counts[:, me]  # from, expert
        piece = jnp.searchsorted(jnp.cumsum(mine.reshape(-1)), jnp.arange(received.shape[0]), side="right")
        expert = jnp.where(piece < mine.size, piece % mine.shape[1], mine.shape[1])  # the last one: of no expert
        by_expert = jnp.argsort(expert, stable=True)
        made = self._made(received[by_expert], mine.sum(0), weights)
        made = jnp.zeros_like(made).at[by_expert].set(made)
        return _combined(jax.lax.ragged_all_to_all(made, jnp.zeros_like(rows), *back, axis_name=axis), order, shares)


def _exchanges(counts: jax.Array, me: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
    """Of rows that devices send to each other, `counts` (from, to), and of the same ones back: where each part begins
    that a device sends, how long it is, where it begins in what is received, and the lengths of what comes."""
    of_senders, of_receivers = jnp.cumsum(counts, 1) - counts, jnp.cumsum(counts, 0) - counts
    there = [of_senders[me], counts[me], of_receivers[me], counts[:, me]]
    back = [of_receivers[:, me], counts[:, me], of_senders[:, me], counts[me]]
    return there, back


def _combined(made: jax.Array, order: jax.Array, shares: jax.Array) -> jax.Array:
    """Rows in their order before sorting, each token's by their shares: (batch, sequence, d)."""
    back = jnp.zeros_like(made).at[order].set(made)
    return jnp.einsum("bsxd,bsx->bsd", back.reshape(*shares.shape, -1), shares)


# Latent attention with one shared head, as DeepSeek's: all heads read one small cache, their weights are by heads.


@dataclass(frozen=True)
class Latent:
    """`rank` numbers of a token are cached; a head has `width`, absorbed into products with the cache."""

    layers: int
    d: int
    heads: int
    width: int
    rank: int
    mlp: int
    vocabulary: int

    def weights(self) -> Tree:
        stack = (self.layers,)
        by_heads = (None, "heads", None, None)
        layers = {
            "norm": Array((*stack, self.d), (None, None)),
            "q": Array((*stack, self.d, self.heads, self.width), (None, "embed", "heads", None)),
            "down_cache": Array((*stack, self.d, self.rank), (None, "embed", None)),
            "up_keys": Array((*stack, self.heads, self.width, self.rank), by_heads),
            "up_values": Array((*stack, self.heads, self.rank, self.width), by_heads),
            "o": Array((*stack, self.heads, self.width, self.d), (None, "heads", None, "embed")),
            "gate": Array((*stack, self.d, self.mlp), (None, "embed", "mlp")),
            "down": Array((*stack, self.mlp, self.d), (None, "mlp", "embed")),
        }
        embedding = Array((self.vocabulary, self.d), ("vocabulary", "embed"))
        return {
            "embedding": embedding,
            "layers": layers,
            "out": Array((self.d, self.vocabulary), embedding.names[::-1]),
        }


def decoded_latent(model: Latent, layout: Layout, batch: int, sequence: int) -> Program:
    """`(weights, cache, position, tokens) -> (cache, next tokens)`: one token for each sequence."""

    def attention(x: jax.Array, weights: Tree, cache: jax.Array, position: jax.Array) -> jax.Array:
        query = jnp.einsum("bd,dhk->bhk", x, weights["q"])
        scores = jnp.einsum("bhk,hkr,btr->bht", query, weights["up_keys"], cache).astype(jnp.float32)
        scores = jnp.where(jnp.arange(sequence) <= position, scores * model.width**-0.5, -1e9)
        mixed = jnp.einsum("bht,btr->bhr", jax.nn.softmax(scores).astype(x.dtype), cache)
        return jnp.einsum("bhr,hrk,hkd->bd", mixed, weights["up_values"], weights["o"])

    def decode(weights: Tree, cache: jax.Array, position: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        def layer(x: jax.Array, given: tuple[Tree, jax.Array]) -> tuple[jax.Array, jax.Array]:
            weights, cache = given
            normed = rms_norm(x, weights["norm"])
            added = (normed @ weights["down_cache"])[:, None]
            cache = jax.lax.dynamic_update_slice_in_dim(cache, added, position, 1)
            x = layout(x + attention(normed, weights, cache, position), "batch", None)
            return layout(x + jax.nn.silu(x @ weights["gate"]) @ weights["down"], "batch", None), cache

        x = layout(weights["embedding"][tokens], "batch", None)
        x, cache = jax.lax.scan(layer, x, (weights["layers"], cache))
        return cache, jnp.argmax(x @ weights["out"], -1).astype(jnp.int32)

    cache = Array((model.layers, batch, sequence, model.rank), (None, "batch", "cache", None), bf16)
    given = (in_type(bf16, model.weights()), cache, Array((), (), i32), Array((batch,), ("batch",), i32))
    return Program(decode, tuple(map(types, given)), tuple(map(names, given)), (cache.names, ("batch",)), (1,), 0.0)
