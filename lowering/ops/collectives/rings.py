"""Products in rings: blocks are multiplied while the next ones travel.

A product of what has to be gathered first begins with the block that the device has, and goes on with those of its
neighbours, which each device sends on; one whose result is scattered adds its term to a sum that comes by and sends
that on, until every sum is where it belongs. As many bytes are sent as by the collective, half of them in either
direction, by permutes that wait for a part of the product only, so that compilers can run them beside the rest.
Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models",
ASPLOS 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sdy_jax.ir.meshes import AxisRef, axes_size
from sdy_jax.lowering.ops.collectives.movement import permuted
from sdy_jax.runtime.meshes import RefinedMesh

Multiply = Callable[[jax.Array, jax.Array], jax.Array]


class Numbers(NamedTuple):
    """Dimension numbers of a product: of both operands those that are contracted, and those of the batch."""

    contracting: tuple[tuple[int, ...], tuple[int, ...]]
    batching: tuple[tuple[int, ...], tuple[int, ...]]

    def free(self, operand: int, rank: int) -> list[int]:
        """The dimensions of an operand that it alone has."""
        taken = self.contracting[operand] + self.batching[operand]
        return [dim for dim in range(rank) if dim not in taken]


@dataclass(frozen=True, slots=True, eq=False)
class Ring:
    """The devices along axes, each a neighbour of the next, the last one of the first."""

    axes: Sequence[AxisRef]
    mesh: RefinedMesh

    @property
    def size(self) -> int:
        return axes_size(self.axes, self.mesh.mesh)

    def position(self, ahead: int) -> jax.Array:
        """The position of the device so many places ahead of this one."""
        return (self.mesh.index(self.axes) + ahead) % self.size

    def passed(self, x: jax.Array, by: int) -> jax.Array:
        """What the device so many places behind this one has."""
        pairs = [(k, (k + by) % self.size) for k in range(self.size)]
        return permuted(x, self.axes, pairs, self.mesh)


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """An operand of a product whose blocks along one dimension come through a ring."""

    block: jax.Array
    dim: int
    ring: Ring

    def blocks(self) -> Iterator[tuple[jax.Array, jax.Array]]:
        """The blocks with their positions: this device's own, then those of its neighbours on either side."""
        yield self.ring.position(0), self.block
        ahead = behind = self.block
        for step in range(1, self.ring.size):
            if step % 2:
                ahead = self.ring.passed(ahead, -1)
                yield self.ring.position((step + 1) // 2), ahead
            else:
                behind = self.ring.passed(behind, 1)
                yield self.ring.position(-step // 2), behind

    def times(self, other: jax.Array, operand: int, numbers: Numbers, multiply: Multiply) -> jax.Array:
        """The product with the other operand, which is whole along the dimension; `operand` says which this one is."""
        place = _place(self, other, operand, numbers)
        found = None
        for position, block in self.blocks():
            part = other
            if place.in_other is not None:
                size = block.shape[self.dim]
                part = lax.dynamic_slice_in_dim(other, position * size, size, place.in_other)
            term = multiply(*((part, block) if operand else (block, part)))
            found = _joined(found, term, place.in_result, position, self.ring.size)
        assert found is not None
        return found


class _Place(NamedTuple):
    """Where the dimension of a gathered operand is in the other one and in the result; None where it is not."""

    in_other: int | None
    in_result: int | None


def _place(gathered: Gathered, other: jax.Array, operand: int, numbers: Numbers) -> _Place:
    dim, ndim = gathered.dim, gathered.block.ndim
    if dim in numbers.contracting[operand]:
        return _Place(numbers.contracting[1 - operand][numbers.contracting[operand].index(dim)], None)
    if dim in numbers.batching[operand]:
        index = numbers.batching[operand].index(dim)
        return _Place(numbers.batching[1 - operand][index], index)
    before = len(numbers.batching[0]) + (len(numbers.free(0, other.ndim)) if operand else 0)
    return _Place(None, before + numbers.free(operand, ndim).index(dim))


def _joined(found: jax.Array | None, term: jax.Array, dim: int | None, position: jax.Array, count: int) -> jax.Array:
    """What was found so far with one more term: added to it, or put in its place along a dimension."""
    if dim is None:
        return term if found is None else found + term
    if found is None:
        shape = tuple(n * count if d == dim else n for d, n in enumerate(term.shape))
        found = jnp.zeros(shape, term.dtype)
    return lax.dynamic_update_slice_in_dim(found, term, position * term.shape[dim], dim)


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A product that is computed where it is scattered."""

    lhs: jax.Array
    rhs: jax.Array
    numbers: Numbers
    multiply: Multiply

    def scattered(self, dim: int, ring: Ring) -> jax.Array:
        """The sum of the products of all devices of a ring, of which each keeps its block along a dimension."""
        operand, of_operand = self._operand_of(dim)
        size = (self.lhs, self.rhs)[operand].shape[of_operand] // ring.size
        half = size // 2 if size % 2 == 0 else size

        def part_of(block: jax.Array, start: int) -> list[jax.Array]:
            taken = [self.lhs, self.rhs]
            taken[operand] = lax.dynamic_slice_in_dim(taken[operand], block * size + start, half, of_operand)
            return taken

        parts = [
            self._summed(partial(part_of, start=start), ring, by) for start, by in ((0, 1), (half, -1)) if start < size
        ]
        return parts[0] if len(parts) == 1 else lax.concatenate(parts, dim)

    def _summed(self, part_of: Callable[[jax.Array], Sequence[jax.Array]], ring: Ring, by: int) -> jax.Array:
        """A part of this device's block, from the operands for that part of each device's: the sum starts at its
        neighbour and goes once around."""
        found = None
        for step in range(ring.size):
            taken = part_of(ring.position(-by * (step + 1)))
            term = self.multiply(*taken)
            found = term if found is None else ring.passed(found, by) + term
        assert found is not None
        return found

    def _operand_of(self, dim: int) -> tuple[int, int]:
        """The operand that has a dimension of the result, and which of its dimensions that is."""
        batch, free = len(self.numbers.batching[0]), self.numbers.free(0, self.lhs.ndim)
        if dim - batch < len(free):
            return 0, free[dim - batch]
        return 1, self.numbers.free(1, self.rhs.ndim)[dim - batch - len(free)]
