"""Moves: the candidates that each node may take instead of the one it has, if not all of them.

See docs/explanation/planner.md#moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from sdy_jax.lowering.model.enumeration import Candidate
from sdy_jax.lowering.model.layout_table import LayoutTable
from sdy_jax.representation.axes import overlaps
from sdy_jax.representation.mesh import AxisRef

Layouts = NDArray[np.generic]
"""The numbers of layouts, or what is said of each, by candidate and slot."""

Allowed = Callable[[int], Layouts]
"""Per candidate and slot, whether a node may have it that has the candidate of this index: it may have those all of
whose slots say so."""


class Move:
    """What a move allows; remembered, as many nodes share their candidates.

    Args:
        allowed: of the layouts of candidates, what a node with one of them may have.
    """

    def __init__(self, allowed: Callable[[Layouts], Allowed]):
        self._allowed = allowed
        self._of_candidates: dict[int, tuple[Sequence[Candidate], Allowed]] = {}
        self._others: dict[tuple[int, int], list[int]] = {}

    def others(self, candidates: Sequence[Candidate], now: int) -> list[int]:
        """The other candidates that a node may take that has one of them."""
        key = id(candidates), now
        if key not in self._others:
            if id(candidates) not in self._of_candidates:
                layouts = np.array([candidate.layouts for candidate in candidates], dtype=np.intp).reshape(
                    len(candidates), -1
                )
                self._of_candidates[id(candidates)] = candidates, self._allowed(layouts)
            slots = self._of_candidates[id(candidates)][1](now)
            self._others[key] = [
                candidate for candidate in np.flatnonzero(slots.all(axis=1)).tolist() if candidate != now
            ]
        return self._others[key]


def everything() -> Move:
    """The move that leaves every node all candidates."""
    return Move(lambda layouts: lambda now: np.ones_like(layouts))


def moves_of(table: LayoutTable, atoms: Sequence[AxisRef]) -> list[Move]:
    """The moves that leave each node a few candidates of many: those that keep all atoms together, and per atom those
    that differ in this one only; none along one atom, where nodes have few."""
    if len(atoms) < 2:
        return []

    def along(atom: AxisRef) -> Move:
        without = _OfEach(lambda layout: table.without(layout, (atom,)))

        def allowed(layouts: Layouts) -> Allowed:
            rest = without(layouts)
            return lambda now: np.equal(rest, rest[now])

        return Move(allowed)

    is_whole = _OfEach(lambda layout: _holds_all_or_none(table, layout, atoms))

    def together(layouts: Layouts) -> Allowed:
        whole = is_whole(layouts)
        return lambda now: whole

    return [Move(together), *map(along, atoms)]


class _OfEach:
    """A function of layouts that is asked for each one once, and for arrays of them at a time."""

    _UNKNOWN = -1

    def __init__(self, function: Callable[[int], int]):
        self._function, self._known = function, np.zeros(0, np.intp)

    def __call__(self, layouts: Layouts) -> Layouts:
        more = max(int(layouts.max(initial=-1)) + 1 - len(self._known), 0)
        self._known = np.pad(self._known, (0, more), constant_values=self._UNKNOWN)
        found = self._known[layouts]
        if (found == self._UNKNOWN).any():
            for layout in np.unique(layouts[found == self._UNKNOWN]).tolist():
                self._known[layout] = self._function(layout)
            found = self._known[layouts]
        return found


def _holds_all_or_none(table: LayoutTable, layout: int, atoms: Sequence[AxisRef]) -> bool:
    """Whether all atoms are in one place of a layout, or none is anywhere."""
    sharding = table.shardings[layout]
    used = [axes for axes in (*sharding.axes, sharding.unreduced_axes) if axes]
    return not used or (len(used) == 1 and all(any(overlaps(a, b) for b in used[0]) for a in atoms))
