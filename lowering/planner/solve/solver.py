"""The PBQP solver: contraction, then exact bucket elimination, or messages where tables would be too large.

See docs/explanation/planner.md#the-solver.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np

from sdy_jax.lowering.planner.solve.contraction import ELIMINATED, BestBeside, CostGraph, Step, contract, graph_of
from sdy_jax.lowering.planner.solve.cost_tables import IMPOSSIBLE, LIMIT, Choices, Vector, content, parts
from sdy_jax.lowering.planner.solve.pbqp import PBQP, Costs, quotient, restricted
from sdy_jax.lowering.planner.solve.trws import GAP, pass_messages

# Exact bucket elimination: nodes are minimised out one by one, the one with the least table first.

MOST_ENTRIES = 60_000_000
"""Entries of all different tables together, all of which are kept: half a gigabyte. Measured (2026-11): sixteen layers
of 400 nodes had 15 million in random graphs with equal layers, 33 million with different ones. With fewer, messages
decide, which prove less; with more, planning takes the memory of the host."""


class EliminationOrder(NamedTuple):
    """Nodes in the order in which they are minimised out, and the entries of the largest table that this makes."""

    nodes: list[int]
    largest: int


def elimination_order(graph: CostGraph, limit: int) -> EliminationOrder:
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
    return EliminationOrder(nodes, largest)


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
        self.steps.append(BestBeside(node, own, tuple((f.scope, f.costs.values) for f in factors)))
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


# From a PBQP to a choice: contraction, then exact elimination, or messages where tables would be too large.

LARGEST_TABLE = 2_000_000
"""Entries of the largest table of an exact elimination: 16 MB, some 20 milliseconds. Measured (2026-11): on random
graphs of 16 layers with 400 nodes each, half a million entries took 0.5 to 3 s in all, messages 4 to 6 s and were 0.2 %
above."""

SMALL_TABLE = 100_000
"""Entries of the largest table up to which elimination comes first: a millisecond. Measured (2026-11): four sums of an
array and its transpose on 2 x 2 x 2 have tables of 1.9 million entries, 0.75 s, and after two rounds of messages one
candidate for three of four nodes."""

FIRST_ROUNDS = 8
"""Rounds of messages before an elimination with larger tables. Guessed: with fewer, candidates are left that a few more
would drop; with more, they take longer than the tables."""

ROUNDS = 40
"""Rounds of messages. Guessed, a guard: half of the solves end sooner, by `trws.CHECKED`."""

FEW_SUMS = 1 << 22
"""Sums up to which a node between two others is minimised out before messages are passed: those of three nodes with
160 candidates each. Measured (2026-11): the solve of MaxText's pipeline takes 3.0 to 3.3 s, where 4.1 to 4.4 without
messages first; with a quarter as many sums 2.8, but among choices of one cost an 8B step on 16 x 16 chips took one that
holds 1.76 times as much. No cost depends on it where messages prove theirs."""

FEW_CANDIDATES = 64
"""Candidates of a node up to which it is tried before message passing which of them are not needed; how long that takes
grows with their third power. Measured (2026-11): of 450 candidates on three axes messages leave a few in less time."""

RESOLUTION = 2.0**-40
"""What costs are rounded to, relative to the start's cost, so that the order of summation decides nothing. Given by 53
bits: ten thousand terms move a total by at most 1e-8 of it; whole numbers of bytes are not rounded at all."""


@dataclass(frozen=True, slots=True)
class Solution:
    """A candidate per node, and what they cost in all; infinite where every choice is impossible.

    `bound`: no choice costs less; of a problem that was refined, none that is equal for nodes of one colour.
    """

    choice: list[int]
    cost: float
    bound: float

    @property
    def is_optimal(self) -> bool:
        """Whether no choice costs less, up to a millionth."""
        return self.is_within(GAP)

    def is_within(self, share: float) -> bool:
        """Whether no choice saves more than this share of the cost."""
        return self.bound >= self.cost * (1 - share)


def solve(
    problem: PBQP,
    start: Sequence[int] | None = None,
    *,
    largest_table: int = LARGEST_TABLE,
    rounds: int = ROUNDS,
    resolution: float = RESOLUTION,
    refines: bool = False,
) -> Solution:
    """The best choice, or a good one with a bound.

    Args:
        problem: costs and edges.
        start: a choice that the result is never worse than. It is returned where nothing is cheaper, and where
            candidates cost the same its own win, then those of the smallest index.
        largest_table: entries of the largest table up to which what contraction leaves is eliminated exactly.
        rounds: of message passing, where it is not; then the best mixture of the result and the start is returned.
        resolution: costs are rounded to multiples of about this fraction of the start's cost.
        refines: where a large problem repeats itself, as equal layers do, nodes of one colour have the same choice.

    >>> import numpy as np
    >>> problem = PBQP([np.array([0.0, 1.0]), np.array([2.0, 0.0])])
    >>> problem.add(0, 1, np.array([[0.0, 5.0], [3.0, 0.0]]))
    >>> solve(problem)
    Solution(choice=[1, 1], cost=1.0, bound=1.0)
    """
    if refines and (small := quotient(problem, start)) is not None:
        best = solve(small.problem, small.start, largest_table=largest_table, rounds=rounds, resolution=resolution)
        return replace(best, choice=small.lifted(best.choice))
    found = _solve(problem, start, largest_table, rounds, resolution)
    if start is None:
        return found
    best = _no_worse(problem, found, start)
    if best.is_optimal or found.choice == list(start):
        return best
    both = restricted(problem, [list(dict.fromkeys(pair)) for pair in zip(found.choice, start, strict=True)])
    incumbent = both.choice_of(best.choice)
    fused = _no_worse(both.problem, _solve(both.problem, incumbent, largest_table, rounds, resolution), incumbent)
    return Solution(both.chosen_from(fused.choice), fused.cost, min(fused.cost, found.bound))


def _no_worse(problem: PBQP, found: Solution, start: Sequence[int]) -> Solution:
    """The solution, or the start where that costs no more."""
    cost = problem.cost(start)
    return found if found.cost < cost else Solution(list(start), cost, min(cost, found.bound))


def _solve(problem: PBQP, start: Sequence[int] | None, largest_table: int, rounds: int, resolution: float) -> Solution:
    given = math.inf if start is None else problem.cost(start)
    if given == 0.0:
        return Solution(list(start or ()), 0.0, 0.0)
    scale = given if given < math.inf else _sum_of_largest(problem)
    unit = 2.0 ** math.floor(math.log2(scale * resolution)) if scale else 1.0
    order = _orders(problem, start)
    graph, raised = graph_of(problem, unit, given, order)
    choice, bound = _solved(graph, given / unit + raised, largest_table, rounds)
    found = [int(candidates.indices[choice[node]]) for node, candidates in enumerate(order)]
    cost = problem.cost(found)
    return Solution(found, cost, min(cost, (bound - raised) * unit if bound < LIMIT else math.inf))


def _solved(graph: CostGraph, most: float, largest_table: int, rounds: int) -> tuple[dict[int, int], float]:
    """A choice for all nodes and a bound, in units; `most` is what suffices."""
    incumbent = _Incumbent(most)
    contract(graph, range(len(graph.vectors)), FEW_CANDIDATES, FEW_SUMS if rounds else math.inf)
    if any(len(graph.tables[node]) <= ELIMINATED for node in graph.remaining()):
        incumbent.pass_messages(graph, min(FIRST_ROUNDS, rounds))
        contract(graph, graph.remaining(), FEW_CANDIDATES)
    order = elimination_order(graph, largest_table)
    if order.largest <= min(largest_table, SMALL_TABLE) and eliminate(graph, order.nodes):
        return graph.undone({}), graph.constant
    at_once, few = FIRST_ROUNDS if order.largest <= largest_table else rounds, math.inf
    while rounds > 0:
        rounds -= incumbent.pass_messages(graph, min(at_once, rounds), few)
        at_once = rounds
        if _solved_exactly(graph, largest_table):
            return graph.undone({}), graph.constant
        # What was found to be too many is not tried again before half of it is left, since messages begin anew then.
        few = sum(len(graph.vectors[node]) for node in graph.remaining()) / 2
        if incumbent.cost - incumbent.bound <= GAP * incumbent.cost:
            break
    return incumbent.choice, incumbent.bound


class _Incumbent:
    """The best choice so far and what it costs, a bound, and what suffices: `most`."""

    def __init__(self, most: float):
        self.most, self.choice, self.cost, self.bound = most, dict[int, int](), math.inf, -math.inf

    def pass_messages(self, graph: CostGraph, rounds: int, few: float = math.inf) -> int:
        """Passes messages and drops the candidates of dearer choices; how many rounds it took."""
        decoded = pass_messages(graph, rounds, self.most, few)
        if decoded.cost < self.cost:
            self.choice, self.cost = graph.undone(decoded.choice), decoded.cost
        self.most, self.bound = min(self.most, self.cost), max(self.bound, decoded.bound)
        fewer = {node: kept for node, kept in decoded.kept.items() if len(kept) < len(graph.vectors[node])}
        graph.keep({node: graph.pool.choices(kept) for node, kept in fewer.items()})
        return decoded.rounds


def _solved_exactly(graph: CostGraph, largest_table: int) -> bool:
    """Contracts what is left of a graph and eliminates it; False where that takes too large tables."""
    contract(graph, graph.remaining())
    order = elimination_order(graph, largest_table)
    return order.largest <= largest_table and eliminate(graph, order.nodes)


def _sum_of_largest(problem: PBQP) -> float:
    """A cost that no possible choice exceeds."""
    own = [_largest(values) for values in problem.costs]
    edges = [edge.ports.weight * _largest(edge.ports.prices) for edge in problem.edges]
    return math.fsum([*own, *edges])


def _largest(values: Costs) -> float:
    return float(values.max(initial=0.0, where=np.isfinite(values)))


def _orders(problem: PBQP, start: Sequence[int] | None) -> list[Choices]:
    """Per node the candidates in the order in which ties are broken."""

    @cache
    def order(size: int, first: int) -> Choices:
        return Choices(np.array([first, *(a for a in range(size) if a != first)]))

    firsts = [0] * len(problem.costs) if start is None else start
    return [order(len(values), first) for values, first in zip(problem.costs, firsts, strict=True)]
