"""Which ops of a segment run again, at a price of holding a byte: a minimum cut.

A node per op says whether it runs again, one per value whether it is there later. What is needed is there. If an op
runs again, what it takes of its part is there; a value is there because its op runs again, which costs the op's time,
or because it is held, which costs its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from sdy_jax.ir.graph import Op, Value
from sdy_jax.lowering.recomputation.segments import Segment

_LARGEST = 1e300
"""Given by floats: times what is nothing, it is nothing."""

_INFINITE = 2**29
_FINITE = 2**28
"""What all finite capacities together are. Given: flows are 32-bit integers, and what is infinite has to be more."""


def ops_to_run_again(
    segment: Segment, seconds: Callable[[Op], float], held_bytes: Callable[[Value], float], price: float
) -> frozenset[Op]:
    """The ops that run again, where time and what is held together cost least; the fewest of them.

    Args:
        segment: the ops, and what is needed of them.
        seconds: the time of an op; infinite where it may not run again.
        held_bytes: what a value takes if it is held, where nothing holds it yet.
        price: of holding a byte, in seconds.
    """
    edges = _Edges()
    values = dict.fromkeys(segment.needed)
    for op in segment.ops:
        taken = [value for value in segment.taken(op) if segment.is_near(value, op)]
        values.update(dict.fromkeys(taken))
        edges.add(op, _SINK, seconds(op))
        for value in taken:
            edges.add(op, value, math.inf)
    made = set(segment.ops)
    for value in values:
        size = segment.needed[value] if value in segment.needed else held_bytes(value)
        edges.add(value, value.owner if value.owner in made else _SINK, price * size)
    for value in segment.needed:
        edges.add(_SOURCE, value, math.inf)
    reached = edges.reached()
    return frozenset(op for op in segment.ops if edges.numbers[op] in reached)


_SOURCE, _SINK = "source", "sink"


class _Edges:
    """A network, whose nodes are numbered as they come."""

    def __init__(self) -> None:
        self.numbers: dict[object, int] = {_SOURCE: 0, _SINK: 1}
        self._edges: dict[tuple[int, int], float] = {}

    def add(self, start: object, end: object, capacity: float) -> None:
        pair = self._number(start), self._number(end)
        self._edges[pair] = self._edges.get(pair, 0.0) + capacity

    def _number(self, node: object) -> int:
        return self.numbers.setdefault(node, len(self.numbers))

    def reached(self) -> frozenset[int]:
        """The nodes on the source's side of a minimum cut, as few as may be."""
        capacities = self._capacities()
        flow = maximum_flow(capacities, 0, 1).flow
        left = capacities - flow
        left.data = np.maximum(left.data, 0)
        left.eliminate_zeros()
        return frozenset(breadth_first_order(left, 0, return_predecessors=False).tolist())

    def _capacities(self) -> csr_array:
        """Capacities as integers."""
        given = np.array(list(self._edges.values()))
        finite = np.isfinite(given)
        scale = _FINITE / max(given[finite].sum(), math.ulp(0.0))
        whole = np.full(len(given), _INFINITE, np.int32)
        whole[finite] = np.ceil(given[finite] * min(scale, _LARGEST)).astype(np.int32)
        count = len(self.numbers)
        return csr_array(
            (whole, tuple(np.array(list(self._edges), int).reshape(-1, 2).T)), (count, count), dtype=np.int32
        )
