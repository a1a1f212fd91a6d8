"""A plan's step as a trace: JSON of trace events, which Perfetto and chrome://tracing show.

The format: "Trace Event Format", Google, 2016. One process is a device, as all do the same; its threads are the lanes
of the timeline. Slices are complete events (`X`), which nest by time, memory is a counter (`C`), and flows (`s`, `t`,
`f`) lead from what makes the operand of a collective through the collective to what takes its result first. Times are
in microseconds.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from sdy_jax.base.errors import SdyError
from sdy_jax.base.files import write_whole
from sdy_jax.ir.locations import alike_from_start
from sdy_jax.plan.record.files import refused
from sdy_jax.plan.record.program import RecordedCollective, RecordedMemory
from sdy_jax.plan.record.record import PlanRecord
from sdy_jax.plan.record.timeline import RecordedExecution, RecordedLane, RecordedRun, RecordedSlice

Event = dict[str, Any]

_PROCESS, _MEASURED = 1, 2
_COMPUTE = 1
"""The numbers of the processes, estimated and measured, and of their first thread. Chosen: viewers sort by them, and
take 0 for an idle process."""

_PARTS = 2**20
"""Parts of a microsecond that times are multiples of. Chosen: they nearly meet nanoseconds, and are a power of two, in
which doubles add up without rounding: what begins where another one ends does so in a viewer that adds `ts` and `dur`,
too, as speedscope does."""


_COLOURS = {"exposed": "thread_state_iowait", "hidden": "grey"}
"""Colours by chrome://tracing's names: orange is what is waited for. Perfetto gives colours of its own."""


def write_trace(record: PlanRecord, path: str | os.PathLike[str]) -> None:
    """Writes the trace of a plan.

    Raises:
        SdyError: the plan's costs are no times, or the file cannot be written.
    """
    text = trace_json(record)
    with refused("the trace of the plan", path):
        write_whole(path, text)


def trace_json(record: PlanRecord) -> str:
    """The text of a trace.

    Raises:
        SdyError: the plan's costs are no times.
    """
    if record.time.unit != "seconds":
        raise SdyError(
            f"the plan of {record.name} has no times: its costs are {record.time.unit}; to fix: plan it by a machine's "
            "rates, partition(..., costs=sdy.CostModel.of_machine('h100', mesh)), or by those of CostModel.calibrate"
        )
    said = {"plan": record.headline, "written by": record.versions[0], "rates": record.time.origin}
    events = list(_Trace(record).events())
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns", "otherData": said}, separators=(",\n", ":"))


def _microseconds(seconds: float) -> float:
    """Whole nanoseconds: viewers keep no parts of one, and Perfetto (v52) drops what would overlap by rounding."""
    return round(round(1e9 * seconds) / 1e3 * _PARTS) / _PARTS


def _lasts(each: RecordedSlice | RecordedExecution) -> bool:
    """Whether it takes a nanosecond: viewers show moments as arrows, piled up."""
    return _microseconds(each.end) > _microseconds(each.start)


def _complete(name: str, thread: int, start: float, end: float, category: str, args: dict[str, Any]) -> Event:
    """A slice. Both of its ends are rounded, so that slices nest as they did."""
    begin = _microseconds(start)
    duration = _microseconds(end) - begin
    found = {"ph": "X", "name": name, "cat": category, "pid": _PROCESS, "tid": thread, "ts": begin, "dur": duration}
    found |= {"cname": _COLOURS[category]} if category in _COLOURS else {}
    return found | {"args": {key: value for key, value in args.items() if value not in (None, "", ())}}


class _Around(NamedTuple):
    """A phase, a scope, or a loop that slices are in; loops are told apart by their ops."""

    label: str
    op: int = -1
    trips: int = 0


@dataclass(slots=True)
class _Open:
    """One of these whose slice has begun."""

    around: _Around
    start: float


class _Trace:
    def __init__(self, record: PlanRecord):
        self._record, self._timeline = record, record.timeline
        self._trips = {loop.op: loop.trips for loop in self._timeline.loops}
        self._threads = dict[int, list[int]]()
        """Per lane of links the threads on which it is shown: more than one where slices overlap."""

    def events(self) -> Iterator[Event]:
        """All events; the metadata comes first."""
        moved = list(self._links())
        sent = [each for each in moved if each[0].collective is not None]
        yield from self._metadata()
        yield from self._computing()
        yield from (event for _, event in moved)
        yield from self._flows([(each, event["tid"]) for each, event in sent])
        if self._record.memory is not None:
            yield from self._memory(self._record.memory)
        if self._record.run is not None:
            yield from self._measured(self._record.run)

    # Names of the process and its threads.

    def _metadata(self) -> Iterator[Event]:
        mesh, origin = self._record.mesh, self._record.time.origin or self._record.mesh.device_kind
        yield _named("process_name", 0, f"{self._record.name} on each of {mesh.size} devices, estimated")
        yield _named("process_labels", 0, origin.replace(",", ";"), "labels")  # viewers take commas for ends of labels
        yield _named("thread_name", _COMPUTE, "compute")
        for lane, threads in sorted(self._threads.items()):
            for number, thread in enumerate(threads):
                beside = f", {number + 1}" if number else ""
                yield _named("thread_name", thread, f"{_track(self._timeline.lanes[lane])}{beside}")
                yield _named("thread_sort_index", thread, thread, "sort_index")

    # What is computed, and what that waits for, in phases, scopes and loops.

    def _computing(self) -> list[Event]:
        """Outer slices before those in them: viewers nest what begins and ends at once in that order."""
        found = list[tuple[int, Event]]()
        opened, at = list[_Open](), 0.0
        for each in filter(_lasts, self._timeline.critical):
            path = self._path(each)
            kept = alike_from_start([scope.around for scope in opened], path)
            found += _closed(opened, kept, each.start)
            opened += [_Open(around, each.start) for around in path[kept:]]
            span, at = (each.start, each.end), each.end
            event = _complete(self._title(each), _COMPUTE, *span, self._category(each), self._args(each))
            found.append((len(opened), event))
        found += _closed(opened, 0, at)
        return [event for _, event in sorted(found, key=lambda each: (each[1]["ts"], each[0]))]

    def _path(self, each: RecordedSlice) -> list[_Around]:
        """The phase, the loops and the scopes that a slice is in, outer ones first."""
        found = [_Around(each.phase)] if each.phase else []
        if each.op is None:
            return found
        around, known = self._around(each.op), list[str]()
        for op in (*around, each.op):
            scopes = [name for name in self._record.ops[op].place.scope.split("/") if name]
            shared = alike_from_start(known, scopes)
            found += map(_Around, scopes[shared:])
            known = scopes if shared == len(known) else known
            if op in self._trips:
                found.append(_Around(self._kind(op), op, self._trips[op]))
        return found

    def _around(self, op: int) -> list[int]:
        """The ops in whose regions an op is, outer ones first."""
        found, parent = list[int](), self._record.ops[op].parent
        while parent is not None:
            found.insert(0, parent)
            parent = self._record.ops[parent].parent
        return found

    def _kind(self, op: int) -> str:
        return self._record.ops[op].title.partition(".")[2] or self._record.ops[op].title

    def _title(self, each: RecordedSlice) -> str:
        if each.collective is not None:
            return f"wait for {_said(self._record.collectives[each.collective])}"
        assert each.op is not None
        op = self._record.ops[each.op]
        return op.title if op.kernel is not None else op.place.primitive or self._kind(each.op)

    def _category(self, each: RecordedSlice) -> str:
        if each.collective is not None:
            return "exposed"
        assert each.op is not None
        return "kernel" if self._record.ops[each.op].kernel is not None else "compute"

    def _args(self, each: RecordedSlice) -> dict[str, Any]:
        """What a slice says of its op, and of the collective."""
        found: dict[str, Any] = {"phase": each.phase, "executions": each.times}
        found["one execution (us)"] = float(f"{1e6 * each.duration / each.times:.6g}")
        if each.host is not None:
            moved = self._record.host[each.host]
            return found | {"type": moved.type, "bytes": moved.bytes, "line": moved.line, "for": moved.path}
        if each.op is not None:
            op = self._record.ops[each.op]
            found |= {"op": op.kind, "value": ", ".join(op.results), "scope": op.place.scope, "line": op.place.lines}
            found |= {"source": op.place.text, "flops": op.flops or None}
            if op.kernel is not None:
                found |= {"bytes of memory": op.kernel.bytes, "basis": op.kernel.basis}
        if each.collective is not None:
            found |= _of_collective(self._record.collectives[each.collective])
        return found

    # What is sent.

    def _links(self) -> Iterator[tuple[RecordedSlice, Event]]:
        """The slices of links, and what moves from and to the host, on as many threads of a lane as overlap."""
        free, ends = _COMPUTE + 1, dict[int, float]()
        for lane in range(1, len(self._timeline.lanes)):
            threads = self._threads.setdefault(lane, [])
            for each in (found for found in self._timeline.slices if found.lane == lane and _lasts(found)):
                thread = next((t for t in threads if ends[t] <= each.start + _SAME * each.end), None)
                if thread is None:
                    thread, free = free, free + 1
                    threads.append(thread)
                ends[thread] = each.end
                how, start = "host" if each.host is not None else "hidden" if each.hidden else "exposed", each.start
                yield each, _complete(self._moving(each, how), thread, start, each.end, how, self._args(each))

    def _moving(self, each: RecordedSlice, how: str) -> str:
        if each.host is not None:
            return self._record.host[each.host].title
        assert each.collective is not None
        return f"{_said(self._record.collectives[each.collective])} ({how})"

    # From what makes a collective's operand to what takes its result.

    def _flows(self, sent: Iterable[tuple[RecordedSlice, int]]) -> Iterator[Event]:
        """A flow per collective: it starts in the slice that makes the operand, steps to the first slice in which it is
        sent, and ends in the first that needs the result. Viewers drop flows that go back in time: a ring is stepped to
        once its operand has begun, and ends that would go back are left out, as some of a bucket, whose members are
        made and taken at several moments."""
        first = dict[int, tuple[RecordedSlice, int]]()
        for each, thread in sent:
            assert each.collective is not None
            first.setdefault(each.collective, (each, thread))
        ends = _Neighbours(self._record)
        for number, (each, thread) in sorted(first.items()):
            maker, user = ends.maker(self._record.collectives[number]), ends.user(self._record.collectives[number])
            name = _said(self._record.collectives[number])
            steps = [(_COMPUTE, _middle(maker))] if maker is not None and _middle(maker) <= each.end else []
            steps.append((thread, max([each.start, *(at for _, at in steps)])))
            steps += [(_COMPUTE, user.start)] if user is not None and user.start >= steps[-1][1] else []
            if len(steps) > 1:
                for phase, (on, at) in zip("s" + "t" * (len(steps) - 2) + "f", steps, strict=True):
                    yield _flow(phase, number, name, on, at)

    # What is held.

    def _memory(self, memory: RecordedMemory) -> Iterator[Event]:
        """What a device holds by kind; of ops that begin at one moment what is most."""
        always = {held.kind: held.bytes for held in memory.border_by_kind}
        kinds = memory.temporaries_by(lambda buffer: buffer.kind)
        most = dict[float, int]()
        for op, start in enumerate(self._timeline.starts):
            at = _microseconds(start)
            most[at] = max(most.get(at, op), op, key=memory.held_at)
        for at, op in sorted(most.items()):
            yield _counter("memory (bytes)", at, always | {kind: sizes[op] for kind, sizes in kinds.items()})
        if memory.available:
            for at in (0.0, _microseconds(self._timeline.total)):
                yield _counter("memory of a device (bytes)", at, {"limit": memory.available})

    # What was measured, where the step ran: a process of its own below the estimate, with the same tracks.

    def _measured(self, run: RecordedRun) -> Iterator[Event]:
        tracks, events = list[tuple[int, float]](), list[Event]()
        for each in filter(_lasts, run.slices):
            free = (n for n, (lane, end) in enumerate(tracks) if lane == each.lane and end <= each.start)
            track = next(free, len(tracks))
            tracks[track : track + 1] = [(each.lane, each.end)]
            events.append(self._execution(each, track + 1))
        name = f"{self._record.name} on one of {self._record.mesh.size} devices, measured"
        events += [_named("process_name", 0, name), _named("process_labels", 0, run.device, "labels")]
        for track, (lane, _) in enumerate(tracks):
            events.append(_named("thread_name", track + 1, _track(run.lanes[lane])))
            events.append(_named("thread_sort_index", track + 1, len(tracks) * lane + track, "sort_index"))
        yield from (event | {"pid": _MEASURED} for event in events)

    def _execution(self, each: RecordedExecution, track: int) -> Event:
        args = {"instruction": each.instruction, "scope": each.scope, "phase": "backward" if each.backward else ""}
        name = each.scope or each.instruction
        if each.collective is not None:
            sent = self._record.collectives[each.collective]
            name, args = _said(sent), args | _of_collective(sent)
        return _complete(name, track, each.start, each.end, "measured", args)


_TRIP = "one trip, as wide as all of them"

_SAME = 1e-9
"""Given: times are sums of floats, whose rounding is no overlap."""


class _Neighbours:
    """The slices of compute next to a collective. What takes no time has none: then the slice before, or behind, in
    whose block it is."""

    def __init__(self, record: PlanRecord):
        self._record = record
        self._slices = [each for each in record.timeline.slices if not each.lane and each.op is not None]
        self._slices.sort(key=lambda each: each.op or 0)
        self._ops = [each.op or 0 for each in self._slices]
        self._made = {name: number for number, op in enumerate(record.ops) for name in op.results}
        self._used = dict[str, int]()
        for number, op in enumerate(record.ops):
            for name in op.operands:
                self._used.setdefault(name, number)

    def maker(self, sent: RecordedCollective) -> RecordedSlice | None:
        """Where its operand is made; None where it is an argument."""
        made = [self._made[one.value] for one in sent.single if one.value in self._made]
        return self._at(bisect_right(self._ops, max(made)) - 1, max(made)) if made else None

    def user(self, sent: RecordedCollective) -> RecordedSlice | None:
        """Where its result is taken first; None where that is no work any more."""
        used = [self._used[one.result] for one in sent.single if one.result in self._used]
        return self._at(bisect_left(self._ops, min(used)), min(used)) if used else None

    def _at(self, place: int, op: int) -> RecordedSlice | None:
        if not 0 <= place < len(self._slices):
            return None
        found = self._slices[place]
        parents = (self._record.ops[number].parent for number in (found.op or 0, op))
        return found if len(set(parents)) == 1 else None


def _track(lane: RecordedLane) -> str:
    """What a lane is called."""
    return f"links of {lane.name}" if lane.axes else lane.name


def _named(what: str, thread: int, value: object, key: str = "name") -> Event:
    return {"ph": "M", "name": what, "pid": _PROCESS, "tid": thread, "ts": 0, "args": {key: value}}


def _counter(name: str, at: float, args: dict[str, float]) -> Event:
    return {"ph": "C", "name": name, "pid": _PROCESS, "tid": 0, "ts": at, "args": args}


def _flow(phase: str, number: int, name: str, thread: int, at: float) -> Event:
    found = {"ph": phase, "id": number, "name": name, "cat": "flow", "pid": _PROCESS, "tid": thread}
    return found | {"ts": _microseconds(at)} | ({"bp": "e"} if phase == "f" else {})


def _middle(each: RecordedSlice) -> float:
    """A moment that is in no slice next to it."""
    return each.start + each.duration / 2


def _closed(opened: list[_Open], kept: int, at: float) -> Iterator[tuple[int, Event]]:
    """Ends the scopes that are inner to some; how many each is in, and its slice."""
    while len(opened) > kept:
        scope = opened.pop()
        label, op, trips = scope.around
        name = f"{label} x {trips}" if trips > 1 else label
        args = {"trips": trips, "drawn as": _TRIP} if trips > 1 else {}
        yield len(opened), _complete(name, _COMPUTE, scope.start, at, "scope" if op < 0 else "loop", args)


def _said(sent: RecordedCollective) -> str:
    """`all_gather over data`, `3 all_gather over data` of a bucket."""
    count = f"{len(sent.members)} " if sent.members else ""
    return f"{count}{sent.kind}" + (f" over {', '.join(sent.axes)}" if sent.axes else "")


def _of_collective(sent: RecordedCollective) -> dict[str, Any]:
    """What a slice says of the collective that it is of."""
    return {
        "axes": ", ".join(sent.axes),
        "bytes on the wire": sent.wire_bytes,
        "moves": ", ".join(one.value for one in sent.single if one.value),
        "type": sent.type,
        "reason": f"for {sent.cause}" + (f" in {sent.place.scope}" if sent.place.scope else ""),
        "line": sent.place.lines,
        "source": sent.place.text,
        "one trip ahead": True if sent.is_ahead else None,
        "in a ring": True if sent.hidden else None,
    }
