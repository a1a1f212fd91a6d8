"""The numbering of the shardings of a graph: one number, a value id, per shardable value and function result.

Several values may share one value id: the sharding of all targets of a data-flow edge is that of the edge's op. Id 0 is
for values that cannot have a sharding, such as the arguments of a reduction's body: it never has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.operations import COMPUTATIONS
from sdy_jax.ir.stored_shardings import set_sharding, sharding_of
from sdy_jax.op_rules.dataflow import FUNC_EDGE, DataFlowEdge, edges_of, edges_of_calls
from sdy_jax.propagation.sharded_values import FunctionResult, ShardedValue
from sdy_jax.representation.sharding import TensorSharding

NO_VALUE = 0
EDGE = "sdy.data_flow_edge"
EDGES = (EDGE, FUNC_EDGE)


@dataclass(frozen=True, slots=True)
class EdgeOp:
    """A data-flow edge that has an op: the op that stands for it, and the op that it belongs to."""

    op: Op
    edge: DataFlowEdge
    owner_op: Op


class ValueIds:
    """The numbering of one graph's value ids."""

    def __init__(self, graph: Graph):
        self._graph = graph
        self.values: list[ShardedValue | None] = [None]
        self._of_value: dict[Value, int] = {}
        self.results: dict[str, list[int]] = {}
        """Per function, the value ids of its result attributes."""
        self.edges: dict[Op, EdgeOp] = {}
        """By the op that stands for the edge."""
        self._inside: set[int] = set()
        """The value ids at the border of a computation without edges."""
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
            for edge in edges_of(op):
                self._share(op, edge)
        for owner_op, edge in edges_of_calls(graph):
            self._find_op(owner_op, edge)  # the arguments and results of calls keep value ids of their own

    def _add(self, value: Value) -> None:
        self._of_value[value] = self._number(value)

    def _number(self, value: ShardedValue) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def _share(self, owner_op: Op, edge: DataFlowEdge) -> None:
        edge_op = self._find_op(owner_op, edge)
        if edge_op is None and owner_op.name in COMPUTATIONS:
            if edge.owner not in self._of_value:
                self._add(edge.owner)
            self._inside.add(self.of(edge.owner))
            return
        shared = self.of(edge_op.results[0] if edge_op else edge.owner)
        for target in edge.targets:
            self._of_value[target] = shared

    def _find_op(self, owner_op: Op, edge: DataFlowEdge) -> Op | None:
        """The op that stands for an edge, which is remembered by it."""
        edge_op = next((user for user, _ in edge.owner.uses if user.name in EDGES), None)
        if edge_op is not None:
            self.edges[edge_op] = EdgeOp(edge_op, edge, owner_op)
        return edge_op

    def of(self, value: Value) -> int:
        """The value id of a value."""
        return self._of_value.get(value, NO_VALUE)

    def of_all(self, values: Sequence[Value]) -> tuple[int, ...]:
        known = self._of_value.get
        return tuple([known(v, NO_VALUE) for v in values])

    def read(self) -> list[TensorSharding | None]:
        """The sharding of each value id, from the graph."""
        found = [self._stored(i, p) if isinstance(p, Value) else None for i, p in enumerate(self.values)]
        for name, value_ids in self.results.items():
            for value_id, sharding in zip(
                value_ids, self._graph.result_shardings(self._graph.functions[name]), strict=True
            ):
                found[value_id] = sharding
        return found

    def _stored(self, value_id: int, value: Value) -> TensorSharding | None:
        return sharding_of(value.mlir) if value_id in self._inside else value.sharding

    def write(self, shardings: Iterable[tuple[int, TensorSharding | None]]) -> None:
        """Stores the shardings of value ids in the graph and its module."""
        values: list[tuple[Value, TensorSharding | None]] = []
        results: dict[Op, dict[int, TensorSharding | None]] = {}
        for value_id, sharding in shardings:
            where = self.values[value_id]
            if isinstance(where, Value) and value_id not in self._inside:
                values.append((where, sharding))
            elif isinstance(where, Value) and sharding is not None:
                set_sharding(where.mlir, sharding)
            elif isinstance(where, FunctionResult):
                results.setdefault(where.function, {})[where.index] = sharding
        self._graph.set_shardings(values)
        for function, found in results.items():
            self._graph.set_result_shardings(function, found)
