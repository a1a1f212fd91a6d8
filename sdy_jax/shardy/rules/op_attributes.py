"""What ops say of themselves: StableHLO's structured attributes as dataclasses, and the operations that ops perform."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

from jax.extend.mlir.dialects import chlo, stablehlo

from sdy_jax.base.extensions import registered
from sdy_jax.ir.custom_ops import stated_work
from sdy_jax.ir.graph import Op, Value
from sdy_jax.shardy.rules.elementwise import is_elementwise
from sdy_jax.shardy.rules.linalg import (
    applies_from_right,
    cholesky_is_lower,
    is_householder_product,
    is_qr,
    makes_no_vectors,
    triangular_system,
)

# StableHLO's structured attributes as frozen dataclasses: what rules and emitters read.
#
# One reader per kind; each takes the `Op` and answers for the ops that its docstring names.

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


# How many operations an op, or a call of a linear algebra library, performs on whole tensors.

# How many operations the calls of linear algebra libraries perform.
#
# Multiplications and additions count one each. Sources: Golub and Van Loan, Matrix Computations (4th edition, 2013),
# 3.2, 4.3, 5.2, 7.4, 7.5, 8.3 and figure 8.6.1. Those of iterations are for the usual number of these; what libraries
# add so that their caches serve them is left out.

_SINGULAR_VECTORS = (14, 8)
"""Operations per row of the longer side and of the shorter one, for the square of the shorter. Published (Golub and
Van Loan, figure 8.6.1): singular values with the vectors that belong to them."""

_SCHUR_VECTORS = 25
"""Operations per cube of the order. Published (Golub and Van Loan, 7.5.6): a Schur form with its vectors."""


class _Work(NamedTuple):
    """The calls whose target matches, of which one problem is an array of `rank` dimensions of operand 0, and the
    operations for one, by its sizes."""

    target: re.Pattern[str]
    rank: int
    operations: Callable[..., float]


def operations_of_library(op: Op) -> float | None:
    """The operations of a call of a linear algebra library, for its whole batch; None for other calls."""
    target, shape = op.text("call_target_name"), op.operands[0].shape or () if op.operands else ()
    work = next((work for work in _TABLE if work.target.fullmatch(target)), None)
    if work is None or len(shape) < work.rank:
        return None
    batch = len(shape) - work.rank
    return math.prod(shape[:batch]) * work.operations(op, *shape[batch:])


def _of_lu(op: Op, m: int, n: int) -> float:
    return min(m, n) ** 2 * (max(m, n) - min(m, n) / 3)


def _of_qr(op: Op, m: int, n: int) -> float:
    return 2 * _of_lu(op, m, n)


def _of_reflectors_applied(op: Op, m: int, k: int) -> float:
    """Each column of operand 2, or each row from the right, takes all k reflectors."""
    rows, columns = (op.operands[2].shape or ())[-2:]
    return 2 * (rows if applies_from_right(op) else columns) * k * (2 * m - k)


def _of_svd(op: Op, m: int, n: int) -> float:
    """By bidiagonal matrices. Of the vectors of the longer side, as many as there are singular values."""
    long, short = max(m, n), min(m, n)
    of_long, of_short = (4, -4 / 3) if makes_no_vectors(op) else _SINGULAR_VECTORS
    return short**2 * (of_long * long + of_short * short)


def _of_symmetric_eigenvalues(op: Op, m: int, n: int) -> float:
    return n**3 * (4 / 3 if makes_no_vectors(op) else 9)


def _of_eigenvalues(op: Op, m: int, n: int) -> float:
    """By the Schur form."""
    return n**3 * (10 if makes_no_vectors(op) else _SCHUR_VECTORS)


def _of_hessenberg(op: Op, m: int, n: int) -> float:
    return 10 / 3 * n**3


def _of_tridiagonal_form(op: Op, m: int, n: int) -> float:
    return 4 / 3 * n**3


def _of_tridiagonal_system(op: Op, n: int) -> float:
    """Elimination takes four operations per row, and substitution seven for each column of operand 3."""
    return n * (4 + 7 * (op.operands[3].shape or ())[-1])


def _of_pivots(op: Op, n: int) -> float:
    return n


_TABLE = tuple(
    _Work(re.compile(target), rank, operations)
    for target, rank, operations in (
        (r"(lapack_[sdcz]|(cu|hip)solver_)getrf_ffi|LuDecomposition", 2, _of_lu),
        (r"lapack_[sdcz]geqp3_ffi|(cu|hip)hybrid_geqp3", 2, _of_qr),
        (r"(lapack_[sdcz](or|un)mqr|(cu|hip)solver_ormqr)_ffi", 2, _of_reflectors_applied),
        (r"(lapack_[sdcz]|(cu|hip)solver_)(gesdd|gesvd[jp]?)_ffi", 2, _of_svd),
        (r"(lapack_[sdcz](sy|he)evd|(cu|hip)solver_syevd)_ffi|Eigh", 2, _of_symmetric_eigenvalues),
        (r"(lapack_[sdcz]geev|(cu|hip)solver_geev)_ffi|(cu|hip)hybrid_eig_(real|comp)", 2, _of_eigenvalues),
        (r"lapack_[sdcz]gees_ffi", 2, _of_eigenvalues),
        (r"lapack_[sdcz]gehrd_ffi", 2, _of_hessenberg),
        (r"(lapack_[sdcz](sy|he)trd|(cu|hip)solver_sytrd)_ffi", 2, _of_tridiagonal_form),
        (r"(lapack_[sdcz]gtsv|(cu|hip)sparse_gtsv2|tridiagonal_solve_perturbed)_ffi", 1, _of_tridiagonal_system),
        (r"(cu|hip)_tridiagonal_solve_perturbed", 1, _of_tridiagonal_system),
        (r"(cu|hip)_lu_pivots_to_permutation", 1, _of_pivots),
    )
)


# How many operations an op performs on whole tensors, as far as it states them or they follow from its shapes.
#
# Multiplications and additions count one each, as do comparisons of a sort. Ops that only move data are not in the
# table, nor are those that look up or scatter: they perform none, or as many on each device however their table is
# split.

Count = Callable[[Op], float]

OPERATIONS: dict[str, Count] = {}


def operations_of(op: Op) -> float:
    """The operations of one execution of an op: what a call states, else by its shapes; 0 where they are not known."""
    work = stated_work(op) if op.name == "stablehlo.custom_call" else None
    if work is not None:
        return work.flops
    if op.name in OPERATIONS:
        return OPERATIONS[op.name](op)
    return _size(op.results[0]) if is_elementwise(op) else 0


def _operations(*names: str) -> Callable[[Count], Count]:
    return registered(OPERATIONS, names, "numbers of operations")


def _size(value: Value) -> int:
    return math.prod(value.shape or ())


@_operations("stablehlo.dot")
def _dot(op: Op) -> float:
    lhs = op.operands[0].shape or ()
    return 2 * _size(op.results[0]) * lhs[-1]


@_operations("stablehlo.dot_general")
def _dot_general(op: Op) -> float:
    lhs = op.operands[0].shape or ()
    return 2 * _size(op.results[0]) * math.prod(lhs[d] for d in dot_dimension_numbers(op).lhs_contracting)


@_operations("chlo.ragged_dot")
def _ragged_dot(op: Op) -> float:
    """Each row of the left side meets one matrix of the right side."""
    numbers = ragged_dot_dimension_numbers(op)
    taken = {*numbers.product.rhs_batching, *numbers.product.rhs_contracting, numbers.groups}
    return 2 * _size(op.operands[0]) * math.prod(n for d, n in enumerate(op.operands[1].shape or ()) if d not in taken)


@_operations("stablehlo.convolution")
def _convolution(op: Op) -> float:
    """Every element of the result takes a window of the kernel; a kernel holds the input features of one group."""
    kernel = op.operands[1]
    features = (kernel.shape or ())[convolution_dimension_numbers(op).kernel_output_feature]
    return 2 * _size(op.results[0]) * _size(kernel) / features if features else 0


@_operations("stablehlo.reduce")
def _reduce(op: Op) -> float:
    return sum(map(_size, op.operands[: len(op.results)]))


@_operations("stablehlo.reduce_window")
def _reduce_window(op: Op) -> float:
    return sum(map(_size, op.results)) * math.prod(dim.size for dim in window(op))


@_operations("stablehlo.select_and_scatter")
def _select_and_scatter(op: Op) -> float:
    return _size(op.operands[1]) * math.prod(dim.size for dim in window(op))


@_operations("stablehlo.sort")
def _sort(op: Op) -> float:
    shape = op.operands[0].shape or ()
    length = shape[op.int("dimension", len(shape) - 1)] if shape else 1
    return _size(op.operands[0]) * math.log2(max(length, 1))


@_operations("stablehlo.fft")
def _fft(op: Op) -> float:
    points = math.prod(op.ints("fft_length"))
    return 5 * max(_size(op.operands[0]), _size(op.results[0])) * math.log2(max(points, 1))


@_operations("stablehlo.cholesky", "stablehlo.triangular_solve", "stablehlo.custom_call")
def _linear_algebra(op: Op) -> float:
    """Of decompositions and solvers; 0 for other calls."""
    if triangular_system(op) is not None:
        return _size(op.results[0]) * (op.operands[0].shape or (1,))[-1]
    if cholesky_is_lower(op) is not None:
        return _size(op.results[0]) * (op.results[0].shape or (1,))[-1] / 3
    if is_qr(op) or is_householder_product(op):
        rows, columns = (op.operands[0].shape or ())[-2:]
        return 2 * _size(op.operands[0]) * columns * max(0.0, 1 - columns / (3 * rows)) if rows else 0
    return operations_of_library(op) or 0
