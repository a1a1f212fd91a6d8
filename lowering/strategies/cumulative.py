"""Cumulative ops: reduce_windows over all elements up to each one, which is what `jnp.cumsum` and its like lower to.

A shard scans its own elements. What the shards before it hold (after it, for a scan in reverse) is combined from their
totals: these are gathered, or, where that sends less and rows are long, passed on in steps of 1, 2, 4, ... shards, as
in Hillis and Steele's scan (https://doi.org/10.1145/7902.7903).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sdy_jax.ir.graph import Block, Graph, Op
from sdy_jax.jax_internals.jit import jit
from sdy_jax.lowering.collectives import data_movement
from sdy_jax.lowering.emission.local_op import LocalOp
from sdy_jax.lowering.emission.names import scope_name
from sdy_jax.lowering.emission.re_emission import numpy_dtype
from sdy_jax.lowering.strategies.monoids import expression, identity, is_identity, reduction_kind
from sdy_jax.lowering.strategies.registry import Inside, Shards, Strategy, pass_through_factors
from sdy_jax.lowering.strategies.shards import block_shape, mask_padding
from sdy_jax.op_rules.op_attributes import WindowDimension, window
from sdy_jax.representation.mesh import axes_size
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.runtime.evaluation import apart


class Monoid(NamedTuple):
    """What a cumulative op combines with, lax's scan, and the kind of reduction whose identity it has."""

    scan: Callable[..., jax.Array]
    combine: Callable[[jax.Array, jax.Array], jax.Array]
    kind: str


_MONOIDS = {
    "sum": Monoid(lax.cumsum, lax.add, "sum"),
    "product": Monoid(lax.cumprod, lax.mul, "product"),
    "max": Monoid(lax.cummax, lax.max, "max"),
    "min": Monoid(lax.cummin, lax.min, "min"),
}
_LOG_SUM_EXP = Monoid(lax.cumlogsumexp, jnp.logaddexp, "max")


class Cumulative(NamedTuple):
    """A cumulative op: along which dimension, from its end or its start, combined by what."""

    dim: int
    reverse: bool
    monoid: Monoid


def cumulative(op: Op) -> Cumulative | None:
    """A reduce_window as a cumulative op; None for other windows."""
    found = [(d, w) for d, w in enumerate(window(op)) if w != WindowDimension()]
    if len(op.operands) != 2 or len(found) != 1:
        return None
    [(dim, along)] = found
    size, monoid = (op.operands[0].shape or ())[dim], _monoid(op.blocks[0], op.operands[0].dtype)
    if monoid is None or not is_identity(op.operands[1], monoid.kind):
        return None
    padding = {(size - 1, 0): False, (0, size - 1): True}.get((along.low, along.high))
    if padding is None or along != WindowDimension(size, low=along.low, high=along.high):
        return None
    return Cumulative(dim, padding, monoid)


def _monoid(body: Block, dtype: str) -> Monoid | None:
    if dtype == "i1":
        return None
    kind = reduction_kind(body)
    if kind is not None:
        return _MONOIDS.get(kind)
    return _LOG_SUM_EXP if dtype in _FLOATS and expression(body) == _log_sum_exp(dtype) else None


_FLOATS = ("f16", "bf16", "f32", "f64")


@functools.cache
def _log_sum_exp(dtype: str) -> tuple[str, ...]:
    """What lax.cumlogsumexp combines by."""
    operand = jax.ShapeDtypeStruct((2,), numpy_dtype(dtype))

    def lowered() -> tuple[str, ...]:
        module = jit(lax.cumlogsumexp).lower(operand).compiler_ir("stablehlo")
        graph = Graph(module.operation)  # type: ignore[union-attr]
        found = (op for f in graph.functions.values() for op in f.walk() if op.name == "stablehlo.reduce_window")
        return expression(next(found).blocks[0])

    return apart(lowered)


def cumulative_strategies(op: Op, rule: OpShardingRule, along: Cumulative) -> list[Strategy]:
    """Every dimension may be split; along the scanned one totals are sent."""
    [factor] = rule.mappings[0][along.dim]
    itemsize = op.operands[0].itemsize

    def by_steps(shards: Shards) -> tuple[bool, int]:
        row = list(block_shape(op.operands[0].shape or (), rule.mappings[0], shards))
        row[along.dim] = 1
        elements = int(np.prod(row))
        return _is_by_steps(shards[factor], elements * itemsize), elements

    def gathered(shards: Shards) -> int:
        is_by_steps, row = by_steps(shards)
        return 0 if is_by_steps else (shards[factor] - 1) * row

    def passed_on(shards: Shards) -> int:
        is_by_steps, row = by_steps(shards)
        return len(_steps(shards[factor])) * row if is_by_steps else 0

    one = frozenset({factor})
    inside = (
        Inside("all_gather", one, 2, gathered),
        Inside("collective_permute", one, 2, passed_on, lambda shards: len(_steps(shards[factor]))),
    )
    return [Strategy("scan_and_totals", pass_through_factors(rule) | one, inside=inside, work=rule.factors_of[0])]


_LONG_ROW = 1 << 14
"""Bytes of a row of totals from which fewer bytes count more than one collective instead of several. Guessed: with
less, totals take more steps to save few bytes; with more, each device receives the totals of all."""


def _is_by_steps(shards: int, row: float) -> bool:
    return row >= _LONG_ROW and len(_steps(shards)) < shards - 1


def _steps(shards: int) -> list[int]:
    """The distances over which totals are passed on; after the first one, a shard knows that of its neighbour."""
    return [1, *(1 << k for k in range(max(shards - 2, 0).bit_length()))]


def scanned(local: LocalOp, along: Cumulative, x: jax.Array) -> jax.Array:
    """The op on this device's block."""
    dim, reverse, (scan, combine, kind) = along
    axes = local.operand_axes(0, dim)
    neutral = jnp.asarray(identity(kind, local.op.operands[0].dtype))
    if reverse:
        x = mask_padding(local, 0, x, [dim], neutral)
    y = scan(x, axis=dim, reverse=reverse)
    if not axes or not y.size:
        return y
    total = lax.slice_in_dim(y, 0, 1, axis=dim) if reverse else lax.slice_in_dim(y, y.shape[dim] - 1, None, axis=dim)
    before = (
        _passed_on
        if _is_by_steps(axes_size(axes, local.mesh.mesh), total.size * local.op.operands[0].itemsize)
        else _gathered
    )
    with jax.named_scope(scope_name(local.op.name, axes, local.op.source)):
        return combine(before(local, along, total, neutral), y)


def _gathered(local: LocalOp, along: Cumulative, total: jax.Array, neutral: jax.Array) -> jax.Array:
    dim, axes = along.dim, local.operand_axes(0, along.dim)
    totals = data_movement.all_gather(total, [axes if d == dim else () for d in range(total.ndim)], local.mesh)
    shard, me = lax.broadcasted_iota(jnp.int32, totals.shape, dim), local.block_index(axes)
    known = jnp.where(shard > me if along.reverse else shard < me, totals, neutral)
    return jnp.expand_dims(lax.reduce(known, neutral, along.monoid.combine, (dim,)), dim)


def _passed_on(local: LocalOp, along: Cumulative, total: jax.Array, neutral: jax.Array) -> jax.Array:
    axes = local.operand_axes(0, along.dim)
    count, me = axes_size(axes, local.mesh.mesh), local.block_index(axes)
    first, *steps = _steps(count)
    position = count - 1 - me if along.reverse else me

    def passed(x: jax.Array, step: int) -> jax.Array:
        pairs = [(t, t + step) for t in range(count - step)]
        x = data_movement.permuted(x, axes, [(t, u) if not along.reverse else (u, t) for t, u in pairs], local.mesh)
        return jnp.where(position >= step, x, neutral)

    found = passed(total, first)
    for step in steps:
        found = along.monoid.combine(passed(found, step), found)
    return found
