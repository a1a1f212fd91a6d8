"""Windows: dimensions that the window does not mix stay sharded, the rest is gathered."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax

from sdy_jax.ir.graph import Op
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.emission.reemitted import re_emit
from sdy_jax.lowering.strategies.cumulative import cumulative, cumulative_strategies, scanned
from sdy_jax.lowering.strategies.monoids import identity, is_identity, reduction_kind
from sdy_jax.lowering.strategies.registry import Strategy, pass_through_factors, strategies
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.rules.op_attributes import window


@strategies("stablehlo.reduce_window", "stablehlo.select_and_scatter")
def _window_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    """A base dilation alone already moves elements between blocks, though the rule lets it pass."""
    along = cumulative(op) if op.name == "stablehlo.reduce_window" else None
    if along is not None:
        return cumulative_strategies(op, rule, along)
    moved = [d for d, w in enumerate(window(op)) if not w.is_trivial or w.base_dilation != 1]
    return [
        Strategy(
            "along_factors",
            pass_through_factors(rule) - frozenset(f for d in moved for f in rule.operand_mappings[0][d]),
        )
    ]


_LAX: dict[str, Callable[..., jax.Array]] = {"sum": lax.add, "max": lax.max, "min": lax.min}
"""The combiners for which lax has a primitive of its own when the initial value is the identity."""


@emitter("stablehlo.reduce_window")
def _reduce_window(local: LocalOp, *operands: jax.Array) -> jax.Array | list[jax.Array]:
    along = cumulative(local.op)
    if along is not None:
        return scanned(local, along, operands[0])
    op, kind = local.op, reduction_kind(local.op.blocks[0])
    if len(operands) != 2 or kind not in _LAX or not is_identity(op.operands[1], kind):
        return re_emit(local, *operands)
    dims = window(op)
    return lax.reduce_window(
        operands[0],
        identity(kind, op.operands[0].dtype),
        _LAX[kind],
        window_dimensions=[w.size for w in dims],
        window_strides=[w.stride for w in dims],
        padding=[(w.low, w.high) for w in dims],
        base_dilation=[w.base_dilation for w in dims],
        window_dilation=[w.window_dilation for w in dims],
    )


@emitter("stablehlo.select_and_scatter")
def _select_and_scatter(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
    return re_emit(local, *operands)
