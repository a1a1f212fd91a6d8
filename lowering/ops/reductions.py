"""Reductions, whose sharded dimensions leave partial results, and cumulative ops such as `jnp.cumsum`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sdy_jax.base.jax_calls import jit
from sdy_jax.ir.graph import Block, Graph, Op
from sdy_jax.ir.meshes import AxisRef, axes_size
from sdy_jax.ir.shardings import OpShardingRule
from sdy_jax.lowering.ops.collectives import movement, reductions
from sdy_jax.lowering.ops.elementwise import expression, identity, is_identity, known_scalar, reduction_kind
from sdy_jax.lowering.ops.re_emission import numpy_dtype, re_emit, scope_name
from sdy_jax.lowering.ops.registry import (
    Inside,
    LocalOp,
    Shards,
    Strategy,
    emitter,
    pass_through_factors,
    runs_part_by_part,
    strategies,
)
from sdy_jax.lowering.ops.shards import block_shape, has_padding, is_leader, mask_padding
from sdy_jax.runtime.evaluation import apart
from sdy_jax.shardy.rules.op_attributes import WindowDimension, window

# Reductions: a sharded dimension that is reduced leaves partial results of the body's kind.
#
# A body that is none of the kinds that collectives know (arg-max pairs, several inputs, anything associative) reduces
# the partial results of all shards once more, in the order of the shards; the emitter exchanges them itself.

runs_part_by_part("stablehlo.reduce")

_LAX: dict[str, Callable[..., jax.Array]] = {
    "sum": lax.reduce_sum,
    "product": lax.reduce_prod,
    "max": lax.reduce_max,
    "min": lax.reduce_min,
    "and": lax.reduce_and,
    "or": lax.reduce_or,
    "xor": lax.reduce_xor,
}
"""The lax function of a kind when the initial value is the identity."""


@strategies("stablehlo.reduce")
def _reduce_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    splittable = pass_through_factors(rule) | rule.reduction
    kind = reduction_kind(op.blocks[0])
    if kind is not None:
        return [Strategy("partial", splittable, rule.reduction, kind)]
    results = range(len(op.operands), len(op.operands) + len(op.results))
    exchanged = tuple(Inside("all_reduce", rule.reduction, tensor) for tensor in results)
    return [Strategy("partials_by_body", splittable, inside=exchanged)]


@emitter("stablehlo.reduce")
def _reduce(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
    count = len(operands) // 2
    inputs, inits, kind = operands[:count], operands[count:], reduction_kind(local.op.blocks[0])
    axes = [axis for dim in local.op.ints("dimensions") for axis in local.operand_axes(0, dim)]
    if kind is not None:
        return _by_kind(local, kind, axes, inputs, inits)
    if not axes:
        return re_emit(local, *operands)
    if _may_repeat(local):
        return _from_everywhere(local, axes, inputs, inits)
    return _from_once(local, axes, inputs, inits)


def _by_kind(
    local: LocalOp, kind: str, axes: Sequence[AxisRef], inputs: Sequence[jax.Array], inits: Sequence[jax.Array]
) -> list[jax.Array]:
    """The initial value counts once: every shard starts from the identity, and the leader adds the initial value.

    Starting from it does not do: where one element is left of each, XLA drops the initial values of several inputs.
    """
    op, dims = local.op, local.op.ints("dimensions")
    plain = all(is_identity(v, kind) for v in op.operands[len(inputs) :])
    if axes:
        neutral = [jnp.asarray(identity(kind, v.dtype)) for v in op.results]
        inputs = [mask_padding(local, i, x, dims, e) for i, (x, e) in enumerate(zip(inputs, neutral, strict=True))]
        if not plain:
            leader = is_leader(local, axes)
            once = [jnp.where(leader, x, e) for x, e in zip(inits, neutral, strict=True)]
            found = re_emit(local, *inputs, *neutral)
            return [reductions.combined(kind, x, y) for x, y in zip(once, found, strict=True)]
    if plain and len(inputs) == 1 and _is_exact(kind, op.operands[0].dtype):
        return [_LAX[kind](inputs[0], dims)]
    return re_emit(local, *inputs, *inits)


def _is_exact(kind: str, dtype: str) -> bool:
    """Whether lax's function lowers to the same op: its sums refuse booleans, its maxima order complex numbers."""
    if "complex" in dtype or dtype in ("i2", "i4", "ui2", "ui4"):
        return False
    return kind in ("and", "or", "xor") or dtype != "i1"


# Bodies of no known kind.

Body = Callable[[Sequence[jax.Array], Sequence[jax.Array]], Sequence[jax.Array]]


def _body(local: LocalOp) -> Body:
    return lambda old, new: tuple(local.evaluation.run_block(local.op.blocks[0], [*old, *new]))


def _may_repeat(local: LocalOp) -> bool:
    """Whether the initial values combined with themselves are known to stay the same, so that every shard may use them.

    True for identities, and for the (-inf, 0) of an arg-max.
    """
    count = len(local.op.results)
    known = [x for v in local.op.operands[count:] if (x := known_scalar(v)) is not None]
    if len(known) < count:
        return False

    def combined() -> list[np.ndarray]:
        inits = [jnp.asarray(x) for x in known]
        return [np.asarray(x) for x in _body(local)(inits, inits)]

    return all(x.tobytes() == y.tobytes() for x, y in zip(apart(combined), known, strict=True))


def _from_everywhere(
    local: LocalOp, axes: Sequence[AxisRef], inputs: Sequence[jax.Array], inits: Sequence[jax.Array]
) -> list[jax.Array]:
    """Reduces every shard, then the shards' results, each from the initial values."""
    dims, body = local.op.ints("dimensions"), _body(local)
    masked = [mask_padding(local, i, x, dims, init) for i, (x, init) in enumerate(zip(inputs, inits, strict=True))]
    partials = re_emit(local, *masked, *inits)

    def combine(terms: Sequence[jax.Array]) -> Sequence[jax.Array]:
        return lax.reduce(tuple(terms), tuple(inits), body, (0,))

    return reductions.all_reduce_by(partials, axes, combine, local.mesh)


def _from_once(
    local: LocalOp, axes: Sequence[AxisRef], inputs: Sequence[jax.Array], inits: Sequence[jax.Array]
) -> list[jax.Array]:
    """Reduces shards without initial values: a flag beside each element is False for padding and empty shards."""
    dims, body = local.op.ints("dimensions"), _with_flags(_body(local))
    shape, nothing = inputs[0].shape, jnp.array(False)
    real = mask_padding(local, 0, jnp.ones(shape, bool), dims, nothing)
    partials = lax.reduce((real, *inputs), (nothing, *inits), body, dims)
    padded = any(has_padding(local, (local.op.operands[0].shape or ())[d], local.operand_axes(0, d)) for d in dims)

    def combine(terms: Sequence[jax.Array]) -> Sequence[jax.Array]:
        flagged = terms if padded else [jnp.ones(terms[0].shape, bool), *terms]
        total = lax.reduce(tuple(flagged), (jnp.array(True), *inits), body, (0,))
        return total if padded else total[1:]

    found = reductions.all_reduce_by(partials if padded else partials[1:], axes, combine, local.mesh)
    return found[1:] if padded else found


def _with_flags(body: Body) -> Body:
    def run(old: Sequence[jax.Array], new: Sequence[jax.Array]) -> Sequence[jax.Array]:
        (had, *before), (has, *after) = old, new
        both = body(before, after)
        kept = (lax.select(had, lax.select(has, c, a), b) for a, b, c in zip(before, after, both, strict=True))
        return (had | has, *kept)

    return run


# Cumulative ops: reduce_windows over all elements up to each one, which is what `jnp.cumsum` and its like lower to.
#
# A shard scans its own elements. What the shards before it hold (after it, for a scan in reverse) is combined from
# their totals: these are gathered, or, where that sends less and rows are long, passed on in steps of 1, 2, 4, ...
# shards, as in Hillis and Steele's scan (https://doi.org/10.1145/7902.7903).


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
    totals = movement.all_gather(total, movement.along(total, dim, axes), local.mesh)
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
        x = movement.permuted(x, axes, [(t, u) if not along.reverse else (u, t) for t, u in pairs], local.mesh)
        return jnp.where(position >= step, x, neutral)

    found = passed(total, first)
    for step in steps:
        found = along.monoid.combine(passed(found, step), found)
    return found
