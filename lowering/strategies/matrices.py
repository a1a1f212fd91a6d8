"""Products whose results are scattered, with the dimensions that are sent as one made as one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from sdy_jax.ir.graph import Op, Value
from sdy_jax.lowering.emission.local_op import LocalOp
from sdy_jax.lowering.emission.on_tpus import as_rows
from sdy_jax.lowering.emission.reemitted import numpy_dtype
from sdy_jax.lowering.emission.rings import Numbers
from sdy_jax.representation.mesh import axes_size
from sdy_jax.representation.sdy_collectives import collective_from_attributes

Multiply = Callable[[jax.Array, jax.Array, Numbers], jax.Array]


class _Side(NamedTuple):
    """One operand of a product: its array, and which of its dimensions are contracted, and batches."""

    x: jax.Array
    contracting: tuple[int, ...]
    batching: tuple[int, ...]

    def merged(self, dims: Sequence[int]) -> _Side:
        """With free dimensions that are neighbours as one."""
        first, more = dims[0], len(dims) - 1
        shape = (*self.x.shape[:first], math.prod(self.x.shape[d] for d in dims), *self.x.shape[first + more + 1 :])
        contracting, batching = (
            tuple(dim if dim < first else dim - more for dim in found) for found in (self.contracting, self.batching)
        )
        return _Side(self.x.reshape(shape), contracting, batching)


def multiplied(local: LocalOp, lhs: jax.Array, rhs: jax.Array, numbers: Numbers, multiply: Multiply) -> jax.Array:
    """A product; where it is scattered as a matrix, the columns of that are one dimension of one operand."""
    sides = [_Side(x, *(pair[side] for pair in numbers)) for side, x in enumerate((lhs, rhs))]
    batch = [(0, dim) for dim in numbers.batching[0]]
    dims = [*batch, *((side, dim) for side in (0, 1) for dim in numbers.free(side, sides[side].x.ndim))]
    shape = [sides[side].x.shape[dim] for side, dim in dims]
    columns = [dims[dim] for dim in _columns(local, shape)]
    if not columns or set(columns) & set(batch) or not _are_neighbours(columns):
        return multiply(lhs, rhs, numbers)
    side = columns[0][0]
    sides[side] = sides[side].merged([dim for _, dim in columns])
    (x, *first), (y, *second) = sides
    return multiply(x, y, Numbers(*zip(first, second, strict=True))).reshape(shape)


def _columns(local: LocalOp, shape: Sequence[int]) -> list[int]:
    """The dimensions of a product's result of this shape that become the columns of a matrix when it is scattered,
    perhaps transposed; none where it is not."""
    result, order = local.op.results[0], list(range(len(shape)))
    while (user := _only_user(result)) is not None and user.name == "stablehlo.transpose":
        order, result = [order[dim] for dim in user.ints("permutation")], user.results[0]
    if user is None or user.name != "sdy.reduce_scatter":
        return []
    (dim, parts), *others = (
        (dim, axes_size(axes, local.mesh.mesh))
        for dim, axes in enumerate(collective_from_attributes(user.name, user.attributes).axes)
        if axes
    )
    itemsize = numpy_dtype(result.dtype).itemsize
    return [] if others or not as_rows([shape[d] for d in order], itemsize, dim, parts) else order[dim + 1 :]


def _only_user(value: Value) -> Op | None:
    return value.uses[0][0] if len(value.uses) == 1 else None


def _are_neighbours(dims: Sequence[tuple[int, int]]) -> bool:
    """Whether dimensions, each with the index of its operand, follow each other in one operand."""
    side, first = dims[0]
    return list(dims) == [(side, first + n) for n in range(len(dims))]
