"""The layouts of a shape class as a graph: states on whole atoms, and the single collectives that lead between them.

See docs/explanation/planner.md#prices-of-all-pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from itertools import chain, combinations, permutations, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdy_jax.lowering.reshard.problem import State, mask_of
from sdy_jax.lowering.reshard.relayouts import Atoms
from sdy_jax.lowering.reshard.search import MAX_PARAMS

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# States in arrays: the lists of atoms that dimensions have are numbered.


class Lists:
    """Lists of atoms by number. Of each, all that it ends with are known, too.

    Attributes:
        known: the number of each list.
        masks, counts: per list, its atoms as a bit mask, and into how many blocks they cut a dimension.
        rests: per pair of lists, the number of what the first has behind that with which both begin.
    """

    def __init__(self, sizes: Sequence[int], lists: Iterable[Atoms]):
        self._sizes = sizes
        self.known: dict[Atoms, int] = {(): 0}
        self.add(lists)

    def add(self, lists: Iterable[Atoms]) -> None:
        """Gives numbers to those that have none."""
        for atoms in lists:
            for start in range(len(atoms)):
                self.known.setdefault(atoms[start:], len(self.known))
        self.masks = np.array([mask_of(atoms) for atoms in self.known], np.int64)
        self.counts = np.array([math.prod([self._sizes[a] for a in atoms]) for atoms in self.known], np.int64)
        self.rests = self._rests()

    def _rests(self) -> Ints:
        most = len(self._sizes)
        atoms = np.full((len(self.known), most), -1)
        for number, found in enumerate(self.known):
            atoms[number, : len(found)] = found
        ends = np.array([[self.known[found[n:]] for n in range(most + 1)] for found in self.known], np.int64)
        are_equal = (atoms[:, None] == atoms) & (atoms >= 0)
        common = np.cumprod(are_equal, axis=-1).sum(-1)
        return ends[np.arange(len(ends))[:, None], common]


class States(NamedTuple):
    """States: the numbers of the lists of their dimensions (columns), and the masks of their unreduced atoms."""

    dims: Ints
    unreduced: Ints

    def at(self, rows: Ints | Bools) -> States:
        """Some of them."""
        return States(self.dims[rows], self.unreduced[rows])

    def also(self, others: States) -> States:
        """These and others."""
        return States(np.concatenate([self.dims, others.dims]), np.concatenate([self.unreduced, others.unreduced]))


class ArcKind(IntEnum):
    """The single collectives, and `nothing`: what leads to hubs and from them."""

    nothing = 0
    all_slice = 1
    all_gather = 2
    reduce_scatter = 3
    all_reduce = 4
    all_to_all = 5
    collective_permute = 6
    replicated_to_unreduced = 7
    sharded_to_unreduced = 8


class Arcs(NamedTuple):
    """Collectives of some kinds over groups of atoms, which are bit masks, from some states to others, by number."""

    kinds: Ints
    groups: Ints
    sources: Ints
    targets: Ints

    @classmethod
    def of(cls, found: Iterable[Arcs]) -> Arcs:
        """All of several."""
        none = cls(*[np.zeros(0, np.int64)] * 4)
        return cls(*map(np.concatenate, zip(none, *found, strict=True)))

    def where(self, chosen: Ints | Bools | slice) -> Arcs:
        """Some of them."""
        return Arcs(*[each[chosen] for each in self])

    def are(self, *kinds: ArcKind) -> Bools:
        """Whether each is of one of some kinds."""
        return np.logical_or.reduce([self.kinds == kind for kind in kinds])

    def are_single(self) -> Bools:
        """Whether each is over one atom."""
        return np.equal(self.groups & (self.groups - 1), 0)

    def changes(self) -> Changes:
        """The atoms that each slices, reduces, and makes unreduced."""
        return Changes(
            *[
                np.where(self.are(*kinds), self.groups, 0)[:, None]
                for kinds in (
                    (ArcKind.all_slice,),
                    (ArcKind.reduce_scatter, ArcKind.all_reduce),
                    (ArcKind.replicated_to_unreduced, ArcKind.sharded_to_unreduced),
                )
            ]
        )


class Changes(NamedTuple):
    """The atoms that each of some collectives (rows) slices, reduces, and makes unreduced."""

    sliced: Ints
    reduced: Ints
    unreduced: Ints

    def are_towards(self, wanted: Ints, unreduced: Ints) -> Bools:
        """Whether each may be used on the way to states (columns) with these atoms in their dimensions, and these
        unreduced.

        The planner slices only what the target's dimensions want, reduces only what the target does not have unreduced,
        and makes unreduced only what it has so.
        """
        return np.equal((self.sliced & ~wanted) | (self.reduced & unreduced) | (self.unreduced & ~unreduced), 0)


# The space of a shape class.
#
# A shape class has, for each dimension that layouts shard, the largest number of equal blocks that atoms can make of
# it. States and arcs are the same for all tensors of a class, whatever their size and item size.

ALL_ORDERS = 1000
"""States up to which the atoms of a dimension are taken in every order; with more, in mesh order only. Given by what is
counted: three atoms in four dimensions make 296, four atoms 2424, in mesh order 1296. Guessed: above, all pairs take
seconds; below, three axes lose layouts that avoid a permute."""


def is_small(rank: int, atoms: int) -> bool:
    """Whether so many dimensions and atoms make few enough states to take the atoms of a dimension in every order."""
    orders = [math.perm(max(rank + n - 1, 0), n) for n in range(atoms + 1)]  # of n atoms in the dimensions
    return sum(math.comb(atoms, n) * 2 ** (atoms - n) * count for n, count in enumerate(orders)) <= ALL_ORDERS


class Space:
    """The states of a class and the arcs between them, sorted by source.

    Permutes lead between any two states with equal shard counts and equal unreduced atoms, and the time of one depends
    on the atoms of both, not on their order. So permutes lead between *hubs*, each of all such states with the same
    atoms: arcs are about as many as states, and not as pairs of them. Hubs are numbered behind states.

    Args:
        blocks: per dimension, a number that all of its shard counts divide.
        sizes: per atom.

    Attributes:
        lists: the lists of atoms that states have, and others that were met.
        states: each atom in one of the dimensions, unreduced, or nowhere; all that divides.
        counts: per state and hub (rows), the number of blocks that each dimension is in.
        shards: their products.
        arcs: what leads from one to another.
    """

    def __init__(self, blocks: Sequence[int], sizes: Sequence[int]):
        self._rank, self._atoms = len(blocks), len(sizes)
        orders = _orders(self._rank, self._atoms)
        self.lists = Lists(sizes, orders)
        self._parts = _Parts.of(orders, self.lists.known, self._atoms)
        self._children: list[Ints] = []
        self.states = self._enumerated(blocks)
        counts = self.counts_of(self.states)
        hubs, permutes = self._permutes(counts)
        self.counts = np.concatenate([counts, counts[hubs]])
        self.shards = self.counts.prod(1)
        arcs = Arcs.of([*self._single(), *self._exchanges(), permutes])
        self.arcs = arcs.where(np.lexsort((arcs.sources, -self.shards[arcs.sources])))
        self.changes = self.arcs.changes()

    def layouts(self, states: Sequence[State]) -> States:
        """States in arrays, whether they are in the space or not."""
        new = {axes for state in states for axes in state.dims} - self.lists.known.keys()
        if new:
            self.lists.add(sorted(new))
        dims = [[self.lists.known[axes] for axes in state.dims] for state in states]
        unreduced = [state.unreduced for state in states]
        return States(np.array(dims, np.int64).reshape(len(states), self._rank), np.array(unreduced, np.int64))

    def numbers(self, layouts: States) -> Ints:
        """Their numbers in the space; -1 where they are not in it."""
        nodes = np.zeros(len(layouts.unreduced), np.int64)
        for children, column in zip(self._children, [*layouts.dims.T, layouts.unreduced], strict=True):
            nodes = children[nodes, np.minimum(column, children.shape[1] - 1)]
        return nodes

    def counts_of(self, layouts: States) -> Ints:
        """The number of blocks that each of their dimensions (columns) is in."""
        return self.lists.counts[layouts.dims]

    def wanted(self, layouts: States) -> Ints:
        """The atoms of their dimensions."""
        return self.lists.masks[layouts.dims].sum(1)

    def _enumerated(self, blocks: Sequence[int]) -> States:
        """All states, dimension by dimension: each list that fits behind those of the dimensions before leads from
        their number to a number of its own, the last one of which is that of a state."""
        masks, counts = self.lists.masks, self.lists.counts
        dims, used = np.zeros((1, 0), np.int64), np.zeros(1, np.int64)
        for block in blocks:
            before, lists = self._numbered(((used[:, None] & masks) == 0) & (block % counts == 0))
            dims, used = np.column_stack([dims[before], lists]), used[before] | masks[lists]
        before, unreduced = self._numbered((used[:, None] & np.arange(1 << self._atoms)) == 0)
        return States(dims[before], unreduced)

    def _numbered(self, fits: Bools) -> tuple[Ints, Ints]:
        before, added = np.nonzero(fits)
        children = np.full((fits.shape[0] + 1, fits.shape[1] + 1), -1)  # a row and a column more, for what is unknown
        children[before, added] = np.arange(len(before))
        self._children.append(children)
        return before, added

    def _single(self) -> Iterator[Arcs]:
        """Collectives of one atom, which one by one do what those of several do; all_reduces of any."""
        (dims, unreduced), parts = self.states, self._parts
        for atom in range(self._atoms):
            bit = np.int64(1 << atom)
            idle = ~(self.wanted(self.states) | unreduced) & bit
            yield self._arcs(ArcKind.replicated_to_unreduced, idle, dims, unreduced | bit)
            for dim, column in enumerate(dims.T):
                longer = _replaced(dims, {dim: parts.longer[column, atom]})
                yield self._arcs(ArcKind.all_slice, idle, longer, unreduced)
                yield self._arcs(ArcKind.reduce_scatter, unreduced & bit, longer, unreduced & ~bit)
        for group in map(np.int64, range(1, 1 << self._atoms)):
            whole = np.where(unreduced & group == group, group, 0)
            yield self._arcs(ArcKind.all_reduce, whole, dims, unreduced & ~group)
        for dim, column in enumerate(dims.T):
            last = self.lists.masks[parts.ends[column, 1]]
            shorter = _replaced(dims, {dim: parts.starts[column, 1]})
            yield self._arcs(ArcKind.all_gather, last, shorter, unreduced)
            yield self._arcs(ArcKind.sharded_to_unreduced, last, shorter, unreduced | last)

    def _arcs(
        self, kind: ArcKind, groups: Ints, dims: Ints, unreduced: Ints, sources: Ints | slice = slice(None)
    ) -> Arcs:
        """From states, all or some, to other ones, where these exist and the group is not empty."""
        found = np.arange(len(self.states.unreduced))[sources]
        targets = self.numbers(States(dims, unreduced))
        return Arcs(np.full_like(groups, kind), groups, found, targets).where((groups > 0) & (targets >= 0))

    def _exchanges(self) -> Iterator[Arcs]:
        """All_to_alls of suffixes of dimensions to the ends of others, of several such pairs at once."""
        (dims, unreduced), parts = self.states, self._parts
        lengths = parts.lengths[dims]
        for pairs in _disjoint_pairs(self._rank):
            for moved in product(*[range(1, lengths[:, source].max() + 1) for source, _ in pairs]):
                sources = np.flatnonzero((lengths[:, [source for source, _ in pairs]] >= moved).all(1))
                old, groups, new = dims[sources], np.zeros(len(sources), np.int64), dict[int, Ints]()
                for (source, target), length in zip(pairs, moved, strict=True):
                    end = parts.ends[old[:, source], length]
                    new |= {source: parts.starts[old[:, source], length], target: parts.joined[old[:, target], end]}
                    groups |= self.lists.masks[end]
                yield self._arcs(ArcKind.all_to_all, groups, _replaced(old, new), unreduced[sources], sources)

    def _permutes(self, counts: Ints) -> tuple[Ints, Arcs]:
        """A state of each hub, and the arcs to hubs, between them, and from them."""
        wanted, unreduced = self.wanted(self.states), self.states.unreduced
        _, alike, sizes = np.unique(
            np.column_stack([counts, unreduced]), axis=0, return_inverse=True, return_counts=True
        )
        alike = alike.ravel()
        states = np.flatnonzero(sizes[alike] > 1)
        keys, first, hubs = np.unique(
            alike[states] << self._atoms | wanted[states], return_index=True, return_inverse=True
        )
        members = states[first]
        left, reached = _pairs_of_equals(keys >> self._atoms)
        groups = wanted[members][left] | wanted[members][reached] | unreduced[members][left]
        entered = len(unreduced) + np.arange(len(keys))
        leaving = entered + len(keys)
        none = np.zeros_like(states)
        arcs = [
            Arcs(none, none, states, leaving[hubs]),
            Arcs(np.full_like(groups, ArcKind.collective_permute), groups, leaving[left], entered[reached]),
            Arcs(none, none, entered[hubs], states),
        ]
        return np.concatenate([members, members]), Arcs.of(arcs)

    # Collectives between given states, each of which may be of several atoms.

    def steps(self, sources: States, targets: States) -> Arcs:
        """All single collectives that lead from some states to others."""
        masks, rests = self.lists.masks, self.lists.rests
        pairs = list(zip(sources.dims.T[:, :, None], targets.dims.T, strict=True))
        ends = [(rests[p, q], rests[q, p]) for p, q in pairs]
        before, after = sources.unreduced[:, None], targets.unreduced
        shape = np.broadcast_shapes(before.shape, after.shape)
        removed = sum([masks[end] for end, _ in ends], np.zeros(shape, np.int64))
        added = sum([masks[end] for _, end in ends], np.zeros(shape, np.int64))
        lost, gained = before & ~after, after & ~before
        keeps = before == after
        gathers, slices = (added == 0) & (removed > 0), (removed == 0) & (added > 0)
        stays = (removed == 0) & (added == 0)
        have, want = self.counts_of(sources), self.counts_of(targets)
        resorts = keeps & ~stays & (have[:, None] == want).all(-1)
        used = self.wanted(sources)[:, None] | self.wanted(targets) | before
        return Arcs.of(
            _chosen(kind, where, groups)
            for kind, where, groups in (
                (ArcKind.all_slice, slices & keeps, added),
                (ArcKind.all_gather, gathers & keeps, removed),
                (ArcKind.reduce_scatter, slices & (lost == added) & (gained == 0), added),
                (ArcKind.all_reduce, stays & (lost > 0) & (gained == 0), lost),
                (ArcKind.all_to_all, keeps & (removed > 0) & (removed == added) & self._exchange(ends), removed),
                (ArcKind.collective_permute, resorts, used),
                (ArcKind.replicated_to_unreduced, stays & (gained > 0) & (lost == 0), gained),
                (ArcKind.sharded_to_unreduced, gathers & (gained == removed) & (lost == 0), removed),
            )
        )

    def _exchange(self, ends: Sequence[tuple[Ints, Ints]]) -> Bools | bool:
        """Whether dimensions only lose ends or only get them, few enough of them, and each lost one is got by one."""
        ok: Bools | bool = self._rank > 1
        for lost, got in ends:
            ok = ok & ((lost == 0) | (got == 0))
            ok = ok & np.logical_or.reduce([lost == 0, *[lost == other for _, other in ends]])
        return ok & (sum([(lost > 0).astype(int) for lost, _ in ends], np.zeros(1, int)) <= _most_exchanged(self._rank))


@lru_cache(maxsize=1 << 8)
def space_of(blocks: tuple[int, ...], sizes: tuple[int, ...]) -> Space:
    """The space of a class."""
    return Space(blocks, sizes)


def _orders(rank: int, atoms: int) -> list[Atoms]:
    """The lists of atoms that a dimension of a space may have: of any atoms, in every order or in that of the mesh."""
    ordered = permutations if is_small(rank, atoms) else combinations
    most = atoms if rank else 0
    return list(chain.from_iterable(ordered(range(atoms), count) for count in range(most + 1)))


class _Parts(NamedTuple):
    """The parts of lists, and what they are parts of, by number; behind the last one where that is no list of a space.

    `longer`: with an atom (columns) at the end. `starts`, `ends`: all but the last atoms, and these, by how many they
    are (columns); the empty list, where there are not as many. `joined`: a list with another one at the end.
    """

    lengths: Ints
    longer: Ints
    starts: Ints
    ends: Ints
    joined: Ints

    @classmethod
    def of(cls, lists: Sequence[Atoms], known: dict[Atoms, int], atoms: int) -> _Parts:
        lists = sorted(lists, key=known.__getitem__)
        none = len(lists)
        cuts = range(1, atoms + 1)
        shaped = np.array([len(found) for found in lists], np.int64)
        longer = [[known.get((*found, atom), none) for atom in range(atoms)] for found in lists]
        starts = [[known[found], *[known[found[: max(len(found) - n, 0)]] for n in cuts]] for found in lists]
        ends = [[0, *[known[found[-n:]] if n <= len(found) else 0 for n in cuts]] for found in lists]
        joined = [[known.get(found + end, none) for end in lists] for found in lists]
        return cls(shaped, *[np.array(each, np.int64).reshape(none, -1) for each in (longer, starts, ends, joined)])


def _most_exchanged(rank: int) -> int:
    return min(MAX_PARAMS, rank // 2)


def _disjoint_pairs(rank: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Pairs of dimensions between which one all_to_all may move atoms."""
    for count in range(1, _most_exchanged(rank) + 1):
        for pairs in combinations(permutations(range(rank), 2), count):
            if len({dim for pair in pairs for dim in pair}) == 2 * count:
                yield pairs


def _replaced(dims: Ints, columns: dict[int, Ints]) -> Ints:
    found = dims.copy()
    for dim, column in columns.items():
        found[:, dim] = column
    return found


def _pairs_of_equals(values: Ints) -> tuple[Ints, Ints]:
    """The indices of all pairs of equal values; these are sorted."""
    starts, stops = np.searchsorted(values, values, "left"), np.searchsorted(values, values, "right")
    counts = stops - starts
    firsts = np.repeat(np.arange(len(values)), counts)
    return firsts, np.arange(len(firsts)) - np.repeat(np.cumsum(counts) - counts - starts, counts)


def _chosen(kind: ArcKind, where: Bools | bool, groups: Ints) -> Arcs:
    sources, targets = np.nonzero(np.broadcast_to(where, groups.shape))
    found = groups[sources, targets]
    return Arcs(np.full_like(found, kind), found, sources, targets)
