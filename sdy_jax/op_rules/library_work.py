"""How many operations the calls of linear algebra libraries perform.

Multiplications and additions count one each. Sources: Golub and Van Loan, Matrix Computations (4th edition, 2013), 3.2,
4.3, 5.2, 7.4, 7.5, 8.3 and figure 8.6.1. Those of iterations are for the usual number of these; what libraries add so
that their caches serve them is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import NamedTuple

from sdy_jax.ir.graph import Op
from sdy_jax.op_rules.linalg import applies_from_right, makes_no_vectors

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
