"""Products of groups of rows, each with a matrix of its own, as of experts: what lies in a block is in groups as well.

Rows are in groups one after the other, so that a block of them has a part of some groups, whose sizes follow from all
sizes. A device that has some of the matrices takes the rows of their groups: they come first, others are in none.
"""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sdy_jax.ir.graph import Op
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.emission.re_emission import numpy_dtype
from sdy_jax.lowering.strategies.dot import precision, product_strategies, without_padding
from sdy_jax.lowering.strategies.registry import Shards, Strategy, strategies
from sdy_jax.lowering.strategies.shards import mask_padding, offset
from sdy_jax.op_rules.flops import operations_of
from sdy_jax.op_rules.op_attributes import RaggedDotDimensionNumbers, ragged_dot_dimension_numbers
from sdy_jax.representation.mesh import Axes, axes_size
from sdy_jax.representation.rule import OpShardingRule


@strategies("chlo.ragged_dot")
def _ragged_dot_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    """As of a product. A row meets one matrix, however many there are; all groups are taken to have as many rows."""
    whole = operations_of(op) / 2

    def shared(shards: Shards) -> float:
        return whole / math.prod(shards)

    return [replace(found, operations=shared) for found in product_strategies(op, rule)]


@emitter("chlo.ragged_dot")
def _ragged_dot(local: LocalOp, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    numbers = ragged_dot_dimension_numbers(local.op)
    product, dim = numbers.product, numbers.ragged
    lhs, rhs = without_padding(local, lhs, rhs, product.lhs_contracting, product.rhs_contracting)
    if local.operand_axes(0, dim):
        sizes = _in_block(local, dim, lhs.shape[dim], sizes)
    is_summed = dim in product.lhs_contracting
    groups = local.result_axes(0, 0) if is_summed else ()
    if numbers.groups is not None:
        groups = local.operand_axes(1, numbers.groups)
        rhs = mask_padding(local, 1, rhs, (numbers.groups,), np.zeros((), rhs.dtype))
    if not groups:
        return _multiplied(local, numbers, lhs, rhs, sizes)
    before, sizes = _of_own_groups(local, groups, sizes)
    lhs = jnp.roll(lhs, -before, dim)
    if is_summed:
        other = dict(zip(product.lhs_contracting, product.rhs_contracting, strict=True))[dim]
        return _multiplied(local, numbers, lhs, jnp.roll(rhs, -before, other), sizes)
    found = _multiplied(local, numbers, lhs, rhs, sizes)
    row = _row(numbers)
    # Compilers may leave what is in no group as it was.
    is_own = lax.broadcasted_iota(sizes.dtype, found.shape, row) < sizes.sum()
    return jnp.roll(jnp.where(is_own, found, np.zeros((), found.dtype)), before, row)


def _row(numbers: RaggedDotDimensionNumbers) -> int:
    """The dimension of the result with the rows: batching ones come first."""
    product = numbers.product
    taken = product.lhs_batching + product.lhs_contracting
    return len(product.lhs_batching) + sum(d not in taken for d in range(numbers.ragged))


def _in_block(local: LocalOp, dim: int, block: int, sizes: jax.Array) -> jax.Array:
    """The sizes of the groups' parts in this device's block of a dimension."""
    size = (local.op.operands[0].shape or ())[dim]
    start = offset(local, local.operand_axes(0, dim), block).astype(sizes.dtype)
    count = jnp.clip(size - start, 0, block)
    ends = jnp.cumsum(sizes)
    return jnp.clip(ends - start, 0, count) - jnp.clip(ends - sizes - start, 0, count)


def _of_own_groups(local: LocalOp, axes: Axes, sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How many rows come before those of this device's groups, and the sizes of these."""
    count = axes_size(axes, local.mesh.mesh)
    sizes = jnp.pad(sizes, (0, -len(sizes) % count))
    block = len(sizes) // count
    first = offset(local, axes, block)
    before = jnp.where(jnp.arange(len(sizes)) < first, sizes, 0).sum(dtype=sizes.dtype)
    return before, lax.dynamic_slice_in_dim(sizes, first, block)


def _multiplied(
    local: LocalOp, numbers: RaggedDotDimensionNumbers, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array
) -> jax.Array:
    product = numbers.product
    dims = lax.RaggedDotDimensionNumbers(
        ((product.lhs_contracting, product.rhs_contracting), (product.lhs_batching, product.rhs_batching)),
        [numbers.ragged],
        [] if numbers.groups is None else [numbers.groups],
    )
    dtype = numpy_dtype(local.op.results[0].dtype)
    return lax.ragged_dot_general(lhs, rhs, sizes, dims, precision(local.op), dtype)
