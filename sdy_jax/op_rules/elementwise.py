"""Rules of ops whose result elements depend on the operands' elements at the same place."""

from __future__ import annotations

from sdy_jax.ir.graph import Op
from sdy_jax.op_rules.builder import NEED_REPLICATION, RuleBuilder, result_shape, shape_of
from sdy_jax.op_rules.elementwise_table import ELEMENTWISE
from sdy_jax.op_rules.linearity import passes_unreduced
from sdy_jax.op_rules.registry import rule
from sdy_jax.representation.rule import OpShardingRule


def elementwise(op: Op, conservative: bool) -> OpShardingRule:
    """One factor per dimension of the result, shared by all tensors; scalars (bounds, predicates) stay out."""
    return RuleBuilder.of(op).pointwise(result_shape(op)).build()


rule("sdy.sharding_constraint", *(name for name, known in ELEMENTWISE.items() if known.in_shardy))(elementwise)
rule(*(name for name, known in ELEMENTWISE.items() if not known.in_shardy), extra=True)(elementwise)
for _name, _known in ELEMENTWISE.items():
    passes_unreduced(_name, _known.passes)


@rule("stablehlo.bitcast_convert")
def bitcast_convert(op: Op, conservative: bool) -> OpShardingRule:
    """Element-wise, but between widths the last dimension of one side holds the pieces of one element."""
    operand, result = shape_of(op), result_shape(op)
    common = min(len(operand), len(result))
    builder = RuleBuilder.of(op).pointwise(min(operand, result, key=len))
    if len(operand) > common:
        builder.add_operands(common, operand[common], NEED_REPLICATION)
    elif len(result) > common:
        builder.add_results(common, result[common], NEED_REPLICATION)
    return builder.build()
