"""What can be said about one node from its own costs and its tables: which candidates are never needed, and whether
it follows a neighbour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sdy_jax.lowering.planning.solver.problem import Costs, Indices
from sdy_jax.lowering.planning.solver.tables import LIMIT, Table

FOLLOWING = 1 << 22
"""Comparisons (pairs of candidates, per port of the neighbour) within which it is tried whether a node follows."""


class Reduction(NamedTuple):
    """`kept`: the candidates needed, None for all. `followed`: the index of the neighbour that the node follows, and
    its candidate per candidate of that neighbour."""

    kept: Indices | None = None
    followed: tuple[int, Indices] | None = None


def reduction(costs: Costs, tables: Sequence[Table], excesses: Sequence[Costs]) -> Reduction:
    """The first reduction that applies to a node.

    Args:
        costs: the node's own.
        tables: its edges, the node's candidates in rows.
        excesses: `Pool.excess` of each.
    """
    more = costs[:, None] - costs[None, :]
    for excess in excesses:
        more += excess
    kept = _undominated(costs, more)
    if len(kept) < len(costs):
        return Reduction(kept=kept)
    for index, (table, excess) in enumerate(zip(tables, excesses, strict=True)):
        follower = _follower(more - excess, table)
        if follower is not None:
            return Reduction(followed=(index, follower))
    return Reduction()


def _undominated(costs: Costs, more: Costs) -> Indices:
    """The candidates that no other one replaces at no more cost; of equal ones the first.

    `more[a, b]` bounds by how much the program can cost more with a in place of b. It obeys the triangle inequality, so
    what is dropped has a replacement that is kept.
    """
    possible = np.flatnonzero(costs < LIMIT)
    if not len(possible):
        return possible[:0] if len(costs) == 1 else np.array([0])
    more = more[np.ix_(possible, possible)] if len(possible) < len(costs) else more
    replaces = more <= 0
    earlier = np.tri(len(possible), k=-1, dtype=bool).T
    dropped = (replaces & (~replaces.T | earlier)).any(axis=0)
    return possible[~dropped]


def _follower(more: Costs, table: Table) -> Indices | None:
    """Per candidate of the neighbour, one that is best whatever the other neighbours do; None if one has none.

    `more`: as above, without this neighbour.
    """
    core = table.core
    if len(more) ** 2 * core.shape[1] > FOLLOWING:
        return None
    rows = table.by_row(core)
    worst = np.empty(rows.shape)
    for a, own in enumerate(more):
        np.max(own[:, None] - rows, axis=0, out=worst[a])
    best = worst + rows <= 0
    if not best.any(axis=0).all():
        return None
    return table.by_col(best.argmax(axis=0))
