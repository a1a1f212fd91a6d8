"""Gather on shards, and what it shares with scatter.

A dimension of the operand along which slices are taken can stay sharded: a device looks up what lies in its own block,
which leaves partial sums with one contributor per element, the others being zero. (Only the sign of a negative zero is
lost in them.) Slices of one element are clamped into the block and masked. Longer ones may reach over its border: the
block is padded with zeros by the slice's length on both sides.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from sdy_jax.ir.graph import Op
from sdy_jax.lowering.collectives import compiler_forms
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.emission.re_emission import re_emit
from sdy_jax.lowering.strategies.monoids import WITHOUT_ZERO, sum_kind
from sdy_jax.lowering.strategies.registry import Strategy, pass_through_factors, runs_part_by_part, strategies
from sdy_jax.lowering.strategies.shards import clamped, factors_of_dims, offset
from sdy_jax.op_rules.op_attributes import GatherDimensionNumbers, gather_dimension_numbers
from sdy_jax.representation.rule import OpShardingRule

runs_part_by_part("stablehlo.gather", sizes="slice_sizes")


@strategies("stablehlo.gather")
def _gather_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    """Reduction factors of a gather's rule are the dimensions of which it takes single elements."""
    if op.results[0].dtype in WITHOUT_ZERO:
        return [Strategy("along_factors", pass_through_factors(rule), work=frozenset())]
    partial = rule.reduction | factors_of_dims(rule.operand_mappings[0], _cut_dims(op))
    splittable = pass_through_factors(rule) | partial
    return [Strategy("masked_lookup", splittable, partial, sum_kind(op.results[0].dtype), work=frozenset())]


def _cut_dims(op: Op) -> list[int]:
    """The dimensions of a gather's operand of which slices of several elements, but not all, are taken anywhere."""
    indexed = gather_dimension_numbers(op).start_index_map
    sizes = zip(op.operands[0].shape or (), op.ints("slice_sizes"), strict=True)
    return [d for d, (n, size) in enumerate(sizes) if 1 < size < n and d in indexed]


@emitter("stablehlo.gather")
def _gather(local: LocalOp, operand: jax.Array, indices: jax.Array) -> list[jax.Array]:
    numbers = gather_dimension_numbers(local.op)
    looked_up, sizes = _looked_up(local, numbers), _local_slice_sizes(local, numbers)
    in_order = local.op.flag("indices_are_sorted")
    if not looked_up:
        indices = _clamped_vector(local, numbers, indices)
        return [_as_array(_gathered(local, numbers, sizes, operand, indices, in_order), numbers)]
    starts, hit = _own_starts(local, numbers, looked_up, indices)
    block = padded(operand, {d: sizes[d] for d in looked_up if sizes[d] > 1})
    found = _gathered(local, numbers, sizes, block, starts, in_order=False)
    return [_masked(found, hit, numbers)]


def _as_array(found: jax.Array, numbers: GatherDimensionNumbers) -> jax.Array:
    """What was looked up, rows for an array of indices as an array like any other."""
    if found.ndim - len(numbers.offset_dims) < 2 or not numbers.offset_dims:
        return found
    return compiler_forms.looked_up(found)


def padded(x: jax.Array, lengths: Mapping[int, int]) -> jax.Array:
    """An array with so many zeros added on both sides of each dimension."""
    return lax.pad(x, jnp.zeros((), x.dtype), [(lengths.get(d, 0), lengths.get(d, 0), 0) for d in range(x.ndim)])


def _gathered(
    local: LocalOp,
    numbers: GatherDimensionNumbers,
    sizes: Sequence[int],
    operand: jax.Array,
    indices: jax.Array,
    in_order: bool,
) -> jax.Array:
    """The op on one device; lax knows it with index vectors along the last dimension only."""
    if numbers.index_vector_dim != indices.ndim - 1:
        text = {"slice_sizes": f"array<i64: {', '.join(map(str, sizes))}>", "indices_are_sorted": str(in_order).lower()}
        return re_emit(local, operand, indices, attributes=text)[0]
    dims = lax.GatherDimensionNumbers(
        offset_dims=numbers.offset_dims,
        collapsed_slice_dims=numbers.collapsed_slice_dims,
        start_index_map=numbers.start_index_map,
        operand_batching_dims=numbers.operand_batching_dims,
        start_indices_batching_dims=numbers.start_indices_batching_dims,
    )
    # The op clamps what is out of bounds: the mode only says so, and lowers to nothing but the op.
    return lax.gather(operand, indices, dims, sizes, indices_are_sorted=in_order, mode="clip")


def _looked_up(local: LocalOp, numbers: GatherDimensionNumbers) -> list[int]:
    """The sharded dimensions of which slices take only a part."""
    sizes = zip(local.op.operands[0].shape or (), local.op.ints("slice_sizes"), strict=True)
    return [
        d
        for d, (n, size) in enumerate(sizes)
        if local.operand_axes(0, d) and size != n and d not in numbers.operand_batching_dims
    ]


def _local_slice_sizes(local: LocalOp, numbers: GatherDimensionNumbers) -> list[int]:
    """The local slice sizes: a dimension taken whole is taken whole of the local block."""
    whole, block = local.op.operands[0].shape or (), local.operand_shape(0)
    return [
        block[d] if size == whole[d] and d not in numbers.operand_batching_dims else size
        for d, size in enumerate(local.op.ints("slice_sizes"))
    ]


def _clamped_vector(local: LocalOp, numbers: GatherDimensionNumbers, indices: jax.Array) -> jax.Array:
    """Indices, clamped where they are one vector. The op would clamp them, but jax 0.10's XLA makes a slice of such a
    gather, joins it with one of its result, and forgets to (openxla/xla#49121)."""
    vectors = indices.shape[: numbers.index_vector_dim] + indices.shape[numbers.index_vector_dim + 1 :]
    if math.prod(vectors) != 1 or not numbers.start_index_map:
        return indices
    starts = [
        clamped(component(indices, numbers.index_vector_dim, k), highest).astype(indices.dtype)
        for k, highest in enumerate(_last_starts(local.op, numbers))
    ]
    return with_components(indices, starts, numbers.index_vector_dim)


def _last_starts(op: Op, numbers: GatherDimensionNumbers) -> list[int]:
    """The last start of a slice in each dimension that indices address."""
    shape, sizes = op.operands[0].shape or (), op.ints("slice_sizes")
    return [shape[d] - sizes[d] for d in numbers.start_index_map]


def _own_starts(
    local: LocalOp, numbers: GatherDimensionNumbers, looked_up: Sequence[int], indices: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Start indices into this device's (padded) block, and per index vector whether it holds the single elements.

    Indices are clamped to the global bounds first, as the gather itself does.
    """
    sizes, block, highest = local.op.ints("slice_sizes"), local.operand_shape(0), _last_starts(local.op, numbers)
    starts = {
        d: clamped(component(indices, numbers.index_vector_dim, k), highest[k])
        for k, d in enumerate(numbers.start_index_map)
    }
    hits = [jnp.array(True)]
    for d in looked_up:
        begin = offset(local, local.operand_axes(0, d), block[d])
        if d not in starts:  # always element 0
            hits.append(begin == 0)
            continue
        inside = starts[d] - begin
        if sizes[d] > 1:
            starts[d] = jnp.clip(inside + sizes[d], 0, block[d] + sizes[d])
            continue
        hits.append((inside >= 0) & (inside < block[d]))
        starts[d] = jnp.clip(inside, 0, block[d] - 1)
    joined = with_components(indices, [starts[d] for d in numbers.start_index_map], numbers.index_vector_dim)
    return joined, functools.reduce(jnp.logical_and, hits)


def _masked(found: jax.Array, hit: jax.Array, numbers: GatherDimensionNumbers) -> jax.Array:
    """The found elements where `hit` (one flag per index vector, or one for all), else zero."""
    if hit.ndim:
        batch = [d for d in range(found.ndim) if d not in numbers.offset_dims]
        hit = lax.broadcast_in_dim(hit, found.shape, batch)
    return jnp.where(hit, found, jnp.zeros((), found.dtype))


def component(indices: jax.Array, vector_dim: int, k: int) -> jax.Array:
    """Element k of every index vector."""
    if vector_dim == indices.ndim:
        return indices
    return lax.index_in_dim(indices, k, vector_dim, keepdims=False)


def with_components(indices: jax.Array, components: Sequence[jax.Array], vector_dim: int) -> jax.Array:
    """Indices made of these elements, in the layout of `indices`; vectors without elements stay as they are."""
    if not components:
        return indices
    return components[0] if vector_dim == indices.ndim else jnp.stack(components, vector_dim)
