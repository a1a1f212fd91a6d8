"""Rules of matrix decompositions and solvers: batch dimensions pass, matrix dimensions are needed whole.

Beyond Shardy, the right-hand sides of a linear system pass too, its unknowns are split like its equations, and the
calls of LAPACK and its like on accelerators have rules: those of the ops that do the same, or rules of their own. Their
names and the dimensions of their operands are those that jax lowers to (0.10 and 0.12 agree). The tests run those for
CPUs; those for GPUs and TPUs are known from what jax lowers for these platforms.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Op
from sdy_jax.ir.shardings import FactorType, OpShardingRule
from sdy_jax.shardy.rules.registry import (
    NEED_REPLICATION,
    PASS_THROUGH,
    WRITTEN_BY_JAX,
    Dim,
    RuleBuilder,
    result_shape,
    rule,
    shape_of,
)


@rule("stablehlo.cholesky")
def cholesky(op: Op, conservative: bool) -> OpShardingRule:
    shape = result_shape(op)
    return RuleBuilder.of(op).pointwise(shape, (len(shape) - 2, len(shape) - 1), NEED_REPLICATION).build()


class TriangularSystem(NamedTuple):
    """How a triangular system reads its matrix `a`: `a x = b`, or `x a = b` where `left` is false."""

    left: bool
    lower: bool
    transposed: bool
    conjugated: bool

    @property
    def kept(self) -> int:
        """The dimension of `a` that numbers the equations; the other one is contracted with x."""
        return -2 if self.left != self.transposed else -1

    @property
    def contracted(self) -> int:
        return -3 - self.kept

    @property
    def solved(self) -> int:
        """The dimension of b that numbers the equations, and of x that numbers the unknowns."""
        return -2 if self.left else -1

    def dims(self, rank: int) -> tuple[int, int, int, int]:
        """The kept and the contracted dimension of a, the solved one of b and x, and their other one."""
        return rank + self.kept, rank + self.contracted, rank + self.solved, rank - 3 - self.solved

    @property
    def forward(self) -> bool:
        """Whether the first equation has one unknown; else the last one has."""
        return self.lower == (self.kept == -2)


_TRSM = re.compile(r"lapack_[sdcz]trsm_ffi")
_POTRF = re.compile(r"(lapack_[sdcz]|cusolver_|hipsolver_)potrf_ffi")
_TRANSPOSED = ("trans_x = 84 : ui8", "trans_x = 67 : ui8")
_CONJUGATED = ("trans_x = 67 : ui8",)
_UPPER = ("uplo = 85 : ui8", "lower = false")
"""How calls say so; the numbers are `T`, `C` and `U`."""


def triangular_system(op: Op) -> TriangularSystem | None:
    """What an op or call solves; None for all others."""
    if op.name == "stablehlo.triangular_solve":
        kind = op.text("transpose_a")
        transposed, conjugated = kind in ("TRANSPOSE", "ADJOINT"), kind == "ADJOINT"
        return TriangularSystem(op.flag("left_side"), op.flag("lower"), transposed, conjugated)
    if not _TRSM.fullmatch(op.text("call_target_name")):
        return None
    return TriangularSystem(
        not _says(op, _RIGHT), not _says(op, _UPPER), _says(op, _TRANSPOSED), _says(op, _CONJUGATED)
    )


def cholesky_is_lower(op: Op) -> bool | None:
    """Whether a Cholesky decomposition reads and makes the lower triangle; None for all other ops."""
    if op.name == "stablehlo.cholesky":
        return op.flag("lower")
    return not _says(op, _UPPER) if _POTRF.fullmatch(op.text("call_target_name")) else None


def _says(op: Op, settings: Sequence[str]) -> bool:
    written = str(op.attributes.get("mhlo.backend_config"))
    return any(said in written for said in settings)


@rule("stablehlo.triangular_solve")
def triangular_solve(op: Op, conservative: bool) -> OpShardingRule:
    """Of a's two matrix dimensions one lies along b; the other one, contracted with x, lies along x."""
    system, a, b = _system(op)
    rank, (kept, contracted, solved, free) = len(a), system.dims(len(a))
    builder = RuleBuilder.of(op).pointwise(a[: rank - 2])
    along_a = ((kept, solved), (None,), a[kept])
    along_b = ((None, free), (free,), b[free])
    for operands, results, size in (along_a, along_b) if system.left else (along_b, along_a):
        builder.add(operands, results, size, NEED_REPLICATION)
    builder.add((contracted, None), (solved,), a[contracted], NEED_REPLICATION)
    return builder.build()


@rule("stablehlo.triangular_solve", beyond=True)
def triangular_solve_by_equations(op: Op, conservative: bool) -> OpShardingRule:
    """The columns of b (its rows in `x a = b`) are systems of their own; x is split like the equations."""
    system, a, b = _system(op)
    rank, (kept, contracted, solved, free) = len(a), system.dims(len(a))
    builder = RuleBuilder.of(op).pointwise(a[: rank - 2])
    builder.add((kept, solved), (solved,), a[kept], NEED_REPLICATION)
    builder.add((None, free), (free,), b[free], PASS_THROUGH)
    builder.add((contracted, None), (None,), a[contracted], NEED_REPLICATION)
    return builder.build()


def _system(op: Op) -> tuple[TriangularSystem, tuple[int, ...], tuple[int, ...]]:
    system = triangular_system(op)
    assert system is not None, op.name
    return system, shape_of(op, 0), shape_of(op, 1)


# QR decompositions, which no op of StableHLO makes.


def qr(op: Op) -> OpShardingRule:
    """A batch of matrices to reflectors, and one scale per reflector."""
    builder, row, column, shape = with_batch(op)
    builder.add((row,), (row, None), shape[row], NEED_REPLICATION)
    builder.add((column,), (column, None), shape[column], NEED_REPLICATION)
    builder.add((None,), (None, row), result_shape(op, 1)[row], NEED_REPLICATION)
    return builder.build()


def householder_product(op: Op) -> OpShardingRule:
    """A batch of reflectors and their scales to orthogonal matrices."""
    builder, row, column, shape = with_batch(op)
    builder.add((row, None), (row,), shape[row], NEED_REPLICATION)
    builder.add((column, None), (column,), shape[column], NEED_REPLICATION)
    builder.add((None, row), (None,), shape_of(op, 1)[row], NEED_REPLICATION)
    return builder.build()


def with_batch(op: Op) -> tuple[RuleBuilder, int, int, tuple[int, ...]]:
    """A builder with the batch dimensions placed, the two matrix dimensions and the shape of operand 0."""
    shape = shape_of(op)
    return RuleBuilder.of(op).pointwise(shape[:-2]), len(shape) - 2, len(shape) - 1, shape


_GEQRF = re.compile(r"Qr|(lapack_[sdcz]|cusolver_|hipsolver_)geqrf_ffi")
_ORGQR = re.compile(r"ProductOfElementaryHouseholderReflectors|(lapack_[sdcz]|cusolver_|hipsolver_)(or|un)gqr_ffi")


def is_qr(op: Op) -> bool:
    """Whether a call decomposes matrices into reflectors, with R above them, and one scale per reflector."""
    return bool(_GEQRF.fullmatch(op.text("call_target_name")))


def is_householder_product(op: Op) -> bool:
    """Whether a call multiplies reflectors, the columns of a matrix below its diagonal, with these scales."""
    return bool(_ORGQR.fullmatch(op.text("call_target_name")))


# Calls of libraries.

_PROBLEM_RANK = (
    (re.compile(r"lapack_[sdcz](potrf|geev|gehrd|getrf|geqrf|geqp3|gees|gesdd|gesvd|trsm|gtsv)_ffi"), 2),
    (re.compile(r"lapack_[sdcz](syevd|heevd|orgqr|ungqr|ormqr|unmqr|sytrd|hetrd)_ffi"), 2),
    (re.compile(r"tridiagonal_solve_perturbed_ffi|LuDecomposition"), 2),
    (re.compile(r"(cu|hip)solver_(potrf|geev|syevd|orgqr|ormqr|getrf|geqrf|gesvdj|gesvdp|gesdd|gesvd|sytrd)_ffi"), 2),
    (re.compile(r"(cu|hip)(sparse_gtsv2_ffi|_tridiagonal_solve_perturbed|hybrid_(eig_real|eig_comp|geqp3))"), 2),
    (re.compile(r"(cu|hip)_lu_pivots_to_permutation"), 1),
)
"""What one problem of a target takes: matrices (rank 2, beside vectors perhaps) or vectors. Dimensions before these are
batch dimensions."""


def batch_dimensions(op: Op) -> int:
    """How many leading dimensions of all operands and results of a library's call number problems of their own.

    jax writes it on the call where it knows it. It does not in programs of symbolic sizes, nor did older versions; then
    it is known from the target. 0 where nothing is known.
    """
    ranks = [v.rank for v in op.operands]
    count = _written_count(op)
    if count is None and ranks:
        target = op.text("call_target_name")
        count = next((max(ranks) - rank for pattern, rank in _PROBLEM_RANK if pattern.fullmatch(target)), 0)
    if not count or count < 0 or not op.results:
        return 0
    sizes = result_shape(op)[:count]
    leading = [(v.shape or ())[:count] for v in op.operands]
    are_alike = all((v.shape or ())[:count] == sizes for v in op.results)
    return count if are_alike and all(_serves(shape, sizes) for shape in leading) else 0


def _serves(shape: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether an operand has a part for each problem, or, where its dimension is 1, one for all."""
    return len(shape) == len(sizes) and all(n in (1, size) for n, size in zip(shape, sizes, strict=True))


def _written_count(op: Op) -> int | None:
    attributes = op.attributes.get("mhlo.frontend_attributes")
    if attributes is None or "num_batch_dims" not in ir.DictAttr(attributes):
        return None
    text = ir.StringAttr(ir.DictAttr(attributes)["num_batch_dims"]).value
    return int(text) if text.isdecimal() else None


_SOLVERS = (
    (re.compile(r"lapack_[sdcz]trsm_ffi"), 1, 0),
    (re.compile(r"lapack_[sdcz]gtsv_ffi"), 3, 3),
    (re.compile(r"(cu|hip)sparse_gtsv2_ffi"), 3, 0),
    (re.compile(r"(lapack_[sdcz](or|un)mqr|(cu|hip)solver_ormqr)_ffi"), 2, 0),
)
"""Targets that apply one matrix to many columns (many rows from the right), with the operand and the result that hold
these. What else they return does not depend on them."""

_RIGHT = ("side = 82 : ui8", "left = false")
"""How calls say that the matrix is on the right; 82 is `R`."""


def applies_from_right(op: Op) -> bool:
    """Whether a call applies a matrix from the right."""
    return _says(op, _RIGHT)


def makes_no_vectors(op: Op) -> bool:
    """Whether a call decomposes matrices for their singular values or eigenvalues alone; 78 is `N`."""
    sides = ("compute_left = 78 : ui8", "compute_right = 78 : ui8"), ("left = false", "right = false")
    return _says(op, ("mode = 78 : ui8", "compute_uv = false")) or any(
        all(_says(op, [side]) for side in both) for both in sides
    )


def independent_columns(op: Op) -> tuple[int, int, int] | None:
    """The operand and the result of a library's call that consist of independent columns, and the dimension that
    numbers these in both; rows where the matrix is applied from the right. None for other calls."""
    target = op.text("call_target_name")
    found = next(((v, r) for pattern, v, r in _SOLVERS if pattern.fullmatch(target)), None)
    if found is None or len(op.operands) <= found[0] or len(op.results) <= found[1]:
        return None
    rank = op.operands[found[0]].rank
    return (*found, rank - 2 if applies_from_right(op) else rank - 1) if rank >= 2 else None


def library_call(op: Op) -> OpShardingRule | None:
    """What the op of StableHLO has that does the same; else batches of problems, and the columns of those that have
    independent ones. None where there is nothing of the kind."""
    if triangular_system(op) is not None:
        return triangular_solve_by_equations(op, False)
    if cholesky_is_lower(op) is not None and [v.shape for v in op.results] == [shape_of(op), shape_of(op)[:-2]]:
        return cholesky(op, False)
    if is_qr(op) or is_householder_product(op):
        return qr(op) if is_qr(op) else householder_product(op)
    count, columns = batch_dimensions(op), independent_columns(op)
    if not count and columns is None:
        return None
    builder = _with_batches(op, count)
    if columns is not None:
        operand, result, dim = columns
        operands, results = _only(len(op.operands), operand, dim), _only(len(op.results), result, dim)
        builder.add(operands, results, shape_of(op, operand)[dim])
    return _whole_otherwise(builder, op, NEED_REPLICATION).build()


def batch_rule(op: Op) -> OpShardingRule | None:
    """The rule that jax writes on calls with batch dimensions: every other dimension has a factor of its own."""
    count = _written_count(op)
    if count is None:
        return None
    return replace(_whole_otherwise(_with_batches(op, count), op, PASS_THROUGH).build(), is_custom=True)


WRITTEN_BY_JAX["stablehlo.custom_call"] = batch_rule


def _with_batches(op: Op, count: int) -> RuleBuilder:
    """The batch dimensions, but for those of operands that serve all problems."""
    builder, tensors = RuleBuilder.of(op), [v.shape or () for v in (*op.operands, *op.results)]
    for dim, size in enumerate((result_shape(op) if op.results else shape_of(op))[:count]):
        dims = [dim if dim < len(shape) and shape[dim] == size else None for shape in tensors]
        builder.add(dims[: len(op.operands)], dims[len(op.operands) :], size)
    return builder


def _only(count: int, tensor: int, dim: int) -> list[Dim]:
    return [dim if number == tensor else None for number in range(count)]


def _whole_otherwise(builder: RuleBuilder, op: Op, kind: FactorType) -> RuleBuilder:
    """Every dimension without a factor gets one of its own."""
    shapes: Sequence[tuple[int, ...]] = [v.shape or () for v in (*op.operands, *op.results)]
    for number, shape in enumerate(shapes):
        for dim, size in enumerate(shape):
            if not builder.has_factor(number, dim):
                every = _only(len(shapes), number, dim)
                builder.add(every[: len(op.operands)], every[len(op.operands) :], size, kind)
    return builder
