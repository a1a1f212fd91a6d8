"""Rules of ops that combine elements along dimensions: reduce, reduce_window, select_and_scatter, batch normalisation,
sort, top_k, fft.
"""

from __future__ import annotations

from collections.abc import Sequence

from sdy_jax.ir.graph import Op, Value
from sdy_jax.ir.rules import FactorType, OpShardingRule
from sdy_jax.shardy.rules.op_attributes import window
from sdy_jax.shardy.rules.registry import (
    NEED_REPLICATION,
    PASS_THROUGH,
    PERMUTATION,
    REDUCTION,
    Dim,
    Linear,
    RuleBuilder,
    passes_unreduced,
    result_shape,
    rule,
    shape_of,
)

# The rule of reduce.


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


# Rules of ops that slide a window: reduce_window, select_and_scatter.


@rule("stablehlo.reduce_window")
def reduce_window(op: Op, conservative: bool) -> OpShardingRule:
    """Window by window; where windows overlap or skip, shards exchange their borders."""
    builder = RuleBuilder.of(op)
    for dim, (size, over) in enumerate(zip(result_shape(op), window(op), strict=True)):
        kind = PASS_THROUGH if over.is_trivial else PERMUTATION
        builder.add_all(dim, size, kind, blocked=conservative and not over.is_trivial)
    return builder.build()


@rule("stablehlo.reduce_window", beyond=True)
def reduce_window_to_one(op: Op, conservative: bool) -> OpShardingRule:
    """The same, but a dimension with a single window is reduced."""
    builder, shape = RuleBuilder.of(op), shape_of(op)
    for dim, (size, over) in enumerate(zip(result_shape(op), window(op), strict=True)):
        if size == 1 and not over.is_trivial:
            builder.add_operands(dim, shape[dim], REDUCTION, blocked=conservative)
            builder.add_results(dim, size, NEED_REPLICATION)
        else:
            kind = PASS_THROUGH if over.is_trivial else PERMUTATION
            builder.add_all(dim, size, kind, blocked=conservative and not over.is_trivial)
    return builder.build()


@rule("stablehlo.select_and_scatter")
def select_and_scatter(op: Op, conservative: bool) -> OpShardingRule:
    """The result has the operand's layout; the source has one element per window."""
    source, builder = shape_of(op, 1), RuleBuilder.of(op)
    for dim, (size, over) in enumerate(zip(result_shape(op), window(op), strict=True)):
        if over.is_trivial:
            builder.add_all(dim, size)
            continue
        builder.add((None, dim, None), (None,), source[dim], NEED_REPLICATION, blocked=conservative)
        builder.add((dim, None, None), (dim,), size, PERMUTATION, blocked=conservative)
    return builder.build()


@rule("stablehlo.select_and_scatter", beyond=True)
def select_and_scatter_by_window(op: Op, conservative: bool) -> OpShardingRule:
    """The same, but the source is split as the operand is, where it has more than one window."""
    source, builder = shape_of(op, 1), RuleBuilder.of(op)
    for dim, (size, over) in enumerate(zip(result_shape(op), window(op), strict=True)):
        if over.is_trivial:
            builder.add_all(dim, size)
        elif source[dim] > 1:
            builder.add_all(dim, size, PERMUTATION, blocked=conservative)
        else:
            builder.add((None, dim, None), (None,), source[dim], NEED_REPLICATION, blocked=conservative)
            builder.add((dim, None, None), (dim,), size, PERMUTATION, blocked=conservative)
    return builder.build()


passes_unreduced("stablehlo.reduce_window", {"sum": Linear.SUMMED})


# Rules of batch normalisation.


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


# Rules of ops that look at all elements along a dimension: sort, top_k, fft.


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
