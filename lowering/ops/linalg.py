"""Matrix decompositions and triangular systems: batches apart, split matrices by blocks, tall ones by rows (TSQR)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from sdy_jax.ir.graph import Op
from sdy_jax.ir.meshes import Axes, axes_size
from sdy_jax.ir.shardings import OpShardingRule
from sdy_jax.lowering.ops.collectives import movement, reductions
from sdy_jax.lowering.ops.re_emission import re_emit, scope_name
from sdy_jax.lowering.ops.registry import Inside, LocalOp, Shards, Strategy, emitter, pass_through_factors, strategies
from sdy_jax.lowering.ops.shards import block_shape, has_padding, lengthened, mask_padding
from sdy_jax.shardy.rules.linalg import (
    TriangularSystem,
    cholesky_is_lower,
    is_householder_product,
    is_qr,
    triangular_system,
)

# Matrix decompositions and solvers: batches are independent, and so are the right-hand sides of a system.
#
# A matrix that is split along its rows is gathered while it is small. A large one stays split for Cholesky
# decompositions and triangular systems, which `blocked` computes block after block; what that costs is
# stated here.

_LARGE = 1 << 16
"""Bytes of a matrix from which it is worth while to compute blocks of it one after the other. Guessed: smaller ones are
gathered in about the time in which the collective of one block starts."""


@strategies("stablehlo.cholesky", "stablehlo.triangular_solve")
def _of_the_op(op: Op, rule: OpShardingRule) -> list[Strategy]:
    return factorization_strategies(op, rule, pass_through_factors(rule)) or []


def factorization_strategies(op: Op, rule: OpShardingRule, passing: frozenset[int]) -> list[Strategy] | None:
    """Those of a Cholesky decomposition or a triangular system, of whole matrices and of blocks; None for other ops."""
    dim = blocked_dim(op)
    if dim is None:
        return None
    is_system = triangular_system(op) is not None
    if is_system:
        # In Shardy's terms nothing passes along the right-hand sides, but they need nothing either.
        passing |= set(rule.operand_mappings[1][_free(op)])
    operations = _of_system if is_system else _of_cholesky
    factors = frozenset(rule.operand_mappings[0][dim])
    whole = Strategy("whole_matrices", passing, work=factors, operations=operations(op, rule, dim))
    n = (op.operands[0].shape or ())[dim]
    if factors != frozenset(rule.result_mappings[0][_along(op, dim)]) or n * n * op.operands[0].itemsize < _LARGE:
        return [whole]
    inside = _sent_for_system(op, rule, dim) if is_system else _sent_for_cholesky(op, rule, dim)
    blocks = Strategy("blocks", passing | factors, inside=inside, work=factors, operations=whole.operations)
    return [whole, blocks]


def blocked_dim(op: Op) -> int | None:
    """The dimension of the matrix along which it may be split into blocks; None for other ops.

    For a lower triangle that is factored, rows; for an upper one, columns; for a system, its equations.
    """
    rank, system = op.operands[0].rank if op.operands else 0, triangular_system(op)
    if system is not None:
        return rank + system.kept
    lower = cholesky_is_lower(op)
    return None if lower is None else rank - 2 if lower else rank - 1


def is_blocked(local: LocalOp) -> bool:
    """Whether an op is to be computed block after block."""
    dim = blocked_dim(local.op)
    return dim is not None and bool(local.operand_axes(0, dim))


def _along(op: Op, dim: int) -> int:
    """The dimension of the result that is split like that of the matrix."""
    system = triangular_system(op)
    return dim if system is None else op.results[0].rank + system.solved


def _free(op: Op) -> int:
    system = triangular_system(op)
    assert system is not None
    return -3 - system.solved


def _blocks(op: Op, rule: OpShardingRule, dim: int, shards: Shards) -> tuple[int, int, int]:
    """In how many blocks the matrix is, the rows of each, and the number of matrices that a device has."""
    shape = block_shape(op.operands[0].shape or (), rule.operand_mappings[0], shards)
    count = math.prod(shards[f] for f in rule.operand_mappings[0][dim])
    return count, shape[dim], math.prod(shape[:-2])


def _of_cholesky(op: Op, rule: OpShardingRule, dim: int) -> Callable[[Shards], float]:
    def operations(shards: Shards) -> float:
        """Per step one block is factored, the column below it solved, and the columns right of it updated."""
        count, block, batch = _blocks(op, rule, dim, shards)
        return batch * block**3 * (count / 3 + 3 * count * (count - 1) / 2)

    return operations


def _of_system(op: Op, rule: OpShardingRule, dim: int) -> Callable[[Shards], float]:
    def operations(shards: Shards) -> float:
        """Per step one block is solved, and the equations of the others updated."""
        count, block, _ = _blocks(op, rule, dim, shards)
        rows = math.prod(block_shape(op.results[0].shape or (), rule.result_mappings[0], shards))
        return block * rows * (count + 2 * (count - 1))

    return operations


def _sent_for_cholesky(op: Op, rule: OpShardingRule, dim: int) -> tuple[Inside, ...]:
    factors = frozenset(rule.operand_mappings[0][dim])

    def columns(shards: Shards) -> float:
        """A column of blocks is gathered for each step but the last one: less than to gather the matrix."""
        count, block, batch = _blocks(op, rule, dim, shards)
        return batch * (count - 1) ** 2 * block**2

    def failures(shards: Shards) -> float:
        """An int32 per matrix says where it is not positive."""
        count, _, batch = _blocks(op, rule, dim, shards)
        return 2 * (count - 1) / count * batch * 4 / op.operands[0].itemsize

    gathered = Inside("all_gather", factors, 0, columns, _steps_between(op, rule, dim))
    return gathered, Inside("all_reduce", factors, 0, failures)


def _sent_for_system(op: Op, rule: OpShardingRule, dim: int) -> tuple[Inside, ...]:
    def unknowns(shards: Shards) -> float:
        """A block of x for each step but the last one."""
        count, _, _ = _blocks(op, rule, dim, shards)
        block = math.prod(block_shape(op.results[0].shape or (), rule.result_mappings[0], shards))
        return (count - 1) * 2 * (count - 1) / count * block

    factors = frozenset(rule.operand_mappings[0][dim])
    return (Inside("all_reduce", factors, 2, unknowns, _steps_between(op, rule, dim)),)


def _steps_between(op: Op, rule: OpShardingRule, dim: int) -> Callable[[Shards], int]:
    """How many steps have one after them, of one per block."""
    return lambda shards: _blocks(op, rule, dim, shards)[0] - 1


# Cholesky decompositions and triangular systems of matrices that stay split, block after block.
#
# Over g devices, each with b rows of an n x n matrix, there are g steps. In each one what its owner knows is shared,
# and the others update their own rows. What is sent is stated by the strategies; a device never holds more than its
# rows and one column of blocks. Rows behind the end are those of an identity, so that they neither fail nor are seen.
# Source: Golub and Van Loan, Matrix Computations, sections 3.1 and 4.2, with one block per device.

Factor = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
"""From a matrix to its lower factor, and where it is not positive: 1 for its first row, 0 if it is positive."""


@emitter("stablehlo.cholesky", "stablehlo.triangular_solve")
def _emit(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
    return blocked(local, *operands) or re_emit(local, *operands)


def blocked(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
    """The results of an op whose matrix is split; nothing for all others."""
    if not is_blocked(local):
        return []
    dim, system = blocked_dim(local.op), triangular_system(local.op)
    assert dim is not None
    with jax.named_scope(scope_name(local.op.name, local.operand_axes(0, dim), local.op.source)):
        return [_solved(local, system, *operands)] if system is not None else _factored(local, *operands)


def _with_identity(local: LocalOp, a: jax.Array, dim: int) -> jax.Array:
    """The local part of a square matrix, which is an identity behind its end."""
    axes, n = local.operand_axes(0, dim), (local.op.operands[0].shape or ())[dim]
    if not has_padding(local, n, axes):
        return a
    other = 2 * a.ndim - 3 - dim
    a = lengthened(a, other, a.shape[dim] * axes_size(axes, local.mesh.mesh) - n)
    own = lax.broadcasted_iota(jnp.int32, a.shape, dim) + local.block_index(axes) * jnp.int32(a.shape[dim])
    index = lax.broadcasted_iota(jnp.int32, a.shape, other)
    return jnp.where((own < n) & (index < n), a, (own == index).astype(a.dtype))


# Triangular systems.


def _solved(local: LocalOp, system: TriangularSystem, a: jax.Array, b: jax.Array) -> jax.Array:
    """This device's rows of x.

    Before step k `rest` is b less what the unknowns before block k contribute. The owner solves its rows for block k,
    and the owners of later ones subtract what that contributes to theirs.
    """
    kept, contracted, solved, _ = system.dims(a.ndim)
    axes, block = local.operand_axes(0, kept), a.shape[kept]
    a, rest = _with_identity(local, a, kept), mask_padding(local, 1, b, [solved], jnp.zeros((), b.dtype))
    me, blocks = local.block_index(axes), range(axes_size(axes, local.mesh.mesh))
    diagonal = lax.dynamic_slice_in_dim(a, me * jnp.int32(block), block, contracted)

    def own() -> jax.Array:
        return re_emit(local, diagonal, rest, result_shapes=[rest.shape])[0]

    for k in blocks[:-1] if system.forward else blocks[:0:-1]:
        found = _broadcast(local, axes, own(), k)
        column = lax.slice_in_dim(a, k * block, (k + 1) * block, axis=contracted)
        is_later = me > k if system.forward else me < k
        rest = jnp.where(is_later, rest - _contribution(system, column, found), rest)
    return own()


def _contribution(system: TriangularSystem, a: jax.Array, x: jax.Array) -> jax.Array:
    matrix = a if system.kept == -2 else a.mT
    matrix = matrix.conj() if system.conjugated else matrix
    product = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    return product(matrix, x) if system.left else product(x, matrix.mT)


def _broadcast(local: LocalOp, axes: Axes, x: jax.Array, owner: int) -> jax.Array:
    """What one of the devices along `axes` has."""
    kept = jnp.where(local.block_index(axes) == owner, x, jnp.zeros((), x.dtype))
    return reductions.all_reduce(kept, axes, "sum", local.mesh)


# Cholesky decompositions.


def _factored(local: LocalOp, a: jax.Array) -> list[jax.Array]:
    """This device's block of the factor, and, where the op has such a result, where the matrix is not positive."""
    dim, is_lower = blocked_dim(local.op), cholesky_is_lower(local.op)
    assert dim is not None
    axes, rows, n = local.operand_axes(0, dim), _with_identity(local, a, dim), a.shape[2 * a.ndim - 3 - dim]
    rows = rows if is_lower else rows.mT
    found, failed = _by_rows(local, axes, rows, _factor_of(local))
    found = jnp.where(_below_diagonal(local, axes, rows), found, rows)[..., :n]
    if len(local.op.results) == 2:
        return [found if is_lower else found.mT, failed]
    found = jnp.where(failed[..., None, None] == 0, found, jnp.asarray(jnp.nan, found.dtype))
    return [found if is_lower else found.mT]


def _below_diagonal(local: LocalOp, axes: Axes, rows: jax.Array) -> jax.Array:
    """Which elements of this device's rows are on the diagonal or below: LAPACK leaves the others as they are."""
    first = local.block_index(axes) * jnp.int32(rows.shape[-2])
    row, column = (lax.broadcasted_iota(jnp.int32, rows.shape[-2:], dim) for dim in range(2))
    return column <= row + first


def _factor_of(local: LocalOp) -> Factor:
    """How the op factors one block; its upper factor is the lower one of the transposed block, transposed."""

    def factor(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        is_lower = cholesky_is_lower(local.op)
        shapes = [x.shape, x.shape[:-2]][: len(local.op.results)]
        found, *failed = re_emit(local, x if is_lower else x.mT, result_shapes=shapes)
        found = found if is_lower else found.mT
        if failed:
            return found, failed[0]
        return found, jnp.isnan(jnp.diagonal(found, axis1=-2, axis2=-1)).any(-1).astype(jnp.int32)

    return factor


def _by_rows(local: LocalOp, axes: Axes, a: jax.Array, factor: Factor) -> tuple[jax.Array, jax.Array]:
    """The rows of the lower factor of a matrix, and where that is not positive, by the right-looking algorithm.

    Before step k columns left of block k are the factor's, the others are a's less what the former contribute, in rows
    from block k on. Above the diagonal is what is left of a there.
    """
    block, count, me = a.shape[-2], axes_size(axes, local.mesh.mesh), local.block_index(axes)
    failed = jnp.zeros(a.shape[:-2], jnp.int32)
    for k in range(count - 1):
        done, column, later = jnp.split(a, [k * block, (k + 1) * block], axis=-1)
        panel = movement.all_gather(column, movement.along(column, a.ndim - 2, axes), local.mesh)
        corner, failing = factor(panel[..., k * block : (k + 1) * block, :])
        below = lax.linalg.triangular_solve(
            corner, panel[..., (k + 1) * block :, :], lower=True, transpose_a=True, conjugate_a=True
        )
        failed = _first(failed, failing, k * block)
        start = jnp.maximum(me - (k + 1), 0) * jnp.int32(block)
        own = lax.dynamic_slice_in_dim(below, start, block, a.ndim - 2)
        updated = later - jnp.matmul(own, below.mT.conj(), precision=lax.Precision.HIGHEST)
        column = jnp.where(me > k, own, jnp.where(me == k, corner, column))
        a = jnp.concatenate([done, column, jnp.where(me > k, updated, later)], -1)
    last = a[..., (count - 1) * block :]
    corner, failing = factor(last)
    failing = _broadcast(local, axes, failing, count - 1)
    a = a.at[..., (count - 1) * block :].set(jnp.where(me == count - 1, corner, last))
    return a, _first(failed, failing, (count - 1) * block)


def _first(failed: jax.Array, failing: jax.Array, offset: int) -> jax.Array:
    """The first row that fails, from those of earlier blocks and that of a block which starts at `offset`."""
    return jnp.where((failed == 0) & (failing > 0), failing + jnp.int32(offset), failed)


# QR decompositions of tall matrices that are split along their rows.
#
# Every device decomposes its own rows, and all of them the stacked triangles (TSQR). What the program wants are the
# reflectors and scales that LAPACK would find, with its signs; these are reconstructed from Q. Multiplying reflectors
# to Q again is a product with one small matrix. Where a device has fewer rows than columns, matrices are gathered:
# triangles would not be smaller. Results are those of the whole matrix up to rounding, if its columns are
# independent; if not, Q and R are others.
#
# Sources: Demmel, Grigori, Hoemmen and Langou (https://doi.org/10.1137/080731992) for TSQR; Ballard, Demmel, Grigori,
# Jacquelin, Knight and Nguyen (https://doi.org/10.1016/j.jpdc.2015.06.003) for the reconstruction; Puglisi
# (https://doi.org/10.1137/0913042) for the product.

_matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def reflector_strategies(op: Op, rule: OpShardingRule, passing: frozenset[int]) -> list[Strategy] | None:
    """Those of a QR decomposition or of a product of reflectors; None for other ops, and for wide matrices."""
    if not is_qr(op) and not is_householder_product(op):
        return None
    rank, (m, n) = op.operands[0].rank, (op.operands[0].shape or ())[-2:]
    if n != ((op.results[1] if is_qr(op) else op.operands[1]).shape or ())[-1]:
        return None
    factors = frozenset(rule.operand_mappings[0][rank - 2])

    def rows(shards: Shards) -> tuple[int, int, int]:
        """The number of shards, the rows of each, and the matrices of a device."""
        block = block_shape(op.operands[0].shape or (), rule.operand_mappings[0], shards)
        return math.prod(shards[f] for f in factors), block[-2], math.prod(block[:-2])

    def of_whole(shards: Shards) -> float:
        return rows(shards)[2] * 2 * n * n * (m - n / 3)

    def of_blocks(shards: Shards) -> float:
        count, block, batch = rows(shards)
        return batch * _operations(is_qr(op), n, count, block)

    def gathered(shards: Shards) -> float:
        """The triangles."""
        count, _, batch = rows(shards)
        return batch * (count - 1) * n * n

    def reduced(shards: Shards) -> float:
        """The first rows of the reflectors or of Q, and sums over rows."""
        count, _, batch = rows(shards)
        return batch * 2 * (count - 1) / count * n * (n + 1 if is_qr(op) else 2 * n)

    inside = [Inside("all_reduce", factors, 0, reduced)]
    if is_qr(op):
        inside.append(Inside("all_gather", factors, 0, gathered))
    return [
        Strategy("whole_matrices", passing, work=factors, operations=of_whole),
        Strategy("triangles", passing | factors, inside=tuple(inside), work=factors, operations=of_blocks),
    ]


def _operations(is_decomposition: bool, n: int, count: int, block: int) -> float:
    """Those of one device for one matrix of n columns, of which each of `count` devices has `block` rows."""
    if block < n:
        return math.inf
    return n * n * (7 * block + 4 * count * n if is_decomposition else 4 * block)


def tall(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
    """The results of such an op where rows are split; nothing for all others."""
    op = local.op
    axes = local.operand_axes(0, op.operands[0].rank - 2) if is_qr(op) or is_householder_product(op) else ()
    if not axes:
        return []
    x = mask_padding(local, 0, operands[0], [operands[0].ndim - 2], jnp.zeros((), operands[0].dtype))
    with jax.named_scope(scope_name(op.name, axes, op.source)):
        return _reflectors(local, axes, x) if is_qr(op) else [_product(local, axes, x, operands[1])]


def _positions(local: LocalOp, axes: Axes, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The row and column of every element in the whole matrix."""
    own = lax.broadcasted_iota(jnp.int32, x.shape[-2:], 0) + local.block_index(axes) * jnp.int32(x.shape[-2])
    return own, lax.broadcasted_iota(jnp.int32, x.shape[-2:], 1)


def _top(local: LocalOp, axes: Axes, x: jax.Array, sums: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first rows of a matrix, as a square, and sums over all devices, from one all_reduce."""
    n = x.shape[-1]
    top = jnp.where(local.block_index(axes) == 0, x[..., :n, :], jnp.zeros((), x.dtype))
    both = reductions.all_reduce(jnp.concatenate([top, sums], -2), axes, "sum", local.mesh)
    return both[..., :n, :], both[..., n:, :]


def _reflectors(local: LocalOp, axes: Axes, x: jax.Array) -> list[jax.Array]:
    """This device's rows of reflectors and R, and the scales.

    From Q R with any signs: [S; 0] is subtracted from Q, for S the signs that LAPACK's Q would differ by, and what is
    left is Y U, with the reflectors Y. Columns of Q with nothing beside the diagonal need no reflector, and keep their
    sign.
    """
    n, (row, column) = x.shape[-1], _positions(local, axes, x)
    q, r = lax.linalg.qr(x, full_matrices=False)
    triangles = movement.all_gather(r, movement.along(r, r.ndim - 2, axes), local.mesh)
    of_triangles, r = lax.linalg.qr(triangles, full_matrices=False)
    q = _matmul(q, lax.dynamic_slice_in_dim(of_triangles, local.block_index(axes) * jnp.int32(n), n, q.ndim - 2))
    others = jnp.abs(jnp.where(row != column, q, 0)).sum(-2, keepdims=True).astype(q.dtype)
    top, others = _top(local, axes, q, others)
    factored, signs = _less_signs(top, is_done=others[..., 0, :].real == 0)
    upper = jnp.triu(factored)
    diagonal = jnp.diagonal(upper, axis1=-2, axis2=-1)
    divisor = upper + jnp.where(jnp.eye(n, dtype=bool), jnp.where(diagonal == 0, 1, 0)[..., None, :], 0).astype(q.dtype)
    lower = lax.linalg.triangular_solve(divisor, q, left_side=False, lower=False)
    padded = [(0, 0, 0)] * (q.ndim - 2)
    first = lax.pad(
        jnp.where(jnp.tri(n, k=-1, dtype=bool), factored, signs[..., :, None] * r),
        jnp.zeros((), q.dtype),
        [*padded, (0, q.shape[-2] - n, 0), (0, 0, 0)],
    )
    return [jnp.where(row < n, first, lower), -diagonal * signs]


def _less_signs(q: jax.Array, is_done: jax.Array) -> tuple[jax.Array, jax.Array]:
    """L and U of q - S in one matrix, and the signs S, which are chosen so that pivots are large.

    Before step i columns before i are final, and the others are what elimination has left of q.
    """
    n = q.shape[-1]
    row, column = (lax.broadcasted_iota(jnp.int32, (n, n), dim) for dim in (0, 1))

    def step(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        left, signs = state
        pivot = lax.dynamic_slice_in_dim(lax.dynamic_slice_in_dim(left, i, 1, -1), i, 1, -2)
        done = lax.dynamic_slice_in_dim(is_done, i, 1, -1)[..., None]
        sign = jnp.where((pivot.real < 0) == done, -1, 1).astype(q.dtype)
        left = jnp.where((row == i) & (column == i), left - sign, left)
        pivot -= sign
        factor = jnp.where(pivot == 0, 0, lax.dynamic_slice_in_dim(left, i, 1, -1) / jnp.where(pivot == 0, 1, pivot))
        eliminated = left - factor * lax.dynamic_slice_in_dim(left, i, 1, -2)
        left = jnp.where((row > i) & (column > i), eliminated, jnp.where((row > i) & (column == i), factor, left))
        return left, jnp.where(row[:, 0] == i, sign[..., 0], signs)

    return lax.fori_loop(0, n, step, (q, jnp.ones(q.shape[:-1], q.dtype)))


def _product(local: LocalOp, axes: Axes, x: jax.Array, scales: jax.Array) -> jax.Array:
    """This device's rows of Q = [I; 0] - Y T Z, with Z the adjoint of Y's first rows, and T from Y's inner products."""
    row, column = _positions(local, axes, x)
    y = jnp.where(row > column, x, (row == column).astype(x.dtype))
    top, inner = _top(local, axes, y, _matmul(y.mT.conj(), y))
    scaled = scales[..., :, None] * jnp.triu(inner, 1) + jnp.eye(x.shape[-1], dtype=x.dtype)
    of_scales = scales[..., :, None] * jnp.eye(x.shape[-1], dtype=x.dtype)
    t = lax.linalg.triangular_solve(scaled, of_scales, left_side=True, lower=False)
    return (row == column).astype(x.dtype) - _matmul(y, _matmul(t, top.mT.conj()))
