"""The cost graph and its contraction: nodes of few edges and dominated candidates are removed exactly."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sdy_jax.lowering.planner.solve.cost_tables import IMPOSSIBLE, LIMIT, Choices, CostTable, Pool, Vector, content
from sdy_jax.lowering.planner.solve.pbqp import PBQP, Costs, Edge, Indices

# The graph under contraction: vectors per node, tables per edge, and what has to be decided when all else is.


class Kept(NamedTuple):
    """A node lost candidates: undone by counting from all of them again."""

    node: int
    kept: Choices


class Best(NamedTuple):
    """A node's candidate is the cheapest beside those of its neighbours, the first on ties."""

    node: int
    own: Vector
    tables: tuple[tuple[int, CostTable], ...]


class BestBeside(NamedTuple):
    """As `Best`, where neighbours count together: `arrays` have an axis for each node in their scope."""

    node: int
    own: Vector
    arrays: tuple[tuple[tuple[int, ...], Costs], ...]


Step = Kept | Best | BestBeside


class CostGraph:
    """A problem in whole units of cost, with normalised vectors and tables.

    Invariant: `constant` plus the vectors and tables of what is left is, at its optimum, the problem's optimum; `steps`
    in reverse order lead from a choice for what is left to one for all nodes, at equal cost.
    """

    def __init__(self, pool: Pool):
        self.pool = pool
        self.constant = 0.0
        self.vectors: list[Vector] = []
        self.tables: list[dict[int, CostTable]] = []
        self.left: list[bool] = []
        self.steps: list[Step] = []

    def add_node(self, vector: Vector, least: float) -> None:
        """Adds a node with these normalised costs, from which `least` was subtracted."""
        self.vectors.append(vector)
        self.tables.append({})
        self.left.append(True)
        self.constant += least

    def neighbours(self, node: int) -> list[int]:
        return sorted(self.tables[node])

    def add_cost(self, node: int, vector: Vector) -> None:
        if vector.is_zero:
            return
        self.vectors[node], least = self.pool.total(self.vectors[node], vector)
        self.constant += least

    def add_edge(self, i: int, j: int, table: CostTable) -> None:
        """Adds a table with the candidates of i in rows."""
        if j in self.tables[i]:
            table = self.pool.joined(self.tables[i][j], table)
        self.set_edge(i, j, table)

    def set_edge(self, i: int, j: int, table: CostTable) -> None:
        rows, cols, rest = self.pool.split(table)
        self.add_cost(i, rows)
        self.add_cost(j, cols)
        if rest is not None:
            self.tables[i][j], self.tables[j][i] = rest, self.pool.turned(rest)
        elif j in self.tables[i]:
            del self.tables[i][j], self.tables[j][i]

    def keep(self, kept: Mapping[int, Choices]) -> None:
        """Drops the other candidates of some nodes."""
        for node, choices in kept.items():
            self.steps.append(Kept(node, choices))
            self.vectors[node], least = self.pool.normal(self.pool.picked(self.vectors[node], choices).values)
            self.constant += least
        for node, choices in kept.items():
            for other in self.neighbours(node):
                if other not in kept:
                    self.set_edge(node, other, self.pool.rows_of(self.tables[node][other], choices))
                elif node < other:
                    self.set_edge(node, other, self.pool.part_of(self.tables[node][other], choices, kept[other]))

    def remove(self, node: int) -> None:
        for other in self.neighbours(node):
            del self.tables[other][node]
        self.tables[node] = {}
        self.left[node] = False

    def remaining(self) -> list[int]:
        return [node for node, left in enumerate(self.left) if left]

    def undone(self, choice: dict[int, int]) -> dict[int, int]:
        """A choice for all nodes, from one for those that are left."""
        chosen, known = dict(choice), dict[object, int]()
        for step in reversed(self.steps):
            match step:
                case Kept(node, kept):
                    chosen[node] = int(kept.indices[chosen[node]])
                case Best(node, own, tables):
                    key = own, tuple([(table, chosen[other]) for other, table in tables])
                    if key not in known:
                        costs = sum((table.column(chosen[other]) for other, table in tables), own.values)
                        known[key] = int(np.argmin(costs))
                    chosen[node] = known[key]
                case BestBeside(node, own, arrays):
                    parts = (array[_index(scope, node, chosen)] for scope, array in arrays)
                    chosen[node] = int(np.argmin(sum(parts, own.values)))
        return chosen


def _index(scope: Sequence[int], node: int, chosen: dict[int, int]) -> tuple[int | slice, ...]:
    return tuple([slice(None) if other == node else chosen[other] for other in scope])


def graph_of(problem: PBQP, unit: float, most: float, order: Sequence[Choices]) -> tuple[CostGraph, float]:
    """The graph of a problem, and by how much rounding may have raised costs, in units.

    Args:
        problem: the problem.
        unit: what costs are rounded to multiples of.
        most: costs above are impossible.
        order: per node its candidates, in the order in which ties are broken.
    """
    loader = _Loader(unit, most)
    graph = CostGraph(loader.pool)
    for values, candidates in zip(problem.costs, order, strict=True):
        graph.add_node(*loader.vector(values, candidates))
    for edge in problem.edges:
        table = loader.table(edge, order[edge.first], order[edge.second])
        graph.add_edge(edge.first, edge.second, table)
    return graph, loader.raised


class _Loader:
    """Rounds costs, equal ones once. `raised`: by how much that may have raised a choice's cost, in units."""

    def __init__(self, unit: float, most: float):
        self.pool, self.raised = Pool(), 0.0
        self._unit, self._most = unit, most
        self._vectors: dict[object, tuple[tuple[Vector, float], float]] = {}
        self._tables: dict[object, tuple[CostTable, float]] = {}

    def vector(self, values: Costs, candidates: Choices) -> tuple[Vector, float]:
        key = id(values), candidates  # equal nodes share arrays, as a rule, which the problem keeps alive
        if key not in self._vectors:
            self._vectors[key] = self._vector(values, candidates)
        found, raised = self._vectors[key]
        self.raised += raised
        return found

    def _vector(self, values: Costs, candidates: Choices) -> tuple[tuple[Vector, float], float]:
        rounded, raised = self._rounded(values)
        key = ("loaded", values.tobytes(), candidates)
        return self.pool.once(key, lambda: self.pool.normal(rounded[candidates.indices])), raised

    def table(self, edge: Edge, first: Choices, second: Choices) -> CostTable:
        rows, cols, prices, weight = edge.ports
        key = id(rows), id(cols), id(prices), weight, first, second
        if key not in self._tables:
            self._tables[key] = self._table(edge, first, second)
        found, raised = self._tables[key]
        self.raised += raised
        return found

    def _table(self, edge: Edge, first: Choices, second: Choices) -> tuple[CostTable, float]:
        rows, cols, prices, weight = edge.ports
        rounded, raised = self._rounded(prices, weight)
        key = ("loaded", id(rounded), rows.tobytes(), cols.tobytes(), first, second)
        return self.pool.once(key, lambda: self.pool.table(rounded, rows[first.indices], cols[second.indices])), raised

    def _rounded(self, values: Costs, weight: float = 1.0) -> tuple[Costs, float]:
        key = ("rounded", content(values), weight)
        return self.pool.once(key, lambda: self._round(values * weight))

    def _round(self, values: Costs) -> tuple[Costs, float]:
        possible = np.isfinite(values) & (values <= self._most)
        units = np.where(possible, values / self._unit, 0.0)
        whole = np.rint(units)
        self.pool.has_impossible |= not possible.all()
        return np.where(possible, whole, IMPOSSIBLE), float((whole - units).max(initial=0.0))


# Which candidates of a node are never needed, as its own costs and its tables say.


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


# Contraction: what is removed exactly, until nothing more can be.

ELIMINATED = 2
"""Nodes with at most that many neighbours are minimised out. Given: with two neighbours no table with more than two
dimensions arises; with three it does, which elimination (`solver.py`) knows and this does not."""


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
