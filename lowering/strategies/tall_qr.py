"""QR decompositions of tall matrices that are split along their rows.

Every device decomposes its own rows, and all of them the stacked triangles (TSQR). What the program wants are the
reflectors and scales that LAPACK would find, with its signs; these are reconstructed from Q. Multiplying reflectors to
Q again is a product with one small matrix. Where a device has fewer rows than columns, matrices are gathered: triangles
would not be smaller. Results are those of the whole matrix up to rounding, if its columns are independent; if not, Q
and R are others.

Sources: Demmel, Grigori, Hoemmen and Langou (https://doi.org/10.1137/080731992) for TSQR; Ballard, Demmel, Grigori,
Jacquelin, Knight and Nguyen (https://doi.org/10.1016/j.jpdc.2015.06.003) for the reconstruction; Puglisi
(https://doi.org/10.1137/0913042) for the product.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from sdy_jax.ir.graph import Op
from sdy_jax.lowering.collectives import chunks, data_movement, reductions
from sdy_jax.lowering.emission.local_op import LocalOp
from sdy_jax.lowering.emission.names import scope_name
from sdy_jax.lowering.strategies.registry import Inside, Shards, Strategy
from sdy_jax.lowering.strategies.shards import block_shape, mask_padding
from sdy_jax.op_rules.linalg import is_householder_product, is_qr
from sdy_jax.representation.mesh import Axes
from sdy_jax.representation.rule import OpShardingRule

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
    triangles = data_movement.all_gather(r, chunks.along(r, r.ndim - 2, axes), local.mesh)
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
