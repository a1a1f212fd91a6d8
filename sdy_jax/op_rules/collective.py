"""Rules of StableHLO's collectives, as they occur in programs written per device.

A dimension that a collective gathers or scatters has different sizes before and after, which have nothing in common.
"""

from __future__ import annotations

from sdy_jax.ir.graph import Op
from sdy_jax.op_rules.builder import NEED_REPLICATION, RuleBuilder, result_shape, shape_of
from sdy_jax.op_rules.registry import rule
from sdy_jax.representation.rule import OpShardingRule


@rule(
    "stablehlo.all_reduce",
    "stablehlo.collective_broadcast",
    "stablehlo.collective_permute",
    "stablehlo.cross-replica-sum",
)
def keeps_shape(op: Op, conservative: bool) -> OpShardingRule:
    """One factor per dimension of the result."""
    return RuleBuilder.of(op).pointwise(result_shape(op)).build()


@rule("stablehlo.all_gather")
def all_gather(op: Op, conservative: bool) -> OpShardingRule:
    return exchanging(op, op.int("all_gather_dim"))


@rule("stablehlo.reduce_scatter")
def reduce_scatter(op: Op, conservative: bool) -> OpShardingRule:
    return exchanging(op, op.int("scatter_dimension"))


@rule("stablehlo.all_to_all")
def all_to_all(op: Op, conservative: bool) -> OpShardingRule:
    return exchanging(op, op.int("split_dimension"), op.int("concat_dimension"))


def exchanging(op: Op, *exchanged: int) -> OpShardingRule:
    """One factor per dimension, but for those that are gathered or scattered."""
    operand, result, builder = shape_of(op), result_shape(op), RuleBuilder.of(op)
    for dim, size in enumerate(operand):
        if dim not in exchanged:
            builder.add_all(dim, size)
    for dim in dict.fromkeys(exchanged):
        builder.add_operands(dim, operand[dim], NEED_REPLICATION)
        builder.add_results(dim, result[dim], NEED_REPLICATION)
    return builder.build()
