"""Which candidates of a node are never needed, as its own costs and its tables say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sdy_jax.lowering.solve.solver.problem import Costs, Indices
from sdy_jax.lowering.solve.solver.tables import LIMIT


def undominated(costs: Costs, excesses: Sequence[Costs]) -> Indices:
    """The candidates that no other one replaces at no more cost; of equal ones the first.

    Args:
        costs: the node's own.
        excesses: `Pool.excess` of each of its edges, the node's candidates in rows.
    """
    # `more[a, b]` bounds by how much the program can cost more with a in place of b. It obeys the triangle inequality,
    # so what is dropped has a replacement that is kept.
    more = costs[:, None] - costs[None, :]
    for excess in excesses:
        more += excess
    possible = np.flatnonzero(costs < LIMIT)
    if not len(possible):
        return possible[:0] if len(costs) == 1 else np.array([0])
    more = more[np.ix_(possible, possible)] if len(possible) < len(costs) else more
    replaces = more <= 0
    earlier = np.tri(len(possible), k=-1, dtype=bool).T
    dropped = (replaces & (~replaces.T | earlier)).any(axis=0)
    return possible[~dropped]
