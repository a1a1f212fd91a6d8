"""StableHLO's structured attributes as frozen dataclasses: what rules and emitters read.

One reader per kind; each takes the `Op` and answers for the ops that its docstring names.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from jax.extend.mlir.dialects import chlo, stablehlo

from sdy_jax.ir.graph import Op

Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DotDimensionNumbers:
    """Which dimensions of the two operands are batched and contracted, pairwise."""

    lhs_batching: Dims
    rhs_batching: Dims
    lhs_contracting: Dims
    rhs_contracting: Dims


@dataclass(frozen=True, slots=True)
class RaggedDotDimensionNumbers:
    """Of a product of groups of rows, each with a matrix of its own: those of the product, the dimension of the left
    operand whose elements are in groups, one after the other, and that of the right operand with an element for each
    group, if it has any."""

    product: DotDimensionNumbers
    ragged: int
    groups: int | None


@dataclass(frozen=True, slots=True)
class GatherDimensionNumbers:
    """How the operand, the start indices and the result of a gather correspond.

    `start_index_map[k]` is the operand dimension that element k of an index vector points into.
    """

    offset_dims: Dims
    collapsed_slice_dims: Dims
    operand_batching_dims: Dims
    start_indices_batching_dims: Dims
    start_index_map: Dims
    index_vector_dim: int


@dataclass(frozen=True, slots=True)
class ScatterDimensionNumbers:
    """How the inputs, the indices and the updates of a scatter correspond."""

    update_window_dims: Dims
    inserted_window_dims: Dims
    input_batching_dims: Dims
    scatter_indices_batching_dims: Dims
    scatter_dims_to_operand_dims: Dims
    index_vector_dim: int

    @property
    def text(self) -> str:
        """The attribute's MLIR text."""
        numbers = ((field.name, getattr(self, field.name)) for field in fields(self))
        listed = (f"{name} = {list(n) if isinstance(n, tuple) else n}" for name, n in numbers)
        return f"#stablehlo.scatter<{', '.join(listed)}>"


@dataclass(frozen=True, slots=True)
class ConvolutionDimensionNumbers:
    """Where batch, features and space are in the operands and the result of a convolution."""

    input_batch: int
    input_feature: int
    input_spatial: Dims
    kernel_input_feature: int
    kernel_output_feature: int
    kernel_spatial: Dims
    output_batch: int
    output_feature: int
    output_spatial: Dims


@dataclass(frozen=True, slots=True)
class WindowDimension:
    """The window along one dimension; missing attributes have their neutral values."""

    size: int = 1
    stride: int = 1
    low: int = 0
    high: int = 0
    base_dilation: int = 1
    window_dilation: int = 1

    @property
    def is_trivial(self) -> bool:
        """One element per output element, nothing skipped or added; dilation by itself does not count."""
        return (self.size, self.stride, self.low, self.high) == (1, 1, 0, 0)

    @property
    def span(self) -> int:
        """From the window's first element to behind its last one."""
        return (self.size - 1) * self.window_dilation + 1


def dot_dimension_numbers(op: Op) -> DotDimensionNumbers:
    """Of `stablehlo.dot_general`."""
    return _dot_numbers(stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"]))


def ragged_dot_dimension_numbers(op: Op) -> RaggedDotDimensionNumbers:
    """Of `chlo.ragged_dot`."""
    numbers = chlo.RaggedDotDimensionNumbers(op.attributes["ragged_dot_dimension_numbers"])
    [ragged] = numbers.lhs_ragged_dimensions
    return RaggedDotDimensionNumbers(_dot_numbers(numbers), ragged, next(iter(numbers.rhs_group_dimensions), None))


def _dot_numbers(numbers: stablehlo.DotDimensionNumbers | chlo.RaggedDotDimensionNumbers) -> DotDimensionNumbers:
    return DotDimensionNumbers(
        tuple(numbers.lhs_batching_dimensions),
        tuple(numbers.rhs_batching_dimensions),
        tuple(numbers.lhs_contracting_dimensions),
        tuple(numbers.rhs_contracting_dimensions),
    )


def gather_dimension_numbers(op: Op) -> GatherDimensionNumbers:
    """Of `stablehlo.gather`."""
    numbers = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    return GatherDimensionNumbers(
        tuple(numbers.offset_dims),
        tuple(numbers.collapsed_slice_dims),
        tuple(numbers.operand_batching_dims),
        tuple(numbers.start_indices_batching_dims),
        tuple(numbers.start_index_map),
        numbers.index_vector_dim,
    )


def scatter_dimension_numbers(op: Op) -> ScatterDimensionNumbers:
    """Of `stablehlo.scatter`."""
    numbers = stablehlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
    return ScatterDimensionNumbers(
        tuple(numbers.update_window_dims),
        tuple(numbers.inserted_window_dims),
        tuple(numbers.input_batching_dims),
        tuple(numbers.scatter_indices_batching_dims),
        tuple(numbers.scattered_dims_to_operand_dims),
        numbers.index_vector_dim,
    )


def convolution_dimension_numbers(op: Op) -> ConvolutionDimensionNumbers:
    """Of `stablehlo.convolution`."""
    numbers = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    return ConvolutionDimensionNumbers(
        numbers.input_batch_dimension,
        numbers.input_feature_dimension,
        tuple(numbers.input_spatial_dimensions),
        numbers.kernel_input_feature_dimension,
        numbers.kernel_output_feature_dimension,
        tuple(numbers.kernel_spatial_dimensions),
        numbers.output_batch_dimension,
        numbers.output_feature_dimension,
        tuple(numbers.output_spatial_dimensions),
    )


def padding(op: Op) -> tuple[tuple[int, int], ...]:
    """(low, high) per windowed dimension of a convolution, `reduce_window` or `select_and_scatter`; zeros if absent."""
    if "padding" not in op.attributes:
        return ((0, 0),) * _windowed_rank(op)
    flat = op.ints("padding")
    return tuple(zip(flat[::2], flat[1::2], strict=True))


def window(op: Op) -> tuple[WindowDimension, ...]:
    """Per dimension of the input of a `reduce_window` or `select_and_scatter`."""
    ones = (1,) * _windowed_rank(op)
    sizes = op.ints("window_dimensions", ones)
    strides = op.ints("window_strides", ones)
    base = op.ints("base_dilations", ones)
    dilations = op.ints("window_dilations", ones)
    return tuple(
        WindowDimension(size, stride, low, high, spread, dilation)
        for size, stride, (low, high), spread, dilation in zip(
            sizes, strides, padding(op), base, dilations, strict=True
        )
    )


def convolution_window(op: Op) -> tuple[WindowDimension, ...]:
    """Per spatial dimension of a `convolution`, the window that its kernel is."""
    ones = (1,) * _windowed_rank(op)
    kernel = op.operands[1].shape or ()
    return tuple(
        WindowDimension(kernel[dim], stride, low, high, spread, dilation)
        for dim, stride, (low, high), spread, dilation in zip(
            convolution_dimension_numbers(op).kernel_spatial,
            op.ints("window_strides", ones),
            padding(op),
            op.ints("lhs_dilation", ones),
            op.ints("rhs_dilation", ones),
            strict=True,
        )
    )


def _windowed_rank(op: Op) -> int:
    """Convolutions slide over all dimensions but batch and feature, the others over all."""
    return op.operands[0].rank - (2 if op.name == "stablehlo.convolution" else 0)
