"""Shortest paths in a space of layouts under the memory cap, to several targets at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sdy_jax.lowering.planning.routes.space import Space

Matrix = NDArray[np.float64]


def shortest(space: Space, times: NDArray[np.float64], targets: NDArray[np.intp], arcs: NDArray[np.intp]) -> Matrix:
    """The least time to each of some states (rows) from every state, over some of the arcs.

    No state on the way has fewer shards than both ends: it would be larger than either. Only where there is no such way
    may it be. So arcs join level by level, from many shards to few, and a pair's time is that at its own level.
    """
    shards, own = space.shards, space.shards[targets]
    left = np.full((len(targets), len(shards)), np.inf)
    found = np.full_like(left, np.inf)
    fewer = np.minimum(own[:, None], shards)
    lowest = np.minimum(shards[space.sources[arcs]], shards[space.targets[arcs]])
    for level in np.unique(shards)[::-1]:
        ending = np.flatnonzero(own == level)
        left[ending, targets[ending]] = 0.0
        joined = lowest >= level
        is_new = np.isin(space.targets[arcs], targets[ending]) | (lowest == level)
        _relax(left, space, times, arcs[joined], is_new[joined])
        found = np.where(fewer == level, left, found)
    return np.where(np.isinf(found), left, found)


def _relax(
    left: Matrix, space: Space, times: NDArray[np.float64], arcs: NDArray[np.intp], waiting: NDArray[np.bool_]
) -> None:
    """Lowers the times in `left`, in place, until no arc (sorted by source) improves one. `waiting`: the arcs that may,
    at first; then those that lead to a state whose time has become less."""
    while waiting.any():
        chosen = arcs[waiting]
        sources = space.sources[chosen]
        starts = np.flatnonzero(np.diff(sources, prepend=-1))
        sources = sources[starts]
        least = np.minimum.reduceat(left[:, space.targets[chosen]] + times[chosen], starts, axis=1)
        before = left[:, sources]
        improved = (least < before).any(axis=0)
        left[:, sources] = np.minimum(before, least)
        is_changed = np.zeros(left.shape[1], bool)
        is_changed[sources[improved]] = True
        waiting = is_changed[space.targets[arcs]]
