"""A product of two arrays whose dimensions have indices, so that they may lie in any order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from sdy_jax.lowering.collectives.rings import Numbers

Precisions = tuple[lax.Precision, lax.Precision] | None
"""Those that a product asks for, one per operand; None where it leaves them open."""

Index = tuple[int, int]
"""A dimension of a product: the operand that has it, the first one where both do, and its place there."""


class IndexedArray(NamedTuple):
    """One operand of a product: its array, the index of each of its dimensions, and its precision."""

    x: jax.Array
    indices: list[Index]
    precision: lax.Precision | None

    @property
    def sizes(self) -> dict[Index, int]:
        return dict(zip(self.indices, self.x.shape, strict=True))

    def places(self, indices: Sequence[Index]) -> list[int]:
        return [self.indices.index(index) for index in indices]

    def transposed(self, indices: list[Index]) -> IndexedArray:
        """With the dimensions in another order."""
        return self._replace(x=lax.transpose(self.x, self.places(indices)), indices=indices)

    def merged(self, indices: Sequence[Index]) -> IndexedArray:
        """With dimensions that are neighbours as one, which has the index of the first."""
        sizes = self.sizes
        sizes[indices[0]] = math.prod(sizes[index] for index in indices)
        left = [index for index in self.indices if index not in indices[1:]]
        return self._replace(x=self.x.reshape([sizes[index] for index in left]), indices=left)


class IndexedProduct(NamedTuple):
    """A product of two operands.

    Attributes:
        operands: its operands.
        batch: the indices of its batch, in the order in which the result has them.
        contracted: the indices over which it sums, in the order in which it does.
    """

    operands: tuple[IndexedArray, IndexedArray]
    batch: list[Index]
    contracted: list[Index]

    @classmethod
    def of(cls, arrays: tuple[jax.Array, jax.Array], numbers: Numbers, precisions: Precisions) -> IndexedProduct:
        """That of two arrays with these dimension numbers."""
        x, y = arrays
        contracted, batched = (dict(zip(rhs, lhs, strict=True)) for lhs, rhs in numbers)
        shared = contracted | batched
        lhs = [(0, dim) for dim in range(x.ndim)]
        rhs = [(0, shared[dim]) if dim in shared else (1, dim) for dim in range(y.ndim)]
        precision = precisions or (None, None)
        operands = (IndexedArray(x, lhs, precision[0]), IndexedArray(y, rhs, precision[1]))
        return cls(operands, *([(0, dim) for dim in dims[0]] for dims in (numbers.batching, numbers.contracting)))

    @property
    def swapped(self) -> IndexedProduct:
        """With the operands in each other's place."""
        return self._replace(operands=self.operands[::-1])

    @property
    def result(self) -> list[Index]:
        """The index of each dimension of the result."""
        x, y = (operand.indices for operand in self.operands)
        return self.batch + [index for index in x if index not in y] + [index for index in y if index not in x]

    @property
    def sizes(self) -> dict[Index, int]:
        """Of each dimension of the operands, by its index."""
        x, y = self.operands
        return x.sizes | y.sizes

    def merged(self, indices: Sequence[Index]) -> IndexedProduct:
        """With dimensions of one operand, which are neighbours, as one."""
        x, y = (each.merged(indices) if indices[0] in each.indices else each for each in self.operands)
        return self._replace(operands=(x, y))

    def multiplied(self, dtype: Any) -> jax.Array:
        x, y = self.operands
        contracting, batching = ((x.places(shared), y.places(shared)) for shared in (self.contracted, self.batch))
        precision = None if x.precision is None or y.precision is None else (x.precision, y.precision)
        return lax.dot_general(x.x, y.x, (contracting, batching), precision=precision, preferred_element_type=dtype)
