"""The layouts of a shape class as a graph of states and single collectives, and the shortest paths in it.

See docs/explanation/planner.md#prices-of-all-pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, permutations, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdy_jax.lowering.reshard.problem import State, atoms_of, mask_of
from sdy_jax.lowering.reshard.relayouts import Atoms
from sdy_jax.lowering.reshard.search import MAX_PARAMS
from sdy_jax.lowering.targets.rates import IN_A_BUCKET, LastCut, Link, Rate, rate, wire_bytes

# The layouts of a shape class as a graph: states on whole atoms, and the single collectives that lead between them.
#
# A shape class has, for each dimension that layouts shard, the largest number of equal blocks that atoms can make of
# it. States and arcs are the same for all tensors of a class, whatever their size and item size.

ALL_ORDERS = 1000
"""States up to which the atoms of a dimension are taken in every order; with more, in mesh order only. Given by what is
counted: three atoms in four dimensions make 296, four atoms 2424, in mesh order 1296. Guessed: above, all pairs take
seconds; below, three axes lose layouts that avoid a permute."""

Step = tuple[str, int, State]
"""A collective, the atoms of its group, and the state that it leads to, or comes from."""


class Arc(NamedTuple):
    """A collective over the atoms in `group` from one state to another, by their indices."""

    kind: str
    group: int
    source: int
    target: int


class Changes(NamedTuple):
    """The atoms that each of some collectives slices, reduces, and makes unreduced.

    The planner slices only what the target's dimensions want, reduces only what the target does not have unreduced, and
    makes unreduced only what it has so.
    """

    sliced: NDArray[np.int64]
    reduced: NDArray[np.int64]
    unreduced: NDArray[np.int64]

    @classmethod
    def of(cls, kinds: Sequence[str], groups: Sequence[int]) -> Changes:
        """Those of collectives over groups of atoms."""
        over = np.array(groups, np.int64)
        sliced = [kind == "all_slice" for kind in kinds]
        reduced = [kind in ("reduce_scatter", "all_reduce") for kind in kinds]
        unreduced = [kind in ("replicated_to_unreduced", "sharded_to_unreduced") for kind in kinds]
        return cls(*[np.where(np.array(which, bool), over, 0) for which in (sliced, reduced, unreduced)])

    def are_towards(self, target: State) -> NDArray[np.bool_]:
        """Whether each may be used on the way to a state, by its unreduced atoms and those of its dimensions."""
        wanted = mask_of(a for axes in target.dims for a in axes)
        useless = (self.sliced & ~wanted) | (self.reduced & target.unreduced) | (self.unreduced & ~target.unreduced)
        return np.equal(useless, 0)


class Lanes(NamedTuple):
    """The last dimension of a class: its index, the shard counts whose blocks are no whole tiles, and the rank of its
    arrays."""

    dim: int
    narrow: frozenset[int]
    rank: int


@dataclass(frozen=True, slots=True)
class Space:
    """The states of a class and the arcs between them, sorted by source.

    `shards`: per state, the number of blocks that its dimensions are in.
    """

    sizes: tuple[int, ...]
    index: dict[State, int]
    shards: NDArray[np.int64]
    arcs: tuple[Arc, ...]
    sources: NDArray[np.intp]
    targets: NDArray[np.intp]
    changes: Changes

    def arcs_to(self, target: State) -> NDArray[np.intp]:
        """The arcs that reshards to a state may use."""
        return np.flatnonzero(self.changes.are_towards(target))

    def cut(self, lanes: Lanes | None, source: State, target: State) -> LastCut | None:
        """What leads from a state to another does to the last dimension, where that matters."""
        if lanes is None or source.dims[lanes.dim] == target.dims[lanes.dim]:
            return None
        before, after = (math.prod([self.sizes[a] for a in state.dims[lanes.dim]]) for state in (source, target))
        return LastCut(int(max(before, after) in lanes.narrow), lanes.rank, before > after) if before != after else None

    def rates(self, links: Sequence[Link], combines: tuple[str, ...], lanes: Lanes | None = None) -> Rates:
        """The rates of the arcs; `links` are per atom."""
        states = list(self.index)
        steps = [(arc.kind, arc.group, states[arc.source], states[arc.target]) for arc in self.arcs]
        return self.rates_of(steps, links, combines, lanes)

    def rates_of(
        self,
        steps: Iterable[tuple[str, int, State, State]],
        links: Sequence[Link],
        combines: tuple[str, ...],
        lanes: Lanes | None,
    ) -> Rates:
        """The rates of collectives over groups from some states to others, of the space or not."""
        known: dict[tuple[str, int, LastCut | None], tuple[float, Rate]] = {}
        found, shards = [], []
        for kind, group, source, target in steps:
            key = kind, group, self.cut(lanes, source, target)
            if key not in known:
                over = [links[a] for a in atoms_of(group)]
                sent = wire_bytes(kind, math.prod([link.size for link in over]), 1.0, 0.0)
                known[key] = sent, rate(kind, over, combines, key[-1])
            found.append(known[key])
            shards.append(math.prod(self.counts(source)))
        sending = np.array([sent * each.per_byte for sent, each in found]) / np.array(shards)
        fixed = np.array([each.fixed if sent else 0.0 for sent, each in found])
        return Rates(sending, fixed, np.array([each.is_shared for _, each in found], bool))

    def counts(self, state: State) -> tuple[int, ...]:
        """The number of blocks that each dimension of a state is in."""
        return tuple([math.prod([self.sizes[a] for a in axes]) for axes in state.dims])


@dataclass(frozen=True, slots=True)
class Rates:
    """Per arc, its seconds for each byte of the whole tensor, and those that it takes whatever the size.

    `are_shared`: as `cost.Rate.is_shared`.
    """

    sending: NDArray[np.float64]
    fixed: NDArray[np.float64]
    are_shared: NDArray[np.bool_]

    @property
    def are_linear(self) -> bool:
        """Whether times are proportional to bytes."""
        return not self.fixed.any()

    def times(self, total: float) -> NDArray[np.float64]:
        """Per arc, the time that it takes for a tensor of `total` bytes."""
        sending = self.sending * total
        if self.are_linear:
            return sending
        return sending + np.minimum(self.fixed, np.where(self.are_shared, IN_A_BUCKET * sending, np.inf))


@lru_cache(maxsize=1 << 8)
def space_of(blocks: tuple[int, ...], sizes: tuple[int, ...]) -> Space:
    """The space of a class.

    Args:
        blocks: per dimension, a number that all of its shard counts divide.
        sizes: per atom.
    """
    index = {state: number for number, state in enumerate(_states(blocks, sizes))}
    shards = [math.prod(sizes[a] for axes in state.dims for a in axes) for state in index]
    arcs = [arc for state, number in index.items() for arc in _arcs(state, number, index, len(sizes))]
    arcs += _permutes(index, sizes)
    arcs.sort(key=lambda arc: (arc.source, arc.target))
    return Space(
        sizes,
        index,
        np.array(shards),
        tuple(arcs),
        np.array([arc.source for arc in arcs], np.intp),
        np.array([arc.target for arc in arcs], np.intp),
        Changes.of([arc.kind for arc in arcs], [arc.group for arc in arcs]),
    )


def _states(blocks: Sequence[int], sizes: Sequence[int]) -> Iterator[State]:
    """Each atom in one of the dimensions, unreduced, or nowhere; all that divides."""
    rank = len(blocks)
    in_all_orders = is_small(rank, len(sizes))
    unreduced = rank + 1
    for places in product(range(rank + 2), repeat=len(sizes)):
        lists = [tuple(a for a, place in enumerate(places) if place == dim) for dim in range(rank)]
        if any(n % math.prod(sizes[a] for a in axes) for n, axes in zip(blocks, lists, strict=True)):
            continue
        mask = mask_of(a for a, place in enumerate(places) if place == unreduced)
        orders = product(*map(permutations, lists)) if in_all_orders else [tuple(lists)]
        yield from (State(tuple(dims), mask) for dims in orders)


def is_small(rank: int, atoms: int) -> bool:
    """Whether so many dimensions and atoms make few enough states to take the atoms of a dimension in every order."""
    orders = [math.perm(max(rank + n - 1, 0), n) for n in range(atoms + 1)]  # of n atoms in the dimensions
    return sum(math.comb(atoms, n) * 2 ** (atoms - n) * count for n, count in enumerate(orders)) <= ALL_ORDERS


def _arcs(state: State, number: int, index: dict[State, int], atoms: int) -> Iterator[Arc]:
    """The arcs from a state, but for permutes."""
    for kind, group, reached in steps(state, atoms):
        target = index.get(reached)
        if target is not None:
            yield Arc(kind, group, number, target)


def steps(state: State, atoms: int) -> Iterator[Step]:
    """The single collectives from a state, but for permutes, with so many atoms."""
    dims, unreduced = state
    idle = set(range(atoms)) - {a for axes in dims for a in axes} - set(atoms_of(unreduced))
    for atom in sorted(idle):
        yield "replicated_to_unreduced", 1 << atom, State(dims, unreduced | 1 << atom)
        yield from (("all_slice", 1 << atom, longer) for longer in _appended(state, atom, unreduced))
    for atom in atoms_of(unreduced):
        rest = unreduced & ~(1 << atom)
        yield from (("reduce_scatter", 1 << atom, longer) for longer in _appended(state, atom, rest))
    for group in _subsets(atoms_of(unreduced)):
        yield "all_reduce", group, State(dims, unreduced & ~group)
    for dim, axes in enumerate(dims):
        if axes:
            bit = 1 << axes[-1]
            yield "all_gather", bit, state.with_dim(dim, axes[:-1])
            yield "sharded_to_unreduced", bit, state.with_dim(dim, axes[:-1], unreduced | bit)
    yield from _exchanges(state)


def _appended(state: State, atom: int, unreduced: int) -> Iterator[State]:
    for dim, axes in enumerate(state.dims):
        yield state.with_dim(dim, (*axes, atom), unreduced)


def _subsets(atoms: Sequence[int]) -> Iterator[int]:
    for count in range(1, len(atoms) + 1):
        yield from map(mask_of, combinations(atoms, count))


def _exchanges(state: State) -> Iterator[Step]:
    """All_to_alls of suffixes of dimensions to the ends of others, of several such pairs at once."""
    dims = state.dims
    singles = [
        (source, target, axes[cut:])
        for source, axes in enumerate(dims)
        for cut in range(len(axes))
        for target in range(len(dims))
        if target != source
    ]
    for count in range(1, min(MAX_PARAMS, len(dims) // 2) + 1):
        for chosen in combinations(singles, count):
            if len({dim for source, target, _ in chosen for dim in (source, target)}) == 2 * count:
                yield "all_to_all", mask_of(a for *_, moved in chosen for a in moved), _exchanged(state, chosen)


def _exchanged(state: State, chosen: Sequence[tuple[int, int, Atoms]]) -> State:
    dims = list(state.dims)
    for source, target, moved in chosen:
        dims[source] = dims[source][: -len(moved)]
        dims[target] = dims[target] + moved
    return State(tuple(dims), state.unreduced)


def _permutes(index: dict[State, int], sizes: Sequence[int]) -> list[Arc]:
    """Permutes between states with equal shard counts and equal unreduced atoms."""
    alike: dict[tuple[tuple[int, ...], int], list[State]] = {}
    for state in index:
        counts = tuple([math.prod(sizes[a] for a in axes) for axes in state.dims])
        alike.setdefault((counts, state.unreduced), []).append(state)
    return [
        Arc("collective_permute", used(a) | used(b), index[a], index[b])
        for states in alike.values()
        for a, b in permutations(states, 2)
    ]


def used(state: State) -> int:
    """The atoms of a state."""
    return mask_of(a for axes in state.dims for a in axes) | state.unreduced


# States that a space leaves out, having too many: atoms of a dimension in another order than that of the mesh.
#
# Layouts at hand may be such states. One is left and reached by a single collective from and to a state of the space,
# or another layout at hand; so a price depends on its two ends, and not on what else is at hand.

_BACK = {
    "all_gather": "all_slice",
    "all_slice": "all_gather",
    "sharded_to_unreduced": "reduce_scatter",
    "reduce_scatter": "sharded_to_unreduced",
    "all_to_all": "all_to_all",
    "collective_permute": "collective_permute",
}
"""What leads back, by what changes the atoms of dimensions; what changes no dimension leads to no state of a space."""

Rated = Callable[[Sequence[tuple[str, int, State, State]]], Rates]
"""The rates of collectives over groups of atoms from some states to others."""


class Steps(NamedTuple):
    """Single collectives between a state outside of a space and others.

    `places`: which of them have a state as their other end. `inside`: which have one that is in the space, and
    `states`, the indices of these.
    """

    places: dict[State, list[int]]
    inside: NDArray[np.intp]
    states: NDArray[np.intp]
    changes: Changes
    rates: Rates

    @classmethod
    def out_of(cls, space: Space, state: State, rated: Rated) -> Steps:
        """Those that lead from a state to others."""
        found = list(_steps_out(space, state))
        rates = rated([(kind, group, state, other) for kind, group, other in found])
        return cls._between(space, found, rates)

    @classmethod
    def into(cls, space: Space, state: State, rated: Rated) -> Steps:
        """Those that lead to a state from those of the space."""
        found = [(_BACK[kind], group, other) for kind, group, other in _steps_out(space, state) if other in space.index]
        rates = rated([(kind, group, other, state) for kind, group, other in found])
        return cls._between(space, found, rates)

    @classmethod
    def _between(cls, space: Space, found: list[Step], rates: Rates) -> Steps:
        inside = [n for n, (*_, other) in enumerate(found) if other in space.index]
        states = [space.index[found[n][-1]] for n in inside]
        places: dict[State, list[int]] = {}
        for n, (*_, other) in enumerate(found):
            places.setdefault(other, []).append(n)
        changes = Changes.of([kind for kind, *_ in found], [group for _, group, _ in found])
        return cls(places, np.array(inside, np.intp), np.array(states, np.intp), changes, rates)


def _steps_out(space: Space, state: State) -> Iterator[Step]:
    """What leads from a state that is not in a space; gathers of several atoms at once, too."""
    yield from steps(state, len(space.sizes))
    for shorter in shortened(state):
        removed = used(state) & ~used(shorter)
        if removed.bit_count() > 1:
            yield "all_gather", removed, shorter
            yield "sharded_to_unreduced", removed, State(shorter.dims, shorter.unreduced | removed)
    counts = space.counts(state)
    for other in space.index:
        if other.unreduced == state.unreduced and space.counts(other) == counts:
            yield "collective_permute", used(state) | used(other), other


def shortened(state: State) -> Iterator[State]:
    """The states whose dimensions have the first atoms of a state's: those to which gathers lead, alone."""
    prefixes = [[axes[:n] for n in range(len(axes) + 1)] for axes in state.dims]
    return (State(dims, state.unreduced) for dims in product(*prefixes))


# Shortest paths in a space of layouts under the memory cap, to several targets at once.

Matrix = NDArray[np.float64]


class Ends(NamedTuple):
    """What paths lead to: the number of shards of each, and the times to it (rows) from the states of a space from
    which a single step leads there; from itself, where it is one of them, none."""

    shards: NDArray[np.int64]
    times: Matrix


def shortest(space: Space, times: NDArray[np.float64], ends: Ends, arcs: NDArray[np.intp]) -> Matrix:
    """The least time to each of some ends (rows) from every state, over some of the arcs.

    No state on the way has fewer shards than both ends: it would be larger than either. Only where there is no such way
    may it be. So arcs join level by level, from many shards to few, and a pair's time is that at its own level.
    """
    shards, own = space.shards, ends.shards
    left = np.full_like(ends.times, np.inf)
    found = left.copy()
    fewer = np.minimum(own[:, None], shards)
    sources, targets, times = space.sources[arcs], space.targets[arcs], times[arcs]
    lowest = np.minimum(shards[sources], shards[targets])
    for level in np.unique(shards)[::-1]:
        ending = (fewer == level) & np.isfinite(ends.times)
        np.minimum(left, ends.times, out=left, where=ending)
        joined = lowest >= level
        is_new = (ending.any(0)[targets] | (lowest == level))[joined]
        _relax(left, sources[joined], targets[joined], times[joined], is_new)
        np.copyto(found, left, where=fewer == level)
    return np.where(np.isinf(found), left, found)


def _relax(
    left: Matrix, sources: NDArray[np.intp], targets: NDArray[np.intp], times: Matrix, waiting: NDArray[np.bool_]
) -> None:
    """Lowers the times in `left`, in place, until no arc (sorted by source) improves one. `waiting`: the arcs that may,
    at first; then those that lead to a state whose time has become less."""
    while waiting.any():
        leaving = sources[waiting]
        starts = np.flatnonzero(np.append(True, leaving[1:] != leaving[:-1]))
        leaving = leaving[starts]
        least = np.minimum.reduceat(left[:, targets[waiting]] + times[waiting], starts, axis=1)
        before = left[:, leaving]
        left[:, leaving] = np.minimum(before, least)
        is_changed = np.zeros(left.shape[1], bool)
        is_changed[leaving[(least < before).any(0)]] = True
        waiting = is_changed[targets]
