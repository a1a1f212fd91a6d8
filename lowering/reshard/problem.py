"""A reshard as an abstract problem: states on numbered atoms of mesh axes, steps between them and their prices.

See docs/explanation/reshards.md#a-small-problem-without-names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, product
from typing import NamedTuple

from sdy_jax.ir.collectives import BY_STRIPS, leads_to_blocks
from sdy_jax.ir.meshes import primes
from sdy_jax.lowering.reshard.relayouts import Atoms, DimChange, StripTotals, change, is_relaid, sent
from sdy_jax.lowering.reshard.strips import block_length
from sdy_jax.lowering.targets.rates import LastCut, Link, Rate, last_cut, rate, wire_bytes

# States of an abstract reshard: which atoms split each dimension, and which are unreduced; steps, and their prices.
#
# Atoms are numbers, in dimensions from major to minor; sets of them are bit masks.


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


# A reshard as a small abstract problem: atoms are numbers, a sharding is a tuple of tuples of them.
#
# An atom is a piece of a mesh axis that no list of the problem cuts further; two atoms are equal or disjoint. Names
# are left out, so that `x -> y` and `data -> model` are one problem with one remembered answer. Example: on x=2, y=2,
# the reshard `[{x}, {y}] -> [{y, x}, {}]` is `((0,), (1,)) -> ((1, 0), ())` with sizes (2, 2). See
# docs/explanation/reshards.md#a-small-problem-without-names.

MOST_DEVICES = 256
"""The largest group whose strips are sent. Guessed, a guard: listing them takes milliseconds, the square of that for
twice as many."""


@dataclass(frozen=True)
class ReshardProblem:
    """Take a tensor of `shape` from `source` to `target`.

    `links` are per atom; `combines` as in a cost model. `min_shards` is the memory cap: no state may have fewer shards
    in all.
    `reorders`: the target is on a mesh with the same axes and the devices in another order, to which one of the
    permutes leads. Its price is that of any permute, but a value that all devices have whole changes for nothing.
    `divides`: whether steps may use parts of atoms. `strips`: whether dimensions may be relaid by strips.
    """

    shape: tuple[int, ...]
    itemsize: float
    links: tuple[Link, ...]
    combines: tuple[str, ...]
    source: State
    target: State
    min_shards: int = 1
    reorders: bool = False
    divides: bool = True
    strips: bool = True
    _products: dict[Atoms, int] = field(default_factory=dict, init=False, compare=False, repr=False)
    _counts: dict[tuple[Atoms, ...], tuple[int, ...]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    _shards: dict[tuple[int, ...], int] = field(default_factory=dict, init=False, compare=False, repr=False)
    _prices: dict[tuple[str, int, tuple[int, ...], tuple[int, ...]], Price] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    _rates: dict[tuple[str, int, LastCut | None], Rate] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Devices along each atom."""
        return tuple([link.size for link in self.links])

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
    def fastest(self) -> float:
        return max(map(self.speed, range(len(self.links))), default=1.0)

    @cached_property
    def slowest(self) -> float:
        return min(map(self.speed, range(len(self.links))), default=1.0)

    def speed(self, atom: int) -> float:
        """The bytes per second along an atom, before they are rounded."""
        return self.links[atom].speed / self.links[atom].moved

    @cached_property
    def slow_atoms(self) -> tuple[int, ...]:
        """The atoms that are slower than others, where it is known what has to go along them."""
        if self.reorders or self.to_unreduce or not self.is_even:
            return ()
        return tuple([atom for atom in range(len(self.links)) if self.speed(atom) < self.fastest])

    @cached_property
    def least_block(self) -> float:
        """The bytes of a block that all atoms cut."""
        return self.total_bytes / math.prod(self.sizes)

    @cached_property
    def lanes(self) -> int:
        """The elements of the last dimension in a tile; 0 where it does not matter how arrays lie."""
        return max([link.copies.lanes for link in self.links], default=0)

    @cached_property
    def cuts_tiles(self) -> bool:
        """Whether an exchange from source to target rearranges parts of tiles, so that other steps may cost less."""
        cut = last_cut(self.shape, self.counts(self.source), self.counts(self.target)) if self.lanes else None
        return any(link.copies.of("all_to_all", cut) > link.copies.of("all_to_all", None) for link in self.links)

    def rate(self, kind: str, group: int, cut: LastCut | None = None) -> Rate:
        """The rate of a kind of collective over the atoms in the mask `group`."""
        key = kind, group, cut
        if key not in self._rates:
            self._rates[key] = rate(kind, [self.links[a] for a in atoms_of(group)], self.combines, cut)
        return self._rates[key]

    def is_of_one_speed(self, group: int) -> bool:
        """Whether the atoms in a mask are equally fast, so that nothing is gained by taking one before the others."""
        return len({self.links[a].speed for a in atoms_of(group)}) < 2

    def used(self, state: State) -> int:
        """Atoms that shard a dimension or are unreduced."""
        return state.unreduced | mask_of(a for axes in state.dims for a in axes)

    def product(self, axes: Atoms) -> int:
        """The number of shards that a list of atoms makes."""
        if axes not in self._products:
            self._products[axes] = math.prod(self.sizes[a] for a in axes)
        return self._products[axes]

    def counts(self, state: State) -> tuple[int, ...]:
        """The shards of each dimension."""
        found = self._counts.get(state.dims)
        if found is None:
            found = self._counts[state.dims] = tuple([self.product(axes) for axes in state.dims])
        return found

    def shards(self, state: State) -> int:
        counts = self.counts(state)
        found = self._shards.get(counts)
        if found is None:
            found = self._shards[counts] = math.prod(counts)
        return found

    def local_bytes(self, state: State) -> float:
        """The bytes of one block, with its padding."""
        if self.is_even:
            return self.total_bytes / self.shards(state)
        counts = self.counts(state)
        return self._padded_bytes(counts, counts)

    def _padded_bytes(self, before: tuple[int, ...], after: tuple[int, ...]) -> float:
        """The bytes of a block with so many shards per dimension, with the padding that a step to others needs."""
        return self.itemsize * math.prod(padded_block(self.shape, before, after))

    @cached_property
    def is_even(self) -> bool:
        """Source and target divide into equal shards; then so does every state between them."""
        ends = (self.source.dims, self.target.dims)
        return not any(n % self.product(axes) for dims in ends for n, axes in zip(self.shape, dims, strict=True))

    @cached_property
    def _padded_counts(self) -> tuple[frozenset[int], ...]:
        """Per dimension, the shard counts that it may have without dividing: those on the way to source or target."""
        ends = zip(self.source.dims, self.target.dims, strict=True)
        return tuple([frozenset(self.product(a[:i]) for a in both for i in range(len(a) + 1)) for both in ends])

    def fits(self, dim: int, few: Atoms, many: Atoms) -> bool:
        """Whether joining blocks, or cutting them, leads from one of two lists of axes to the other, the longer one.

        It does where the longer list divides the dimension, and where the shorter one is empty: padding is added before
        the dimension is cut and taken off when it is whole again. Otherwise joined blocks have to be blocks.
        """
        shards = self.product(many)
        if self.shape[dim] % shards == 0:
            return True
        if self.is_even or shards not in self._padded_counts[dim]:
            return False
        return leads_to_blocks(self.shape[dim], self.product(few), shards)

    def leads(self, before: State, after: State) -> bool:
        """Whether one step can lead from a state to another, as far as blocks are concerned."""
        pairs = zip(before.dims, after.dims, strict=True)
        return all(
            self.product(a) == self.product(b) or self.fits(d, *sorted((a, b), key=self.product))
            for d, (a, b) in enumerate(pairs)
        )

    def has_to_relay(self, dim: int, have: Atoms, want: Atoms) -> bool:
        """Whether a dimension has to be relaid by strips."""
        return is_relaid(self.shape[dim], self.sizes, have, want)

    def change(self, before: State, after: State) -> DimChange | None:
        """What strips do between two states; None where they cannot, or where too many devices would send them."""
        found = change(self.shape, self.sizes, before.dims, after.dims)
        return found if found and found.relaid.count(found.relaid.group) <= MOST_DEVICES else None

    def price(self, kind: str, group: int, before: State, after: State) -> Price:
        """The price of one step over the atoms in the mask `group`."""
        if kind == BY_STRIPS:
            return self._price_of_strips(before, after)
        key = kind, group, self.counts(before), self.counts(after)
        found = self._prices.get(key)
        if found is None:
            found = self._prices[key] = self._price_between(*key)
        return found

    def _price_between(self, kind: str, group: int, before: tuple[int, ...], after: tuple[int, ...]) -> Price:
        """The price of a step from so many shards per dimension to others."""
        wire = self._wire_bytes(kind, group, before, after)
        if not wire and kind in ("all_slice", "replicated_to_unreduced", "sharded_to_unreduced"):
            return Price(0.0, 0.0, 0, 1)
        return Price(self._rate(kind, group, before, after).time(wire), wire, 1, 1)

    def time_alone(self, kind: str, group: int, before: State, after: State) -> float:
        """The time of one step, not by strips, that shares its latency with no other collective."""
        counts = self.counts(before), self.counts(after)
        return self._rate(kind, group, *counts).alone(self._wire_bytes(kind, group, *counts))

    def _wire_bytes(self, kind: str, group: int, before: tuple[int, ...], after: tuple[int, ...]) -> float:
        if self.is_even:
            b_in, b_out = self.total_bytes / math.prod(before), self.total_bytes / math.prod(after)
        else:
            b_in, b_out = self._padded_bytes(before, after), self._padded_bytes(after, after)
        return wire_bytes(kind, math.prod(self.sizes[a] for a in atoms_of(group)), b_in, b_out)

    def _rate(self, kind: str, group: int, before: tuple[int, ...], after: tuple[int, ...]) -> Rate:
        return self.rate(kind, group, last_cut(self.shape, before, after) if self.lanes else None)

    def _price_of_strips(self, before: State, after: State) -> Price:
        done = self.change(before, after)
        assert done is not None, "moves are made of changes"
        return self._strips(before, after, done, sent(done.relaid))

    def price_of_planned_strips(self, before: State, after: State) -> Price:
        """As `price`, of strips as they are sent, of which the price may be an estimate."""
        done = self.change(before, after)
        assert done is not None, "steps are changes"
        found = done.relayout
        return self._strips(before, after, done, StripTotals(found.wire_elements, found.rounds))

    def _strips(self, before: State, after: State, done: DimChange, found: StripTotals) -> Price:
        counts = map(max, self.counts(before), self.counts(after))
        row = math.prod(
            block_length(n, count) for d, (n, count) in enumerate(zip(self.shape, counts, strict=True)) if d != done.dim
        )
        wire = self.itemsize * row * found.elements
        each = self.rate("collective_permute", mask_of(done.relaid.group))
        return Price(found.rounds * each.fixed + wire * each.per_byte, wire, 1, 1)

    def permute_price(self, state: State) -> Price:
        """A permute is charged at the slowest axis of the problem."""
        if self.reorders and self.shards(state) == 1 and not state.unreduced:
            return Price(0.0, 0.0, 0, 1)
        wire = self.local_bytes(state)
        return Price(self.rate("collective_permute", self.all_atoms).time(wire), wire, 1, 1)

    def bound(self, state: State) -> float:
        """Bytes that some device has still to receive whatever the plan.

        Padding is left out. With nothing (more) to reduce these are the bytes of a device's target block that its
        present block lacks. With g-fold sums to reduce, the smallest local block b that all other atoms can make is
        scattered, which costs (1 - 1/g) b, and what the target block has beyond the b / g that are then at hand must
        arrive.
        """
        if self.reorders:
            return self._bound_to_reorder(state)
        open_atoms = state.unreduced & ~self.target.unreduced
        if open_atoms:
            group = math.prod(self.sizes[a] for a in atoms_of(open_atoms))
            least = self.total_bytes * group / math.prod(self.sizes)
            if self.to_unreduce:
                return (1 - 1 / group) * least
            return (1 - 2 / group) * least + self._share_of_bytes(self.target)
        if self.target.unreduced & ~state.unreduced:
            return 0.0
        common = 1
        for have, want in zip(state.dims, self.target.dims, strict=True):
            if have[: len(want)] != want[: len(have)]:
                # One device is first along the one atom and last along the other: it has nothing of its block.
                return self._share_of_bytes(self.target)
            common *= max(self.product(have), self.product(want))
        return self._share_of_bytes(self.target) - self.total_bytes / common

    def _bound_to_reorder(self, state: State) -> float:
        """The bound before the device order has changed.

        A permute is still to come and sends whole blocks, so a device must receive all of its target block; of a
        replicated target, all but the block at hand. A replicated state needs no permute.
        """
        if self.to_unreduce or (self.shards(state) == 1 and not state.unreduced):
            return 0.0
        at_hand = self._share_of_bytes(state) if self.shards(self.target) == 1 else 0.0
        return max(0.0, self._share_of_bytes(self.target) - at_hand)

    def _share_of_bytes(self, state: State) -> float:
        return self.total_bytes / self.shards(state)


# How atoms are cut into parts, so that reshards may move parts of axes.

MAX_REFINEMENTS = 8
"""Orders of the parts of composite axes that are tried (a 6-candidate axis is 2x3 or 3x2). Guessed, a guard: each is a
search; with fewer, some reshards between odd parts of axes cost more."""


AtomCut = tuple[tuple[int, ...], ...]
"""Per atom, the sizes that it is cut into."""


def fine_cuts(problem: ReshardProblem) -> list[AtomCut]:
    """The cuts of every atom into the parts that plans are made of, those of ascending primes first.

    The parts are primes, or one power of a prime where all that is divided and all that divides are powers of that: on
    a 256x256 mesh whole axes move, as on a 2x2 mesh.
    """
    sizes, whole = problem.sizes, math.prod(problem.sizes)
    if not problem.divides:
        return [tuple((n,) for n in sizes)]
    units = [_unit(p, [*sizes, *(math.gcd(n, whole) for n in problem.shape)]) for p in sorted(set(primes(whole)))]
    ways = [list(islice(_orders(_parts_in(units, n)), MAX_REFINEMENTS)) for n in sizes]
    return list(islice(product(*ways), MAX_REFINEMENTS))


def coarse_cuts(problem: ReshardProblem) -> list[AtomCut]:
    """Every atom whole, or in two of which one is as large as the largest thing that is smaller than the atom."""
    if not problem.divides:
        return []
    whole = math.prod(problem.sizes)
    numbers = {*problem.sizes, *(math.gcd(n, whole) for n in problem.shape)} - {1}
    ways = []
    for size in problem.sizes:
        part = max((n for n in numbers if n < size and size % n == 0), default=size)
        ways.append(list(dict.fromkeys([(size // part, part), (part, size // part)])) if part < size else [(size,)])
    return list(islice(product(*ways), MAX_REFINEMENTS))


def _orders(parts: list[int]) -> Iterator[tuple[int, ...]]:
    """The distinct permutations of a sorted list, in ascending order."""
    if not parts:
        yield ()
    for first in dict.fromkeys(parts):
        rest = parts.copy()
        rest.remove(first)
        yield from ((first, *order) for order in _orders(rest))


def _unit(prime: int, numbers: list[int]) -> int:
    """The largest power of a prime of which all numbers hold a power."""
    return prime ** math.gcd(*(primes(n).count(prime) for n in numbers if n))


def _parts_in(units: list[int], n: int) -> list[int]:
    parts = []
    for unit in units:
        while n % unit == 0:
            parts.append(unit)
            n //= unit
    return parts


def refined(problem: ReshardProblem, cut: AtomCut) -> ReshardProblem:
    """The same problem on the pieces of its atoms."""
    if all(len(sizes) == 1 for sizes in cut):
        return problem
    starts = [sum(map(len, cut[:i])) for i in range(len(cut))]

    def state(coarse: State) -> State:
        dims = tuple(tuple(starts[a] + i for a in axes for i in range(len(cut[a]))) for axes in coarse.dims)
        unreduced = mask_of(starts[a] + i for a in atoms_of(coarse.unreduced) for i in range(len(cut[a])))
        return State(dims, unreduced)

    links = tuple(part for link, sizes in zip(problem.links, cut, strict=True) for part in link.cut(sizes))
    return replace(problem, links=links, source=state(problem.source), target=state(problem.target))
