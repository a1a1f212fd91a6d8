"""Products that are made as they are sent: with the operands in the places, and the dimensions as one, as that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from sdy_jax.ir.graph import Op
from sdy_jax.lowering.collectives.lanes import as_rows
from sdy_jax.lowering.collectives.rings import Numbers
from sdy_jax.lowering.emission.local_op import LocalOp
from sdy_jax.lowering.emission.re_emission import numpy_dtype
from sdy_jax.lowering.strategies.product_order import Precisions, multiplied_in_order
from sdy_jax.representation.mesh import axes_size
from sdy_jax.representation.sdy_collectives import collective_from_attributes


class _Side(NamedTuple):
    """One operand of a product: its array, its precision, and which of its dimensions are contracted, and batches."""

    x: jax.Array
    precision: lax.Precision | None
    contracting: tuple[int, ...]
    batching: tuple[int, ...]

    def merged(self, dims: Sequence[int]) -> _Side:
        """With free dimensions that are neighbours as one."""
        first, more = dims[0], len(dims) - 1
        shape = (*self.x.shape[:first], math.prod(self.x.shape[d] for d in dims), *self.x.shape[first + more + 1 :])
        contracting, batching = (
            tuple(dim if dim < first else dim - more for dim in found) for found in (self.contracting, self.batching)
        )
        return _Side(self.x.reshape(shape), self.precision, contracting, batching)


def multiplied(
    local: LocalOp, operands: tuple[jax.Array, jax.Array], numbers: Numbers, precisions: Precisions, dtype: Any
) -> jax.Array:
    """A product. Where it is scattered as a matrix, the columns of that are one dimension of one operand. Where the
    operands change their places in a transposition that follows, they have these places: what is transposed back here
    cancels that: a compiler that has lanes copies such a gradient before it is gathered; others take it as it is."""
    if local.mesh.forms.of_ops.in_order:
        return multiplied_in_order(local.op, operands, numbers, precisions, dtype)
    if not local.mesh.forms.in_lanes:
        dimensions = (numbers.contracting, numbers.batching)
        return lax.dot_general(*operands, dimensions, precision=precisions, preferred_element_type=dtype)
    asked = precisions or (None, None)
    sides = [_Side(x, asked[side], *(pair[side] for pair in numbers)) for side, x in enumerate(operands)]
    batch, *free = [(0, dim) for dim in numbers.batching[0]], *_free(numbers, *operands)
    dims, changed = [*batch, *free[0], *free[1]], [*batch, *free[1], *free[0]]
    columns = [dims[dim] for dim in _columns(local, [sides[side].x.shape[dim] for side, dim in dims])]
    sizes = {(side, dim): sides[side].x.shape[dim] for side, dim in dims}
    if columns and not set(columns) & set(batch) and _are_neighbours(columns):
        side = columns[0][0]
        sides[side] = sides[side].merged([dim for _, dim in columns])
    if not _is_transposed(local.op, [dims.index(dim) for dim in changed]):
        return _product(sides, dtype).reshape([sizes[dim] for dim in dims])
    found = _product(sides[::-1], dtype).reshape([sizes[dim] for dim in changed])
    return found.transpose([changed.index(dim) for dim in dims])


def _free(numbers: Numbers, *operands: jax.Array) -> list[list[tuple[int, int]]]:
    """The free dimensions of both operands, each with the operand's index."""
    return [[(side, dim) for dim in numbers.free(side, x.ndim)] for side, x in enumerate(operands)]


def _product(sides: Sequence[_Side], dtype: Any) -> jax.Array:
    x, y = sides
    numbers = ((x.contracting, y.contracting), (x.batching, y.batching))
    precision = None if x.precision is None or y.precision is None else (x.precision, y.precision)
    return lax.dot_general(x.x, y.x, numbers, precision=precision, preferred_element_type=dtype)


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


def _are_neighbours(dims: Sequence[tuple[int, int]]) -> bool:
    """Whether dimensions, each with the index of its operand, follow each other in one operand."""
    side, first = dims[0]
    return list(dims) == [(side, first + n) for n in range(len(dims))]
