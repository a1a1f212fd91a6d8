"""Products that are made as they are sent: with the operands in the places, and the dimensions as one, as that is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from sdy_jax.ir.graph import Op
from sdy_jax.lowering.collectives.lanes import as_rows
from sdy_jax.lowering.collectives.rings import Numbers
from sdy_jax.lowering.emission.local_op import LocalOp
from sdy_jax.lowering.emission.re_emission import numpy_dtype
from sdy_jax.lowering.strategies.indexed_product import Index, IndexedProduct, Precisions
from sdy_jax.lowering.strategies.product_order import multiplied_in_order
from sdy_jax.representation.mesh import axes_size
from sdy_jax.representation.sdy_collectives import collective_from_attributes


def multiplied(
    local: LocalOp, operands: tuple[jax.Array, jax.Array], numbers: Numbers, precisions: Precisions, dtype: Any
) -> jax.Array:
    """A product. Where it is scattered as a matrix, the columns of that are one dimension of one operand. Where the
    operands change their places in a transposition that follows, they have these places: what is transposed back here
    cancels that: a compiler that has lanes copies such a gradient before it is gathered; others take it as it is."""
    product = IndexedProduct.of(operands, numbers, precisions)
    if local.mesh.forms.in_order:
        return multiplied_in_order(local.op, product, dtype)
    if not local.mesh.forms.in_lanes:
        return product.multiplied(dtype)
    sizes, result, changed = product.sizes, product.result, product.swapped.result
    columns = [result[dim] for dim in _columns(local, [sizes[index] for index in result])]
    if columns and not set(columns) & set(product.batch) and _are_neighbours(columns):
        product = product.merged(columns)
    if not _is_transposed(local.op, [result.index(index) for index in changed]):
        return product.multiplied(dtype).reshape([sizes[index] for index in result])
    found = product.swapped.multiplied(dtype).reshape([sizes[index] for index in changed])
    return found.transpose([changed.index(index) for index in result])


def _is_transposed(op: Op, permutation: Sequence[int]) -> bool:
    """Whether this transposition alone takes an op's result."""
    user = op.results[0].only_user
    if user is None or user.name != "stablehlo.transpose":
        return False
    return list(user.ints("permutation")) == list(permutation)


def _columns(local: LocalOp, shape: Sequence[int]) -> list[int]:
    """The dimensions of a product's result of this shape that become the columns of a matrix when it is scattered,
    perhaps transposed; none where it is not."""
    result, order = local.op.results[0], list(range(len(shape)))
    while (user := result.only_user) is not None and user.name == "stablehlo.transpose":
        order, result = [order[dim] for dim in user.ints("permutation")], user.results[0]
    if user is None or user.name != "sdy.reduce_scatter":
        return []
    (dim, parts), *others = (
        (dim, axes_size(axes, local.mesh.mesh))
        for dim, axes in enumerate(collective_from_attributes(user.name, user.attributes).axes)
        if axes
    )
    itemsize = numpy_dtype(result.dtype).itemsize
    return (
        []
        if others or not as_rows([shape[d] for d in order], itemsize, dim, parts, local.mesh.forms)
        else order[dim + 1 :]
    )


def _are_neighbours(dims: Sequence[Index]) -> bool:
    """Whether dimensions, each with the index of its operand, follow each other in one operand."""
    side, first = dims[0]
    return list(dims) == [(side, first + n) for n in range(len(dims))]
