"""The timeline of one step on a device: when ops compute and collectives are sent, beside work or waited for.

See docs/explanation/schedule.md#the-timeline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Block, Graph, Op
from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.operations import pre_order
from sdy_jax.lowering.planner.facts.fusion import inner_blocks, ops_in_line
from sdy_jax.lowering.planner.op_times import OpTime, OpTimes, SendingOp, WorkDone
from sdy_jax.lowering.planner.problem.layout_plan import PlacedProgram
from sdy_jax.lowering.planner.report import CollectiveRecord
from sdy_jax.lowering.planner.schedule.hidden_time import (
    Beside,
    Ran,
    Schedule,
    Sending,
    Wait,
    WorkTimes,
    runs_each_time,
)
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.lowering.targets.family import Collectives

# Slices of the timeline, and the loops that they are in.
#
# A loop is as wide as all of its trips take, and what is in it is drawn as one trip that is stretched to that: a slice
# is as long as all executions of what it is of, so that the slices of a lane add up to what the plan says. So do a
# conditional's branches, one after the other: the estimate counts all of them.


class TimeSlice(NamedTuple):
    """What a device does for some time.

    Attributes:
        op: what computes, or sends.
        start, duration: in the unit of the cost model; the duration is that of all executions.
        times: the executions, by estimate.
        collective: the number of the collective that is sent, in the plan; None where an op computes.
        is_hidden: it is sent while something is computed.
        traffic: the bytes of a device's memory that the op reads and writes, in all executions.
    """

    op: Op | None
    start: float
    duration: float
    times: float = 1.0
    collective: int | None = None
    is_hidden: bool = False
    traffic: float = 0.0


class Repeated(NamedTuple):
    """A loop, or a conditional, with when it runs and how often its body does each time."""

    op: Op
    start: float
    duration: float
    trips: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The slices of a step in the order in which they start, the loops, outer ones first, when the step ends, and when
    each op begins."""

    slices: tuple[TimeSlice, ...] = ()
    loops: tuple[Repeated, ...] = ()
    end: float = 0.0
    starts: Mapping[Op, float] = field(default_factory=dict)


# What ops take and send, by their numbers in the module, which it keeps while it is copied and cached.


class NumberedOps:
    """The ops of a program that was placed, by their numbers in its module as it is now."""

    def __init__(self, placed: PlacedProgram):
        numbers, self._report = _numbers(placed.module), placed.report
        self._left = {number: numbers[op] for op, number in placed.remaining_ops}
        self._index = {op: number for number, op in enumerate(placed.graph.ops)}
        self._own = {id(record): numbers[op] for op, record in placed.inserted.items()}
        self._written = {id(record) for record in placed.report.written.values()}

    def times(self, order: Sequence[int] | None) -> OpTimes:
        """What the ops take, and which send; `order`: the numbers that they have got since."""
        singles = [one for record in self._report.collectives for one in record.members or (record,)]
        work, senders = list(self._work()), [self._sender(one) for one in singles]
        if order is not None:
            work = [done._replace(op=order[done.op]) for done in work]
            senders = [by._replace(op=order[by.op]) if by.op >= 0 else by for by in senders]
        return OpTimes(tuple(sorted(work)), tuple(senders))

    def _work(self) -> Iterator[OpTime]:
        """What ops take that were folded into others since counts with those that come next."""
        found, time, traffic = dict[int, WorkDone](), 0.0, 0.0
        for number, done in sorted(self._report.work_of.items()):
            if number not in self._left:
                time, traffic = time + done.times * done.time, traffic + done.times * done.traffic
                continue
            found[number] = done
            if done.times:  # what never runs takes nothing over
                found[number] = done.with_folded(time, traffic)
                time = traffic = 0.0
        if time and (runs := [number for number, done in found.items() if done.times]):
            last = max(runs)
            found[last] = found[last].with_folded(time, traffic)
        return (OpTime(self._left[number], done.time, done.traffic) for number, done in found.items())

    def _sender(self, record: CollectiveRecord) -> SendingOp:
        first, beside = self._report.added(record)
        if id(first) in self._own:
            return SendingOp(self._own[id(first)], True)
        number = self._index.get(beside, -1)
        return SendingOp(self._left.get(number, -1), id(first) in self._written)


def _numbers(module: ir.Operation) -> dict[ir.Operation, int]:
    """The ops of a module in pre-order. Those of the bindings are hashed by what they say: they must not change as long
    as this is used."""
    return {op: number for number, op in enumerate(pre_order(module))}


# How a partitioned program runs, from what outlived its planning.


class Sent(NamedTuple):
    """A collective of a plan.

    Attributes:
        number: its own, in the plan.
        sending: its ops, none where the module does not have them, and its record.
        time: of one execution.
        is_moved: it is one that is started when it can be, or a trip ahead; neither a part of an op's work, nor in a
            ring.
    """

    number: int
    sending: Sending
    time: float
    is_moved: bool

    @property
    def op(self) -> Op | None:
        """Its op, the first one of a bucket."""
        return self.sending.ops[0] if self.sending.ops else None

    @property
    def hidden(self) -> float:
        """Of one execution the time that a ring hides."""
        return self.sending.record.hidden

    @property
    def product(self) -> Op | None:
        """Of a ring the op that computes while it is sent."""
        op = self.op
        if op is None or not self.hidden:
            return None
        return op.results[0].only_user if op.name == "sdy.all_gather" else op.operands[0].defining_op


@dataclass(frozen=True)
class Timing:
    """A partitioned program as planning left it, and what it takes.

    Args:
        graph: the program.
        times: what its ops take, and which send.
        collectives: those of the plan.
        mesh, costs: of the plan.
        compiler: says which collectives are started before they are waited for.
    """

    graph: Graph
    times: OpTimes
    collectives: Sequence[CollectiveRecord]
    mesh: Mesh
    costs: CostModel
    compiler: Collectives

    @cached_property
    def ran(self) -> Ran:
        """How the program runs, with what of its collectives is hidden but for rings."""
        compiler = self.compiler if self.costs.unit == "seconds" else Collectives()
        moved = {op: each.sending for each in self.sent if each.is_moved for op in each.sending.ops}
        busy = {product: each.hidden for each in self.sent if (product := each.product) is not None}
        schedule = Schedule(WorkTimes(self.graph, self.costs), moved, self.mesh, self.costs, compiler, busy)
        return schedule.of(self.graph.main.blocks[0])

    @cached_property
    def sent(self) -> list[Sent]:
        """The collectives, in the order of the plan."""
        found, senders = [], iter(self.times.senders)
        for number, record in enumerate(self.collectives):
            by = [next(senders) for _ in record.members or (record,)]
            sending = Sending(tuple([self._ops[each.op] for each in by if each.op in self._ops]), record)
            is_moved = bool(sending.ops) and all(each.is_alone for each in by) and not record.hidden
            found.append(Sent(number, sending, record.sending_time(self.costs, self.mesh), is_moved))
        return found

    @cached_property
    def work(self) -> dict[Op, OpTime]:
        """What one execution takes, of each op that takes some time."""
        return {self._ops[done.op]: done for done in self.times.work}

    @cached_property
    def _ops(self) -> dict[int, Op]:
        """The ops by their numbers in the module."""
        numbers = _numbers(self.graph.module)
        return {numbers[op.mlir]: op for op in self.graph.ops}


def timeline_of(timing: Timing) -> Timeline:
    """When all of a program runs on a device."""
    return _Layout(timing).timeline()


def timeline_without_ops(collectives: Iterable[tuple[float, CollectiveRecord]]) -> Timeline:
    """That of a program on local arrays, of which the times of collectives are known and nothing else: one after the
    other."""
    found, at = list[TimeSlice](), 0.0
    for number, (time, record) in enumerate(collectives):
        times = record.estimated_times
        if time:
            found.append(TimeSlice(None, at, times * time, times, number))
            at += times * time
    return Timeline(tuple(found), (), at)


class _Layout:
    """Puts slices one after the other: ops in program order, what is waited for before the op that needs it, what is
    hidden beside the ops that hide it, and what slows these after them."""

    def __init__(self, timing: Timing):
        self._timing, self._work = timing, timing.work
        self._number = {id(each.sending): each.number for each in timing.sent}
        self._slices, self._loops, self._starts = list[TimeSlice](), list[Repeated](), dict[Op, float]()
        self._at, self._beside = defaultdict[Op, list[Sent]](list), defaultdict[Op, list[Sent]](list)
        self._gone = list[Sent]()
        for each in timing.sent:
            if each.time and not each.is_moved:
                self._file(each)
        self._busy = set[Block]()
        for op in (*self._work, *self._at, *(op for each in timing.sent if (op := each.op))):
            self._mark(op.block)

    def _file(self, each: Sent) -> None:
        """Where a collective stands that the compiler does not move."""
        op = each.op
        if op is None or op.block is None:
            self._gone.append(each)
            return
        self._at[op].append(each)
        if each.hidden:
            self._beside[each.product or op].append(each)

    def _mark(self, block: Block | None) -> None:
        while block is not None and block not in self._busy:
            self._busy.add(block)
            block = block.parent.block

    def timeline(self) -> Timeline:
        """The slices of the main function."""
        end = self._block(self._timing.graph.main.blocks[0], self._timing.ran, 0.0, 1.0)
        for each in self._gone:
            end = self._wait(each.number, None, end, each.time, each.sending.record.estimated_times)
        slices = tuple(sorted(self._slices, key=lambda each: each.start))
        return Timeline(slices, tuple(self._loops), end, self._starts)

    def _block(self, block: Block, ran: Ran, start: float, times: float) -> float:
        """Runs a block so many times; when it ends."""
        waits, beside = defaultdict[Op, list[Wait]](list), defaultdict[Op, list[Beside]](list)
        for wait in ran.waits:
            waits[wait.before].append(wait)
        for each in ran.beside:
            beside[each.op].append(each)
        at = start
        for op in ops_in_line(block):
            for wait in waits[op]:
                number = self._number[id(wait.sending)]
                at = self._wait(number, self._op(number), at, wait.time, times)
            for sent in self._at[op]:
                at = self._wait(sent.number, op, at, sent.time - sent.hidden, times)
            self._starts[op] = begin = at
            at = self._run(op, ran, at, times)
            hidden = list[tuple[int, float]]()
            for each in beside[op]:
                number = self._number[id(each.sending)]
                hidden.append((number, each.time))
                at = self._wait(number, self._op(number), at, each.slowed, times)
            self._hide([*hidden, *((each.number, each.hidden) for each in self._beside[op])], begin, times)
        return at

    def _run(self, op: Op, ran: Ran, start: float, times: float) -> float:
        """Runs an op, and what is in its regions; when it ends."""
        at = start
        if op in self._work:
            _, time, traffic = self._work[op]
            at += times * time
            self._slices.append(TimeSlice(op, start, times * time, times, traffic=times * traffic))
        blocks = [block for block in inner_blocks(op) if block in self._busy]
        if not blocks:
            return at
        inner, place = {block: (runs, inside) for runs, block, inside in ran.inner.get(op, ())}, len(self._loops)
        trips = 1.0
        for block in blocks:
            runs, inside = inner.get(block, (runs_each_time(block), Ran()))
            at, trips = self._block(block, inside, at, times * runs), runs
        self._loops.insert(place, Repeated(op, start, at - start, trips))
        return at

    def _wait(self, number: int, op: Op | None, start: float, time: float, times: float) -> float:
        """A collective for which everything waits; when it ends."""
        if time <= 0.0:
            return start
        self._slices.append(TimeSlice(op, start, times * time, times, number))
        return start + times * time

    def _hide(self, sent: Sequence[tuple[int, float]], start: float, times: float) -> None:
        """Collectives beside work that starts at some time, one after the other."""
        for number, time in sent:
            self._slices.append(TimeSlice(self._op(number), start, times * time, times, number, is_hidden=True))
            start += times * time

    def _op(self, number: int) -> Op | None:
        return self._timing.sent[number].op
