"""Gather and scatter on shards: lookups leave partial sums, updates outside of a device's block are dropped."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.mlir import ir

from sdy_jax.ir.graph import Op
from sdy_jax.ir.meshes import AxisRef
from sdy_jax.ir.shardings import OpShardingRule
from sdy_jax.ir.stored_shardings import sharding_of
from sdy_jax.lowering.ops.collectives import movement
from sdy_jax.lowering.ops.elementwise import WITHOUT_ZERO, identity, is_identity, reduction_kind, returns_new, sum_kind
from sdy_jax.lowering.ops.re_emission import re_emit
from sdy_jax.lowering.ops.registry import (
    LocalOp,
    Strategy,
    emitter,
    folds_when_settled,
    pass_through_factors,
    runs_part_by_part,
    strategies,
)
from sdy_jax.lowering.ops.shards import clamped, factors_of_dims, has_padding, is_leader, offset
from sdy_jax.shardy.rules.op_attributes import (
    GatherDimensionNumbers,
    ScatterDimensionNumbers,
    gather_dimension_numbers,
    scatter_dimension_numbers,
)

# Gather on shards, and what it shares with scatter.
#
# A dimension of the operand along which slices are taken can stay sharded: a device looks up what lies in its own
# block, which leaves partial sums with one contributor per element, the others being zero. (Only the sign of a
# negative zero is lost in them.) Slices of one element are clamped into the block and masked. Longer ones may reach
# over its border: the block is padded with zeros by the slice's length on both sides.

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
    return movement.looked_up(found)


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


# Scatter on shards.
#
# A dimension of the inputs in which slices are put can stay sharded: a device updates what lies in its own block and
# needs no communication, because updates outside of the block are dropped by the op's semantics. A slice that reaches
# over the border of the block is put into a padded block, of which the padding is cut off again.
#
# Updates that are sharded leave partial results of the combiner's kind. A combiner without one, such as overwriting,
# needs all updates on every device; moving them is never more than combining whole results.

runs_part_by_part("stablehlo.scatter")


@strategies("stablehlo.scatter")
def _scatter_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    numbers, kind = scatter_dimension_numbers(op), reduction_kind(op.blocks[0])
    inputs, indices = rule.operand_mappings[0], rule.operand_mappings[len(op.results)]
    moved = factors_of_dims(inputs, _target_dims(op, numbers))
    split = factors_of_dims(indices, _vector_dims(op, numbers))
    if not numbers.scatter_dims_to_operand_dims:  # there is no index by which updates could be dropped
        return [Strategy("along_factors", pass_through_factors(rule) - moved - split, work=frozenset())]
    own = (pass_through_factors(rule) | moved) - split
    if kind is None:
        return [Strategy("own_updates", own, work=frozenset())]
    return [Strategy("own_updates", own | split, split, kind, work=frozenset())]


def _target_dims(op: Op, numbers: ScatterDimensionNumbers) -> list[int]:
    """The dimensions of the inputs of which an update covers only a part, at the position of its index (or the first).

    A part of several elements at the first place is left out: it has no index that could be moved.
    """
    whole, updates = op.operands[0].shape or (), op.operands[len(op.results) + 1].shape or ()
    skipped = numbers.inserted_window_dims + numbers.input_batching_dims
    windows = zip([d for d in range(len(whole)) if d not in skipped], numbers.update_window_dims, strict=True)
    indexed = numbers.scatter_dims_to_operand_dims
    return [*numbers.inserted_window_dims, *(d for d, u in windows if updates[u] < whole[d] and d in indexed)]


def _vector_dims(op: Op, numbers: ScatterDimensionNumbers) -> list[int]:
    """The dimensions of the indices along which updates of the same inputs lie."""
    skipped = (numbers.index_vector_dim, *numbers.scatter_indices_batching_dims)
    return [d for d in range(op.operands[len(op.results)].rank) if d not in skipped]


@folds_when_settled("stablehlo.scatter")
def _into_addend(op: Op) -> ir.Operation | None:
    """Where updates are added to zeros, and the result to another array, they are added to that: as XLA does, and there
    is an array less. The gradient of a loss by labels is such a sum, of the size of logits."""
    if len(op.results) != 1 or reduction_kind(op.blocks[0]) != "sum" or not is_identity(op.operands[0], "sum"):
        return None
    scatter, uses = op.mlir, list(op.mlir.results[0].uses)
    add = uses[0].owner.operation if len(uses) == 1 else None
    if add is None or add.name != "stablehlo.add" or add.block != scatter.block:
        return None
    addend = add.operands[1 - uses[0].operand_number]
    layout = sharding_of(addend)
    if layout is not None and layout.unreduced_axes:
        return None
    if layout != sharding_of(scatter.results[0]) or layout != sharding_of(scatter.operands[0]):
        return None
    scatter.move_before(add)
    scatter.operands[0] = addend
    add.results[0].replace_all_uses_with(scatter.results[0])
    return add


@emitter("stablehlo.scatter")
def _scatter(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
    count = len(operands) // 2
    inputs, indices, updates = list(operands[:count]), operands[count], operands[count + 1 :]
    numbers = scatter_dimension_numbers(local.op)
    moved = [d for d in _target_dims(local.op, numbers) if local.operand_axes(0, d)]
    split = [d for d in _vector_dims(local.op, numbers) if local.operand_axes(count, d)]
    if not moved and not split:
        return _scattered(local, numbers, operands, local.op.flag("indices_are_sorted"))
    widths = _widths(local, numbers, moved)
    starts = _own_targets(local, numbers, widths, split, indices)
    if split:
        inputs = _leader_keeps(local, inputs, [axis for d in split for axis in local.operand_axes(count, d)])
    margins = {d: width for d, width in widths.items() if width > 1}
    blocks = [padded(x, margins) for x in inputs]
    if starts.size == len(numbers.scatter_dims_to_operand_dims):
        # XLA makes dynamic slices of a scatter of one update; jax 0.10's then joins them with the one that cut the
        # block out, and forgets to clamp.
        blocks = list(lax.optimization_barrier(blocks))
    found = _scattered(local, numbers, (*blocks, starts, *updates), in_order=False)
    return [_without(x, margins) for x in found]


def _widths(local: LocalOp, numbers: ScatterDimensionNumbers, moved: Sequence[int]) -> dict[int, int]:
    """How many elements of each of these dimensions of the inputs an update covers."""
    skipped = numbers.inserted_window_dims + numbers.input_batching_dims
    windows = [d for d in range(local.op.operands[0].rank) if d not in skipped]
    updates = local.op.operands[len(local.op.results) + 1].shape or ()
    covered = dict(zip(windows, (updates[u] for u in numbers.update_window_dims), strict=True))
    return {d: covered.get(d, 1) for d in moved}


def _without(x: jax.Array, margins: Mapping[int, int]) -> jax.Array:
    """Undoes `padded`."""
    for d, width in margins.items():
        x = lax.slice_in_dim(x, width, x.shape[d] - width, axis=d)
    return x


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
    """The op on one device, in a form that XLA computes rightly."""
    count = len(operands) // 2
    inputs, indices, updates = _told_apart(operands[:count]), operands[count], operands[count + 1 :]
    if numbers.scatter_dims_to_operand_dims:
        return _emitted(local, numbers, (*inputs, indices, *updates), in_order)
    # Of updates of one element at no index, XLA keeps the first only: put all at index 0 of a new dimension.
    vector = numbers.index_vector_dim
    zeros = jnp.zeros((*indices.shape[:vector], 1, *indices.shape[vector + 1 :]), indices.dtype)
    found = _emitted(local, _with_index(numbers), (*(x[None] for x in inputs), zeros, *updates), in_order)
    return [lax.squeeze(x, [0]) for x in found]


def _told_apart(inputs: Sequence[jax.Array]) -> list[jax.Array]:
    """The inputs, such that XLA cannot find two to be equal: on CPUs it then updates both in one buffer.

    Each is chosen over a value of its own, by a condition that XLA does not see to be false.
    """
    if len(inputs) == 1:
        return list(inputs)
    never = lax.optimization_barrier(jnp.zeros(len(inputs), bool))
    others = lax.optimization_barrier([jnp.zeros((), x.dtype) for x in inputs])
    return [jnp.where(never[k], other, x) for k, (x, other) in enumerate(zip(inputs, others, strict=True))]


def _with_index(numbers: ScatterDimensionNumbers) -> ScatterDimensionNumbers:
    """Those of inputs with one more dimension, of size one, in front, which is the only one with an index."""
    return dataclasses.replace(
        numbers,
        inserted_window_dims=(0, *(d + 1 for d in numbers.inserted_window_dims)),
        input_batching_dims=tuple(d + 1 for d in numbers.input_batching_dims),
        scatter_dims_to_operand_dims=(0,),
    )


def _emitted(
    local: LocalOp, numbers: ScatterDimensionNumbers, operands: Sequence[jax.Array], in_order: bool
) -> list[jax.Array]:
    """lax knows the op for one input, a few combiners, and index vectors along the last dimension."""
    body = local.op.blocks[0]
    function: Callable[..., jax.Array] | None = lax.scatter if returns_new(body) else _LAX.get(reduction_kind(body))
    if function is None or len(operands) != 3 or numbers.index_vector_dim != operands[1].ndim - 1:
        shapes = [x.shape for x in operands[: len(operands) // 2]]
        attributes = {"indices_are_sorted": str(in_order).lower(), "scatter_dimension_numbers": numbers.text}
        return re_emit(local, *operands, result_shapes=shapes, attributes=attributes)
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


def _own_targets(
    local: LocalOp,
    numbers: ScatterDimensionNumbers,
    widths: Mapping[int, int],
    split: Sequence[int],
    indices: jax.Array,
) -> jax.Array:
    """Indices relative to this device's (padded) block; what lies outside is dropped by the scatter.

    They are signed, so that an index before the block is out of range. Whole updates that are out of range globally,
    and those of padded index vectors, are sent there too.
    """
    dims, vector_dim = numbers.scatter_dims_to_operand_dims, numbers.index_vector_dim
    starts = [_signed(component(indices, vector_dim, k)) for k in range(len(dims))]
    whole, block = local.op.operands[0].shape or (), local.operand_shape(0)
    valid = _are_real(local, numbers, split, starts[0].shape)
    for d, width in widths.items():
        begin = offset(local, local.operand_axes(0, d), block[d])
        if d not in dims:  # always element 0
            valid.append(jnp.broadcast_to(begin == 0, starts[0].shape))
            continue
        k = dims.index(d)
        if width > 1:
            valid.append((starts[k] >= 0) & (starts[k] <= whole[d] - width))
            begin -= width
        starts[k] = starts[k] - begin
    if valid:
        starts[0] = jnp.where(functools.reduce(jnp.logical_and, valid), starts[0], -1)
    return with_components(indices, starts, vector_dim)


def _are_real(
    local: LocalOp, numbers: ScatterDimensionNumbers, split: Sequence[int], shape: Sequence[int]
) -> list[jax.Array]:
    """Per dimension of the indices that has padding, which vectors are none."""
    number, found = len(local.op.results), []
    for d in split:
        size, axes = (local.op.operands[number].shape or ())[d], local.operand_axes(number, d)
        if has_padding(local, size, axes):
            position = lax.broadcasted_iota(jnp.int32, shape, d - (d > numbers.index_vector_dim))
            found.append(position + offset(local, axes, local.operand_shape(number)[d]) < size)
    return found


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
