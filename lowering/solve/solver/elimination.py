"""Exact bucket elimination: nodes are minimised out one by one, the one with the least table first."""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from sdy_jax.lowering.solve.solver.graph import Beside, CostGraph, Step
from sdy_jax.lowering.solve.solver.problem import Costs
from sdy_jax.lowering.solve.solver.tables import IMPOSSIBLE, LIMIT, Vector, content, parts

MOST_ENTRIES = 60_000_000
"""Entries of all different tables together, all of which are kept: half a gigabyte. Measured (2026-11): sixteen layers
of 400 nodes had 15 million in random graphs with equal layers, 33 million with different ones. With fewer, messages
decide, which prove less; with more, planning takes the memory of the host."""


class Order(NamedTuple):
    """Nodes in the order in which they are minimised out, and the entries of the largest table that this makes."""

    nodes: list[int]
    largest: int


def elimination_order(graph: CostGraph, limit: int) -> Order:
    """The order by least table first, ties by node number; it ends where the least table is above the limit."""
    around = {node: set(graph.tables[node]) for node in graph.remaining()}
    sizes = [len(vector) for vector in graph.vectors]
    entries = {node: math.prod([sizes[other] for other in others]) for node, others in around.items()}
    heap = sorted((size, node) for node, size in entries.items())
    nodes: list[int] = []
    largest = 0
    while heap:
        size, node = heapq.heappop(heap)
        if node not in around or entries[node] != size:
            continue
        largest = max(largest, size)
        if size > limit:
            break
        nodes.append(node)
        others = around.pop(node)
        for other in sorted(others):
            around[other] |= others
            around[other] -= {node, other}
            entries[other] = math.prod([sizes[k] for k in around[other]])
            heapq.heappush(heap, (entries[other], other))
    return Order(nodes, largest)


class _Factor(NamedTuple):
    """Costs that depend on several nodes together, in ascending order."""

    scope: tuple[int, ...]
    costs: _Array


class _Array:
    """A normalised array of costs, stored once per content."""

    __slots__ = ("values",)

    def __init__(self, values: Costs):
        self.values = values


def eliminate(graph: CostGraph, nodes: Sequence[int]) -> bool:
    """Minimises out all nodes in this order; False, and the graph as it was, where the tables are too many."""
    elimination = _Elimination(graph)
    for node in nodes:
        elimination.minimise(node)
        if elimination.entries > MOST_ENTRIES:
            return False
    for node in nodes:
        graph.remove(node)
    graph.steps += elimination.steps
    graph.constant += elimination.constant
    return True


class _Elimination:
    """Factors by node; a factor is listed with each node of its scope. `entries`: of all different factors so far."""

    def __init__(self, graph: CostGraph):
        self._pool, self._vectors = graph.pool, dict(enumerate(graph.vectors))
        self.steps: list[Step] = []
        self.constant, self.entries = 0.0, 0
        self._arrays: dict[Hashable, _Array] = {}
        self._factors: dict[int, dict[tuple[int, ...], list[_Array]]] = {node: {} for node in graph.remaining()}
        for node in graph.remaining():
            for other in graph.neighbours(node):
                if node < other:
                    dense = np.ascontiguousarray(graph.tables[node][other].dense())
                    self._add((node, other), self._array(dense))

    def _array(self, values: Costs) -> _Array:
        key = content(values)
        found = self._arrays.get(key)
        if found is None:
            found = self._arrays[key] = _Array(values)
            self.entries += values.size
        return found

    def _add(self, scope: tuple[int, ...], array: _Array) -> None:
        for node in scope:
            self._factors[node].setdefault(scope, []).append(array)

    def minimise(self, node: int) -> None:
        """Replaces the factors of a node by one of its neighbours."""
        own, found = self._vectors[node], self._factors.pop(node)
        factors = [_Factor(scope, array) for scope in sorted(found) for array in found[scope]]
        others = tuple(sorted({k for scope in found for k in scope if k != node}))
        for other in others:
            for scope in found:
                self._factors[other].pop(scope, None)
        self.steps.append(Beside(node, own, tuple((f.scope, f.costs.values) for f in factors)))
        if not others:
            self.constant += float(own.values.min())
            return
        # Equal layers differ in the numbers of their nodes only.
        places = tuple(tuple(-1 if k == node else others.index(k) for k in f.scope) for f in factors)
        key = ("bucket", own, places, *(f.costs for f in factors))
        array, least = self._pool.once(key, lambda: self._least(own, places, [f.costs.values for f in factors]))
        self.constant += least
        if len(others) == 1:
            self._vectors[others[0]], least = self._pool.total(
                self._vectors[others[0]], self._pool.vector(array.values)
            )
            self.constant += least
        elif array.values.any():
            self._add(others, array)

    def _least(self, own: Vector, places: Sequence[tuple[int, ...]], arrays: Sequence[Costs]) -> tuple[_Array, float]:
        """The factor that a node leaves, normalised, and what was subtracted."""
        rank = 1 + max(place for scope in places for place in scope)
        aligned = [_aligned(array, scope, rank) for scope, array in zip(places, arrays, strict=True)]
        shape = np.broadcast_shapes(*(array.shape[1:] for array in aligned))
        least: Costs = np.full(shape, IMPOSSIBLE)
        aligned.append(own.values.reshape(-1, *(1,) * rank))
        for some in parts(len(own), math.prod(shape)):
            np.minimum(least, np.minimum.reduce(_sum([array[some] for array in aligned]), axis=0), out=least)
        lowest = float(least.min())
        return self._array(np.where(least >= LIMIT, IMPOSSIBLE, least - lowest)), lowest


def _sum(arrays: Sequence[Costs]) -> Costs:
    """The sum, of small arrays first."""
    total, *others = sorted(arrays, key=lambda array: array.size)
    for array in others:
        total = total + array
    return total


def _aligned(array: Costs, scope: tuple[int, ...], rank: int) -> Costs:
    """The array with the eliminated node's axis (-1 in the scope) first, then an axis per other node."""
    axis = scope.index(-1)
    moved = np.moveaxis(array, axis, 0)
    lengths = dict(zip((k for k in scope if k >= 0), moved.shape[1:], strict=True))
    return moved.reshape(len(moved), *(lengths.get(k, 1) for k in range(rank)))
