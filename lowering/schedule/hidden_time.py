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
from typing import NamedTuple

from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.lowering.analysis.trip_counts import trips
from sdy_jax.lowering.costs.cost_model import CostModel
from sdy_jax.lowering.interface.collective_record import CollectiveRecord
from sdy_jax.lowering.interface.setting import Setting
from sdy_jax.lowering.proposal.proposal import Proposal
from sdy_jax.lowering.schedule.marks import Inserted
from sdy_jax.lowering.schedule.work_times import WorkTimes
from sdy_jax.representation.mesh import Mesh

_UNSURE = 0.1
"""The share of hidden time that counts whatever is sent: compilers hide less than the model says. Guessed: with none,
programs send more bytes for hundredths of their time; with a third, layers are gathered before loops that hide them."""

_TRAFFIC = 3.0
"""Bytes of memory per byte on the wire. Given: what is sent is read, what is received is written, and it is read once
more by what needs it, or adds it up."""


class Hidden(NamedTuple):
    """The time of collectives that is hidden, and what of it that saves."""

    time: float = 0.0
    saved: float = 0.0


def counted_share(record: CollectiveRecord, costs: CostModel, mesh: Mesh) -> float:
    """The share of a collective's time that counts though it is hidden: what it takes beside bytes, in which units
    wait, and a part of the memory's rate, which the work beside it lacks. That is much of small collectives and over
    fast links, and little of large ones over a network.

    By it BERT on 8 H100s sends 1.1 GiB, not 2.25 in 290 gathers more, which would save 4 of 42 ms if all were hidden
    (2026-11, `scripts/bench_models`).
    """
    sent = record.sending_time(costs, mesh)
    if not sent:
        return 1.0
    sending = min(record.bytes_time(costs, mesh), sent)
    counted = sent - (1 - _UNSURE) * sending + costs.memory * _TRAFFIC * record.wire_bytes
    return min(1.0, counted / sent)


def hidden_by_work(proposal: Proposal, inserted: Inserted, setting: Setting) -> Hidden:
    """The time of a partitioned module's collectives that is hidden, in all executions; none where the model does not
    know time.

    Args:
        proposal: the module, as it is now.
        inserted: its collectives that nothing else hides; those that the program holds itself are known.
        setting: what collectives cost, and the devices.
    """
    if setting.costs.unit != "seconds":
        return Hidden()
    graph = proposal.partitioned
    schedule = _Schedule(graph, proposal.report.written | dict(inserted), proposal.mesh, setting)
    took = schedule.of(graph.main.blocks[0])
    return Hidden(took.hidden, took.saved)


@dataclass(slots=True)
class _Took:
    """The time of a block's work and waiting, the time of its collectives that is hidden, and what of it that saves."""

    time: float = 0.0
    hidden: float = 0.0
    saved: float = 0.0


class _Schedule:
    def __init__(self, graph: Graph, inserted: Inserted, mesh: Mesh, setting: Setting):
        self._inserted, self._mesh, self._costs = inserted, mesh, setting.costs
        self._starts, self._work = setting.target.compiler.collectives.starts, WorkTimes(graph, setting.costs)

    def of(self, block: Block) -> _Took:
        """Runs a block once."""
        took, links = _Took(), _Links()
        places = {op: place for place, op in enumerate(block.ops)}
        ready: dict[int, list[tuple[int, float, float]]] = {}
        for op in block.ops:
            if self._has_start(op):
                maker = op.operands[0].defining_op
                start = places[maker] + 1 if maker is not None and maker in places else 0
                needed = _needed(op.results[0], block, places)
                ready.setdefault(start, []).append((needed, self._sent(op), self._counted(op)))
        for place, op in enumerate(block.ops):
            for sent in ready.get(place, ()):
                links.add(*sent)
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
            took.saved += times * inner.saved
        sent = links.send(time)
        took.hidden += sent.time
        took.saved += sent.saved
        return time

    def _has_start(self, op: Op) -> bool:
        record = self._inserted.get(op.mlir)
        return record is not None and record.kind in self._starts

    def _sent(self, op: Op) -> float:
        return self._inserted[op.mlir].sending_time(self._costs, self._mesh)

    def _counted(self, op: Op) -> float:
        return counted_share(self._inserted[op.mlir], self._costs, self._mesh)


@dataclass(slots=True)
class _Sent:
    """A collective on its way: the place where it is needed, the time that is left, and the share of it that counts
    though it is hidden."""

    needed: int
    left: float
    counted: float


class _Links:
    """What is on its way, in the order in which it is needed."""

    def __init__(self) -> None:
        self._sent: list[_Sent] = []

    def add(self, needed: int, time: float, counted: float) -> None:
        self._sent.append(_Sent(needed, time, counted))
        self._sent.sort(key=lambda each: each.needed)

    def send(self, time: float) -> Hidden:
        """Sends for some time, what is needed first before others; how long there was something to send."""
        left, saved = time, 0.0
        for each in self._sent:
            done = min(each.left, left)
            each.left -= done
            left -= done
            saved += done * (1 - each.counted)
        return Hidden(time - left, saved)

    def finish(self, place: int) -> float:
        """The time until all is there that is needed at a place."""
        due = [each.left for each in self._sent if each.needed <= place]
        self._sent = self._sent[len(due) :]
        return math.fsum(due)


def _needed(value: Value, block: Block, places: Mapping[Op, int]) -> int:
    """The place in its block of the first op that reads a value, or whose blocks do."""
    return min([places[user.ancestor_in(block)] for user, _ in value.uses], default=len(places))
