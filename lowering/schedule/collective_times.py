"""How long the collectives of a partitioned program take, of which small ones may run together.

What depends on a product, and another one on it, is sent in between: at that moment there is nothing else to send. All
other collectives of a kind and group fill buckets, where the cost model says that such are combined.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph
from sdy_jax.lowering.analysis.critical_path import CriticalPath
from sdy_jax.lowering.costs.cost_model import CostModel
from sdy_jax.lowering.interface.collective_record import CollectiveRecord
from sdy_jax.representation.mesh import Mesh


class CollectiveTimes:
    """The times of a program's collectives.

    Args:
        graph: the program, whose collectives are all there.
        inserted: those that the partitioner made.
        costs: the cost model.
        mesh: the program's.
    """

    def __init__(self, graph: Graph, inserted: Mapping[ir.Operation, CollectiveRecord], costs: CostModel, mesh: Mesh):
        self._costs, self._mesh = costs, mesh
        self._movable = _movable(graph, inserted) if costs.combines else frozenset()

    def of(self, records: Iterable[CollectiveRecord]) -> float:
        """The time of some collectives in all their executions."""
        groups: dict[object, list[CollectiveRecord]] = {}
        for record in records:
            groups.setdefault(self._group(record), []).append(record)
        return sum(map(self._together, groups.values()))

    def _group(self, record: CollectiveRecord) -> object:
        """What those have in common that may run together."""
        if id(record) not in self._movable:
            return id(record)
        return (
            record.kind,
            record.axes,
            record.dtype,
            record.depth,
            record.branches,
            record.estimated_times,
            record.cut,
            record.moved.is_rounded,
        )

    def _together(self, records: list[CollectiveRecord]) -> float:
        first, wires = records[0], [record.wire_bytes for record in records]
        costs = first.costs(self._costs)
        return first.estimated_times * costs.sending_times(first.kind, first.axes, self._mesh, wires, first.cut)


def _movable(graph: Graph, inserted: Mapping[ir.Operation, CollectiveRecord]) -> frozenset[int]:
    """The identities of the records of collectives that no products are between."""
    between = CriticalPath.of_products(graph).between
    ops = (op for op in graph.ops if op.mlir in inserted and between.isdisjoint(op.results))
    return frozenset(id(inserted[op.mlir]) for op in ops)
