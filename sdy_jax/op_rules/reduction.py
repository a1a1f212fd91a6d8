"""The rule of reduce."""

from __future__ import annotations

from sdy_jax.ir.graph import Op
from sdy_jax.op_rules.builder import REDUCTION, RuleBuilder, shape_of
from sdy_jax.op_rules.linearity import Linear, passes_unreduced
from sdy_jax.op_rules.registry import rule
from sdy_jax.representation.rule import OpShardingRule


@rule("stablehlo.reduce")
def reduce(op: Op, conservative: bool) -> OpShardingRule:
    """N inputs, N scalar initial values, N results without the reduced dimensions."""
    count, reduced = len(op.results), op.ints("dimensions")
    builder, out = RuleBuilder.of(op), 0
    for dim, size in enumerate(shape_of(op)):
        inputs = (dim,) * count + (None,) * count
        if dim in reduced:
            builder.add(inputs, (None,) * count, size, REDUCTION)
            continue
        builder.add(inputs, (out,) * count, size)
        out += 1
    return builder.build()


passes_unreduced("stablehlo.reduce", {"sum": Linear.SUMMED})
