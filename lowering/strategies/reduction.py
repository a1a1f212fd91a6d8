"""Reductions: a sharded dimension that is reduced leaves partial results of the body's kind."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from sdy_jax.graph import Op
from sdy_jax.lowering.generic import re_emit
from sdy_jax.lowering.strategies.monoids import identity, is_identity, reduction_kind
from sdy_jax.lowering.strategies.registry import (
    LocalOp,
    Strategy,
    emitter,
    pass_through_factors,
    strategies,
)
from sdy_jax.lowering.strategies.shards import is_leader, mask_padding
from sdy_jax.representation.rule import OpShardingRule

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
    kept = pass_through_factors(rule)
    kind = reduction_kind(op.blocks[0])
    if kind is None:
        return [Strategy("along_factors", kept)]
    return [Strategy("partial", kept | rule.reduction, kind)]


@emitter("stablehlo.reduce")
def _reduce(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
    """The initial value counts once: the leader starts from it, the others from the identity."""
    op, count = local.op, len(operands) // 2
    dims = op.ints("dimensions")
    axes = [axis for dim in dims for axis in local.operand_axes(0, dim)]
    kind = reduction_kind(op.blocks[0])
    plain = kind is not None and all(is_identity(v, kind) for v in op.operands[count:])
    inputs, inits = list(operands[:count]), list(operands[count:])
    if axes and kind is not None:
        for i, value in enumerate(op.operands[:count]):
            neutral = jnp.asarray(identity(kind, value.dtype))
            inputs[i] = mask_padding(local, i, inputs[i], dims, neutral)
            if not plain:
                inits[i] = jnp.where(is_leader(local, axes), inits[i], neutral)
    if plain and count == 1 and kind is not None and _is_exact(kind, op.operands[0].dtype):
        return [_LAX[kind](inputs[0], dims)]
    return re_emit(local, *inputs, *inits)


def _is_exact(kind: str, dtype: str) -> bool:
    """Whether lax's function lowers to the same op: its sums refuse booleans, its maxima order complex numbers."""
    return "complex" not in dtype and (kind in ("and", "or", "xor") or dtype != "i1")
