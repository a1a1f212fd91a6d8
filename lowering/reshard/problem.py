"""A reshard as a small abstract problem: atoms are numbers, a sharding is a tuple of tuples of them.

An atom is a piece of a mesh axis that no list of the problem cuts further; two atoms are equal or disjoint. Names
are left out, so that `x -> y` and `data -> model` are one problem with one remembered answer.
Example: on x=2, y=2, the reshard `[{x}, {y}] -> [{y, x}, {}]` is `((0,), (1,)) -> ((1, 0), ())` with sizes (2, 2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from sdy_jax.lowering.reshard.cost import CostModel

Atoms = tuple[int, ...]


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


@dataclass(frozen=True)
class ReshardProblem:
    """Take a tensor of `shape` from `source` to `target`.

    `sizes` and `bandwidths` are per atom. `min_shards` is the memory cap: no state may have fewer shards in all.
    `reorders`: the target is on a mesh with the same axes and the devices in another order, to which one of the
    permutes leads. Its price is that of any permute, but a value that all devices have whole changes for nothing.
    `divides`: whether steps may use parts of atoms.
    """

    shape: tuple[int, ...]
    itemsize: float
    sizes: tuple[int, ...]
    bandwidths: tuple[float, ...]
    latency: float
    source: State
    target: State
    min_shards: int = 1
    reorders: bool = False
    divides: bool = True
    _products: dict[Atoms, int] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def total_bytes(self) -> float:
        return math.prod(self.shape) * self.itemsize

    @cached_property
    def all_atoms(self) -> int:
        return (1 << len(self.sizes)) - 1

    @cached_property
    def to_reduce(self) -> int:
        return self.source.unreduced & ~self.target.unreduced

    @cached_property
    def to_unreduce(self) -> int:
        return self.target.unreduced & ~self.source.unreduced

    @cached_property
    def sliceable(self) -> int:
        """Atoms worth slicing: those that the target's dimensions want."""
        return mask_of(a for axes in self.target.dims for a in axes)

    @cached_property
    def model(self) -> CostModel:
        return CostModel(self.latency)

    @cached_property
    def slowest(self) -> float:
        return min(self.bandwidths, default=1.0)

    @cached_property
    def fastest(self) -> float:
        return max(self.bandwidths, default=1.0)

    def used(self, state: State) -> int:
        """Atoms that shard a dimension or are unreduced."""
        return state.unreduced | mask_of(a for axes in state.dims for a in axes)

    def product(self, axes: Atoms) -> int:
        """The number of shards that a list of atoms makes."""
        if axes not in self._products:
            self._products[axes] = math.prod(self.sizes[a] for a in axes)
        return self._products[axes]

    def counts(self, state: State) -> tuple[int, ...]:
        return tuple(self.product(axes) for axes in state.dims)

    def shards(self, state: State) -> int:
        return math.prod(self.product(axes) for axes in state.dims)

    def local_bytes(self, state: State) -> float:
        return self.total_bytes / self.shards(state)

    def fits(self, dim: int, axes: Atoms) -> bool:
        """The dimension divides into that many shards."""
        return self.shape[dim] % self.product(axes) == 0

    def is_legal(self, state: State) -> bool:
        return all(self.fits(d, axes) for d, axes in enumerate(state.dims))

    def price(self, kind: str, group: int, before: State, after: State) -> Price:
        """The price of one step over the atoms in the mask `group`."""
        b_in, b_out = self.local_bytes(before), self.local_bytes(after)
        size = math.prod(self.sizes[a] for a in atoms_of(group))
        wire = self.model.wire_bytes(kind, size, b_in, b_out)
        if not wire and kind in ("all_slice", "replicated_to_unreduced", "sharded_to_unreduced"):
            return Price(0.0, 0.0, 0, 1)
        slowest = min((self.bandwidths[a] for a in atoms_of(group)), default=1.0)
        return Price(self.model.group_time(kind, size, slowest, b_in, b_out), wire, 1, 1)

    def permute_price(self, state: State) -> Price:
        """A permute is charged at the slowest axis of the problem."""
        if self.reorders and self.shards(state) == 1 and not state.unreduced:
            return Price(0.0, 0.0, 0, 1)
        wire = self.local_bytes(state)
        return Price(self.latency + wire / self.slowest, wire, 1, 1)

    def bound(self, state: State) -> float:
        """Bytes that some device has still to receive whatever the plan.

        With nothing (more) to reduce these are the bytes of a device's target block that its present block lacks.
        With g-fold sums to reduce, the smallest local block b that all other atoms can make is scattered, which costs
        (1 - 1/g) b, and what the target block has beyond the b / g that are then at hand must arrive.
        """
        if self.reorders:
            return self._bound_to_reorder(state)
        open_atoms = state.unreduced & ~self.target.unreduced
        if open_atoms:
            group = math.prod(self.sizes[a] for a in atoms_of(open_atoms))
            least = self.total_bytes * group / math.prod(self.sizes)
            if self.to_unreduce:
                return (1 - 1 / group) * least
            return (1 - 2 / group) * least + self.local_bytes(self.target)
        if self.target.unreduced & ~state.unreduced:
            return 0.0
        common = 1
        for have, want in zip(state.dims, self.target.dims, strict=True):
            if have[: len(want)] != want[: len(have)]:
                # One device is first along the one atom and last along the other: it has nothing of its block.
                return self.local_bytes(self.target)
            common *= max(self.product(have), self.product(want))
        return self.local_bytes(self.target) - self.total_bytes / common

    def _bound_to_reorder(self, state: State) -> float:
        """The bound before the device order has changed.

        A permute is still to come and sends whole blocks, so a device must receive all of its target block; of a
        replicated target, all but the block at hand. A replicated state needs no permute.
        """
        if self.to_unreduce or (self.shards(state) == 1 and not state.unreduced):
            return 0.0
        at_hand = self.local_bytes(state) if self.shards(self.target) == 1 else 0.0
        return max(0.0, self.local_bytes(self.target) - at_hand)
