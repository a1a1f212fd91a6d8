"""How much of the time of collectives a compiler hides by itself, as it moves their starts and their ends apart.

What is sent waits for its operand alone, and only what reads it waits for it: in between the device computes. In each
block the links send what has to be there first, one collective at a time, while products run; what is not done when it
is needed is waited for. A collective of a kind for which a compiler has no start is waited for at once.
See docs/explanation/schedule.md#what-compilers-hide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.lowering.analysis.trip_counts import trips
from sdy_jax.lowering.interface.setting import Setting
from sdy_jax.lowering.proposal.proposal import Proposal
from sdy_jax.lowering.schedule.marks import Inserted
from sdy_jax.lowering.schedule.work_times import WorkTimes
from sdy_jax.representation.mesh import Mesh


def hidden_by_work(proposal: Proposal, inserted: Inserted, setting: Setting) -> float:
    """The time of a partitioned module's collectives that is hidden, in all executions.

    Args:
        proposal: the module, as it is now.
        inserted: its collectives that nothing else hides; those that the program holds itself are known.
        setting: a model of time, and the devices.
    """
    graph = proposal.partitioned
    schedule = _Schedule(graph, proposal.report.written | dict(inserted), proposal.mesh, setting)
    return schedule.of(graph.main.blocks[0]).hidden


@dataclass(slots=True)
class _Took:
    """The time of a block's work and waiting, and the time of its collectives that is hidden."""

    time: float = 0.0
    hidden: float = 0.0


class _Schedule:
    def __init__(self, graph: Graph, inserted: Inserted, mesh: Mesh, setting: Setting):
        self._inserted, self._mesh, self._costs = inserted, mesh, setting.costs
        self._starts, self._work = setting.target.compiler.collectives.starts, WorkTimes(graph, setting.costs)

    def of(self, block: Block) -> _Took:
        """Runs a block once."""
        took, links = _Took(), _Links()
        places = {op: place for place, op in enumerate(block.ops)}
        ready: dict[int, list[tuple[int, float]]] = {}
        for op in block.ops:
            if self._has_start(op):
                maker = op.operands[0].defining_op
                start = places[maker] + 1 if maker is not None and maker in places else 0
                ready.setdefault(start, []).append((_needed(op.results[0], block, places), self._sent(op)))
        for place, op in enumerate(block.ops):
            for needed, sent in ready.get(place, ()):
                links.add(needed, sent)
            took.time += links.finish(place)
            took.time += self._run(op, links, took)
        return took

    def _run(self, op: Op, links: _Links, took: _Took) -> float:
        """The time of an op, in which links send."""
        if op.mlir in self._inserted:
            return 0.0 if self._has_start(op) else self._sent(op)
        time = self._work.of(op)
        for block in op.blocks:
            times = trips(op) if op.name == "stablehlo.while" else 1
            inner = self.of(block)
            time += times * inner.time
            took.hidden += times * inner.hidden
        took.hidden += links.send(time)
        return time

    def _has_start(self, op: Op) -> bool:
        record = self._inserted.get(op.mlir)
        return record is not None and record.kind in self._starts

    def _sent(self, op: Op) -> float:
        return self._inserted[op.mlir].sending_time(self._costs, self._mesh)


class _Links:
    """What is on its way, by the place where it is needed: that place, and the time that is left."""

    def __init__(self) -> None:
        self._left: list[list[float]] = []

    def add(self, needed: int, sent: float) -> None:
        self._left.append([needed, sent])
        self._left.sort(key=lambda each: each[0])

    def send(self, time: float) -> float:
        """Sends for some time, what is needed first before others; how long there was something to send."""
        left = time
        for each in self._left:
            done = min(each[1], left)
            each[1] -= done
            left -= done
        return time - left

    def finish(self, place: int) -> float:
        """The time until all is there that is needed at a place."""
        due = [left for needed, left in self._left if needed <= place]
        self._left = self._left[len(due) :]
        return math.fsum(due)


def _needed(value: Value, block: Block, places: Mapping[Op, int]) -> int:
    """The place in its block of the first op that reads a value, or whose blocks do."""
    return min([places[user.ancestor_in(block)] for user, _ in value.uses], default=len(places))
