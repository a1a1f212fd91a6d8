"""States that a space leaves out, having too many: atoms of a dimension in another order than that of the mesh.

Layouts at hand may be such states. One is left and reached by a single collective from and to a state of the space, or
another layout at hand; so a price depends on its two ends, and not on what else is at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdy_jax.lowering.reshard.routes.space import Changes, Rates, Space, Step, steps, used
from sdy_jax.lowering.reshard.states import State

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
