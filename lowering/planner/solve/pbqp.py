"""The PBQP as data: nodes with costs of candidates, edges with prices of pairs; and colour refinement of it.

It knows nothing of layouts. See docs/explanation/planner.md#the-solver.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdy_jax.base.errors import InternalError

# The problem as data: a partitioned boolean quadratic problem (PBQP) has candidates with costs, and edges with prices
# of pairs of them.

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


class PBQP:
    """A PBQP: nodes 0 to n-1 in program order; exactly one candidate is chosen for each.

    Args:
        costs: per node the costs of its candidates, at least 0; infinite where one is impossible.
        edges: per pair of nodes the price of each pair of candidates: a matrix, or `Ports`.

    Edges between the same nodes are added together.

    >>> problem = PBQP([np.array([0.0, 1.0]), np.array([2.0, 0.0])])
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

    problem: PBQP
    allowed: list[Indices]

    def chosen_from(self, choice: Sequence[int]) -> list[int]:
        """The original problem's candidates for a choice of this one."""
        return [int(kept[a]) for kept, a in zip(self.allowed, choice, strict=True)]

    def choice_of(self, choice: Sequence[int]) -> list[int]:
        """The choice here for the original problem's, whose candidates must all have been kept."""
        return [kept.tolist().index(a) for kept, a in zip(self.allowed, choice, strict=True)]


def restricted(problem: PBQP, allowed: Sequence[Sequence[int] | Indices]) -> Restriction:
    """The problem with only the `allowed` candidates of each node, in the given order."""
    kept = [np.asarray(indices, np.intp) for indices in allowed]
    smaller = PBQP([values[indices] for values, indices in zip(problem.costs, kept, strict=True)])
    for edge in problem.edges:
        rows, cols, prices, weight = edge.ports
        ports = Ports(rows[kept[edge.first]], cols[kept[edge.second]], prices, weight)
        smaller.edges.append(Edge(edge.first, edge.second, ports))
    return Restriction(smaller, kept)


# Quotients of problems that repeat themselves, as the layers of a network do: one node per colour.
#
# Colour refinement: nodes have one colour if they have as many candidates, of which the start has the same one, and
# edges by the same ports to nodes of the same colours, whatever these cost. The quotient is the given problem,
# restricted to choices that are equal for nodes of one colour, with the start among them; what it costs is the same.
# See docs/explanation/planner.md#the-solver.

LARGE = 12_000
"""Nodes from which on a problem is refined. Measured (2026-11, `scripts/bench_models`): 32 layers of an 8B model,
unrolled, have 24,000; they are solved in 3.4 s along two parts of an axis, which took 21.7, and in 0.5 s along a whole
one, which took 2.3, to equal costs. Eight layers have 6,000, and take 4 s as they are."""

REFINEMENTS = 2
"""Rounds of refinement: edges up to which what is around a node tells it apart. Measured (2026-11): with 2, 3 and 4,
the nodes of those 32 layers are of 2,000, 3,000 and 4,000 colours, as more layers near the ends are apart from those
between. With 2 a choice that costs least of all was found, and with 4 one that costs 0.003 more, as larger problems are
solved less well."""

SAVES = 4
"""How many times as many nodes a problem has as there are colours, so that its quotient is solved. Guessed: what
repeats itself less is solved as it is."""


class Quotient(NamedTuple):
    """A problem with one node per colour. `colours`: per node of the given one, its node; `start`: the given one's, or
    none."""

    problem: PBQP
    colours: list[int]
    start: list[int] | None

    def lifted(self, choice: Sequence[int]) -> list[int]:
        """The given problem's choice for one of this."""
        return [choice[colour] for colour in self.colours]


def quotient(problem: PBQP, start: Sequence[int] | None) -> Quotient | None:
    """The quotient of a problem by its colours; None where it is small, or does not repeat itself."""
    count = len(problem.costs)
    if count < LARGE:
        return None
    colours = _colours(problem, start)
    if SAVES * (max(colours) + 1) > count:
        return None
    first = dict[int, int]()
    for node, colour in enumerate(colours):
        first.setdefault(colour, node)
    made = PBQP(_sums(problem, colours))
    for (a, b, *_), ports in _added(problem, colours):
        made.add(a, b, ports)
    return Quotient(made, colours, None if start is None else [start[node] for node in first.values()])


def _sums(problem: PBQP, colours: Sequence[int]) -> list[Costs]:
    """What the nodes of each colour cost together."""
    found: list[Costs | None] = [None] * (max(colours) + 1)
    for colour, costs in zip(colours, problem.costs, strict=True):
        known = found[colour]
        found[colour] = costs if known is None else known + costs
    return [costs for costs in found if costs is not None]


def _added(problem: PBQP, colours: Sequence[int]) -> Iterable[tuple[tuple[int, ...], Ports]]:
    """The edges between nodes of the same colours by the same ports, as one."""
    found = dict[tuple[int, ...], Ports]()
    for edge in problem.edges:
        rows, cols, prices, weight = edge.ports
        key = colours[edge.first], colours[edge.second], id(rows), id(cols), *prices.shape
        known = found.get(key)
        paid = prices * weight
        found[key] = Ports(rows, cols, paid if known is None else known.prices + paid)
    return found.items()


def _colours(problem: PBQP, start: Sequence[int] | None) -> list[int]:
    """The colours of nodes after some rounds of refinement, numbered by the first node of each."""
    firsts = start or [0] * len(problem.costs)
    colours = _numbered([(len(costs), first) for costs, first in zip(problem.costs, firsts, strict=True)])
    ends = _numbered([(id(edge.ports.rows), id(edge.ports.cols), edge.ports.weight) for edge in problem.edges])
    for _ in range(REFINEMENTS):
        around: list[list[tuple[int, int, bool]]] = [[] for _ in colours]
        for edge, ports in zip(problem.edges, ends, strict=True):
            around[edge.first].append((ports, colours[edge.second], True))
            around[edge.second].append((ports, colours[edge.first], False))
        colours = _numbered([(colour, *sorted(found)) for colour, found in zip(colours, around, strict=True)])
    return colours


def _numbered(keys: Sequence[Hashable]) -> list[int]:
    """The number of each key, by the first time that it occurs."""
    numbers = dict[Hashable, int]()
    return [numbers.setdefault(key, len(numbers)) for key in keys]
