"""The rule of random bit generators."""

from __future__ import annotations

from sdy_jax.ir.graph import Op
from sdy_jax.op_rules.builder import NEED_REPLICATION, RuleBuilder, result_shape, shape_of
from sdy_jax.op_rules.registry import rule
from sdy_jax.representation.rule import OpShardingRule


@rule("stablehlo.rng_bit_generator")
def rng_bit_generator(op: Op, conservative: bool) -> OpShardingRule:
    """The state goes in and out whole; the bits are sharded freely."""
    builder = RuleBuilder.of(op)
    for dim, size in enumerate(shape_of(op)):
        builder.add((dim,), (dim, None), size, NEED_REPLICATION, blocked=True)
    for dim, size in enumerate(result_shape(op, 1)):
        builder.add((None,), (None, dim), size)
    return builder.build()
