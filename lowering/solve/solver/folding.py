"""Problems that repeat themselves, as the layers of a network do, with one node in place of all that are alike.

Nodes are alike if what is around them is, whatever it costs: as many candidates, of which the start has the same one,
and edges by the same ports to nodes that are alike in turn. The folded problem is the given one, restricted to choices
that are equal for nodes that are alike, with the start among them; what it costs is the same.
See docs/explanation/planner.md#the-solver.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from sdy_jax.lowering.solve.solver.problem import Costs, Ports, Problem

LARGE = 12_000
"""Nodes from which on a problem is folded. Measured (2026-11, `scripts/bench_models`): 32 layers of an 8B model,
unrolled, have 24,000; they are solved in 3.4 s along two parts of an axis, which took 21.7, and in 0.5 s along a whole
one, which took 2.3, to equal costs. Eight layers have 6,000, and take 4 s as they are."""

SURROUNDINGS = 2
"""Edges up to which what is around a node tells it apart. Measured (2026-11): with 2, 3 and 4, the nodes of those 32
layers are of 2,000, 3,000 and 4,000 kinds, as more layers near the ends are apart from those between. With 2 a choice
that costs least of all was found, and with 4 one that costs 0.003 more, as larger problems are solved less well."""

SAVES = 4
"""How many times as many nodes a problem has as there are kinds, so that it is folded. Guessed: what repeats itself
less is solved as it is."""


class Folded(NamedTuple):
    """A folded problem. `kinds`: per node of the given one, its node; `start`: the given one's, or none."""

    problem: Problem
    kinds: list[int]
    start: list[int] | None

    def unfolded(self, choice: Sequence[int]) -> list[int]:
        """The given problem's choice for one of this."""
        return [choice[kind] for kind in self.kinds]


def folded(problem: Problem, start: Sequence[int] | None) -> Folded | None:
    """A problem with one node per kind; None where it is small, or does not repeat itself."""
    count = len(problem.costs)
    if count < LARGE:
        return None
    kinds = _kinds(problem, start)
    if SAVES * (max(kinds) + 1) > count:
        return None
    first = dict[int, int]()
    for node, kind in enumerate(kinds):
        first.setdefault(kind, node)
    made = Problem(_sums(problem, kinds))
    for (a, b, *_), ports in _added(problem, kinds):
        made.add(a, b, ports)
    return Folded(made, kinds, None if start is None else [start[node] for node in first.values()])


def _sums(problem: Problem, kinds: Sequence[int]) -> list[Costs]:
    """What the nodes of each kind cost together."""
    found: list[Costs | None] = [None] * (max(kinds) + 1)
    for kind, costs in zip(kinds, problem.costs, strict=True):
        known = found[kind]
        found[kind] = costs if known is None else known + costs
    return [costs for costs in found if costs is not None]


def _added(problem: Problem, kinds: Sequence[int]) -> Iterable[tuple[tuple[int, ...], Ports]]:
    """The edges between nodes of the same kinds by the same ports, as one."""
    found = dict[tuple[int, ...], Ports]()
    for edge in problem.edges:
        rows, cols, prices, weight = edge.ports
        key = kinds[edge.first], kinds[edge.second], id(rows), id(cols), *prices.shape
        known = found.get(key)
        paid = prices * weight
        found[key] = Ports(rows, cols, paid if known is None else known.prices + paid)
    return found.items()


def _kinds(problem: Problem, start: Sequence[int] | None) -> list[int]:
    """The kinds of nodes, numbered by the first of each."""
    firsts = start or [0] * len(problem.costs)
    kinds = _numbered([(len(costs), first) for costs, first in zip(problem.costs, firsts, strict=True)])
    ends = _numbered([(id(edge.ports.rows), id(edge.ports.cols), edge.ports.weight) for edge in problem.edges])
    for _ in range(SURROUNDINGS):
        around: list[list[tuple[int, int, bool]]] = [[] for _ in kinds]
        for edge, ports in zip(problem.edges, ends, strict=True):
            around[edge.first].append((ports, kinds[edge.second], True))
            around[edge.second].append((ports, kinds[edge.first], False))
        kinds = _numbered([(kind, *sorted(found)) for kind, found in zip(kinds, around, strict=True)])
    return kinds


def _numbered(keys: Sequence[Hashable]) -> list[int]:
    """The number of each key, by the first time that it occurs."""
    numbers = dict[Hashable, int]()
    return [numbers.setdefault(key, len(numbers)) for key in keys]
