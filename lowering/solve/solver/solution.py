"""From a problem to a choice: contraction, then exact elimination, or messages where tables would be too large."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from sdy_jax.lowering.solve.solver.contraction import ELIMINATED, contract
from sdy_jax.lowering.solve.solver.elimination import eliminate, elimination_order
from sdy_jax.lowering.solve.solver.folding import folded
from sdy_jax.lowering.solve.solver.graph import CostGraph, graph_of
from sdy_jax.lowering.solve.solver.problem import Costs, Problem, restricted
from sdy_jax.lowering.solve.solver.tables import LIMIT, Choices
from sdy_jax.lowering.solve.solver.trws import GAP, pass_messages

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

    `bound`: no choice costs less; of a problem that was folded, none that is equal for nodes that are alike.
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
    problem: Problem,
    start: Sequence[int] | None = None,
    *,
    largest_table: int = LARGEST_TABLE,
    rounds: int = ROUNDS,
    resolution: float = RESOLUTION,
    folds: bool = False,
) -> Solution:
    """The best choice, or a good one with a bound.

    Args:
        problem: costs and edges.
        start: a choice that the result is never worse than. It is returned where nothing is cheaper, and where
            candidates cost the same its own win, then those of the smallest index.
        largest_table: entries of the largest table up to which what contraction leaves is eliminated exactly.
        rounds: of message passing, where it is not; then the best mixture of the result and the start is returned.
        resolution: costs are rounded to multiples of about this fraction of the start's cost.
        folds: where a large problem repeats itself, as equal layers do, nodes that are alike have the same choice.

    >>> import numpy as np
    >>> problem = Problem([np.array([0.0, 1.0]), np.array([2.0, 0.0])])
    >>> problem.add(0, 1, np.array([[0.0, 5.0], [3.0, 0.0]]))
    >>> solve(problem)
    Solution(choice=[1, 1], cost=1.0, bound=1.0)
    """
    if folds and (small := folded(problem, start)) is not None:
        best = solve(small.problem, small.start, largest_table=largest_table, rounds=rounds, resolution=resolution)
        return replace(best, choice=small.unfolded(best.choice))
    found = _solve(problem, start, largest_table, rounds, resolution)
    if start is None:
        return found
    best = _no_worse(problem, found, start)
    if best.is_optimal or found.choice == list(start):
        return best
    both = restricted(problem, [list(dict.fromkeys(pair)) for pair in zip(found.choice, start, strict=True)])
    known = both.choice_of(best.choice)
    fused = _no_worse(both.problem, _solve(both.problem, known, largest_table, rounds, resolution), known)
    return Solution(both.chosen_from(fused.choice), fused.cost, min(fused.cost, found.bound))


def _no_worse(problem: Problem, found: Solution, start: Sequence[int]) -> Solution:
    """The solution, or the start where that costs no more."""
    cost = problem.cost(start)
    return found if found.cost < cost else Solution(list(start), cost, min(cost, found.bound))


def _solve(
    problem: Problem, start: Sequence[int] | None, largest_table: int, rounds: int, resolution: float
) -> Solution:
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
    """A choice for all nodes and a bound, in units; `most` is what is known to suffice."""
    known = _Known(most)
    contract(graph, range(len(graph.vectors)), FEW_CANDIDATES, FEW_SUMS if rounds else math.inf)
    if any(len(graph.tables[node]) <= ELIMINATED for node in graph.remaining()):
        known.pass_messages(graph, min(FIRST_ROUNDS, rounds))
        contract(graph, graph.remaining(), FEW_CANDIDATES)
    order = elimination_order(graph, largest_table)
    if order.largest <= min(largest_table, SMALL_TABLE) and eliminate(graph, order.nodes):
        return graph.undone({}), graph.constant
    at_once = FIRST_ROUNDS if order.largest <= largest_table else rounds
    while rounds > 0:
        rounds -= known.pass_messages(graph, min(at_once, rounds))
        at_once = rounds
        if _solved_exactly(graph, largest_table):
            return graph.undone({}), graph.constant
        if known.cost - known.bound <= GAP * known.cost:
            break
    return known.choice, known.bound


class _Known:
    """The best choice so far and what it costs, a bound, and what suffices: `most`."""

    def __init__(self, most: float):
        self.most, self.choice, self.cost, self.bound = most, dict[int, int](), math.inf, -math.inf

    def pass_messages(self, graph: CostGraph, rounds: int) -> int:
        """Passes messages and drops the candidates of dearer choices; how many rounds it took."""
        decoded = pass_messages(graph, rounds, self.most)
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


def _sum_of_largest(problem: Problem) -> float:
    """A cost that no possible choice exceeds."""
    own = [_largest(values) for values in problem.costs]
    edges = [edge.ports.weight * _largest(edge.ports.prices) for edge in problem.edges]
    return math.fsum([*own, *edges])


def _largest(values: Costs) -> float:
    return float(values.max(initial=0.0, where=np.isfinite(values)))


def _orders(problem: Problem, start: Sequence[int] | None) -> list[Choices]:
    """Per node the candidates in the order in which ties are broken."""

    @cache
    def order(size: int, first: int) -> Choices:
        return Choices(np.array([first, *(a for a in range(size) if a != first)]))

    firsts = [0] * len(problem.costs) if start is None else start
    return [order(len(values), first) for values, first in zip(problem.costs, firsts, strict=True)]
