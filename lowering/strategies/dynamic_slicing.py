"""Slices and updates at positions that are known at run time.

Along a sharded dimension every device finds the part of the slice or update that falls into its own block. Updates
need no communication; slices are partial sums, with one contributor per element.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from sdy_jax.ir.graph import Op
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.strategies.monoids import WITHOUT_ZERO, sum_kind
from sdy_jax.lowering.strategies.registry import (
    Strategy,
    accesses_part,
    pass_through_factors,
    runs_part_by_part,
    strategies,
)
from sdy_jax.lowering.strategies.shards import clamped, offset, resized_factors
from sdy_jax.representation.rule import OpShardingRule

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
