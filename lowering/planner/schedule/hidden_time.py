"""How long collectives and work of a partitioned program take, and how much of that a compiler hides by itself.

See docs/explanation/schedule.md#what-compilers-hide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.ir.collectives import BUCKET, FILLED, PACKED, PREFETCHED, RING
from sdy_jax.ir.custom_ops import Uneven, stated_work
from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.operations import pre_order
from sdy_jax.lowering.ops.products import pace
from sdy_jax.lowering.planner.facts.fusion import CriticalPath, inner_blocks, made_by, ops_in_line, readers, takes_long
from sdy_jax.lowering.planner.facts.loops import executions
from sdy_jax.lowering.planner.memory.buffers import LocalBytes
from sdy_jax.lowering.planner.problem.layout_plan import PlacedProgram
from sdy_jax.lowering.planner.report import CollectiveRecord, PartitionReport
from sdy_jax.lowering.planner.setting import Setting
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.lowering.targets.family import Collectives
from sdy_jax.shardy.rules import RuleBook
from sdy_jax.shardy.rules.op_attributes import dot_dimension_numbers, operations_of

# The marks that steps after placement leave on ops for emission: rings, trips ahead, buckets.


def erase_marks(module: ir.Operation) -> None:
    """Removes those of a program that was partitioned before."""
    for op in pre_order(module):
        attributes = op.attributes
        for mark in (RING, PREFETCHED, FILLED, BUCKET, PACKED):
            if mark in attributes:
                del attributes[mark]


Inserted = Mapping[ir.Operation, CollectiveRecord]
"""The collectives of a module that the partitioner made, with their records."""


class HiddenCollectives:
    """The collectives of a program that run while something is computed. `others` are those that do not."""

    def __init__(self, inserted: Inserted):
        self.others, self._hidden = dict(inserted), dict[int, CollectiveRecord]()

    def hide(self, collective: ir.Operation, hidden: float = 0.0, is_ahead: bool = False) -> None:
        """Says for how long of its time a ring hides one, and whether it runs a trip ahead of its loop."""
        record = self.others.pop(collective)
        self._hidden[id(record)] = replace(record, hidden=hidden, is_ahead=is_ahead)

    def reported(self, report: PartitionReport) -> Inserted:
        """Puts the new records in the place of the old ones; the other collectives."""
        report.exchange(self._hidden)
        return self.others


# How long the products and kernels of a partitioned program compute, by the cost model.


class DeviceTimes(NamedTuple):
    """How long work takes a device's units, and its memory; both at once, so it takes the longer of the two."""

    units: float = 0.0
    memory: float = 0.0

    def times(self, share: float) -> DeviceTimes:
        """Those of a part of it, or of several executions."""
        return DeviceTimes(share * self.units, share * self.memory)

    def and_(self, other: DeviceTimes) -> DeviceTimes:
        """Those of both."""
        return DeviceTimes(self.units + other.units, self.memory + other.memory)


class WorkTimes:
    """Times on one device. Only products and kernels are counted: what else there is mostly fuses with them.

    `bytes`: those of values on one device.
    """

    def __init__(self, graph: Graph, costs: CostModel):
        self._costs, self._local, self._rules = costs, LocalBytes(graph), RuleBook()
        self._found = dict[Op, DeviceTimes]()
        self.bytes = self._local.of

    def of(self, op: Op) -> float:
        """The time of one execution."""
        return max(self.demands(op))

    def demands(self, op: Op) -> DeviceTimes:
        """What one execution takes of the device."""
        if not takes_long(op):
            return DeviceTimes()
        if op not in self._found:
            operations, moved = self._amounts(op)
            self._found[op] = DeviceTimes(self._costs.flop * operations, self._costs.memory * moved)
        return self._found[op]

    def _amounts(self, op: Op) -> tuple[float, float]:
        """Its operations, and the bytes that it reads and writes."""
        work = stated_work(op) if op.name == "stablehlo.custom_call" else None
        if work is not None:
            return self._share(op, work.operations, work.uneven), self._share(op, work.bytes, work.uneven)
        return self.operations(op), sum(self.touched(op))

    def operations(self, product: Op) -> float:
        """A product's operations on one device, in those of bfloat16 that take as long."""
        return self._count(product) * pace(product, self._costs)

    def _count(self, product: Op) -> float:
        if product.name != "stablehlo.dot_general":
            return self._share(product, operations_of(product) / 2)
        lhs, (result,) = self._local.shape(product.operands[0]), product.results
        contracted = dot_dimension_numbers(product).lhs_contracting
        return math.prod(self._local.shape(result)) * math.prod(lhs[dim] for dim in contracted)

    def touched(self, op: Op) -> list[float]:
        """The bytes of each operand and result on one device."""
        return [self.bytes(value) for value in (*op.operands, *op.results)]

    def _share(self, op: Op, whole: float, uneven: Uneven = ()) -> float:
        """What one device has of what all perform for an op."""
        rule = self._rules.rule_of(op)
        return whole if rule is None else self._local.share_of(op, rule, whole, uneven)


# How long the collectives of a partitioned program take, of which small ones may run together.
#
# What depends on a product, and another one on it, is sent in between: at that moment there is nothing else to send.
# All other collectives of a kind and group that do not wait for each other fill buckets, where the cost model says that
# such are combined.


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
        self._turns = _turns(graph, inserted) if costs.combines else {}

    def of(self, records: Iterable[CollectiveRecord]) -> float:
        """The time of some collectives in all their executions."""
        groups: dict[object, list[CollectiveRecord]] = {}
        for record in records:
            groups.setdefault((_alike(record), self._turns.get(id(record), id(record))), []).append(record)
        return sum(map(self._together, groups.values()))

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


# How much of the time of collectives is hidden, as a compiler moves their starts and their ends apart.
#
# What is sent waits for its operand alone, and only what reads it waits for it: in between the device computes. What
# runs a trip ahead is there at the end of the trip before. In each block the links send what has to be there first, one
# collective at a time, while products run; what is not done when it is needed is waited for. A collective of a kind for
# which a compiler has no start is waited for at once. See docs/explanation/schedule.md#what-compilers-hide.

_TRAFFIC = 3.0
"""Bytes of memory per byte on the wire. Given: what is sent is read, what is received is written, and it is read once
more by what needs it, or adds it up."""

_COPIED = 2
"""How often what runs a trip ahead is read or written beside. Given: what one trip fetched is read while the next is
written, so a loop copies it into what it carries."""


def hidden_by_work(placed: PlacedProgram, setting: Setting) -> float:
    """The time of a module's collectives that a compiler hides, in all executions; none where the model knows none."""
    if setting.costs.unit != "seconds":
        return 0.0
    work, compiler = WorkTimes(placed.partitioned, setting.costs), setting.target.compiler.collectives
    schedule = Schedule(work, sendings_of(placed), placed.mesh, setting.costs, compiler)
    return schedule.of(placed.partitioned.main.blocks[0]).hidden


def sendings_of(placed: PlacedProgram) -> dict[Op, Sending]:
    """The collectives of a partitioned module as it is now, those that the program holds itself among them."""
    records = placed.report.written | dict(placed.inserted)
    return {op: Sending((op,), records[op.mlir]) for op in placed.partitioned.ops if op.mlir in records}


class Sending(NamedTuple):
    """What runs as one collective: its op, or those of a bucket's members, which follow each other in a block."""

    ops: tuple[Op, ...]
    record: CollectiveRecord


class Wait(NamedTuple):
    """So long nothing is computed, before an op of the block, as a collective is waited for."""

    before: Op
    sending: Sending
    time: float


class Beside(NamedTuple):
    """A collective is sent while an op of the block computes, which hides it for so long, and is `slowed` for so long,
    as both need the same units or the same memory."""

    op: Op
    sending: Sending
    time: float
    slowed: float


@dataclass(slots=True)
class Ran:
    """How a block runs once.

    Attributes:
        time: of its products and kernels, and of waiting.
        idle: how long of that links send nothing.
        demands: what products and kernels need meanwhile.
        hidden: the time of its collectives that is hidden.
        waits, beside: what the two are made of, in the order in which they come; inside of `inner` blocks they have
            their own.
        inner: how the blocks of its ops run, and how often each time, by op.
    """

    time: float = 0.0
    idle: float = 0.0
    demands: DeviceTimes = field(default_factory=DeviceTimes)
    hidden: float = 0.0
    waits: list[Wait] = field(default_factory=list)
    beside: list[Beside] = field(default_factory=list)
    inner: dict[Op, list[tuple[float, Block, Ran]]] = field(default_factory=dict)


class Schedule:
    """Plays a partitioned program through.

    Args:
        work: the times of the program's ops.
        sendings: its collectives by their ops, the members of a bucket with the same one.
        mesh, costs: of the program.
        compiler: says which collectives are started before they are waited for, beside those that run ahead.
        busy: how long rings keep the links busy while ops compute.
    """

    def __init__(
        self,
        work: WorkTimes,
        sendings: Mapping[Op, Sending],
        mesh: Mesh,
        costs: CostModel,
        compiler: Collectives,
        busy: Mapping[Op, float] | None = None,
    ):
        self.work, self._sendings, self._mesh, self._costs, self._compiler = work, sendings, mesh, costs, compiler
        self._busy = busy or {}

    def of(self, block: Block) -> Ran:
        """Runs a block once."""
        ran, links, ops = Ran(), _Links(), ops_in_line(block)
        ready = self._ready(ops)
        for place, op in enumerate(ops):
            for on_its_way in ready.get(place, ()):
                links.add(on_its_way)
            for sending, time in links.finish(place):
                self._wait(ran, op, sending, time)
            self._run(op, links, ran)
        return ran

    def _ready(self, ops: Sequence[Op]) -> dict[int, list[_OnItsWay]]:
        """What is started among the ops of a block, by the places at which its operands are there."""
        places = {op: place for place, op in enumerate(ops)}
        ready: dict[int, list[_OnItsWay]] = {}
        for members in self._started(ops).values():
            sending = self._sendings[members[0]]
            sent, waited = self._sent(sending), self.around(sending)
            if sending.record.is_ahead:
                start, needed, waited = 0, len(ops) - 1, min(sent, waited + self.copying(members[0]))
            else:
                makers = [made_by(op.operands[0]) for op in members]
                start = max([places[maker] + 1 if maker is not None and maker in places else 0 for maker in makers])
                needed = min([_needed(op.results[0], places) for op in members])
            ready.setdefault(start, []).append(_OnItsWay(sending, needed, sent - waited, waited))
        return ready

    def around(self, sending: Sending) -> float:
        """The time that a collective takes beside its bytes, which nothing hides: units start it, and wait for it."""
        record = sending.record
        return max(0.0, self._sent(sending) - record.bytes_time(self._costs, self._mesh))

    def copying(self, gather: Op) -> float:
        """The time that it takes to carry what is gathered a trip ahead into the next trip."""
        return self._costs.memory * _COPIED * self.work.bytes(gather.results[0])

    def _started(self, ops: Sequence[Op]) -> dict[int, list[Op]]:
        """The ops of the collectives that are started in a block, by identities of what runs as one."""
        found: dict[int, list[Op]] = {}
        for op in ops:
            sending = self._sendings.get(op)
            if sending is not None and self._has_start(sending):
                found.setdefault(id(sending), []).append(op)
        return found

    def _run(self, op: Op, links: _Links, ran: Ran) -> None:
        """Runs an op, while links send."""
        sending = self._sendings.get(op)
        if sending is not None:
            if op is sending.ops[0] and not self._has_start(sending):
                self._wait(ran, op, sending, self._sent(sending))
            return
        demands = self.work.demands(op)
        time = max(demands)
        idle = max(0.0, time - self._busy.get(op, 0.0))
        demands = demands.times(idle / time if time else 0.0)
        for block in inner_blocks(op):
            inner = self.of(block)
            if inner.time or inner.waits or inner.inner:
                times = runs_each_time(block)
                time += times * inner.time
                idle += times * inner.idle
                demands = demands.and_(inner.demands.times(times))
                ran.hidden += times * inner.hidden
                ran.inner.setdefault(op, []).append((times, block, inner))
        ran.time += time
        shares, left = demands.times(1 / idle if idle else 0.0), idle
        for sending, sent in links.send(idle):
            left -= sent
            slowed = sent * self._lacking(shares, sending.record)
            ran.time += slowed
            ran.hidden += sent - slowed
            ran.beside.append(Beside(op, sending, sent - slowed, slowed))
        ran.idle += left
        ran.demands = ran.demands.and_(shares.times(left))

    def _lacking(self, shares: DeviceTimes, record: CollectiveRecord) -> float:
        """By what share of the time that something is sent work takes longer, which needs such shares of the device
        alone: of units, or of its memory, both need more than there is."""
        sending = record.bytes_time(self._costs, self._mesh)
        memory = self._costs.memory * _TRAFFIC * record.wire_bytes / sending if sending else 0.0
        return min(1.0, max(0.0, shares.units + self._compiler.units - 1, shares.memory + memory - 1))

    def _wait(self, ran: Ran, op: Op, sending: Sending, time: float) -> None:
        if time:
            ran.time += time
            ran.waits.append(Wait(op, sending, time))

    def _has_start(self, sending: Sending) -> bool:
        return sending.record.is_ahead or sending.record.kind in self._compiler.starts

    def _sent(self, sending: Sending) -> float:
        return sending.record.sending_time(self._costs, self._mesh)


def runs_each_time(block: Block) -> float:
    """How often a block runs each time that its op does, by estimate; 0 where that never runs."""
    around = executions(block.parent).estimate
    return executions(block.ops[0]).estimate / around if around else 0.0


@dataclass(slots=True)
class _OnItsWay:
    """A collective on its way: the place where it is needed, the time that is left, and the time that nothing hides."""

    sending: Sending
    needed: int
    left: float
    waited: float


class _Links:
    """What is on its way, in the order in which it is needed."""

    def __init__(self) -> None:
        self._sent: list[_OnItsWay] = []

    def add(self, on_its_way: _OnItsWay) -> None:
        self._sent.append(on_its_way)
        self._sent.sort(key=lambda each: each.needed)

    def send(self, time: float) -> list[tuple[Sending, float]]:
        """Sends for some time, what is needed first before others; for how long each."""
        found = []
        for each in self._sent:
            done = min(each.left, time)
            if done:
                each.left -= done
                time -= done
                found.append((each.sending, done))
        return found

    def finish(self, place: int) -> list[tuple[Sending, float]]:
        """What is needed at a place, and the time until it is there."""
        due = [each for each in self._sent if each.needed <= place]
        self._sent = self._sent[len(due) :]
        return [(each.sending, each.left + each.waited) for each in due]


def _needed(value: Value, places: Mapping[Op, int]) -> int:
    """The place among ops in line of the first that reads a value, or whose blocks do."""
    return min([_place(user, places) for user, _ in readers(value)], default=len(places))


def _place(op: Op, places: Mapping[Op, int]) -> int:
    """That of an op, or of the one in line that it is in."""
    while op not in places:
        assert op.parent is not None
        op = op.parent
    return places[op]
