"""Ops that cut and shift along dimensions, at positions that the program states: slices, pads, reversals.

Along a sharded dimension the devices send each other the strips that they lack (`strips/strips.py`). Dimensions are
moved one after the other: whole ones that shrink, then sharded ones in the order that sends least, then whole ones that
grow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import permutations

import jax
from jax import lax

from sdy_jax.ir.graph import Op
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.emission.redistribute import fetch, redistribute, reversed_, sliced
from sdy_jax.lowering.strategies.monoids import WITHOUT_ZERO, sum_kind
from sdy_jax.lowering.strategies.registry import (
    Inside,
    Shards,
    Strategy,
    pass_through_factors,
    runs_part_by_part,
    strategies,
)
from sdy_jax.lowering.strategies.shards import block_shape, factors_of_dims, resized_factors
from sdy_jax.lowering.strips.strip_plan import StripPlan
from sdy_jax.lowering.strips.wants import Slice, reverse_plan, slice_plan
from sdy_jax.lowering.strips.window_reads import Reads, Window, window_reads
from sdy_jax.op_rules.slicing import PADDINGS
from sdy_jax.representation.mesh import axes_size
from sdy_jax.representation.rule import OpShardingRule

runs_part_by_part("stablehlo.pad")
runs_part_by_part("stablehlo.slice", sizes="limit_indices")

PlanOf = Callable[[int, int], StripPlan]
"""The strips that move along a dimension, given as its index, in some number of shards."""


_MAX_ORDERED = 3
"""The most split dimensions of which all orders are compared. Guessed, a guard: orders are the factorial of that."""


def by_strips(op: Op, rule: OpShardingRule, dims: Sequence[int], plan_of: PlanOf) -> Strategy:
    """An op on one operand that moves strips along `dims`."""
    mapping = rule.operand_mappings[0]

    def inside(dim: int) -> Inside:
        def sent(shards: Shards) -> int:
            per_dim = [math.prod([shards[f] for f in factors]) for factors in mapping]
            return dict(_sent_in_order(op, dims, plan_of, per_dim)).get(dim, 0)

        return Inside("collective_permute", factors_of_dims(mapping, [dim]), 0, sent)

    splittable = pass_through_factors(rule) | factors_of_dims(mapping, dims)
    return Strategy("by_strips", splittable, inside=tuple(map(inside, dims)), work=frozenset())


def _sent_in_order(op: Op, dims: Iterable[int], plan_of: PlanOf, shards: Sequence[int]) -> list[tuple[int, int]]:
    """Those of `dims` that are split, in the order in which least is sent, with the elements that a device sends."""
    split = [d for d in dims if shards[d] > 1]
    orders = permutations(split) if len(split) <= _MAX_ORDERED else [split]
    return min(
        (_sent_by(op, order, plan_of, shards) for order in orders), key=lambda found: sum(sent for _, sent in found)
    )


def _sent_by(op: Op, order: Iterable[int], plan_of: PlanOf, shards: Sequence[int]) -> list[tuple[int, int]]:
    """The split dimensions in this order, with what is sent along each after those before it have changed."""
    old, new = (
        [-(-n // k) for n, k in zip(v.shape or (), shards, strict=True)] for v in (op.operands[0], op.results[0])
    )
    block = [a if k > 1 else min(a, b) for k, a, b in zip(shards, old, new, strict=True)]
    found = []
    for dim in order:
        row = math.prod([n for d, n in enumerate(block) if d != dim])
        found.append((dim, row * plan_of(dim, shards[dim]).wire_elements))
        block[dim] = new[dim]
    return found


def moved_along(
    local: LocalOp, x: jax.Array, dims: Sequence[int], plan_of: PlanOf, move: Callable[[jax.Array, int], jax.Array]
) -> jax.Array:
    """A local operand moved along each of `dims`: whole ones that shrink, sharded ones, whole ones that grow."""
    sizes = list(zip(local.op.operands[0].shape or (), local.op.results[0].shape or (), strict=True))
    shards = [_shards(local, d) for d in range(len(sizes))]
    whole = [d for d in dims if not local.operand_axes(0, d)]
    split = [dim for dim, _ in _sent_in_order(local.op, dims, plan_of, shards)]
    shrinking = [d for d in whole if sizes[d][1] <= sizes[d][0]]
    growing = [d for d in whole if d not in shrinking]
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


def _sliced(op: Op, dim: int, shards: int) -> Slice:
    return slice_plan((op.operands[0].shape or ())[dim], shards, *_interval(op, dim))


@strategies("stablehlo.slice")
def _slice_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    """Few elements of a large dimension are cheaper as a partial sum, to which their owners contribute."""
    dims = _cut_dims(op)
    strips = by_strips(op, rule, dims, lambda dim, shards: _sliced(op, dim, shards).plan)
    if not dims or op.results[0].dtype in WITHOUT_ZERO:
        return [strips]
    summed = resized_factors(op, rule)
    return [strips, Strategy("own_part", strips.splittable, summed, sum_kind(op.results[0].dtype), work=frozenset())]


@emitter("stablehlo.slice")
def _slice(local: LocalOp, operand: jax.Array) -> jax.Array:
    op = local.op

    def move(x: jax.Array, dim: int) -> jax.Array:
        axes = local.operand_axes(0, dim)
        if not axes:
            return lax.slice_in_dim(x, *_interval(op, dim), dim)
        plan = _sliced(op, dim, _shards(local, dim))
        return sliced(local, x, dim, axes, plan, own_part=not local.result_axes(0, dim))

    return moved_along(local, operand, _cut_dims(op), lambda dim, shards: _sliced(op, dim, shards).plan, move)


# --- pads ---


def _padded_dims(op: Op) -> list[int]:
    """A pad by (1, -1) keeps the size and still shifts."""
    paddings = [op.ints(name) for name in PADDINGS]
    return [d for d in range(op.operands[0].rank or 0) if any(p[d] for p in paddings)]


def _padding(op: Op, dim: int) -> tuple[int, int, int]:
    low, high, interior = (op.ints(name)[dim] for name in PADDINGS)
    return low, high, interior


def _padded(op: Op, dim: int, shards: int) -> Reads:
    low, high, interior = _padding(op, dim)
    size = (op.operands[0].shape or ())[dim]
    return window_reads(Window(size, low=low, high=high, base_dilation=interior + 1), shards)


@strategies("stablehlo.pad")
def _pad_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    return [by_strips(op, rule, _padded_dims(op), lambda dim, shards: _padded(op, dim, shards).plan)]


@emitter("stablehlo.pad")
def _pad(local: LocalOp, operand: jax.Array, value: jax.Array) -> jax.Array:
    op = local.op

    def move(x: jax.Array, dim: int) -> jax.Array:
        axes = local.operand_axes(0, dim)
        if axes:
            return fetch(local, x, dim, axes, _padded(op, dim, _shards(local, dim)), value)
        return lax.pad(x, value, [_padding(op, dim) if d == dim else (0, 0, 0) for d in range(x.ndim)])

    return moved_along(local, operand, _padded_dims(op), lambda dim, shards: _padded(op, dim, shards).plan, move)


# --- reversals ---


def _reversed(op: Op, dim: int, shards: int) -> StripPlan:
    return reverse_plan((op.operands[0].shape or ())[dim], shards)


def _turned(op: Op, shards: Sequence[int]) -> list[int]:
    """The split dimensions that are reversed and divide. One permute turns them all: in the order of all their axes, a
    block comes from as far before the end as the device is behind the start."""
    sizes = op.operands[0].shape or ()
    return [d for d in op.ints("dimensions") if shards[d] > 1 and not sizes[d] % shards[d]]


@strategies("stablehlo.reverse")
def _reverse_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    mapping, dims = rule.operand_mappings[0], op.ints("dimensions")

    def per_dim(shards: Shards) -> list[int]:
        return [math.prod([shards[f] for f in factors]) for factors in mapping]

    def turned(shards: Shards) -> int:
        counts = per_dim(shards)
        return math.prod(block_shape(op.operands[0].shape or (), mapping, shards)) if _turned(op, counts) else 0

    def shifted(dim: int, shards: Shards) -> int:
        counts = per_dim(shards)
        rest = [d for d in dims if d not in _turned(op, counts)]
        return dict(_sent_in_order(op, rest, partial(_reversed, op), counts)).get(dim, 0)

    factors = [factors_of_dims(mapping, [dim]) for dim in dims]
    moved = frozenset[int]().union(*factors)
    pairs = zip(dims, factors, strict=True)
    inside = (
        Inside("collective_permute", moved, 0, turned),
        *(Inside("collective_permute", found, 0, partial(shifted, dim)) for dim, found in pairs),
    )
    return [Strategy("by_strips", pass_through_factors(rule) | moved, inside=inside, work=frozenset())]


@emitter("stablehlo.reverse")
def _reverse(local: LocalOp, operand: jax.Array) -> jax.Array:
    op, dims = local.op, local.op.ints("dimensions")
    turned = _turned(op, [_shards(local, d) for d in range(operand.ndim)])
    if turned:
        axes = [axis for dim in turned for axis in local.operand_axes(0, dim)]
        shards = axes_size(axes, local.mesh.mesh)
        plan = reverse_plan(operand.shape[turned[0]] * shards, shards)
        operand = redistribute(local, [operand], turned[0], axes, plan, None)
    shifted = [d for d in dims if d not in turned]

    def move(x: jax.Array, dim: int) -> jax.Array:
        axes = local.operand_axes(0, dim)
        if axes:
            return reversed_(local, x, dim, axes, _reversed(op, dim, _shards(local, dim)))
        return lax.rev(x, (dim,))

    return lax.rev(moved_along(local, operand, shifted, partial(_reversed, op), move), turned)
