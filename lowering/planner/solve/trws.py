"""Sequential tree-reweighted message passing (TRW-S; Kolmogorov 2006): a bound and a good choice for large graphs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sdy_jax.lowering.planner.solve.contraction import CostGraph
from sdy_jax.lowering.planner.solve.cost_tables import IMPOSSIBLE, LIMIT, MIN, CostTable, Pool, least_per_port
from sdy_jax.lowering.planner.solve.pbqp import Costs, Indices

# What message passing needs of a problem: nodes in order, with the links to those before and after each.


@dataclass(slots=True)
class EdgeEnd:
    """An edge as one of its nodes sees it: its candidates in rows. `sent` goes to the other node; `back` is its link
    back. `before`: what was sent in the round before, if the other node is an earlier one. `has_impossible`: whether
    any cost of the graph is."""

    other: int
    table: CostTable
    sent: Costs
    before: Costs
    has_impossible: bool
    back: EdgeEnd = field(init=False)

    def send(self, costs: Costs) -> float:
        """Sends the least of `costs` plus the edge, per candidate of the other node, with a minimum of 0, which is
        returned."""
        table = self.table
        per_port = least_per_port(costs - self.back.sent, table.rows, len(table.core))
        message = MIN(per_port[:, None] + table.core)
        least = float(MIN(message))
        message -= least
        if self.has_impossible:
            np.minimum(message, IMPOSSIBLE, out=message)
        self.sent = table.by_col(message)
        return least

    def advance(self, momentum: float) -> None:
        """Lets the message go on as it changed in the last round. What became possible or impossible stays."""
        sent = self.sent
        if momentum:
            change = sent - self.before
            further = sent + momentum * change
            self.sent = np.where(np.abs(change) < LIMIT, further, sent) if self.has_impossible else further
        self.before = sent

    def excess(self, costs: Costs) -> Costs:
        """Per candidate, by how much `costs` and the edge cost more with it than at least, after `send`."""
        least = (self.table.core + least_per_port(-self.sent, self.table.cols, self.table.core.shape[1])).min(axis=1)
        found: Costs = costs - self.back.sent + self.table.by_row(least)
        return found - found.min()


@dataclass(slots=True)
class MessageNode:
    """A node that is left, with the candidates in `kept`."""

    number: int
    costs: Costs
    kept: Indices
    earlier: list[EdgeEnd]
    later: list[EdgeEnd]
    links: list[EdgeEnd]
    share: float
    """The part of the node's costs that each message carries on."""

    def gathered(self) -> Costs:
        costs = self.costs
        for link in self.links:
            costs = costs + link.back.sent
        return costs

    def keep(self, pool: Pool, indices: Indices) -> None:
        """Drops all other candidates."""
        self.costs, self.kept = self.costs[indices], self.kept[indices]
        choices = pool.choices(indices)
        for link in self.links:
            link.table, link.back.sent = pool.rows_of(link.table, choices), link.back.sent[indices]
            link.back.table, link.back.before = pool.turned(link.table), link.back.before[indices]


def message_nodes(graph: CostGraph) -> list[MessageNode]:
    found: dict[int, MessageNode] = {}
    for number in graph.remaining():
        costs = graph.vectors[number].values
        links = [link_of(graph, number, other) for other in graph.neighbours(number)]
        earlier, later = [k for k in links if k.other < number], [k for k in links if k.other > number]
        share = 1 / max(len(earlier), len(later), 1)
        found[number] = MessageNode(number, costs, np.arange(len(costs)), earlier, later, links, share)
        for link in earlier:
            link.back = next(k for k in found[link.other].later if k.other == number)
            link.back.back = link
    return list(found.values())


def link_of(graph: CostGraph, number: int, other: int) -> EdgeEnd:
    nothing = np.zeros(len(graph.vectors[other]))
    return EdgeEnd(other, graph.tables[number][other], nothing, nothing, graph.pool.has_impossible)


# Sequential tree-reweighted message passing (TRW-S; Kolmogorov 2006): a bound and a good choice for large graphs.
#
# The bound is a concave function of the messages to earlier nodes, whatever these are, and rises for many rounds
# along one direction. So messages go further that way with momentum (Nesterov 1983), which begins anew where the
# bound falls (O'Donoghue and Candes 2015). The ten graphs of four training steps on 2 x 4 took 150 rounds so, and 264
# without (2026-11).

GAP = 1e-6
"""The gap between a choice and the bound, relative to the choice, at which passing stops. Guessed: with less, more
rounds for what no program shows; with more, plans say that they are proven and are not."""

PATIENCE = 25
"""Rounds without a better choice, and with a bound that rises by less than `RISES` of itself, after which it stops.
Guessed: with fewer, choices are dearer; with more, planning takes longer where nothing comes of it."""


RISES = 1e-4
"""Guessed: see `PATIENCE`."""

_SWEEPS = 10
"""Rounds over all nodes in which a choice is improved. Guessed, a guard: it ends as soon as a round changes nothing."""

_ROUNDING = 1e-9
"""The share of a cost by which a candidate's may be above what is known. Given: they are sums of floats."""

IMPROVED = 5
"""Every so many rounds the choice is improved node by node. Measured (2026-11): gaps of 4 % and 0.2 % became 1 % and
0.2 %. Each time takes about as long as a round."""


CHECKED = 4
"""Every so many rounds it is seen which candidates can still matter. Measured (2026-11, `scripts/bench_bytes`): half of
the solves of all ways of the benchmarks' nodes end after 12 to 20 rounds so, with few candidates left, which
contraction solves."""

FEW = 3
"""Candidates per node, on average, with which a graph is likely to be solved exactly. Guessed: with more, contraction
is tried that fails; with fewer, messages go on where it would have ended."""


class Decoded(NamedTuple):
    """The best choice found for the nodes that are left, its cost and a lower bound, with the graph's constant.

    `kept`: per node that is left, the candidates with which a choice may cost no more than what is known to suffice.
    `rounds`: how many there were.
    """

    choice: dict[int, int]
    cost: float
    bound: float
    kept: dict[int, Indices]
    rounds: int


def pass_messages(graph: CostGraph, rounds: int, most: float, few: float = math.inf) -> Decoded:
    """At most so many rounds, forward and backward over the nodes that are left in their order. Candidates that occur
    only in choices above `most`, or above the best one, are dropped; where few are left, that ends it: `FEW` a node,
    and at most `few` in all."""
    passing, number = _Passing(graph, most), 0
    few = min(few, FEW * len(graph.remaining()))
    for number in range(1, rounds + 1):
        passing.run(improves=number % IMPROVED == 0 or number == rounds)
        if passing.is_done or (number % CHECKED == 0 and passing.left() <= few):
            break
    return passing.decoded(number)


class _Passing:
    """The nodes with their messages, and what was found so far, without the graph's constant."""

    def __init__(self, graph: CostGraph, most: float):
        self._graph, self._most, self._nodes = graph, most - graph.constant, message_nodes(graph)
        self._size = sum(len(node.costs) for node in self._nodes)
        self._choice, self._cost = dict[int, int](), math.inf
        self._bound = self._latest = -math.inf
        self._waited = self._rising = 0

    def run(self, improves: bool) -> None:
        """One round; its choice is improved node by node if so said."""
        self._advance()
        chosen, cost = _forward(self._nodes)
        if improves:
            cost += _improve(self._nodes, chosen)
        before, self._latest = self._latest, _backward(self._nodes)
        self._rising = self._rising + 1 if self._latest >= before else 0
        raised = max(self._bound, self._latest)
        is_still = cost >= self._cost and raised - self._bound < RISES * abs(raised)
        self._waited, self._bound = self._waited + 1 if is_still else 0, raised
        if cost < self._cost:
            self._choice, self._cost = {n.number: int(n.kept[chosen[n.number]]) for n in self._nodes}, cost

    def _advance(self) -> None:
        momentum = max(self._rising - 1, 0) / (self._rising + 2)
        for node in self._nodes:
            for link in node.earlier:
                link.advance(momentum)

    @property
    def is_done(self) -> bool:
        """Whether choice and bound are close, or have not changed for long."""
        gap = self._cost - self._bound
        return gap <= GAP * (self._graph.constant + self._cost) or self._waited >= PATIENCE

    def left(self) -> int:
        """Goes on with the candidates that are needed, if these are fewer; how many they are."""
        needed = self._needed()
        left = sum(map(len, needed))
        if left < self._size:
            self._size = left
            for node, indices in zip(self._nodes, needed, strict=True):
                if len(indices) < len(node.costs):
                    node.keep(self._graph.pool, indices)
        return left

    def _needed(self) -> list[Indices]:
        """Per node, the candidates with which the bound stays below what is known; all where that is none."""
        gap = min(self._most, self._cost) * (1 + _ROUNDING) - self._latest
        found = []
        for node in self._nodes:
            indices = np.flatnonzero(_excess(node) <= gap)
            found.append(indices if len(indices) else np.arange(len(node.costs)))
        return found

    def decoded(self, rounds: int) -> Decoded:
        kept = {node.number: node.kept[found] for node, found in zip(self._nodes, self._needed(), strict=True)}
        self._take_apart()
        constant = self._graph.constant
        return Decoded(self._choice, constant + self._cost, constant + self._bound, kept, rounds)

    def _take_apart(self) -> None:
        """Lets links go, with their tables: what refers to itself would stay until garbage is collected, and planning
        puts that off."""
        for node in self._nodes:
            for link in node.links:
                del link.back


def _forward(nodes: list[MessageNode]) -> tuple[dict[int, int], float]:
    """Sends messages to later nodes; meanwhile chooses for each node the best beside what is chosen already."""
    choice: dict[int, int] = {}
    total = 0.0
    for node in nodes:
        paid = node.costs
        for link in node.earlier:
            paid = paid + link.table.column(choice[link.other])
        hoped = paid
        for link in node.later:
            hoped = hoped + link.back.sent
        chosen = int(hoped.argmin())
        choice[node.number] = chosen
        total += float(paid[chosen])
        shared = node.share * node.gathered()
        for link in node.later:
            link.send(shared)
    return choice, total


def _excess(node: MessageNode) -> Costs:
    """Per candidate, by how much the bound of the last backward pass rises where it is chosen.

    The bound is a sum of minima, of a node's own part and of its edges to earlier nodes among others.
    """
    costs = node.gathered()
    excess: Costs = (1 - len(node.earlier) * node.share) * (costs - costs.min())
    for link in node.earlier:
        excess = excess + link.excess(node.share * costs)
    return excess


def _improve(nodes: list[MessageNode], choice: dict[int, int]) -> float:
    """Gives each node its best candidate beside the others' until none changes; returns by how much the cost grows."""
    change = 0.0
    for _ in range(_SWEEPS):
        before = change
        for node in nodes:
            costs = node.costs
            for link in node.links:
                costs = costs + link.table.column(choice[link.other])
            best, current = int(costs.argmin()), choice[node.number]
            if costs[best] < costs[current]:
                change += float(costs[best] - costs[current])
                choice[node.number] = best
        if change == before:
            break
    return change


def _backward(nodes: list[MessageNode]) -> float:
    """Sends messages to earlier nodes, and returns the bound.

    What is subtracted from a message is the minimum of its edge with the share of the sender's costs that it carries;
    shares that no message carries count with their own minimum.
    """
    bound = 0.0
    for node in reversed(nodes):
        costs = node.gathered()
        shared = node.share * costs
        for link in node.earlier:
            bound += link.send(shared)
        bound += (1 - len(node.earlier) * node.share) * float(MIN(costs))
    return bound
