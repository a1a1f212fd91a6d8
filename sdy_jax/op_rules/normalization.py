"""Rules of batch normalisation."""

from __future__ import annotations

from collections.abc import Sequence

from sdy_jax.ir.graph import Op, Value
from sdy_jax.op_rules.builder import NEED_REPLICATION, PASS_THROUGH, Dim, RuleBuilder
from sdy_jax.op_rules.registry import rule
from sdy_jax.representation.rule import FactorType, OpShardingRule


@rule("stablehlo.batch_norm_inference")
def batch_norm_inference(op: Op, conservative: bool) -> OpShardingRule:
    return _per_feature(op, PASS_THROUGH)


@rule("stablehlo.batch_norm_training", "stablehlo.batch_norm_grad", extra=True)
def batch_norm_with_statistics(op: Op, conservative: bool) -> OpShardingRule:
    """Mean and variance of a feature need all of its elements."""
    return _per_feature(op, NEED_REPLICATION)


def _per_feature(op: Op, others: FactorType) -> OpShardingRule:
    """Tensors are shaped like the input or have one element per feature. `others`: dimensions besides the feature."""
    builder, feature = RuleBuilder.of(op), op.int("feature_index")
    for dim, size in enumerate(op.operands[0].shape or ()):
        operands, results = (_places(values, op.operands[0].rank, dim, feature) for values in (op.operands, op.results))
        builder.add(operands, results, size, PASS_THROUGH if dim == feature else others)
    return builder.build()


def _places(values: Sequence[Value], rank: int, dim: int, feature: int) -> list[Dim]:
    """Where a dimension of the input is in each tensor."""
    return [dim if v.rank == rank else 0 if dim == feature else None for v in values]
