"""Where shardings live: every shardable value and function result of a graph has a number here.

Several values may share one place: all targets of a data-flow edge are read and written through the edge's op. Place 0
is nowhere: values that cannot have a sharding (arguments of a reduction's body, for instance) read nothing there.
"""

from __future__ import annotations

from dataclasses import dataclass

from sdy_jax.graph import Graph, Op, Value
from sdy_jax.propagation.record import FunctionResult, Place
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.rules.dataflow import DataFlowEdge, edges_of

NOWHERE = 0
EDGE = "sdy.data_flow_edge"


@dataclass(frozen=True, slots=True)
class EdgeOp:
    """A data-flow edge that has an op: the op that stands for it, and the op that it belongs to."""

    op: Op
    edge: DataFlowEdge
    owner_op: Op


class Places:
    """The numbering of one graph's places."""

    def __init__(self, graph: Graph, compat: str | None = None):
        self._graph = graph
        self.places: list[Place | None] = [None]
        self._of_value: dict[Value, int] = {}
        self.results: dict[str, list[int]] = {}
        """Per function, the places of its result attributes."""
        self.edges: dict[Op, EdgeOp] = {}
        """By the op that stands for the edge."""
        for op in graph.ops:
            for result in op.results:
                self._add(result)
        for function in graph.functions.values():
            for argument in function.blocks[0].arguments:
                self._add(argument)
        for name, function in graph.functions.items():
            count = len(function.blocks[0].terminator.operands)
            self.results[name] = [self._number(FunctionResult(function, i)) for i in range(count)]
        for op in graph.ops:
            for edge in edges_of(op, compat):
                self._share(op, edge)

    def _add(self, value: Value) -> None:
        self._of_value[value] = self._number(value)

    def _number(self, place: Place) -> int:
        self.places.append(place)
        return len(self.places) - 1

    def _share(self, owner_op: Op, edge: DataFlowEdge) -> None:
        edge_op = next((user for user, _ in edge.owner.uses if user.name == EDGE), None)
        if edge_op is not None:
            self.edges[edge_op] = EdgeOp(edge_op, edge, owner_op)
        shared = self.of(edge_op.results[0] if edge_op else edge.owner)
        for target in edge.targets:
            self._of_value[target] = shared

    def of(self, value: Value) -> int:
        """The place of a value."""
        return self._of_value.get(value, NOWHERE)

    def read(self) -> list[TensorSharding | None]:
        """The sharding of each place, from the graph."""
        found = [p.sharding if isinstance(p, Value) else None for p in self.places]
        for name, places in self.results.items():
            for place, sharding in zip(places, self._graph.result_shardings(self._graph.functions[name]), strict=True):
                found[place] = sharding
        return found

    def write(self, place: int, sharding: TensorSharding | None) -> None:
        """Stores a sharding in the graph and its module."""
        where = self.places[place]
        if isinstance(where, Value):
            self._graph.set_sharding(where, sharding)
        elif where is not None:
            self._graph.set_result_sharding(where.function, where.index, sharding)
