"""Reductions: a sharded dimension that is reduced leaves partial results of the body's kind.

A body that is none of the kinds that collectives know (arg-max pairs, several inputs, anything associative) reduces the
partial results of all shards once more, in the order of the shards; the emitter exchanges them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sdy_jax.ir.graph import Op
from sdy_jax.lowering.collectives import reductions
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.emission.re_emission import re_emit
from sdy_jax.lowering.strategies.monoids import identity, is_identity, known_scalar, reduction_kind
from sdy_jax.lowering.strategies.registry import Inside, Strategy, pass_through_factors, runs_part_by_part, strategies
from sdy_jax.lowering.strategies.shards import has_padding, is_leader, mask_padding
from sdy_jax.representation.mesh import AxisRef
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.runtime.evaluation import apart

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
