"""Rules of ops that look at all elements along a dimension: sort, top_k, fft."""

from __future__ import annotations

from sdy_jax.ir.graph import Op
from sdy_jax.op_rules.builder import NEED_REPLICATION, RuleBuilder, result_shape, shape_of
from sdy_jax.op_rules.registry import rule
from sdy_jax.representation.rule import OpShardingRule


@rule("stablehlo.sort")
def sort(op: Op, conservative: bool) -> OpShardingRule:
    """Nothing propagates along the sorted dimension if it is the only one worth sharding."""
    shape, along = shape_of(op), op.int("dimension", -1) % max(op.operands[0].rank, 1)
    builder, alone = RuleBuilder.of(op), all(size == 1 for dim, size in enumerate(shape) if dim != along)
    for dim, size in enumerate(shape):
        if dim == along:
            builder.add_all(dim, size, NEED_REPLICATION, blocked=alone)
        else:
            builder.add_all(dim, size)
    return builder.build()


@rule("chlo.top_k", extra=True)
def top_k(op: Op, conservative: bool) -> OpShardingRule:
    """Values and indices of the `k` largest elements along the last dimension."""
    *batch, last = shape_of(op)
    builder = RuleBuilder.of(op).pointwise(tuple(batch))
    builder.add_operands(len(batch), last, NEED_REPLICATION, blocked=True)
    builder.add_results(len(batch), result_shape(op)[-1], NEED_REPLICATION, blocked=True)
    return builder.build()


@rule("stablehlo.fft")
def fft(op: Op, conservative: bool) -> OpShardingRule:
    """Transforms the trailing dimensions; the last one may change its size (RFFT, IRFFT)."""
    shape, builder = shape_of(op), RuleBuilder.of(op)
    batch = len(shape) - len(op.ints("fft_length"))
    resized = shape[-1:] != result_shape(op)[-1:]
    for dim, size in enumerate(shape):
        if dim < batch:
            builder.add_all(dim, size)
        else:
            builder.add_all(dim, size, NEED_REPLICATION, blocked=resized and dim == len(shape) - 1)
    return builder.build()
