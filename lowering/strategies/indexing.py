"""Gather and scatter on shards.

A dimension of the operand that is indexed element by element can stay sharded: a device looks up (or updates) the
elements that lie in its own block. A gather then leaves partial sums with one non-zero contributor per element; a
scatter needs no communication, because updates outside of the block are dropped by its semantics. Sharded updates of a
scatter leave partial results of the combiner's kind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from sdy_jax.graph import Op
from sdy_jax.lowering.generic import re_emit
from sdy_jax.lowering.strategies.dot import sum_kind
from sdy_jax.lowering.strategies.monoids import identity, reduction_kind, returns_new
from sdy_jax.lowering.strategies.registry import (
    LocalOp,
    Strategy,
    emitter,
    pass_through_factors,
    strategies,
)
from sdy_jax.lowering.strategies.shards import clamped, has_padding, is_leader, offset
from sdy_jax.representation.mesh import AxisRef
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.rules.attributes import (
    GatherDimensionNumbers,
    ScatterDimensionNumbers,
    gather_dimension_numbers,
    scatter_dimension_numbers,
)


@strategies("stablehlo.gather")
def _gather_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    """Reduction factors of a gather's rule are the dimensions of which it takes single elements."""
    return [Strategy("masked_lookup", pass_through_factors(rule) | rule.reduction, sum_kind(op.results[0].dtype))]


@emitter("stablehlo.gather")
def _gather(local: LocalOp, operand: jax.Array, indices: jax.Array) -> list[jax.Array]:
    numbers = gather_dimension_numbers(local.op)
    looked_up, sizes = _looked_up(local, numbers), _local_slice_sizes(local, numbers)
    in_order = local.op.flag("indices_are_sorted")
    if not looked_up:
        return [_gathered(local, numbers, sizes, operand, indices, in_order)]
    starts, hit = _own_starts(local, numbers, looked_up, indices)
    found = _gathered(local, numbers, sizes, operand, starts, in_order=False)
    return [_masked(found, hit, numbers)]


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
    """The sharded dimensions of which single elements are taken."""
    sizes = zip(local.op.operands[0].shape or (), local.op.ints("slice_sizes"), strict=True)
    return [
        d
        for d, (n, size) in enumerate(sizes)
        if local.operand_axes(0, d) and size != n and d not in numbers.operand_batching_dims
    ]


def _local_slice_sizes(local: LocalOp, numbers: GatherDimensionNumbers) -> list[int]:
    """Dimensions that are taken whole are taken whole locally."""
    whole, block = local.op.operands[0].shape or (), local.operand_shape(0)
    return [
        block[d] if size == whole[d] and d not in numbers.operand_batching_dims else size
        for d, size in enumerate(local.op.ints("slice_sizes"))
    ]


def _own_starts(
    local: LocalOp, numbers: GatherDimensionNumbers, looked_up: Sequence[int], indices: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Start indices into this device's block, and per index vector whether the element lies there.

    Indices are clamped to the global bounds first, as the gather itself does.
    """
    whole, sizes, block = local.op.operands[0].shape or (), local.op.ints("slice_sizes"), local.operand_shape(0)
    starts = {
        d: clamped(component(indices, numbers.index_vector_dim, k), whole[d] - sizes[d])
        for k, d in enumerate(numbers.start_index_map)
    }
    hits = []
    for d in looked_up:
        begin = offset(local, local.operand_axes(0, d), block[d])
        if d not in starts:  # always element 0
            hits.append(begin == 0)
            continue
        inside = starts[d] - begin
        hits.append((inside >= 0) & (inside < block[d]))
        starts[d] = jnp.clip(inside, 0, block[d] - 1)
    joined = with_components(indices, [starts[d] for d in numbers.start_index_map], numbers.index_vector_dim)
    return joined, functools.reduce(jnp.logical_and, hits)


def _masked(found: jax.Array, hit: jax.Array, numbers: GatherDimensionNumbers) -> jax.Array:
    """What was found where `hit` (one flag per index vector, or one for all), else zero."""
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


@strategies("stablehlo.scatter")
def _scatter_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    numbers = scatter_dimension_numbers(op)
    always_first = [d for d in numbers.inserted_window_dims if d not in numbers.scatter_dims_to_operand_dims]
    kept = pass_through_factors(rule) - frozenset(f for d in always_first for f in rule.operand_mappings[0][d])
    kind = reduction_kind(op.blocks[0])
    if kind is None or not numbers.scatter_dims_to_operand_dims:
        return [Strategy("own_updates", kept)]
    return [Strategy("own_updates", kept | rule.reduction, kind)]


@emitter("stablehlo.scatter")
def _scatter(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
    count = len(operands) // 2
    inputs, indices, updates = list(operands[:count]), operands[count], operands[count + 1 :]
    numbers = scatter_dimension_numbers(local.op)
    moved, split = _moved_dims(local, numbers), _split_dims(local, numbers)
    if not moved and not split:
        return _scattered(local, numbers, operands, local.op.flag("indices_are_sorted"))
    starts = _own_targets(local, numbers, moved, split, indices)
    if split:
        inputs = _leader_keeps(local, inputs, [axis for d in split for axis in local.operand_axes(count, d)])
    return _scattered(local, numbers, (*inputs, starts, *updates), in_order=False)


_LAX: dict[str | None, Callable[..., jax.Array]] = {
    "sum": lax.scatter_add,
    "product": lax.scatter_mul,
    "max": lax.scatter_max,
    "min": lax.scatter_min,
}
"""The lax function of a combiner's kind."""


def _scattered(
    local: LocalOp, numbers: ScatterDimensionNumbers, operands: Sequence[jax.Array], in_order: bool
) -> list[jax.Array]:
    """The op on one device; lax knows it for one input, a few combiners, and index vectors along the last dimension."""
    body = local.op.blocks[0]
    function: Callable[..., jax.Array] | None = lax.scatter if returns_new(body) else _LAX.get(reduction_kind(body))
    if function is None or len(operands) != 3 or numbers.index_vector_dim != operands[1].ndim - 1:
        return re_emit(local, *operands, attributes={"indices_are_sorted": str(in_order).lower()})
    dims = lax.ScatterDimensionNumbers(
        update_window_dims=numbers.update_window_dims,
        inserted_window_dims=numbers.inserted_window_dims,
        scatter_dims_to_operand_dims=numbers.scatter_dims_to_operand_dims,
        operand_batching_dims=numbers.input_batching_dims,
        scatter_indices_batching_dims=numbers.scatter_indices_batching_dims,
    )
    unique = local.op.flag("unique_indices")
    # The op drops what is out of bounds: the mode only says so, and lowers to nothing but the op.
    return [function(*operands, dims, indices_are_sorted=in_order, unique_indices=unique, mode="drop")]


def _moved_dims(local: LocalOp, numbers: ScatterDimensionNumbers) -> list[int]:
    """The sharded dimensions of the inputs that are indexed element by element."""
    return [d for d in numbers.inserted_window_dims if local.operand_axes(0, d)]


def _split_dims(local: LocalOp, numbers: ScatterDimensionNumbers) -> list[int]:
    """The dimensions of the indices along which different devices hold different updates of the same inputs."""
    count = len(local.op.operands) // 2
    return [
        d
        for d in range(local.op.operands[count].rank)
        if local.operand_axes(count, d) and d not in (numbers.index_vector_dim, *numbers.scatter_indices_batching_dims)
    ]


def _own_targets(
    local: LocalOp, numbers: ScatterDimensionNumbers, moved: Sequence[int], split: Sequence[int], indices: jax.Array
) -> jax.Array:
    """Indices relative to this device's block; what lies outside is dropped by the scatter.

    They are signed, so that an index before the block is out of range. Padded index vectors point behind the block.
    """
    dims, vector_dim = numbers.scatter_dims_to_operand_dims, numbers.index_vector_dim
    starts = [_signed(component(indices, vector_dim, k)) for k in range(len(dims))]
    block = local.operand_shape(0)
    for d in moved:
        k = dims.index(d)
        starts[k] = starts[k] - offset(local, local.operand_axes(0, d), block[d])
    number = len(local.op.operands) // 2
    for d in split:
        size, axes = (local.op.operands[number].shape or ())[d], local.operand_axes(number, d)
        if has_padding(local, size, axes):
            position = lax.broadcasted_iota(jnp.int32, starts[0].shape, d - (d > vector_dim))
            position += offset(local, axes, indices.shape[d])
            starts[0] = jnp.where(position < size, starts[0], block[dims[0]])
    return with_components(indices, starts, vector_dim)


def _signed(index: jax.Array) -> jax.Array:
    """As int32 at least. Unsigned indices too large for that turn negative, which is as far out of range."""
    return index.astype(jnp.int64 if index.dtype.itemsize == 8 else jnp.int32)


def _leader_keeps(local: LocalOp, inputs: Sequence[jax.Array], axes: Sequence[AxisRef]) -> list[jax.Array]:
    """The inputs on the first device along `axes`, the combiner's identity on the others."""
    kind, leader = reduction_kind(local.op.blocks[0]), is_leader(local, axes)
    return [
        jnp.where(leader, x, jnp.asarray(identity(kind or "sum", v.dtype)))
        for x, v in zip(inputs, local.op.operands, strict=False)
    ]
