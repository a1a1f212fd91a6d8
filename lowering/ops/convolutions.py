"""Convolutions: batches, features, groups and space can be sharded.

Contracted features leave partial sums. Where space is split, a device reads of its neighbours what its windows reach
(`reshard/strip_reads.py`), dimension after dimension, so that the second one brings the corners. The cases:

- The result is split with the input: a device reads what its block of the result needs.
- The kernel is split with the input, as the output's gradient is in the gradient of a kernel: a device reads what its
  block of the kernel meets, and has a term of every result. So it has where only the kernel is split, out of the whole
  input.

The fill values of a dilated input are never sent, and computed with only where shards start at different phases
between two strides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
from jax import lax

from sdy_jax.ir.graph import Op
from sdy_jax.ir.shardings import OpShardingRule
from sdy_jax.lowering.ops.elementwise import sum_kind
from sdy_jax.lowering.ops.products import precision, without_padding
from sdy_jax.lowering.ops.re_emission import re_emit
from sdy_jax.lowering.ops.registry import LocalOp, Strategy, emitter, pass_through_factors, strategies
from sdy_jax.lowering.ops.windows import (
    LocalWindow,
    WindowFetch,
    array_text,
    fetched,
    padding_text,
    read_by_elements,
    read_by_windows,
    whole_window,
)
from sdy_jax.lowering.reshard.strip_reads import Window
from sdy_jax.shardy.rules.op_attributes import (
    ConvolutionDimensionNumbers,
    convolution_dimension_numbers,
    convolution_window,
)


@dataclass(frozen=True, slots=True)
class _Space:
    """One spatial dimension: its index in input, kernel and result, and how the kernel moves along it."""

    input: int
    kernel: int
    result: int
    window: Window


def _space(op: Op, dims: ConvolutionDimensionNumbers) -> list[_Space]:
    reversal = op.ints("window_reversal", (0,) * len(dims.input_spatial))
    indices = zip(dims.input_spatial, dims.kernel_spatial, dims.output_spatial, strict=True)
    shape = op.operands[0].shape or ()
    return [
        _Space(*found, replace(whole_window(shape[found[0]], window), is_reversed=bool(flag)))
        for found, window, flag in zip(indices, convolution_window(op), reversal, strict=True)
    ]


@strategies("stablehlo.convolution")
def _convolution_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    dims = convolution_dimension_numbers(op)
    space, batch = _space(op, dims), frozenset(rule.mappings[2][dims.output_batch])
    fetches = [found for dim in space if (found := _fetch(rule, dim)) is not None]
    split = frozenset(found.factor for found in fetches)
    spatial = frozenset(f for dim in space for f in (*rule.mappings[0][dim.input], *rule.mappings[1][dim.kernel]))
    splittable = ((pass_through_factors(rule) | rule.reduction) - spatial) | split
    inside = fetched(0, op.operands[0].shape or (), rule.mappings[0], fetches)
    kind = sum_kind(op.results[0].dtype)
    partial = Strategy("partial", splittable, rule.reduction & splittable, kind, tuple(inside), batch=batch)
    alone = _of_kernel_alone(rule, space)
    if not alone:
        return [partial]
    whole = splittable - spatial
    return [partial, Strategy("split_kernel", whole | alone, (rule.reduction & whole) | alone, kind, batch=batch)]


def _of_kernel_alone(rule: OpShardingRule, space: Sequence[_Space]) -> frozenset[int]:
    """The factors of the kernel's spatial dimensions that are no others'."""
    kernel = frozenset(f for dim in space for f in rule.mappings[1][dim.kernel] if rule.factor_sizes[f] > 1)
    return kernel - rule.factors_of[0] - rule.factors_of[2]


def _fetch(rule: OpShardingRule, dim: _Space) -> WindowFetch | None:
    """How a spatial dimension may be split: along its major factor, if that of the result or the kernel is the same."""
    lhs, kernel, result = (
        next((f for f in factors if rule.factor_sizes[f] > 1), None)
        for factors in (rule.mappings[0][dim.input], rule.mappings[1][dim.kernel], rule.mappings[2][dim.result])
    )
    if lhs is None or lhs not in (kernel, result):
        return None
    return WindowFetch(dim.input, lhs, dim.window, read_by_elements if lhs == kernel else read_by_windows)


@emitter("stablehlo.convolution")
def _convolution(local: LocalOp, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """The group counts follow from local shapes: a device holds whole groups, or a part of a single one."""
    op, dims = local.op, convolution_dimension_numbers(local.op)
    contracted = (dims.kernel_input_feature, *dims.kernel_spatial)
    lhs, rhs = without_padding(local, lhs, rhs, (dims.input_feature,), contracted)
    counts = {
        "feature_group_count": _ratio(lhs.shape[dims.input_feature], rhs.shape[dims.kernel_input_feature]),
        "batch_group_count": _ratio(lhs.shape[dims.input_batch], local.result_shape()[dims.output_batch]),
    }
    spaces = [_local_window(local, dim) for dim in _space(op, dims)]
    for space in spaces:
        lhs = space.fetched(local, lhs, 0)
    windows = [space.local_window(lhs) for space in spaces]
    if _has_lax_form(op) and all(counts.values()):
        result = _lax_convolution(op, dims, lhs, rhs, counts, windows)
    else:
        result = _re_emitted(local, dims, lhs, rhs, counts, windows)
    for space, dim in zip(spaces, dims.output_spatial, strict=True):
        result = space.kept(local, result, dim)
    return result


def _is_kernel_alone(local: LocalOp, dim: _Space) -> bool:
    return local.operand_axes(1, dim.kernel) != () == local.operand_axes(0, dim.input)


def _local_window(local: LocalOp, dim: _Space) -> LocalWindow:
    axes = local.operand_axes(1, dim.kernel)
    if _is_kernel_alone(local, dim):
        return LocalWindow.over_whole(local, dim.input, dim.window, axes)
    return LocalWindow.of(local, dim.input, dim.window, contracted=axes != ())


def _re_emitted(
    local: LocalOp,
    dims: ConvolutionDimensionNumbers,
    lhs: jax.Array,
    rhs: jax.Array,
    counts: Mapping[str, int],
    windows: Sequence[Window],
) -> jax.Array:
    shape = list(local.result_shape())
    for dim, window in zip(dims.output_spatial, windows, strict=True):
        shape[dim] = window.result_size
    attributes = {name: f"{n} : i64" for name, n in counts.items() if n}
    if windows:
        attributes["padding"] = padding_text((w.low, w.high) for w in windows)
        attributes["lhs_dilation"] = array_text(w.base_dilation for w in windows)
    return re_emit(local, lhs, rhs, result_shapes=[shape], attributes=attributes)[0]


def _has_lax_form(op: Op) -> bool:
    """Whether lax can express the op: it has no window reversal, splits complex numbers, and refuses mixed types."""
    dtypes = {value.dtype for value in (*op.operands, *op.results)}
    odd = len(dtypes) > 1 or any(dtype == "i1" or "complex" in dtype for dtype in dtypes)
    return not odd and not any(op.ints("window_reversal"))


def _lax_convolution(
    op: Op,
    dims: ConvolutionDimensionNumbers,
    lhs: jax.Array,
    rhs: jax.Array,
    counts: Mapping[str, int],
    windows: Sequence[Window],
) -> jax.Array:
    numbers = lax.ConvDimensionNumbers(
        (dims.input_batch, dims.input_feature, *dims.input_spatial),
        (dims.kernel_output_feature, dims.kernel_input_feature, *dims.kernel_spatial),
        (dims.output_batch, dims.output_feature, *dims.output_spatial),
    )
    return lax.conv_general_dilated(
        lhs,
        rhs,
        window_strides=[w.stride for w in windows],
        padding=[(w.low, w.high) for w in windows],
        lhs_dilation=[w.base_dilation for w in windows],
        rhs_dilation=[w.window_dilation for w in windows],
        dimension_numbers=numbers,
        precision=precision(op),
        preferred_element_type=lhs.dtype,
        feature_group_count=counts["feature_group_count"],
        batch_group_count=counts["batch_group_count"],
    )


def _ratio(whole: int, part: int) -> int:
    return whole // part if part else 0
