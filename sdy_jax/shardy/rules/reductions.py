"""Rules of ops that combine elements along dimensions: reductions, windows, matrix products, convolutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from sdy_jax.ir.graph import Op, Value
from sdy_jax.ir.shardings import FactorType, OpShardingRule
from sdy_jax.shardy.rules.op_attributes import (
    ConvolutionDimensionNumbers,
    Dims,
    DotDimensionNumbers,
    convolution_dimension_numbers,
    convolution_window,
    dot_dimension_numbers,
    ragged_dot_dimension_numbers,
    window,
)
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


# Rules of matrix products.


@rule("stablehlo.dot")
def dot(op: Op, conservative: bool) -> OpShardingRule:
    """Contracts the last dimension of the left side with the first one of the right side; each is 1-D or 2-D."""
    last = op.operands[0].rank - 1
    return _contraction(op, DotDimensionNumbers((), (), (last,), (0,)))


@rule("stablehlo.dot_general")
def dot_general(op: Op, conservative: bool) -> OpShardingRule:
    return _contraction(op, dot_dimension_numbers(op))


@rule("chlo.ragged_dot", extra=True)
def ragged_dot(op: Op, conservative: bool) -> OpShardingRule | None:
    """As a product, and along groups: each device can take the rows of those that it has. Groups of elements of a
    batching dimension, and groups that differ along others, stay whole."""
    numbers, rhs = ragged_dot_dimension_numbers(op), shape_of(op, 1)
    if op.operands[2].rank != 1:
        return None
    product, builder, of_sums = numbers.product, RuleBuilder.of(op), numbers.ragged in numbers.product.lhs_contracting
    grouped = () if numbers.groups is None else (numbers.groups,)
    for out, (left, right) in enumerate(_kept(op, product, grouped), start=int(of_sums)):
        whole = left == numbers.ragged and right is not None
        builder.add((left, right, None), (out,), result_shape(op)[out], NEED_REPLICATION if whole else PASS_THROUGH)
    for left, right in zip(product.lhs_contracting, product.rhs_contracting, strict=True):
        builder.add((left, right, None), (None,), rhs[right], REDUCTION)
    if of_sums:
        builder.add((None, None, None), (0,), result_shape(op)[0])
    for group in grouped:
        builder.add((None, group, None), (None,), rhs[group], REDUCTION)
    builder.add((None, None, 0), (None,), shape_of(op, 2)[0], NEED_REPLICATION)
    return builder.build()


def _contraction(op: Op, numbers: DotDimensionNumbers) -> OpShardingRule:
    """The result has the batching dimensions, then what remains of the left side, then of the right side."""
    builder = RuleBuilder.of(op)
    for out, (left, right) in enumerate(_kept(op, numbers)):
        builder.add((left, right), (out,), result_shape(op)[out])
    for left, right in zip(numbers.lhs_contracting, numbers.rhs_contracting, strict=True):
        builder.add((left, right), (None,), shape_of(op)[left], REDUCTION)
    return builder.build()


def _kept(op: Op, numbers: DotDimensionNumbers, groups: Dims = ()) -> list[tuple[int | None, int | None]]:
    """The dimensions of both sides that a dimension of the result is, of which `groups` are none."""
    left, right = numbers.lhs_batching + numbers.lhs_contracting, numbers.rhs_batching + numbers.rhs_contracting
    return [
        *zip(numbers.lhs_batching, numbers.rhs_batching, strict=True),
        *((dim, None) for dim in _others(op.operands[0].rank, left)),
        *((None, dim) for dim in _others(op.operands[1].rank, right + groups)),
    ]


def _others(rank: int, dims: Dims) -> list[int]:
    return [dim for dim in range(rank) if dim not in dims]


passes_unreduced("stablehlo.dot_general", {"sum": Linear.ONE_FACTOR})


# The rule of convolutions.

_AddSpace = Callable[[RuleBuilder, Op, ConvolutionDimensionNumbers], None]


@rule("stablehlo.convolution")
def convolution(op: Op, conservative: bool) -> OpShardingRule:
    """Batch groups, batch, space, feature groups, input features, output features of a group."""
    return _convolution(op, None if conservative else _add_factored_space)


@rule("stablehlo.convolution", newer=True)
def convolution_with_all_of_space(op: Op, conservative: bool) -> OpShardingRule:
    """The same, but windows and positions that have no part of the input's size are factors of their own."""
    return _convolution(op, None if conservative else partial(_add_factored_space, keeps_all=True))


@rule("stablehlo.convolution", beyond=True)
def convolution_by_space(op: Op, conservative: bool) -> OpShardingRule:
    """The same, but every spatial dimension of the input is one factor, whose shards need not be equal.

    It is the result's, or, where the kernel spans more of the input than the results do, the kernel's: so it is in the
    gradient of a kernel, of which each shard of the input has a term.
    """
    return _convolution(op, None if conservative else _add_space)


def _convolution(op: Op, add_space: _AddSpace | None) -> OpShardingRule:
    dims = convolution_dimension_numbers(op)
    kernel, result = shape_of(op, 1), result_shape(op)
    batch_groups, feature_groups = op.int("batch_group_count", 1), op.int("feature_group_count", 1)
    builder = RuleBuilder.of(op)
    if batch_groups > 1:
        builder.add((dims.input_batch, dims.kernel_output_feature), (dims.output_feature,), batch_groups)
    builder.add((dims.input_batch, None), (dims.output_batch,), result[dims.output_batch])
    if add_space is not None:
        add_space(builder, op, dims)
    if feature_groups > 1:
        builder.add((dims.input_feature, dims.kernel_output_feature), (dims.output_feature,), feature_groups)
    contracted = (dims.input_feature, dims.kernel_input_feature)
    builder.add(contracted, (None,), kernel[dims.kernel_input_feature], REDUCTION)
    features_of_group = result[dims.output_feature] // (batch_groups * feature_groups)
    if features_of_group > 1:
        builder.add((None, dims.kernel_output_feature), (dims.output_feature,), features_of_group)
    return builder.build()


def _add_space(builder: RuleBuilder, op: Op, dims: ConvolutionDimensionNumbers) -> None:
    kernel, result = shape_of(op, 1), result_shape(op)
    spatial = zip(dims.input_spatial, dims.kernel_spatial, dims.output_spatial, convolution_window(op), strict=True)
    for inside, at, out, placed in spatial:
        if placed.span > (result[out] - 1) * placed.stride + 1:
            builder.add((inside, at), (None,), kernel[at], REDUCTION)
            builder.add((None, None), (out,), result[out], NEED_REPLICATION)
        else:
            builder.add((inside, None), (out,), result[out], PERMUTATION)
            builder.add((None, at), (None,), kernel[at], NEED_REPLICATION)


def _add_factored_space(
    builder: RuleBuilder, op: Op, dims: ConvolutionDimensionNumbers, keeps_all: bool = False
) -> None:
    """Each spatial dimension of the input is windows times positions inside a window, the larger one first.

    The windows are the result's dimension, the positions the kernel's. What the first of the two leaves of the input's
    size bounds the second. Where it leaves nothing, the second stays out, or is kept without the input: elements of the
    kernel or of the result in another order.
    """
    operand, kernel, result = shape_of(op, 0), shape_of(op, 1), result_shape(op)
    for inside, at, out in zip(dims.input_spatial, dims.kernel_spatial, dims.output_spatial, strict=True):
        windows: tuple[int, Dim, Dim, FactorType] = (result[out], None, out, PERMUTATION)
        window: tuple[int, Dim, Dim, FactorType] = (kernel[at], at, None, REDUCTION)
        rest = operand[inside]
        for size, on_kernel, on_result, kind in (windows, window) if result[out] >= kernel[at] else (window, windows):
            factor = min(rest, size)
            if factor > 1:
                builder.add((inside, on_kernel), (on_result,), factor, kind)
                rest //= factor
            elif keeps_all and size > 1:
                builder.add((None, on_kernel), (on_result,), size, PERMUTATION)


passes_unreduced("stablehlo.convolution", {"sum": Linear.ONE_FACTOR})
