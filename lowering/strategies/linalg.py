"""Matrix decompositions and solvers: batches are independent, and so are the right-hand sides of a system."""

from __future__ import annotations

from sdy_jax.ir.graph import Op
from sdy_jax.lowering.strategies.registry import Strategy, pass_through_factors, strategies
from sdy_jax.representation.rule import OpShardingRule


@strategies("stablehlo.triangular_solve")
def _triangular_solve(op: Op, rule: OpShardingRule) -> list[Strategy]:
    """Columns of `b` in `a x = b`, rows in `x a = b`; nothing propagates along them, but they need nothing either."""
    side = -1 if op.flag("left_side") else -2
    return [Strategy("along_factors", pass_through_factors(rule) | set(rule.operand_mappings[1][side]))]
