"""Slices, updates and rotations at positions that are known at run time."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.mlir import ir

from sdy_jax.ir.graph import Op
from sdy_jax.ir.meshes import AxisRef, axes_size
from sdy_jax.ir.shardings import OpShardingRule
from sdy_jax.lowering.ops.collectives import movement
from sdy_jax.lowering.ops.elementwise import WITHOUT_ZERO, is_identity, sum_kind
from sdy_jax.lowering.ops.re_emission import scope_name
from sdy_jax.lowering.ops.registry import (
    Inside,
    LocalOp,
    Shards,
    Strategy,
    accesses_part,
    emitter,
    folds,
    pass_through_factors,
    runs_part_by_part,
    strategies,
)
from sdy_jax.lowering.ops.shards import block_shape, clamped, factors_of_dims, offset, resized_factors
from sdy_jax.shardy.rules.slicing import ROLL, rolled_dim

# Slices and updates at positions that are known at run time.
#
# Along a sharded dimension every device finds the part of the slice or update that falls into its own block. Updates
# need no communication; slices are partial sums, with one contributor per element.

runs_part_by_part("stablehlo.dynamic_update_slice")
runs_part_by_part("stablehlo.dynamic_slice", sizes="slice_sizes")

accesses_part(reads="stablehlo.dynamic_slice", writes="stablehlo.dynamic_update_slice")


@emitter("stablehlo.dynamic_slice")
def _dynamic_slice(local: LocalOp, operand: jax.Array, *starts: jax.Array) -> jax.Array:
    """Sharded dimensions are taken whole, their start clamped to zero in either case, or looked up in the own block.

    The primitive is bound by itself: lax.dynamic_slice would read negative starts from the end.
    """
    sizes, positions, shifts = list(local.result_shape()), list(starts), dict[int, jax.Array]()
    for dim, whole in enumerate(local.op.operands[0].shape or ()):
        axes, size = local.operand_axes(0, dim), sizes[dim]
        if axes and (local.op.results[0].shape or ())[dim] != whole:
            begin = clamped(starts[dim], whole - size) - offset(local, axes, operand.shape[dim])
            sizes[dim] = min(size, operand.shape[dim])
            position = jnp.clip(begin, 0, operand.shape[dim] - sizes[dim])
            shifts[dim] = begin - position
            positions[dim] = position.astype(starts[dim].dtype)
        else:
            # The op would clamp it, but jax 0.10's XLA joins slices of slices, and forgets to.
            positions[dim] = clamped(starts[dim], operand.shape[dim] - size).astype(starts[dim].dtype)
    found = lax.dynamic_slice_p.bind(operand, *positions, slice_sizes=tuple(sizes))
    for dim, shift in shifts.items():
        found = _shifted(found, dim, shift, local.result_shape()[dim])
    return found


def _shifted(x: jax.Array, dim: int, shift: jax.Array, length: int) -> jax.Array:
    """`length` elements of a dimension from position `shift` on, which may lie outside; zeros where there are none.

    Example: [a, b, c] from -1 on, 2 elements: [0, a].
    """
    margins = [(length, length, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)]
    padded = lax.pad(x, jnp.zeros((), x.dtype), margins)
    return lax.dynamic_slice_in_dim(padded, jnp.clip(shift + length, 0, x.shape[dim] + length), length, dim)


@strategies("stablehlo.dynamic_slice")
def _dynamic_slice_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    if op.results[0].dtype in WITHOUT_ZERO:
        return [Strategy("along_factors", pass_through_factors(rule) - resized_factors(op, rule), work=frozenset())]
    partial = resized_factors(op, rule) - rule.permutation
    splittable = pass_through_factors(rule) | partial
    return [Strategy("own_part", splittable, partial, sum_kind(op.results[0].dtype), work=frozenset())]


@emitter("stablehlo.dynamic_update_slice")
def _dynamic_update_slice(local: LocalOp, operand: jax.Array, update: jax.Array, *starts: jax.Array) -> jax.Array:
    """Along a sharded dimension of which the update is a part, every device writes what falls into its own block."""
    positions, masks = list(starts), []
    for dim, (whole, size) in enumerate(
        zip(local.op.operands[0].shape or (), local.op.operands[1].shape or (), strict=True)
    ):
        axes = local.operand_axes(0, dim)
        if axes and whole != size:
            begin = clamped(starts[dim], whole - size) - offset(local, axes, operand.shape[dim])
            update, position, mask = _own_part(update, dim, begin, operand.shape[dim])
            positions[dim] = position.astype(starts[dim].dtype)
            masks.append(mask)
    if masks:
        old = lax.dynamic_slice_p.bind(operand, *positions, slice_sizes=update.shape)
        update = jnp.where(functools.reduce(jnp.logical_and, masks), update, old)
    return lax.dynamic_update_slice_p.bind(operand, update, *positions)


def _own_part(update: jax.Array, dim: int, begin: jax.Array, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What a block of `block` elements sees of an update that begins at local position `begin`, which may lie outside.

    Returns:
        The update shifted into a window that lies inside the block, the window's position, and a mask (of size one in
        the other dimensions) that is true where the window holds elements of the update.

    Example: block 4, update [a, b], begin 3: window position 2, contents [-, a], mask [False, True].
    """
    size = update.shape[dim]
    length = min(size, block)
    position = jnp.clip(begin, 0, block - length)
    padded = jnp.pad(update, [(length, length) if d == dim else (0, 0) for d in range(update.ndim)])
    first = jnp.clip(position - begin, -length, size)
    part = lax.dynamic_slice_in_dim(padded, first + length, length, dim)
    mask_shape = [length if d == dim else 1 for d in range(update.ndim)]
    index = lax.broadcasted_iota(jnp.int32, mask_shape, dim) + (position - begin)
    return part, position, (index >= 0) & (index < size)


@strategies("stablehlo.dynamic_update_slice")
def _dynamic_update_slice_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    """The update is needed whole along dimensions of which it is a part; it is all that is written."""
    operand, update, *_ = rule.factors_of
    return [Strategy("own_part", pass_through_factors(rule) - (update - operand), work=update)]


# `sdy_jax.roll`: rotations of a dimension by an offset that is known at run time.
#
#     %0 = stablehlo.custom_call @sdy_jax.roll(%x, %start) {dimension = 0 : i64, is_back = false}
#       : (tensor<1024x64xf32>, tensor<i32>) -> tensor<1024x64xf32>
#
# is what `jnp.roll` makes of a traced shift: x twice in a row, and the 1024 rows from `start` on, clamped to [0,
# 1024]. With `is_back` it is its gradient, which turns back. As one op it needs no exchange for the joined value, of
# which no device needs more than a block.
#
# A device wants a block that lies in two, at the same distance from each device's own: q whole blocks and r elements
# on. By steps, blocks are sent on by 1, 2, 4, ... devices, and kept where q has that bit; then each device takes what
# lacks from its neighbour. That is log2(g) + 1 blocks on the wire, where an all_gather has g - 1.


@folds("stablehlo.dynamic_slice")
def _fold_roll(op: Op) -> bool:
    dim, joined = rolled_dim(op), op.operands[0].defining_op
    if dim is None or joined is None:
        return False
    _replace(op, joined.mlir.operands[0], op.mlir.operands[1 + dim], dim, is_back=False)
    return True


@folds("stablehlo.add")
def _fold_gradient(op: Op) -> bool:
    """The gradient of such a slice: a value put among zeros of twice its size, whose halves are added."""
    low, high = (value.defining_op for value in op.operands)
    if low is None or high is None or not low.name == high.name == "stablehlo.slice":
        return False
    update = low.operands[0].defining_op
    if low.operands[0] is not high.operands[0] or update is None or update.name != "stablehlo.dynamic_update_slice":
        return False
    shape, zeros = op.results[0].shape or (), update.operands[0]
    dims = [d for d, (n, m) in enumerate(zip(shape, zeros.shape or (), strict=True)) if n != m]
    if len(dims) != 1 or not is_identity(zeros, "sum") or update.operands[1].shape != shape:
        return False
    (dim,) = dims
    intervals = {(half.ints("start_indices")[dim], half.ints("limit_indices")[dim]) for half in (low, high)}
    if intervals != {(0, shape[dim]), (shape[dim], 2 * shape[dim])}:
        return False
    _replace(op, update.mlir.operands[1], update.mlir.operands[2 + dim], dim, is_back=True)
    return True


def _replace(op: Op, x: ir.Value, start: ir.Value, dim: int, is_back: bool) -> None:
    old = op.results[0].mlir
    attributes = {
        "call_target_name": ir.StringAttr.get(ROLL, old.context),
        "dimension": ir.IntegerAttr.get(ir.IntegerType.get_signless(64, old.context), dim),
        "is_back": ir.BoolAttr.get(is_back, old.context),
    }
    if "sdy.sharding" in op.mlir.attributes:
        attributes["sdy.sharding"] = op.mlir.attributes["sdy.sharding"]
    roll = ir.Operation.create(
        "stablehlo.custom_call",
        results=[old.type],
        operands=[x, start],
        attributes=attributes,
        loc=op.mlir.location,
        ip=ir.InsertionPoint(op.mlir),
    )
    old.replace_all_uses_with(roll.results[0])


@strategies(ROLL)
def _roll_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    mapping = rule.operand_mappings[0]
    moved = factors_of_dims(mapping, [op.int("dimension")])

    def sent(shards: Shards) -> int:
        count = math.prod(shards[f] for f in moved)
        block = math.prod(block_shape(op.operands[0].shape or (), mapping, shards))
        return (len(_steps(count)) + 1) * block if count > 1 else 0

    inside = Inside("collective_permute", moved, 0, sent)
    splittable = pass_through_factors(rule) | moved
    return [Strategy("by_steps", splittable, inside=(inside,), work=frozenset(), dividing=moved)]


def _steps(shards: int) -> list[int]:
    """The powers of two of which distances to other shards are sums."""
    return [1 << bit for bit in range((shards - 1).bit_length())]


@emitter(ROLL)
def _roll(local: LocalOp, x: jax.Array, start: jax.Array) -> jax.Array:
    dim = local.op.int("dimension")
    axes, size = local.operand_axes(0, dim), (local.op.operands[0].shape or ())[dim]
    begin = clamped(start, size)
    if local.op.flag("is_back"):
        begin = size - begin
    if not axes:
        return _interval(x, x, begin, dim)
    with jax.named_scope(scope_name(local.op.name, axes, local.op.source)):
        return _by_steps(local, x, begin % size, dim, axes)


def _by_steps(local: LocalOp, x: jax.Array, begin: jax.Array, dim: int, axes: tuple[AxisRef, ...]) -> jax.Array:
    blocks, rest = begin // x.shape[dim], begin % x.shape[dim]
    for step in _steps(axes_size(axes, local.mesh.mesh)):
        x = jnp.where((blocks & step) > 0, _from_ahead(local, x, axes, step), x)
    return _interval(x, _from_ahead(local, x, axes, 1), rest, dim)


def _from_ahead(local: LocalOp, x: jax.Array, axes: tuple[AxisRef, ...], distance: int) -> jax.Array:
    """The block of the device that is so far ahead, round and round."""
    shards = axes_size(axes, local.mesh.mesh)
    return movement.permuted(x, axes, [((t + distance) % shards, t) for t in range(shards)], local.mesh)


def _interval(x: jax.Array, following: jax.Array, begin: jax.Array, dim: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(lax.concatenate([x, following], dim), begin, x.shape[dim], dim)
