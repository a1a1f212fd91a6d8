"""Rules of batch normalisation."""

from __future__ import annotations

from sdy_jax.graph import Op
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.rules.builder import RuleBuilder, shape_of
from sdy_jax.rules.registry import rule


@rule("stablehlo.batch_norm_inference")
def batch_norm_inference(op: Op, conservative: bool) -> OpShardingRule:
    """Scale, offset, mean and variance have one element per feature."""
    builder, feature = RuleBuilder.of(op), op.int("feature_index")
    for dim, size in enumerate(shape_of(op)):
        per_feature = 0 if dim == feature else None
        builder.add((dim, *(per_feature,) * 4), (dim,), size)
    return builder.build()
