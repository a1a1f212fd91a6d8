"""Ops that cut and shift along dimensions, at positions that the program states: slices, pads, reversals.

Along a sharded dimension the devices send each other the strips that they lack (`emission/strips.py`). Dimensions are
moved one after the other: whole ones that shrink, then sharded ones, then whole ones that grow, so that what is sent
is small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax
from jax import lax

from sdy_jax.ir.graph import Op
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.emission.redistribute import fetch, reversed_, sliced
from sdy_jax.lowering.emission.strips import StripPlan
from sdy_jax.lowering.emission.wants import Window, reverse_plan, slice_plan, window_reads
from sdy_jax.lowering.strategies.monoids import WITHOUT_ZERO, sum_kind
from sdy_jax.lowering.strategies.registry import Inside, Shards, Strategy, pass_through_factors, strategies
from sdy_jax.lowering.strategies.shards import block_shape, factors_of_dims, resized_factors
from sdy_jax.representation.mesh import axes_size
from sdy_jax.representation.rule import OpShardingRule

PlanOf = Callable[[int, int], StripPlan]
"""The strips that move along a dimension, given as its index, in some number of shards."""


def by_strips(op: Op, rule: OpShardingRule, dims: Iterable[int], plan_of: PlanOf) -> Strategy:
    """An op on one operand that moves strips along `dims`, in the order of `in_order`."""
    inside = tuple(_strips(op, rule, dim, dims, plan_of) for dim in in_order(op, dims))
    splittable = pass_through_factors(rule) | factors_of_dims(rule.operand_mappings[0], dims)
    return Strategy("by_strips", splittable, inside=inside, work=frozenset())


def in_order(op: Op, dims: Iterable[int]) -> list[int]:
    """Dimensions in the order in which an op moves along them: those that shrink come first."""
    sizes = list(zip(op.operands[0].shape or (), op.results[0].shape or (), strict=True))
    return sorted(dims, key=lambda d: sizes[d][1] / max(sizes[d][0], 1))


def _strips(op: Op, rule: OpShardingRule, dim: int, dims: Iterable[int], plan_of: PlanOf) -> Inside:
    """What moves along one dimension, after those that come before it."""
    operand, result = op.operands[0].shape or (), op.results[0].shape or ()
    mapping, order = rule.operand_mappings[0], in_order(op, dims)
    earlier = set(order[: order.index(dim)])

    def sent(shards: Shards) -> int:
        old, new = block_shape(operand, mapping, shards), block_shape(result, rule.result_mappings[0], shards)
        row = 1
        for d in range(len(operand)):
            is_split = shards[mapping[d][0]] > 1
            if d != dim:
                row *= (new if d in earlier else old)[d] if is_split else min(old[d], new[d])
        return row * plan_of(dim, shards[mapping[dim][0]]).wire_elements

    return Inside("collective_permute", factors_of_dims(mapping, [dim]), 0, sent)


def moved_along(
    local: LocalOp, x: jax.Array, dims: Iterable[int], move: Callable[[jax.Array, int], jax.Array]
) -> jax.Array:
    """A local operand moved along each of `dims`: whole ones that shrink, sharded ones, whole ones that grow."""
    order = in_order(local.op, dims)
    sizes = list(zip(local.op.operands[0].shape or (), local.op.results[0].shape or (), strict=True))
    split = [d for d in order if local.operand_axes(0, d)]
    shrinking = [d for d in order if d not in split and sizes[d][1] <= sizes[d][0]]
    growing = [d for d in order if d not in split and d not in shrinking]
    for dim in (*shrinking, *split, *growing):
        x = move(x, dim)
    return x


def _shards(local: LocalOp, dim: int) -> int:
    return axes_size(local.operand_axes(0, dim), local.mesh.mesh)


# --- slices ---


def _cut_dims(op: Op) -> list[int]:
    sizes = zip(op.operands[0].shape or (), op.results[0].shape or (), strict=True)
    return [d for d, (n, m) in enumerate(sizes) if n != m]


def _interval(op: Op, dim: int) -> tuple[int, int, int]:
    """Start, limit and stride."""
    return op.ints("start_indices")[dim], op.ints("limit_indices")[dim], op.ints("strides")[dim]


@strategies("stablehlo.slice")
def _slice_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    """Few elements of a large dimension are cheaper as a partial sum, to which their owners contribute."""
    sizes, dims = op.operands[0].shape or (), _cut_dims(op)
    strips = by_strips(op, rule, dims, lambda d, shards: slice_plan(sizes[d], shards, *_interval(op, d)).plan)
    if not dims or op.results[0].dtype in WITHOUT_ZERO:
        return [strips]
    partial = resized_factors(op, rule)
    return [strips, Strategy("own_part", strips.splittable, partial, sum_kind(op.results[0].dtype), work=frozenset())]


@emitter("stablehlo.slice")
def _slice(local: LocalOp, operand: jax.Array) -> jax.Array:
    op = local.op

    def move(x: jax.Array, dim: int) -> jax.Array:
        axes, (start, limit, stride) = local.operand_axes(0, dim), _interval(op, dim)
        if not axes:
            return lax.slice_in_dim(x, start, limit, stride, dim)
        plan = slice_plan(op.operands[0].shape[dim], _shards(local, dim), start, limit, stride)  # type: ignore[index]
        return sliced(local, x, dim, axes, plan, own_part=not local.result_axes(0, dim))

    return moved_along(local, operand, _cut_dims(op), move)


# --- pads ---

_PADDINGS = ("edge_padding_low", "edge_padding_high", "interior_padding")


def _padded_dims(op: Op) -> list[int]:
    """A pad by (1, -1) keeps the size and still shifts."""
    paddings = [op.ints(name) for name in _PADDINGS]
    return [d for d in range(op.operands[0].rank or 0) if any(p[d] for p in paddings)]


def _padding(op: Op, dim: int) -> tuple[int, int, int]:
    low, high, interior = (op.ints(name)[dim] for name in _PADDINGS)
    return low, high, interior


def _window(op: Op, dim: int) -> Window:
    low, high, interior = _padding(op, dim)
    return Window((op.operands[0].shape or ())[dim], low=low, high=high, base_dilation=interior + 1)


@strategies("stablehlo.pad")
def _pad_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    return [by_strips(op, rule, _padded_dims(op), lambda d, shards: window_reads(_window(op, d), shards).plan)]


@emitter("stablehlo.pad")
def _pad(local: LocalOp, operand: jax.Array, value: jax.Array) -> jax.Array:
    op = local.op

    def move(x: jax.Array, dim: int) -> jax.Array:
        axes = local.operand_axes(0, dim)
        if axes:
            return fetch(local, x, dim, axes, window_reads(_window(op, dim), _shards(local, dim)), value)
        return lax.pad(x, value, [_padding(op, dim) if d == dim else (0, 0, 0) for d in range(x.ndim)])

    return moved_along(local, operand, _padded_dims(op), move)


# --- reversals ---


@strategies("stablehlo.reverse")
def _reverse_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    sizes = op.operands[0].shape or ()
    return [by_strips(op, rule, op.ints("dimensions"), lambda d, shards: reverse_plan(sizes[d], shards))]


@emitter("stablehlo.reverse")
def _reverse(local: LocalOp, operand: jax.Array) -> jax.Array:
    sizes = local.op.operands[0].shape or ()

    def move(x: jax.Array, dim: int) -> jax.Array:
        axes = local.operand_axes(0, dim)
        if axes:
            return reversed_(local, x, dim, axes, reverse_plan(sizes[dim], _shards(local, dim)))
        return lax.rev(x, (dim,))

    return moved_along(local, operand, local.op.ints("dimensions"), move)
