"""Convolutions: batches, features and groups can be sharded, and contracted features leave partial sums.

Space is not split: a block of the result needs its neighbours' borders.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
from jax import lax

from sdy_jax.ir.graph import Op
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.emission.reemitted import re_emit
from sdy_jax.lowering.strategies.dot import precision, without_padding
from sdy_jax.lowering.strategies.monoids import sum_kind
from sdy_jax.lowering.strategies.registry import Strategy, pass_through_factors, strategies
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.rules.op_attributes import ConvolutionDimensionNumbers, convolution_dimension_numbers, padding


@strategies("stablehlo.convolution")
def _convolution_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    dims = convolution_dimension_numbers(op)
    spatial = frozenset(f for d in dims.input_spatial for f in rule.operand_mappings[0][d])
    spatial |= frozenset(f for d in dims.kernel_spatial for f in rule.operand_mappings[1][d])
    splittable = (pass_through_factors(rule) | rule.reduction) - spatial
    return [Strategy("partial", splittable, rule.reduction - spatial, sum_kind(op.results[0].dtype))]


@emitter("stablehlo.convolution")
def _convolution(local: LocalOp, lhs: jax.Array, rhs: jax.Array) -> jax.Array | list[jax.Array]:
    """The group counts follow from local shapes: a device holds whole groups, or a part of a single one."""
    dims = convolution_dimension_numbers(local.op)
    lhs, rhs = without_padding(local, lhs, rhs, (dims.input_feature,), (dims.kernel_input_feature,))
    counts = {
        "feature_group_count": _ratio(lhs.shape[dims.input_feature], rhs.shape[dims.kernel_input_feature]),
        "batch_group_count": _ratio(lhs.shape[dims.input_batch], local.result_shape()[dims.output_batch]),
    }
    if not _has_lax_form(local.op) or not all(counts.values()):
        return re_emit(local, lhs, rhs, attributes={name: f"{n} : i64" for name, n in counts.items() if n})
    return _lax_convolution(local.op, dims, lhs, rhs, counts)


def _has_lax_form(op: Op) -> bool:
    """Whether lax can express the op: it has no window reversal, splits complex numbers, and refuses mixed types."""
    dtypes = {value.dtype for value in (*op.operands, *op.results)}
    odd = len(dtypes) > 1 or any(dtype == "i1" or "complex" in dtype for dtype in dtypes)
    return not odd and not any(op.ints("window_reversal"))


def _lax_convolution(
    op: Op, dims: ConvolutionDimensionNumbers, lhs: jax.Array, rhs: jax.Array, counts: Mapping[str, int]
) -> jax.Array:
    numbers = lax.ConvDimensionNumbers(
        (dims.input_batch, dims.input_feature, *dims.input_spatial),
        (dims.kernel_output_feature, dims.kernel_input_feature, *dims.kernel_spatial),
        (dims.output_batch, dims.output_feature, *dims.output_spatial),
    )
    ones = (1,) * len(dims.input_spatial)
    return lax.conv_general_dilated(
        lhs,
        rhs,
        window_strides=op.ints("window_strides", ones),
        padding=padding(op),
        lhs_dilation=op.ints("lhs_dilation", ones),
        rhs_dilation=op.ints("rhs_dilation", ones),
        dimension_numbers=numbers,
        precision=precision(op),
        preferred_element_type=lhs.dtype,
        feature_group_count=counts["feature_group_count"],
        batch_group_count=counts["batch_group_count"],
    )


def _ratio(whole: int, part: int) -> int:
    return whole // part if part else 0
