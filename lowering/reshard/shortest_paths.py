"""The times of collectives between the layouts of a class, and the shortest paths by them, to several targets at once.

See docs/explanation/planner.md#prices-of-all-pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdy_jax.lowering.reshard.layout_graph import ArcKind, Arcs, Bools, Ints, Space
from sdy_jax.lowering.reshard.problem import atoms_of
from sdy_jax.lowering.targets.rates import IN_A_BUCKET, LastCut, Link, Rate, rate, wire_bytes

Matrix = NDArray[np.float64]

# Times of collectives.


class Lanes(NamedTuple):
    """The last dimension of a class: its index, the shard counts whose blocks are no whole tiles, and the rank of its
    arrays."""

    dim: int
    narrow: frozenset[int]
    rank: int

    def cuts(self, before: Ints, after: Ints) -> Ints:
        """A number for what is done to the last dimension, from some shard counts (rows) to others."""
        have, want = before[:, self.dim], after[:, self.dim]
        narrow = np.isin(np.maximum(have, want), list(self.narrow))
        return np.where(have == want, 0, 1 + 2 * narrow + (have > want))

    def cut(self, number: int) -> LastCut | None:
        """What a number stands for."""
        return LastCut((number - 1) // 2, self.rank, bool((number - 1) % 2)) if number else None


_CUTS = 5
"""Given: how many numbers `Lanes.cuts` has."""


class Rates(NamedTuple):
    """Per arc, its seconds for each byte of the whole tensor, and those that it takes whatever the size.

    `are_shared`: as `Rate.is_shared`.
    """

    sending: Matrix
    fixed: Matrix
    are_shared: Bools

    @property
    def are_linear(self) -> bool:
        """Whether times are proportional to bytes."""
        return not self.fixed.any()

    def times(self, total: float) -> Matrix:
        """Per arc, the time that it takes for a tensor of `total` bytes."""
        sending = self.sending * total
        if self.are_linear:
            return sending
        return sending + np.minimum(self.fixed, np.where(self.are_shared, IN_A_BUCKET * sending, np.inf))


class RouteNetwork(NamedTuple):
    """What collectives run over: a link per atom, the kinds that are combined, and lanes where these matter."""

    links: tuple[Link, ...]
    combines: tuple[str, ...]
    lanes: Lanes | None

    def rates(self, arcs: Arcs, before: Ints, after: Ints) -> Rates:
        """The rates of arcs, which lead from some shard counts (rows) to others."""
        cuts = self.lanes.cuts(before, after) if self.lanes else 0
        groups = 1 << len(self.links)
        keys, which = np.unique((arcs.kinds * groups + arcs.groups) * _CUTS + cuts, return_inverse=True)
        found = [
            self._rate(ArcKind(key // _CUTS // groups), key // _CUTS % groups, key % _CUTS) for key in keys.tolist()
        ]
        sending = np.array([sent * each.per_byte for sent, each in found])
        fixed = np.array([each.fixed if sent else 0.0 for sent, each in found])
        are_shared = np.array([each.is_shared for _, each in found], bool)
        return Rates(sending[which] / before.prod(1), fixed[which], are_shared[which])

    def _rate(self, kind: ArcKind, group: int, cut: int) -> tuple[float, Rate]:
        """What one collective sends of a block, and its rate."""
        if kind is ArcKind.nothing:
            return 0.0, Rate(0.0, 0.0)
        links = [self.links[a] for a in atoms_of(group)]
        sent = wire_bytes(kind.name, math.prod([link.size for link in links]), 1.0, 0.0)
        return sent, rate(kind.name, links, self.combines, self.lanes.cut(cut) if self.lanes else None)


# Shortest paths in a space of layouts under the memory cap.


class Ends(NamedTuple):
    """What paths lead to: of each end the shards, the atoms of its dimensions and the unreduced ones, and the times to
    it (columns) from the states of a space (rows) from which a single step leads there; from itself, if it is one of
    them, none."""

    shards: Ints
    wanted: Ints
    unreduced: Ints
    times: Matrix

    def parts(self, most: int) -> Iterator[tuple[Ints, Ends]]:
        """The indices of some, and these: such that use about the same arcs, as many as there may be."""
        order = np.lexsort((self.unreduced, self.wanted))
        for start in range(0, len(order), most):
            some = order[start : start + most]
            yield some, Ends(self.shards[some], self.wanted[some], self.unreduced[some], self.times[:, some])


_AT_ONCE, _PIECE = 32, 8192
"""The targets to which shortest paths are found at once, and the arcs that are looked at together. Measured (2026-11,
five atoms in four dimensions): two megabytes of times stay in a cache; 5.1 s with 16 and all arcs, 3.1 with these."""


def shortest(space: Space, times: Matrix, ends: Ends) -> Matrix:
    """The least time from every state (rows) to each of some ends (columns), over arcs that take some times."""
    found = np.empty_like(ends.times)
    for some, part in ends.parts(_AT_ONCE):
        found[:, some] = _shortest(space, times, part)
    return found


def _shortest(space: Space, times: Matrix, ends: Ends) -> Matrix:
    """The least times to a few ends.

    No state on the way has fewer shards than both ends: it would be larger than either. Only where there is no such way
    may it be. So arcs join level by level, from many shards to few, and a pair's time is that at its own level.
    """
    arcs, times = _usable(space, times, ends)
    shards, states = space.shards, len(ends.times)
    left = np.full((len(shards), len(ends.shards)), np.inf)
    found = left[:states].copy()
    fewer = np.minimum(ends.shards, shards[:states, None])
    are_last = np.isfinite(ends.times)
    lowest = np.minimum(shards[arcs.sources], shards[arcs.targets])
    for level in np.unique(shards)[::-1]:
        at_level = fewer == level
        ending = at_level & are_last
        np.minimum(left[:states], ends.times, out=left[:states], where=ending)
        joined = np.flatnonzero(lowest >= level)
        among = arcs.where(joined)
        is_new = (lowest[joined] == level) | np.isin(among.targets, np.flatnonzero(ending.any(1)))
        _relax(left, among, joined, times, is_new)
        np.copyto(found, left[:states], where=at_level)
    return np.where(np.isinf(found), left[:states], found)


def _usable(space: Space, times: Matrix, ends: Ends) -> tuple[Arcs, Matrix]:
    """The arcs that lead towards any of some ends, and their times (rows) towards each of them (columns)."""
    pairs, which = np.unique(np.stack([ends.wanted, ends.unreduced]), axis=1, return_inverse=True)
    towards = space.changes.are_towards(*pairs)
    some = np.flatnonzero(towards.any(1))
    usable = np.where(towards[some].take(which.ravel(), 1), times[some, None], np.inf)
    return space.arcs.where(some), np.ascontiguousarray(usable)


def _relax(left: Matrix, arcs: Arcs, rows: Ints, times: Matrix, is_new: Bools) -> None:
    """Lowers the times in `left`, in place, until no arc improves one; `rows` has those of the arcs in `times`.

    Looked at are new arcs, then those to a node whose time has become less since; piece by piece, so that what is at
    hand stays in a cache, and so that a piece has the times that the ones before have found.
    """
    changed = np.zeros(len(left), np.int64)  # when the time of a node became less, in pieces looked at
    pieces = _pieces(arcs.sources)
    seen = [0] * len(pieces)
    now, is_done = 0, False
    while not is_done:
        is_done = True
        for n, piece in enumerate(pieces):
            waiting = changed[arcs.targets[piece]] > seen[n]
            if not seen[n]:
                waiting |= is_new[piece]
            now += 1
            seen[n] = now
            some = np.flatnonzero(waiting) + piece.start
            if len(some):
                less = _lower(left, arcs.sources[some], arcs.targets[some], times.take(rows[some], 0))
                changed[less] = now + 1
                is_done &= not len(less)


def _lower(left: Matrix, sources: Ints, targets: Ints, onward: Matrix) -> Ints:
    """Lowers the times of the sources of some arcs, in place; returns the sources whose times are less now."""
    starts = np.append(0, np.flatnonzero(sources[1:] != sources[:-1]) + 1)
    leaving = sources[starts]
    onward += left.take(targets, 0)
    least = np.minimum.reduceat(onward, starts, axis=0)
    before = left.take(leaving, 0)
    are_less = (least < before).any(1)
    left[leaving[are_less]] = np.minimum(before[are_less], least[are_less])
    return leaving[are_less]


def _pieces(sources: Ints) -> list[slice]:
    """Pieces of about `_PIECE` arcs, such that all arcs of a source are in one."""
    starts = np.append(np.flatnonzero(sources[1:] != sources[:-1]) + 1, len(sources))
    cuts = starts[np.searchsorted(starts, np.arange(_PIECE, len(sources), _PIECE))]
    return [slice(a, b) for a, b in pairwise(dict.fromkeys([0, *cuts.tolist(), len(sources)]))]
