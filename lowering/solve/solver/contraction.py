"""Contraction: what is removed exactly, until nothing more can be."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from sdy_jax.lowering.solve.solver.dominance import undominated
from sdy_jax.lowering.solve.solver.graph import Best, CostGraph
from sdy_jax.lowering.solve.solver.problem import Indices

ELIMINATED = 2
"""Nodes with at most that many neighbours are minimised out. Given: with two neighbours no table with more than two
dimensions arises; with three it does, which `elimination.py` knows and this does not."""


def contract(graph: CostGraph, nodes: Iterable[int], most: float = math.inf, most_sums: float = math.inf) -> None:
    """Removes nodes and candidates, each step keeping an optimum, until no step applies.

    Nodes with few neighbours are minimised out first, where that takes at most `most_sums` sums. Of others the
    candidates that are never needed go, where these are at most `most`. A node is looked at again when its costs or
    edges change.
    """
    work = _Worklist(graph, nodes)
    while (node := work.next()) is not None:
        if len(graph.tables[node]) <= ELIMINATED:
            if _sums(graph, node) <= most_sums:
                work.add(_eliminate(graph, node))
        elif len(graph.vectors[node]) <= most:
            work.add(_reduce(graph, node))


class _Worklist:
    """Nodes to look at, in order of arrival; those with few neighbours first."""

    def __init__(self, graph: CostGraph, nodes: Iterable[int]):
        self._graph, self._waiting = graph, [False] * len(graph.vectors)
        self._few: deque[int] = deque()
        self._many: deque[int] = deque()
        self.add(nodes)

    def add(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            if len(self._graph.tables[node]) <= ELIMINATED:
                self._few.append(node)
            elif not self._waiting[node]:
                self._many.append(node)
                self._waiting[node] = True

    def next(self) -> int | None:
        while self._few or self._many:
            node = self._few.popleft() if self._few else self._many.popleft()
            self._waiting[node] = False
            if self._graph.left[node]:
                return node
        return None


def _sums(graph: CostGraph, node: int) -> int:
    """How many sums it takes to minimise a node out."""
    ports: list[int] = [table.core.shape[1] for table in graph.tables[node].values()]
    return len(graph.vectors[node]) * math.prod(ports)


def _eliminate(graph: CostGraph, node: int) -> list[int]:
    others, pool, own = graph.neighbours(node), graph.pool, graph.vectors[node]
    tables = [graph.tables[node][other] for other in others]
    graph.steps.append(Best(node, own, tuple(zip(others, tables, strict=True))))
    graph.remove(node)
    match others:
        case [other]:
            graph.add_cost(other, pool.minimised(own, tables[0]))
        case [first, second]:
            graph.add_edge(first, second, pool.minimised_out(own, *tables))
    return others


def _reduce(graph: CostGraph, node: int) -> list[int]:
    others, pool, own = graph.neighbours(node), graph.pool, graph.vectors[node]
    tables = [graph.tables[node][other] for other in others]

    def found() -> Indices:
        return undominated(own.values, [pool.excess(table) for table in tables])

    kept = pool.once(("undominated", own, *tables), found)
    if len(kept) == len(own):
        return []
    graph.keep({node: pool.choices(kept)})
    return [node, *others]
