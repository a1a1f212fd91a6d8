"""How long collectives and work of a partitioned program take, and how much of that a compiler hides by itself.

See docs/explanation/schedule.md#what-compilers-hide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.ir.collectives import BUCKET, FILLED, PACKED, PREFETCHED, RING
from sdy_jax.ir.custom_ops import Uneven, stated_work
from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.operations import pre_order
from sdy_jax.lowering.ops.products import pace
from sdy_jax.lowering.ops.registry import PARTIAL_ACCESS
from sdy_jax.lowering.planner.facts.fusion import (
    fuses,
    inner_blocks,
    line_of,
    made_by,
    ops_in_line,
    readers,
    takes_long,
)
from sdy_jax.lowering.planner.facts.loops import executions
from sdy_jax.lowering.planner.memory.buffers import LocalBytes
from sdy_jax.lowering.planner.problem.layout_plan import PlacedProgram
from sdy_jax.lowering.planner.report import CollectiveRecord, PartitionReport, bucket_of
from sdy_jax.lowering.planner.schedule.collective_times import CollectiveTimes
from sdy_jax.lowering.targets.cost_model import CostModel, DeviceTimes
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
            self._found[op] = self._costs.demands(*self._amounts(op))
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


# How much of the time of collectives is hidden, as a compiler moves their starts and their ends apart.
#
# What is sent waits for its operand alone, and only what reads it waits for it: in between the device computes. What
# runs a trip ahead is there at the end of the trip before. What a trip only stores may be sent until the next one has
# its own to send, if the compiler moves it there. In each block the links send what has to be there first, one
# collective at a time, while products run; what is not done when it is needed is waited for. A collective of a kind for
# which a compiler has no start is waited for at once. See docs/explanation/schedule.md#what-compilers-hide.

_TRAFFIC = 3.0
"""Bytes of memory per byte on the wire. Given: what is sent is read, what is received is written, and it is read once
more by what needs it, or adds it up."""

_COPIED = 2
"""How often what runs a trip ahead is read or written beside. Given: what one trip fetched is read while the next is
written, so a loop copies it into what it carries."""


def sendings_of(placed: PlacedProgram) -> dict[Op, Sending]:
    """The collectives of a partitioned module as it is now, those that the program holds itself among them."""
    records = placed.report.written | dict(placed.inserted)
    return {op: Sending((op,), records[op.mlir]) for op in placed.partitioned.ops if op.mlir in records}


def in_buckets(sendings: Mapping[Op, Sending], times: CollectiveTimes) -> dict[Op, Sending]:
    """Collectives as they will run, where nobody has formed buckets yet: those that may run as one do, as many as a
    bucket takes, if the operands of all are there before the first is needed."""
    found, ops = dict(sendings), {id(each.record): op for op, each in sendings.items()}
    for alike in times.together(each.record for each in sendings.values()):
        if len(alike) == 1 or not (most := times.bucket(alike[0])):
            continue
        for members in _filled([ops[id(record)] for record in alike], sendings, most):
            if len(members) > 1:
                one = Sending(tuple(members), bucket_of(0, [sendings[op].record for op in members]))
                found |= dict.fromkeys(members, one)
    return found


def _filled(ops: Sequence[Op], sendings: Mapping[Op, Sending], most: float) -> Iterator[list[Op]]:
    """Collectives of a block in buckets of so many bytes at most."""
    places = {op: place for place, op in enumerate(ops_in_line(_line(ops[0])))}
    bucket, start, needed, sent = list[Op](), 0, len(places), 0.0
    for op in ops:
        begins, ends, wire = _ready(op, places), _needed(op.results[0], places), sendings[op].record.wire_bytes
        start, needed, sent = max(start, begins), min(needed, ends), sent + wire
        if bucket and (sent > most or start > needed):
            yield bucket
            bucket, start, needed, sent = [], begins, ends, wire
        bucket.append(op)
    yield bucket


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
        """Runs a block once; of a loop's body a trip in the midst of others."""
        ops = ops_in_line(block)
        ran, stored = self._play(ops, [])
        if not stored:
            return ran
        ran, left = self._play(ops, stored)
        over = math.fsum(each.left for each in left) - math.fsum(each.left for each in stored)
        self._wait(ran, ops[-1], stored[0].sending, max(0.0, over))  # each trip would leave more to the next one
        return ran

    def _play(self, ops: Sequence[Op], stored: Sequence[_OnItsWay]) -> tuple[Ran, list[_OnItsWay]]:
        """Runs ops that follow each other, beside what the trip before left to be sent; what they leave."""
        ran, links = Ran(), _Links()
        ready = self._starting(ops)
        for each in stored:
            links.add(replace(each, needed=each.start))
        for place, op in enumerate(ops):
            for on_its_way in ready.get(place, ()):
                links.add(on_its_way)
            for sending, time in links.finish(place):
                self._wait(ran, op, sending, time)
            self._run(op, links, ran)
        return ran, links.left

    def _starting(self, ops: Sequence[Op]) -> dict[int, list[_OnItsWay]]:
        """What is started among the ops of a block, by the places at which its operands are there."""
        places = {op: place for place, op in enumerate(ops)}
        ready: dict[int, list[_OnItsWay]] = {}
        for members in self._started(ops).values():
            sending = self._sendings[members[0]]
            sent, waited = self._sent(sending), self.around(sending)
            if sending.record.is_ahead:
                start, needed, waited = 0, len(ops) - 1, min(sent, waited + self.copying(members[0]))
            else:
                start = max([_ready(op, places) for op in members])
                needed = min([_needed(op.results[0], places) for op in members])
                if all(self._is_late(op) for op in members):
                    needed = len(ops)
            ready.setdefault(start, []).append(_OnItsWay(sending, start, needed, sent - waited, waited))
        return ready

    def _is_late(self, collective: Op) -> bool:
        """Whether the compiler moves a collective of a loop into the next trip."""
        is_moved = self._sendings[collective].record.kind in self._compiler.pipelines
        is_in_loop = is_moved and _line(collective).parent.name == "stablehlo.while"
        return is_in_loop and _is_only_stored(collective.results[0])

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
    """A collective on its way: the places from which on it is sent and where it is needed, the time that is left, and
    the time that nothing hides."""

    sending: Sending
    start: int
    needed: int
    left: float
    waited: float


class _Links:
    """What is on its way, in the order in which it is needed."""

    def __init__(self) -> None:
        self._sent: list[_OnItsWay] = []

    @property
    def left(self) -> list[_OnItsWay]:
        """What is on its way still."""
        return self._sent

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


def _line(op: Op) -> Block:
    """The block in which an op runs in line."""
    assert op.block is not None  # of collectives
    return line_of(op.block)


def _ready(op: Op, places: Mapping[Op, int]) -> int:
    """The place among ops in line from which on a collective may be sent."""
    maker = made_by(op.operands[0])
    return places[maker] + 1 if maker is not None and maker in places else 0


def _needed(value: Value, places: Mapping[Op, int]) -> int:
    """The place among ops in line of the first that reads a value, or whose blocks do."""
    return min([_place(user, places) for user, _ in readers(value)], default=len(places))


def _is_only_stored(value: Value) -> bool:
    """Whether each element of a value goes into a stack, as it is or converted, and nowhere else."""
    return all(
        (PARTIAL_ACCESS.get(op.name) == "write" and index == 1)
        or (fuses(op) and len(op.operands) == 1 and _is_only_stored(op.results[0]))
        for op, index in readers(value)
    )


def _place(op: Op, places: Mapping[Op, int]) -> int:
    """That of an op, or of the one in line that it is in."""
    while op not in places:
        assert op.parent is not None
        op = op.parent
    return places[op]
