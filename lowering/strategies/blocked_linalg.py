"""Cholesky decompositions and triangular systems of matrices that stay split, block after block.

Over g devices, each with b rows of an n x n matrix, there are g steps. In each one what its owner knows is shared,
and the others update their own rows. What is sent is stated in `linalg.py`; a device never holds more than its rows and
one column of blocks. Rows behind the end are those of an identity, so that they neither fail nor are seen.
Source: Golub and Van Loan, Matrix Computations, sections 3.1 and 4.2, with one block per device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from sdy_jax.lowering.collectives import chunks, data_movement, reductions
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.emission.names import scope_name
from sdy_jax.lowering.emission.re_emission import re_emit
from sdy_jax.lowering.strategies.linalg import blocked_dim, is_blocked
from sdy_jax.lowering.strategies.shards import has_padding, lengthened, mask_padding
from sdy_jax.op_rules.linalg import TriangularSystem, cholesky_is_lower, triangular_system
from sdy_jax.representation.mesh import Axes, axes_size

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
        panel = data_movement.all_gather(column, chunks.along(column, a.ndim - 2, axes), local.mesh)
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
