"""Sequential tree-reweighted message passing (TRW-S; Kolmogorov 2006): a bound and a good choice for large graphs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sdy_jax.lowering.planning.solver.graph import Graph
from sdy_jax.lowering.planning.solver.problem import Costs
from sdy_jax.lowering.planning.solver.tables import IMPOSSIBLE, Table, least_per_port

GAP = 1e-6
"""The gap between a choice and the bound, relative to the choice, at which passing stops."""

PATIENCE = 25
"""Rounds without a better choice, and with a bound that rises by less than 1e-4 of itself, after which it stops."""


IMPROVED = 5
"""Every so many rounds the choice is improved node by node: gaps of 4 % and 0.2 % became 1 % and 0.2 % (2026-11)."""


class Decoded(NamedTuple):
    """The best choice found for the nodes that are left, its cost and a lower bound, with the graph's constant.

    `least`: per node that is left and candidate, a lower bound for all choices with that candidate.
    """

    choice: dict[int, int]
    cost: float
    bound: float
    least: dict[int, Costs]


@dataclass(slots=True)
class _Link:
    """An edge as one of its nodes sees it: its candidates in rows. `sent` goes to the other node; `back` is its link
    back."""

    other: int
    table: Table
    sent: Costs
    back: _Link | None = None

    def send(self, costs: Costs) -> float:
        """Sends the least of `costs` plus the edge, per candidate of the other node, with a minimum of 0, which is
        returned."""
        per_port = least_per_port(costs - self.received, self.table.rows, len(self.table.core))
        message = (per_port[:, None] + self.table.core).min(axis=0)
        least = float(message.min())
        self.sent = self.table.by_col(np.minimum(message - least, IMPOSSIBLE))
        return least

    def excess(self, costs: Costs) -> Costs:
        """Per candidate, by how much `costs` and the edge cost more with it than at least, after `send`."""
        least = (self.table.core + least_per_port(-self.sent, self.table.cols, self.table.core.shape[1])).min(axis=1)
        found: Costs = costs - self.received + self.table.by_row(least)
        return found - found.min()

    @property
    def received(self) -> Costs:
        assert self.back is not None
        return self.back.sent


@dataclass(slots=True)
class _Node:
    number: int
    costs: Costs
    earlier: list[_Link]
    later: list[_Link]

    @property
    def share(self) -> float:
        """The part of the node's costs that each message carries on."""
        return 1 / max(len(self.earlier), len(self.later), 1)

    def gathered(self) -> Costs:
        costs = self.costs
        for link in (*self.earlier, *self.later):
            costs = costs + link.received
        return costs


def pass_messages(graph: Graph, rounds: int) -> Decoded:
    """At most so many rounds, forward and backward over the nodes that are left in their order."""
    nodes = _nodes(graph)
    best, bound = Decoded({}, math.inf, -math.inf, {}), -math.inf
    waited = 0
    for number in range(1, rounds + 1):
        choice, cost = _forward(nodes)
        if number % IMPROVED == 0 or number == rounds:
            cost += _improve(nodes, choice)
        latest = _backward(nodes)
        raised = max(bound, latest)
        is_still = cost >= best.cost and raised - bound < 1e-4 * abs(raised)
        waited = waited + 1 if is_still else 0
        bound = raised
        if cost < best.cost:
            best = Decoded(choice, cost, bound, {})
        if best.cost - bound <= GAP * (graph.constant + best.cost) or waited >= PATIENCE:
            break
    least = {node.number: graph.constant + latest + _excess(node) for node in nodes}
    return Decoded(best.choice, graph.constant + best.cost, graph.constant + bound, least)


def _nodes(graph: Graph) -> list[_Node]:
    found: dict[int, _Node] = {}
    for number in graph.remaining():
        costs = graph.vectors[number].values
        links = [_Link(k, graph.tables[number][k], np.zeros(len(graph.vectors[k]))) for k in graph.neighbours(number)]
        node = _Node(number, costs, [k for k in links if k.other < number], [k for k in links if k.other > number])
        found[number] = node
        for link in node.earlier:
            link.back = next(k for k in found[link.other].later if k.other == number)
            link.back.back = link
    return list(found.values())


def _forward(nodes: list[_Node]) -> tuple[dict[int, int], float]:
    """Sends messages to later nodes; meanwhile chooses for each node the best beside what is chosen already."""
    choice: dict[int, int] = {}
    total = 0.0
    for node in nodes:
        paid = node.costs
        for link in node.earlier:
            paid = paid + link.table.column(choice[link.other])
        hoped = paid
        for link in node.later:
            hoped = hoped + link.received
        chosen = int(hoped.argmin())
        choice[node.number] = chosen
        total += float(paid[chosen])
        shared = node.share * node.gathered()
        for link in node.later:
            link.send(shared)
    return choice, total


def _excess(node: _Node) -> Costs:
    """Per candidate, by how much the bound of the last backward pass rises where it is chosen.

    The bound is a sum of minima, of a node's own part and of its edges to earlier nodes among others.
    """
    costs = node.gathered()
    excess: Costs = (1 - len(node.earlier) * node.share) * (costs - costs.min())
    for link in node.earlier:
        excess = excess + link.excess(node.share * costs)
    return excess


def _improve(nodes: list[_Node], choice: dict[int, int]) -> float:
    """Gives each node its best candidate beside the others' until none changes; returns by how much the cost grows."""
    change = 0.0
    for _ in range(10):
        before = change
        for node in nodes:
            costs = node.costs
            for link in (*node.earlier, *node.later):
                costs = costs + link.table.column(choice[link.other])
            best, current = int(costs.argmin()), choice[node.number]
            if costs[best] < costs[current]:
                change += float(costs[best] - costs[current])
                choice[node.number] = best
        if change == before:
            break
    return change


def _backward(nodes: list[_Node]) -> float:
    """Sends messages to earlier nodes, and returns the bound.

    What is subtracted from a message is the minimum of its edge with the share of the sender's costs that it carries;
    shares that no message carries count with their own minimum.
    """
    bound = 0.0
    for node in reversed(nodes):
        costs = node.gathered()
        shared = node.share * costs
        bound += sum(link.send(shared) for link in node.earlier)
        bound += (1 - len(node.earlier) * node.share) * float(costs.min())
    return bound
