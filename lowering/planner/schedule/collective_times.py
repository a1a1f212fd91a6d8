"""How long the collectives of a partitioned program take, of which small ones run together.

See docs/explanation/schedule.md#what-the-planner-knows-of-buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Block, Graph, Value
from sdy_jax.ir.meshes import Mesh
from sdy_jax.lowering.planner.facts.fusion import CriticalPath
from sdy_jax.lowering.planner.report import CollectiveRecord
from sdy_jax.lowering.targets.cost_model import CostModel

# What depends on a product, and another one on it, is sent in between: at that moment there is nothing else to send.
# All other collectives of a kind and group that do not wait for each other fill buckets, where the cost model says that
# such are combined.


class CollectiveTimes:
    """The times of a program's collectives, and which of them run together.

    Args:
        graph: the program, whose collectives are all there.
        inserted: those that the partitioner made.
        costs: the cost model.
        mesh: the program's.
    """

    def __init__(self, graph: Graph, inserted: Mapping[ir.Operation, CollectiveRecord], costs: CostModel, mesh: Mesh):
        self._costs, self._mesh = costs, mesh
        self._turns = _turns(graph, inserted) if costs.combines else {}

    def of(self, records: Iterable[CollectiveRecord]) -> float:
        """The time of some collectives in all their executions."""
        return sum(map(self._together, self.together(records)))

    def together(self, records: Iterable[CollectiveRecord]) -> list[list[CollectiveRecord]]:
        """Those that may run as one, where the cost model says that such do, in the order in which they are given."""
        groups: dict[object, list[CollectiveRecord]] = {}
        for record in records:
            groups.setdefault((_alike(record), self._turns.get(id(record), id(record))), []).append(record)
        return list(groups.values())

    def bucket(self, record: CollectiveRecord) -> float:
        """The bytes that such collectives send as one, at most; 0 where each runs alone."""
        is_shared = record.kind in self._costs.combines
        return self._costs.bucket_bytes(record.kind, record.axes, self._mesh) if is_shared else 0.0

    def _together(self, records: list[CollectiveRecord]) -> float:
        first, wires = records[0], [record.wire_bytes for record in records]
        costs = first.costs(self._costs)
        return first.estimated_times * costs.sending_times(first.kind, first.axes, self._mesh, wires, first.cut)


def _alike(record: CollectiveRecord) -> object:
    """What collectives have in common that may run together."""
    return record.kind, record.axes, record.dtype, record.estimated_times, record.cut, record.moved.is_rounded


class _Turn(NamedTuple):
    """When a collective may run: its block, and how many of those alike wait for each other before it."""

    block: Block | None
    before: int


def _turns(graph: Graph, inserted: Mapping[ir.Operation, CollectiveRecord]) -> dict[int, _Turn]:
    """By the identity of its record, the turn of each collective that no products are between."""
    between, turns = CriticalPath.of_products(graph).between, dict[int, _Turn]()
    before: dict[Value, Mapping[object, int]] = {}
    for op in graph.ops:
        waits = _most([before[value] for value in op.operands if value in before])
        record = inserted.get(op.mlir)
        if record is not None and between.isdisjoint(op.results):
            alike = _alike(record)
            turns[id(record)] = _Turn(op.block, waits.get(alike, 0))
            waits = {**waits, alike: waits.get(alike, 0) + 1}
        if waits:
            before.update(dict.fromkeys(op.results, waits))
    return turns


def _most(counts: list[Mapping[object, int]]) -> Mapping[object, int]:
    """The most of each kind of some counts."""
    found: Mapping[object, int] = counts[0] if counts else {}
    for other in counts:
        if other is not found and other != found:
            found = {key: max(found.get(key, 0), other.get(key, 0)) for key in (*found, *other)}
    return found
