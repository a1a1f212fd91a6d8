"""Serving of language models: prefilling a cache, and one token for each sequence from a cache, or from its pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from models.common import Array, Layout, Program, Tree, attention, bf16, i32, in_type, names, rms_norm, rotary, types
from models.llama import Llama


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
    flops = model.flops(batch, sequence, logits=1)
    return Program(prefill, (types(weights), tokens.type), (names(weights), tokens.names), results, (), flops)


def decoded(model: Llama, layout: Layout, batch: int, sequence: int) -> Program:
    """`(weights, keys, values, position, tokens) -> (keys, values, next tokens)`: one token for each sequence."""

    def decode(
        weights: Tree, keys: jax.Array, values: jax.Array, position: jax.Array, tokens: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        def layer(x: jax.Array, given: tuple[Tree, jax.Array, jax.Array]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            weights, keys, values = given
            q, k, v = model.heads_of(rms_norm(x, weights["attention_norm"]), weights)
            keys = jax.lax.dynamic_update_slice_in_dim(keys, rotary(k, position[None]), position, 1)
            values = jax.lax.dynamic_update_slice_in_dim(values, v, position, 1)
            found = attention(rotary(q, position[None]), keys, values, jnp.arange(sequence) <= position)
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
    results = (cache.names, cache.names, tokens.names)
    return Program(decode, tuple(map(types, given)), named, results, (1, 2), model.flops(batch, sequence, 1))


PAGE = 64
"""Tokens of a page of a cache. Chosen: between vLLM's 16 and 128."""


_PAGES, _QUERIES = 8, 32
"""Pages and queries that ragged paged attention takes at a time, which asks the device at hand otherwise. Chosen: 512
tokens, as splash attention."""

_SPLITS, _SHARED = 16, 2
"""Parts of a sequence's pages that paged attention for GPUs takes at once, its default, and pages that each holds in
shared memory: 128 tokens, as its default of 8 pages of 16; 512 were more than an H100 has."""


class Pages(Protocol):
    """A kernel that attends to a cache of pages."""

    @property
    def mapped(self) -> bool:
        """In a `shard_map` around the call and what it adds to the cache: heads are split, and sequences with their own
        pages, whose numbers are a device's. Else called plainly."""

    def cache(self, model: Llama, pages: int) -> Array:
        """The cache of all layers."""

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: jax.Array, table: jax.Array, lengths: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """What a token of each sequence finds, (sequences, heads, width), and the cache of a layer with its keys and
        values; `table`: the pages of each sequence, `lengths`: how many tokens they have."""


@dataclass(frozen=True)
class RaggedPages:
    """Ragged paged attention of JAX's kernels for TPUs: keys and values are beside each other."""

    mapped: bool = True

    def cache(self, model: Llama, pages: int) -> Array:
        shape = (model.layers, pages, PAGE, 2 * model.kv_heads, model.width)
        return Array(shape, (None, "batch", None, "kv_heads", None), bf16)

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: jax.Array, table: jax.Array, lengths: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        page, place = _place(table, lengths)
        cache = cache.at[page, place].set(jnp.stack([k, v], 2).reshape(k.shape[0], -1, k.shape[2]))
        starts, count = jnp.arange(q.shape[0] + 1), jnp.array([q.shape[0]], jnp.int32)
        found = ragged_paged_attention(
            q, cache, lengths + 1, table, starts, count,
            sm_scale=q.shape[-1] ** -0.5,
            num_kv_pages_per_block=min(_PAGES, table.shape[1]),
            num_queries_per_block=min(_QUERIES, q.shape[0]),
        )  # fmt: skip
        return found, cache


@dataclass(frozen=True)
class SplitPages:
    """Paged attention of JAX's kernels for GPUs: pages are by head, keys before values."""

    mapped: bool = True
    interpret: bool = False

    def cache(self, model: Llama, pages: int) -> Array:
        shape = (model.layers, 2, model.kv_heads, pages, PAGE, model.width)
        return Array(shape, (None, None, "kv_heads", "batch", None, None), bf16)

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: jax.Array, table: jax.Array, lengths: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        page, place = _place(table, lengths)
        cache = cache.at[:, :, page, place].set(jnp.stack([k, v]).swapaxes(1, 2))
        q = q * q.shape[-1] ** -0.5
        found = paged_attention(
            q, *cache, table, lengths + 1,
            pages_per_compute_block=_SHARED,
            k_splits=min(_SPLITS, table.shape[1]),
            interpret=self.interpret,
        )  # fmt: skip
        return found, cache


def _place(table: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The page of the next token of each sequence, and its place there."""
    return jnp.take_along_axis(table, lengths[:, None] // PAGE, 1)[:, 0], lengths % PAGE


def decoded_from_pages(model: Llama, layout: Layout, batch: int, sequence: int, pages: Pages) -> Program:
    """`(weights, cache, table, lengths, tokens) -> (cache, next tokens)`: one token for each sequence."""
    cache = pages.cache(model, batch * sequence // PAGE)
    heads, of_keys = ("batch", "heads", None), ("batch", "kv_heads", None)
    of_layer = cache.names[1:]

    def attend(*given: jax.Array) -> tuple[jax.Array, jax.Array]:
        if not pages.mapped:
            return pages.attend(*given)
        taken = (heads, of_keys, of_keys, of_layer, ("batch", None), ("batch",))
        found = (layout.spec(heads), layout.spec(of_layer))
        mapped = jax.shard_map(
            pages.attend, mesh=layout.mesh, in_specs=layout.specs(taken), out_specs=found, check_vma=False
        )
        return mapped(*given)  # type: ignore[no-any-return]

    def decode(
        weights: Tree, cache: jax.Array, table: jax.Array, lengths: jax.Array, tokens: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        def layer(x: jax.Array, given: tuple[Tree, jax.Array]) -> tuple[jax.Array, jax.Array]:
            weights, cache = given
            q, k, v = model.heads_of(rms_norm(x, weights["attention_norm"]), weights)
            q, k = (rotary(part, lengths[:, None]) for part in (q, k))
            found, cache = attend(q[:, 0], k[:, 0], v[:, 0], cache, table, lengths)
            x = layout(x + (found.reshape(x.shape[0], -1) @ weights["o"])[:, None], "batch", None, None)
            x = layout(x + model.mlp(rms_norm(x, weights["mlp_norm"]), weights, layout), "batch", None, None)
            return x, cache

        x = layout(weights["embedding"][tokens][:, None], "batch", None, None)
        x, cache = jax.lax.scan(layer, x, (weights["layers"], cache))
        return cache, jnp.argmax(model.logits(x, weights, layout)[:, 0], -1).astype(jnp.int32)

    weights, whole = in_type(bf16, model.weights()), Array((batch,), ("batch",), i32)
    given = (weights, cache, Array((batch, sequence // PAGE), ("batch", None), i32), whole, whole)
    named = tuple(map(names, given))
    results = (cache.names, whole.names)
    return Program(decode, tuple(map(types, given)), named, results, (1,), model.flops(batch, sequence, 1))
