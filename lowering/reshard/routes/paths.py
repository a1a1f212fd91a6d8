"""Shortest paths in a space of layouts under the memory cap, to several targets at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdy_jax.lowering.reshard.routes.space import Space

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
