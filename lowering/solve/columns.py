"""The layouts that ports of nodes may have, where each node may only have some of its candidates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdy_jax.lowering.model.enumeration import Candidate
from sdy_jax.lowering.model.nodes import Port


class Column(NamedTuple):
    """The layouts that a port may have, in order, and for each candidate of its node the index of its own."""

    layouts: list[int]
    of_candidate: NDArray[np.intp]

    @classmethod
    def of(cls, candidates: Sequence[Candidate], allowed: Iterable[int], slot: int) -> Column:
        """The column of a slot of a node that may have these of its candidates."""
        each = [candidates[candidate].layouts[slot] for candidate in allowed]
        index = {layout: i for i, layout in enumerate(sorted(set(each)))}
        return cls(list(index), np.array([index[layout] for layout in each]))


def different(uses: Iterable[Port], column: Callable[[Port], Column]) -> list[Port]:
    """The uses of a value, one for all slots of a node that take it in equal layouts."""
    found: dict[object, Port] = {}
    for use in uses:
        layouts, of_candidate = column(use)
        found.setdefault((use.node, tuple(layouts), of_candidate.tobytes()), use)
    return list(found.values())
