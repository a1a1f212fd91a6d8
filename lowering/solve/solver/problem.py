"""The problem as data: candidates with costs, edges with prices of pairs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdy_jax.errors import InternalError

Costs = NDArray[np.float64]
Indices = NDArray[np.intp]


class Ports(NamedTuple):
    """An edge whose price depends on the candidates' *ports* only: candidate a and b cost
    `weight * prices[rows[a], cols[b]]`.

    Candidates are many, the layouts in which they take a value few: several edges may share one array of prices.
    """

    rows: Indices
    cols: Indices
    prices: Costs
    weight: float = 1.0

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), len(self.cols)

    @property
    def turned(self) -> Ports:
        """The edge as the other node sees it."""
        return Ports(self.cols, self.rows, self.prices.T, self.weight)

    def price(self, a: int, b: int) -> float:
        return self.weight * self.prices.item(self.rows.item(a), self.cols.item(b))


@dataclass(frozen=True, slots=True)
class Edge:
    """A priced pair of nodes, `first < second`."""

    first: int
    second: int
    ports: Ports


class Problem:
    """Nodes 0 to n-1 in program order; exactly one candidate is chosen for each.

    Args:
        costs: per node the costs of its candidates, at least 0; infinite where one is impossible.
        edges: per pair of nodes the price of each pair of candidates: a matrix, or `Ports`.

    Edges between the same nodes are added together.

    >>> problem = Problem([np.array([0.0, 1.0]), np.array([2.0, 0.0])])
    >>> problem.add(0, 1, np.array([[0.0, 5.0], [3.0, 0.0]]))
    >>> problem.cost([1, 1])
    1.0
    """

    def __init__(self, costs: Iterable[Costs], edges: Mapping[tuple[int, int], Costs | Ports] | None = None) -> None:
        self.costs = [np.asarray(values, np.float64) for values in costs]
        self.edges: list[Edge] = []
        for number, values in enumerate(self.costs):
            if values.ndim != 1 or not len(values):
                raise InternalError(f"node {number} needs a list of costs, one per candidate, got shape {values.shape}")
        for (i, j), prices in (edges or {}).items():
            self.add(i, j, prices)

    def add(self, i: int, j: int, prices: Costs | Ports) -> None:
        """Adds an edge: `prices[a, b]` for candidate a of node i and b of node j."""
        ports = prices if isinstance(prices, Ports) else _each_its_own(np.asarray(prices, np.float64))
        wanted = (len(self.costs[i]), len(self.costs[j]))
        if ports.shape != wanted:
            raise InternalError(f"edge {i}-{j} needs prices for {wanted} candidates, got {ports.shape}")
        if i == j:
            own = [ports.price(a, a) for a in range(wanted[0])]
            self.costs[i] = self.costs[i] + np.array(own)
        else:
            self.edges.append(Edge(i, j, ports) if i < j else Edge(j, i, ports.turned))

    def cost(self, choice: Sequence[int]) -> float:
        """The cost of one candidate per node."""
        own = [values.item(a) for values, a in zip(self.costs, choice, strict=True)]
        return math.fsum([*own, *(e.ports.price(choice[e.first], choice[e.second]) for e in self.edges)])


@cache
def identity(size: int) -> Indices:
    """0 to size-1; one array per size, which nobody changes."""
    return np.arange(size)


@cache
def zeros(size: int) -> Costs:
    """So many candidates that cost nothing; one array per size, which nobody changes."""
    return np.zeros(size)


def _each_its_own(prices: Costs) -> Ports:
    rows, cols = prices.shape
    return Ports(identity(rows), identity(cols), prices)


class Restriction(NamedTuple):
    """A problem with fewer candidates; `allowed[i]` are the candidates of node i that it kept, in its order."""

    problem: Problem
    allowed: list[Indices]

    def chosen_from(self, choice: Sequence[int]) -> list[int]:
        """The original problem's candidates for a choice of this one."""
        return [int(kept[a]) for kept, a in zip(self.allowed, choice, strict=True)]

    def choice_of(self, choice: Sequence[int]) -> list[int]:
        """The choice here for the original problem's, whose candidates must all have been kept."""
        return [kept.tolist().index(a) for kept, a in zip(self.allowed, choice, strict=True)]


def restricted(problem: Problem, allowed: Sequence[Sequence[int] | Indices]) -> Restriction:
    """The problem with only the `allowed` candidates of each node, in the given order."""
    kept = [np.asarray(indices, np.intp) for indices in allowed]
    smaller = Problem([values[indices] for values, indices in zip(problem.costs, kept, strict=True)])
    for edge in problem.edges:
        rows, cols, prices, weight = edge.ports
        ports = Ports(rows[kept[edge.first]], cols[kept[edge.second]], prices, weight)
        smaller.edges.append(Edge(edge.first, edge.second, ports))
    return Restriction(smaller, kept)
