"""How many operations an op, or a call of a linear algebra library, performs on whole tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import NamedTuple

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
from sdy_jax.shardy.rules.op_attributes import (
    convolution_dimension_numbers,
    dot_dimension_numbers,
    ragged_dot_dimension_numbers,
    window,
)

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
