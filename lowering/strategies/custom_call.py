"""Custom calls: opaque computations that run on shards as they are."""

from __future__ import annotations

from sdy_jax.ir.graph import Op
from sdy_jax.lowering.strategies.registry import Strategy, pass_through_factors, strategies
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.rules.linalg import independent_columns

_OF_WHOLE_MATRICES = frozenset(
    ["Cholesky", "CompactWyHelper", "Eigh", "InvertDiagBlocksLowerTriangular", "InvertDiagBlocksUpperTriangular"]
)
"""Targets that need all of each matrix, although shardings propagate along its dimensions."""


@strategies("stablehlo.custom_call")
def _custom_call(op: Op, rule: OpShardingRule) -> list[Strategy]:
    """Along pass-through factors that every result has and some operand: the same call on a block gives that block.

    Rules of linear algebra calls list matrix dimensions as pass-through factors; those cannot be split. Independent
    columns can be, even if there are results beside them, which are then the same on every device.
    """
    count = len(rule.operand_mappings)
    operands, results = rule.factors_of[:count], [f for f in rule.factors_of[count:] if f]
    everywhere = frozenset.intersection(*results) if results else frozenset()
    shared = {f for f in pass_through_factors(rule) & everywhere if any(f in t for t in operands)}
    if op.text("call_target_name") in _OF_WHOLE_MATRICES:
        shared.difference_update(*rule.operand_mappings[0][-2:])
    columns = independent_columns(op)
    if columns is not None:
        operand, _, dim = columns
        shared |= {f for f in rule.operand_mappings[operand][dim] if f in pass_through_factors(rule)}
    return [Strategy("on_blocks", frozenset(shared))]
