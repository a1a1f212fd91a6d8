"""Rules of matrix products and convolutions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from sdy_jax.ir.graph import Op
from sdy_jax.ir.rules import FactorType, OpShardingRule
from sdy_jax.shardy.rules.op_attributes import (
    ConvolutionDimensionNumbers,
    Dims,
    DotDimensionNumbers,
    convolution_dimension_numbers,
    convolution_window,
    dot_dimension_numbers,
    ragged_dot_dimension_numbers,
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
    for inside, at, out, window in spatial:
        if window.span > (result[out] - 1) * window.stride + 1:
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
