"""Windows: dimensions that the window does not mix stay sharded, the rest is gathered."""

from __future__ import annotations

import jax

from sdy_jax.graph import Op
from sdy_jax.lowering.generic import re_emit
from sdy_jax.lowering.strategies.registry import LocalOp, Strategy, emitter, pass_through_factors, strategies
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.rules.attributes import window


@strategies("stablehlo.reduce_window", "stablehlo.select_and_scatter")
def _window_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    """A base dilation alone already moves elements between blocks, though the rule lets it pass."""
    moved = [d for d, w in enumerate(window(op)) if not w.is_trivial or w.base_dilation != 1]
    return [
        Strategy(
            "along_factors",
            pass_through_factors(rule) - frozenset(f for d in moved for f in rule.operand_mappings[0][d]),
        )
    ]


@emitter("stablehlo.reduce_window", "stablehlo.select_and_scatter")
def _windowed(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
    return re_emit(local, *operands)
