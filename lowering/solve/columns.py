"""The layouts that ports of nodes may have, where each node may only have some of its ways."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdy_jax.lowering.model.enumeration import Way
from sdy_jax.lowering.model.nodes import Port


class Column(NamedTuple):
    """The layouts that a port may have, in order, and for each way of its node the index of its own."""

    layouts: list[int]
    of_way: NDArray[np.intp]

    @classmethod
    def of(cls, ways: Sequence[Way], allowed: Iterable[int], slot: int) -> Column:
        """The column of a slot of a node that may have these of its ways."""
        each = [ways[way].layouts[slot] for way in allowed]
        index = {layout: i for i, layout in enumerate(sorted(set(each)))}
        return cls(list(index), np.array([index[layout] for layout in each]))


def different(uses: Iterable[Port], column: Callable[[Port], Column]) -> list[Port]:
    """The uses of a value, one for all slots of a node that take it in equal layouts."""
    found: dict[object, Port] = {}
    for use in uses:
        layouts, of_way = column(use)
        found.setdefault((use.node, tuple(layouts), of_way.tobytes()), use)
    return list(found.values())
