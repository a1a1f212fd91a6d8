"""States of an abstract reshard: which atoms split each dimension, and which are unreduced; steps, and their prices.

Atoms are numbers, in dimensions from major to minor; sets of them are bit masks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sdy_jax.lowering.strips.relayout import Atoms


class State(NamedTuple):
    """Atoms per dimension, major to minor, and the set of unreduced atoms as a bit mask."""

    dims: tuple[Atoms, ...]
    unreduced: int

    def with_dim(self, dim: int, axes: Atoms, unreduced: int | None = None) -> State:
        dims = self.dims
        mask = self.unreduced if unreduced is None else unreduced
        return State((*dims[:dim], axes, *dims[dim + 1 :]), mask)


class ReshardStep(NamedTuple):
    """A collective by its kind, the atoms it communicates over, and the state it leads to."""

    kind: str
    group: int
    state: State


class Price(NamedTuple):
    """What plans are compared by, in this order."""

    time: float
    wire_bytes: float
    communicating: int
    steps: int

    def plus(self, other: Price) -> Price:
        return Price(
            self.time + other.time,
            self.wire_bytes + other.wire_bytes,
            self.communicating + other.communicating,
            self.steps + other.steps,
        )


FREE = Price(0.0, 0.0, 0, 0)
MERGEABLE = frozenset({"all_slice", "all_gather", "reduce_scatter", "replicated_to_unreduced", "sharded_to_unreduced"})
"""Two neighbouring steps of one of these kinds can be written as one."""


def mask_of(atoms: Iterable[int]) -> int:
    mask = 0
    for atom in atoms:
        mask |= 1 << atom
    return mask


def atoms_of(mask: int) -> list[int]:
    return [i for i in range(mask.bit_length()) if mask >> i & 1]


def padded_block(shape: Sequence[int], before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    """The local shape that a step starts from, given the shards of each dimension before and after it: what it cuts is
    as long as the blocks that it makes."""
    lengths = zip(shape, before, after, strict=True)
    return tuple([-(-n // have) if want <= have else -(-n // want) * (want // have) for n, have, want in lengths])


_RELATIVE, _ABSOLUTE = 1e-9, 1e-12
"""Given: costs are sums of floats, in bytes or seconds; a picosecond is nothing."""


def same_cost(a: float, b: float) -> bool:
    """Equal up to the rounding of sums."""
    return math.isclose(a, b, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
