"""Ops that give the same elements another shape: broadcasts, transposes, bit casts, and reshapes with their strips."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import jax
from jax import lax

from sdy_jax.ir.graph import Op
from sdy_jax.ir.meshes import Axes, axes_size
from sdy_jax.ir.shardings import OpShardingRule, TensorMapping
from sdy_jax.lowering.ops.re_emission import numpy_dtype, re_emit
from sdy_jax.lowering.ops.registry import (
    Inside,
    LocalOp,
    Shards,
    Strategy,
    emitter,
    pass_through_factors,
    rematerializable,
    runs_part_by_part,
    strategies,
)
from sdy_jax.lowering.ops.shards import block_shape, redistribute
from sdy_jax.lowering.reshard.strip_reads import Level, reshape_plan
from sdy_jax.lowering.reshard.strips import block_length

# Ops that give the same elements another shape: broadcasts, reshapes, transposes, bit casts.

runs_part_by_part("stablehlo.broadcast_in_dim", "stablehlo.transpose")

rematerializable("stablehlo.broadcast_in_dim", "stablehlo.transpose", "stablehlo.reshape")


@emitter("stablehlo.broadcast_in_dim")
def _broadcast_in_dim(local: LocalOp, operand: jax.Array) -> jax.Array:
    dims = local.op.ints("broadcast_dimensions")
    in_order = lax.transpose(operand, sorted(range(len(dims)), key=dims.__getitem__))  # lax takes ascending ones only
    return lax.broadcast_in_dim(in_order, local.result_shape(), sorted(dims))


@strategies("stablehlo.broadcast_in_dim")
def _broadcast_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    """A dimension of size one that is expanded must be whole: its only element lies in the first block."""
    operand, result = rule.factors_of
    return [Strategy("along_factors", pass_through_factors(rule) - (operand - result))]


@emitter("stablehlo.broadcast")
def _broadcast(local: LocalOp, operand: jax.Array) -> jax.Array:
    shape = local.result_shape()
    return lax.broadcast_in_dim(operand, shape, range(len(shape) - operand.ndim, len(shape)))


@emitter("stablehlo.transpose")
def _transpose(local: LocalOp, operand: jax.Array) -> jax.Array:
    return lax.transpose(operand, local.op.ints("permutation"))


@emitter("stablehlo.bitcast_convert")
def _bitcast_convert(local: LocalOp, operand: jax.Array) -> jax.Array:
    target = numpy_dtype(local.op.results[0].dtype)
    if operand.dtype.itemsize == target.itemsize and "complex" not in local.op.operands[0].dtype:
        return lax.bitcast_convert_type(operand, target)
    return re_emit(local, operand)[0]


# Reshapes on shards.
#
# The dimensions of the two shapes fall into groups of equal products, flattened and divided again each by itself.
# Where blocks of a group are contiguous ranges of it, equal on both sides, a reshape is local. In any other case the
# ranges that shards hold and want differ, and only strips of the difference travel: for the strategy, a group of
# which one dimension is split on either side is one factor.
#
# Example: `f32[4,65,64]` with 65 split over 8 to `f32[260,64]` with 260 split: each shard holds four ranges of 9 rows
# (the last one of 2), and wants one of 33.

runs_part_by_part("stablehlo.reshape")

_MOST_STRIPS = 16
"""The longest list of ranges that a shard may hold, or want. Guessed: of more, an all_to_all to another dimension sends
as much in one step."""


class DimensionGroup(NamedTuple):
    """Dimensions of the operand and of the result with one product."""

    operand: range
    result: range


def dimension_groups(operand: Sequence[int], result: Sequence[int]) -> list[DimensionGroup]:
    """The smallest groups of equal products. Example: [4, 65, 64] and [260, 64] have ({0, 1}, {0}) and ({2}, {1})."""
    products = [list(itertools.accumulate(shape, lambda a, b: a * b)) for shape in (operand, result)]
    ends = [
        [len(of_side) - of_side[::-1].index(product) for of_side in products]
        for product in dict.fromkeys(n for n in products[0] if n in products[1])
    ]
    return [DimensionGroup(range(a, b), range(c, d)) for (a, c), (b, d) in itertools.pairwise([[0, 0], *ends])]


def _level(shape: Sequence[int], dims: range, dim: int) -> Level:
    """A dimension in its group."""
    return Level(math.prod(shape[dims.start : dim]), shape[dim], math.prod(shape[dim + 1 : dims.stop]))


@strategies("stablehlo.reshape")
def _reshape_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    shapes = op.operands[0].shape or (), op.results[0].shape or ()
    merged = [group for group in dimension_groups(*shapes) if len(group.operand) > 1 or len(group.result) > 1]
    strips = [_by_strips(*shapes, rule, group, *dims) for group in merged for dims in _pairs(*shapes, group)]
    return [Strategy("along_factors", _common_factors(rule)), *strips]


def _common_factors(rule: OpShardingRule) -> frozenset[int]:
    """Where dimensions do not fit together, the rule has factors that only one side has: `([i, jk])->([l, mk])`."""
    operand, result = rule.factors_of
    return pass_through_factors(rule) & operand & result


def _pairs(operand: Sequence[int], result: Sequence[int], group: DimensionGroup) -> Iterator[tuple[int, int]]:
    """The dimensions of the operand and of the result that may be split while the group is sent in strips."""
    sides = ((operand, group.operand), (result, group.result))
    few = [[d for d in dims if shape[d] > 1 and _level(shape, dims, d).major <= _MOST_STRIPS] for shape, dims in sides]
    return itertools.product(few[0], few[1])


@lru_cache(maxsize=1024)
def _by_strips(
    operand: tuple[int, ...],
    result: tuple[int, ...],
    rule: OpShardingRule,
    group: DimensionGroup,
    before: int,
    after: int,
) -> Strategy:
    """One factor for dimension `before` of the operand and `after` of the result, the others of their group whole.

    A second factor, of no dimension, makes up for the group's other elements: all of them are work.
    """
    flat, size = len(rule.factor_sizes), min(operand[before], result[after])
    of_operand = _only(rule.operand_mappings[0], group.operand, before, flat)
    of_result = _only(rule.result_mappings[0], group.result, after, flat)
    rest = math.prod(operand[d] for d in group.operand) // size
    sizes = (*rule.factor_sizes, size, rest)
    own = replace(rule, factor_sizes=sizes, operand_mappings=(of_operand,), result_mappings=(of_result,))
    source, target = _level(operand, group.operand, before), _level(result, group.result, after)

    def sent(shards: Shards) -> int:
        block = block_shape(operand, of_operand, shards)
        beside = math.prod(n for d, n in enumerate(block) if d not in group.operand)
        return reshape_plan(source, target, shards[flat]).wire_elements * beside

    strips = Inside("collective_permute", frozenset((flat,)), 0, sent)
    splittable = _common_factors(rule) & own.factors_of[0] | {flat}
    work = own.factors_of[0] | {flat + 1}
    return Strategy("strips", splittable, inside=(strips,), work=work, rule=own)


def _only(mapping: TensorMapping, group: range, dim: int, factor: int) -> TensorMapping:
    """A mapping in which a group has a factor along one dimension."""
    return tuple([(factor,) if d == dim else () if d in group else f for d, f in enumerate(mapping)])


@emitter("stablehlo.reshape")
def _reshape(local: LocalOp, operand: jax.Array) -> jax.Array:
    shapes = local.op.operands[0].shape or (), local.op.results[0].shape or ()
    for group in dimension_groups(*shapes):
        split = _split(local, group)
        if split is not None:
            operand = _in_strips(local, operand, group, *split)
    return lax.reshape(operand, local.result_shape())


def _split(local: LocalOp, group: DimensionGroup) -> tuple[Axes, Level, Level] | None:
    """The axes and the dimensions that they split, where the blocks of a group are not the same ranges of it."""
    before = [d for d in group.operand if local.operand_axes(0, d)]
    after = [d for d in group.result if local.result_axes(0, d)]
    if len(before) != 1 or len(after) != 1:
        return None
    axes = local.operand_axes(0, before[0])
    source = _level(local.op.operands[0].shape or (), group.operand, before[0])
    target = _level(local.op.results[0].shape or (), group.result, after[0])
    blocks = (block_length(level.size, axes_size(axes, local.mesh.mesh)) * level.minor for level in (source, target))
    same = source.major == target.major == 1 and len(set(blocks)) == 1
    return None if same or axes != local.result_axes(0, after[0]) else (axes, source, target)


def _in_strips(
    local: LocalOp, x: jax.Array, group: DimensionGroup, axes: Axes, source: Level, target: Level
) -> jax.Array:
    """The blocks of the result's group, flattened, in an array of three dimensions."""
    shards = axes_size(axes, local.mesh.mesh)
    block = block_length(source.size, shards) * source.minor
    after = math.prod(local.operand_shape(0)[group.operand.stop :])
    flat = lax.reshape(x, (x.size // (source.major * block * after), source.major, block, after))
    rows = [lax.index_in_dim(flat, p, axis=1, keepdims=False) for p in range(source.major)]
    return redistribute(local, rows, 1, axes, reshape_plan(source, target, shards))
