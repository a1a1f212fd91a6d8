"""What message passing needs of a problem: nodes in order, with the links to those before and after each."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sdy_jax.lowering.solve.solver.graph import CostGraph
from sdy_jax.lowering.solve.solver.problem import Costs, Indices
from sdy_jax.lowering.solve.solver.tables import IMPOSSIBLE, LIMIT, MIN, Pool, Table, least_per_port


@dataclass(slots=True)
class Link:
    """An edge as one of its nodes sees it: its candidates in rows. `sent` goes to the other node; `back` is its link
    back. `before`: what was sent in the round before, if the other node is an earlier one. `has_impossible`: whether
    any cost of the graph is."""

    other: int
    table: Table
    sent: Costs
    before: Costs
    has_impossible: bool
    back: Link = field(init=False)

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
    earlier: list[Link]
    later: list[Link]
    links: list[Link]
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


def link_of(graph: CostGraph, number: int, other: int) -> Link:
    nothing = np.zeros(len(graph.vectors[other]))
    return Link(other, graph.tables[number][other], nothing, nothing, graph.pool.has_impossible)
