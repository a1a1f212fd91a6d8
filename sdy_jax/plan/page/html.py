"""The page of a plan: a template, its style and scripts, and a recorded plan as columns of numbers."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence
from importlib.resources import files
from itertools import accumulate
from typing import Any

from sdy_jax.base.errors import SdyError, with_article
from sdy_jax.base.files import write_whole
from sdy_jax.base.jax_calls import api_boundary
from sdy_jax.plan.page.findings import held_reason, host_columns, layout_choice
from sdy_jax.plan.record.differences import CollectiveChange, PlanDiff
from sdy_jax.plan.record.files import refused
from sdy_jax.plan.record.program import (
    RecordedBorder,
    RecordedBuffer,
    RecordedCollective,
    RecordedFrame,
    RecordedMemory,
    RecordedPipeline,
    RecordedPlace,
    RecordedPropagation,
    RecordedTensor,
)
from sdy_jax.plan.record.record import PlanRecord
from sdy_jax.plan.record.recorded_plan import RecordedReason, RecordedRecomputed
from sdy_jax.plan.record.timeline import (
    RecordedExecution,
    RecordedLane,
    RecordedRoofline,
    RecordedRun,
    RecordedSlice,
    RecordedTimeline,
)
from sdy_jax.plan.record.transfers import Transfers

# A recorded plan as a page reads it: columns of numbers, and each string, line and layout once.


class _Table:
    """Gives equal entries one number, in the order in which they come."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}

    def __call__(self, entry: Hashable) -> int:
        return self.numbers.setdefault(entry, len(self.numbers))

    @property
    def entries(self) -> list[Any]:
        return list(self.numbers)


def columns(record: PlanRecord) -> dict[str, Any]:
    """What JSON can say of a record. Strings stand in `strings`, and elsewhere by their numbers."""
    return _Columns(record).all()


class _Columns:
    def __init__(self, record: PlanRecord):
        self._record = record
        self._strings, self._frames, self._places, self._tensors = _Table(), _Table(), _Table(), _Table()
        self._names = _Table()
        for value in record.values:
            self._names(value.name)

    def all(self) -> dict[str, Any]:
        record, text = self._record, self._strings
        mesh, time = record.mesh, record.time
        found = {
            "name": record.name,
            "headline": record.headline,
            "mesh": {"axes": [[a.name, a.size] for a in mesh.axes], "ids": mesh.device_ids, "kind": mesh.device_kind},
            "line": [record.line.line, record.line.text],
            "versions": record.versions,
            "options": record.options,
            "wire": record.wire_bytes,
            "known": record.known,
            "transfers": {"": _transfers(record.transfers)}
            | {kind: _transfers(each) for kind, each in record.transfers_by_kind.items()},
            "flops": record.flops,
            "repeated": record.repeated_flops,
            "time": [time.compute, time.communication, time.hidden, time.unit, time.origin],
            "fingerprint": record.fingerprint,
            "values": self._values(),
            "ops": self._ops(),
            "collectives": self._collectives(),
            "memory": self._memory(record.memory) if record.memory is not None else None,
            "arguments": self._border(record.arguments),
            "closed": self._border(record.closed_over),
            "results": self._border(record.results),
            "annotations": [[each.kind, each.text, each.type, self._place(each.place)] for each in record.annotations],
            "notes": [[each.op, each.line, each.message, each.scope] for each in (*record.dear, *record.notes)],
            "host": list(map(host_columns, record.host)),
            "padding": [[each.type, each.line, each.bytes] for each in record.padding],
            "recomputed": _recomputed(record.recomputed) if record.recomputed is not None else None,
            "blocked": [[each.type, each.line, each.dim, each.parts, each.bytes] for each in record.blocked],
            "local_sorts": [[each.rows, each.axes, each.line] for each in record.local_sorts],
            "pipelines": list(map(_pipeline, record.pipelines)),
            "tried": [[t.microbatches, t.lines, t.time, t.peak, t.fits, t.chosen] for t in record.tried],
            "timeline": self._timeline(record.timeline) if time.unit == "seconds" else None,
            "run": self._run(record.run) if record.run is not None else None,
            "roofline": _roofline(record.roofline) if record.roofline is not None else None,
            "layouts": layout_choice(time.unit, record.layouts) if record.layouts is not None else None,
            "reasons": [self._reason(each) for each in record.reasons],
            "steps": self._steps(record.propagation) if record.propagation is not None else None,
        }
        # The tables come last: what is above fills them.
        found["names"] = [text(name) for name in self._names.entries]
        found["tensors"] = self._tensors.entries
        found["places"] = self._places.entries
        found["frames"] = self._frames.entries
        found["strings"] = text.entries
        return found

    # Parts that many share.

    def _tensor(self, tensor: RecordedTensor) -> int:
        return self._tensors((self._strings(tensor.type), tensor.bytes))

    def _frame(self, frame: RecordedFrame) -> int:
        return self._frames((self._strings(frame.line), self._strings(frame.text), self._strings(frame.function)))

    def _place(self, place: RecordedPlace) -> int:
        text, callers = self._strings, tuple(map(self._frame, place.callers))
        said = text(place.library), text(place.scope), text(place.primitive), int(place.backward)
        return self._places((self._frame(place.frames[0]), *said, callers))

    # The program.

    def _values(self) -> dict[str, list[int]]:
        values = self._record.values
        return {
            "tensor": [self._tensor(value.tensor) for value in values],
            "proposed": [self._strings(value.proposed) for value in values],
            "op": _or_none(value.op for value in values),
        }

    def _ops(self) -> dict[str, Any]:
        ops = self._record.ops
        return {
            "kind": [self._strings(op.title) for op in ops],
            "place": [self._place(op.place) for op in ops],
            "operands": [[self._names(name) for name in op.operands] for op in ops],
            "results": [[self._names(name) for name in op.results] for op in ops],
            "parent": _or_none(op.parent for op in ops),
            "times": [op.times for op in ops],
            "flops": [op.flops for op in ops],
            "alike": {number: op.alike for number, op in enumerate(ops) if op.repeated},
        }

    def _collectives(self) -> list[list[Any]]:
        return [self._collective(one, each.bucket) for each in self._record.collectives for one in each.single]

    def _collective(self, one: RecordedCollective, bucket: int | None) -> list[Any]:
        text = self._strings
        number = {"op": one.op, "serves": one.serves, "bucket": bucket}
        said = [text(each) for each in (one.kind, ", ".join(one.axes), one.reduction, one.type, one.origin, one.cause)]
        where = [-1 if each is None else each for each in number.values()]
        ends = [self._names(name) if name else -1 for name in (one.value, one.result)]
        flags = one.times_known + 2 * one.counted + 4 * one.again + 8 * one.is_ahead
        times = one.total_time, one.hidden * one.estimated_times
        return [*said, one.wire_bytes, one.times, *times, self._place(one.place), *where, *ends, flags]

    def _memory(self, memory: RecordedMemory) -> dict[str, Any]:
        return {
            "arguments": memory.arguments,
            "results": memory.results,
            "temporaries": memory.temporaries,
            "shared": memory.shared,
            "available": memory.available,
            "own": memory.own_results,
            "peak": memory.peak,
            # What an op takes and what it makes are not all there at one moment of it.
            "timeline": [min(size, memory.temporaries) for size in memory.timeline],
            "always": [[held.kind, held.bytes] for held in memory.border_by_kind],
            "buffers": [self._buffer(buffer) for buffer in memory.buffers],
        }

    def _buffer(self, buffer: RecordedBuffer) -> list[Any]:
        return [self._names(buffer.value), buffer.bytes, buffer.first, buffer.last, buffer.kind]

    def _timeline(self, timeline: RecordedTimeline) -> dict[str, Any]:
        """The slices by columns."""
        slices = timeline.slices
        return {
            "lanes": list(map(_lane, timeline.lanes)),
            "loops": [[loop.op, _short(loop.start), _short(loop.duration), loop.trips] for loop in timeline.loops],
            "starts": list(map(_short, timeline.starts)),
            "slices": {
                **{name: [getattr(each, name) for each in slices] for name in _OF_SLICES},
                **{name: [_short(getattr(each, name)) for each in slices] for name in ("start", "duration")},
                "op": _or_none(each.op for each in slices),
                "host": _or_none(each.host for each in slices),
                "collective": self._first(slices),
            },
        }

    def _first(self, slices: Sequence[RecordedSlice | RecordedExecution]) -> list[int]:
        """The collectives that slices are of, by their numbers on the page; a bucket is its first member."""
        first = [0, *accumulate(len(each.single) for each in self._record.collectives)]
        return [-1 if each.collective is None else first[each.collective] for each in slices]

    def _run(self, run: RecordedRun) -> dict[str, Any]:
        slices = run.slices
        columns = {name: [getattr(each, name) for each in slices] for name in _OF_EXECUTIONS}
        named = {"instruction": [self._strings(each.instruction) for each in slices]}
        named |= {"scope": [self._strings(each.scope) for each in slices]}
        lanes = list(map(_lane, run.lanes))
        return {
            "device": run.device,
            "seconds": run.seconds,
            "lanes": lanes,
            "slices": columns | named | {"collective": self._first(slices)},
        }

    # What the user says.

    def _border(self, values: Sequence[RecordedBorder]) -> list[list[Any]]:
        return [[v.path, self._tensor(v.tensor), v.origin, v.stated, v.line, v.move] for v in values]

    def _reason(self, each: RecordedReason) -> list[Any]:
        values = [[self._strings(mark.line), self._strings(mark.what)] for mark in each.values]
        return [values, each.saves, each.costs, each.times]

    def _steps(self, said: RecordedPropagation) -> dict[str, Any]:
        text, name = self._strings, self._names
        starts = [[name(each.value), text(each.type), [text(t) for t in each.texts]] for each in said.starts]
        spreads = [
            [
                each.step,
                name(each.value),
                text(each.type),
                text(each.axis),
                each.dim,
                name(each.source) if each.source else -1,
                each.source_dim,
                text(each.op),
                self._place(each.place),
                each.level,
                each.priority,
            ]
            for each in said.spreads
        ]
        return {"starts": starts, "spreads": spreads}


def _transfers(found: Transfers) -> list[float]:
    return [found.count, found.unmerged, found.bytes]


def _or_none(numbers: Iterable[int | None]) -> list[int]:
    return [-1 if number is None else number for number in numbers]


def _lane(lane: RecordedLane) -> str:
    """What a lane is called."""
    return f"links: {lane.name}" if lane.axes else lane.name


_OF_EXECUTIONS = ("lane", "start", "duration", "backward")
_OF_SLICES = ("lane", "times", "hidden", "phase")


def _short(time: float) -> float:
    """A time as the page reads it: in ten digits, which tell ops of a step apart, where floats have seventeen, of which
    that of a large program is a third."""
    return float(f"{time:.10g}")


def _roofline(found: RecordedRoofline) -> dict[str, Any]:
    """What is used of each resource, and its peak."""
    resources = [[each.name, each.amount, each.peak] for each in found.resources]
    return {"resources": resources, "seconds": found.seconds, "mfu": found.mfu}


_OF_PIPELINES = (
    *("schedule", "axis", "stages", "microbatches", "rounds", "layers", "trips", "bubble", "sent", "stacks", "carried"),
    *("held", "groups", "durations", "kinds", "times", "op"),
)


def _pipeline(found: RecordedPipeline) -> dict[str, Any]:
    """A pipeline; its timeline as a list per row: trip, kind, and microbatches and rounds by stage."""
    rows = [[row.trip, found.kinds.index(row.kind), row.microbatches, row.rounds] for row in found.rows]
    boundary = [found.forward_bytes, found.backward_bytes]
    return {name: getattr(found, name) for name in _OF_PIPELINES} | {
        "boundary": boundary,
        "rows": rows,
        "reason": held_reason(found),
    }


def _recomputed(found: RecordedRecomputed) -> list[Any]:
    """What is not held, what runs again, and the bytes that are held less."""
    values = [[each.type, each.line, each.bytes] for each in found.values]
    return [values, [[each.op, each.line, each.flops] for each in found.ops], found.bytes]


# What differs between two plans, as a page reads it.


def differences(before: PlanRecord, after: PlanRecord) -> dict[str, Any]:
    """What JSON can say of the differences. Collectives stand by their numbers in the plans, -1 where one has none."""
    found: PlanDiff = after.diff(before)
    numbers = [{id(one): number for number, one in enumerate(_singles(record))} for record in (before, after)]
    return {
        "causes": [[cause.line, cause.what, cause.text] for cause in found.causes],
        "amounts": [[each.name, each.before, each.after, each.unit] for each in found.amounts],
        "border": [[each.side, each.path, each.before or "", each.after or ""] for each in found.border],
        "collectives": [_collective(change, *numbers) for change in found.collectives],
        "values": [[each.name, each.before, each.after, each.line, each.count] for each in found.values],
    }


def _singles(record: PlanRecord) -> Iterator[RecordedCollective]:
    return (one for each in record.collectives for one in each.single)


def _collective(change: CollectiveChange, before: dict[int, int], after: dict[int, int]) -> list[Any]:
    return [before.get(id(change.before), -1), after.get(id(change.after), -1), change.count, change.bytes]


# The page of a plan: a template, with its style, its scripts and the plan's data written into it, as a file or in
# a notebook.

_SCRIPTS = (
    "basics",
    "layouts",
    "plans",
    "steps",
    "scopes",
    "device_grid",
    "windowed",
    "tree",
    "graph_layout",
    "graph",
    "source",
    "tables",
    "reasons",
    "details",
    "memory",
    "pipelines",
    "held",
    "time",
    "compare",
    "search",
    "headline",
    "main",
)
"""The scripts in the order in which they run; each uses those before it, as one module."""

_STYLES = ("page.css", "pipelines.css", "time.css")


def write_page(record: PlanRecord, path: str | os.PathLike[str], against: PlanRecord | None = None) -> None:
    """Writes the page of a plan.

    Raises:
        SdyError: the file cannot be written.
    """
    text = page(record, against)
    with refused("the page of the plan", path):
        write_whole(path, text)


def page(record: PlanRecord, against: PlanRecord | None = None) -> str:
    """The page of a plan, and of what differs from another one. Only scripts with the hash that the page states run in
    it, whatever the names and lines of the program contain."""
    script = "\n".join(_asset(f"{name}.js") for name in _SCRIPTS)
    hashed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    data: dict[str, Any] = {"plans": [columns(each) for each in (record, against) if each is not None]}
    if against is not None:
        data["differences"] = differences(against, record)
    parts = {
        "title": html.escape(f"{record.name}: plan"),
        "hash": f"sha256-{hashed}",
        "style": "\n".join(map(_asset, _STYLES)),
        "data": _json(data),
        "script": script,
    }
    before, *rest = _asset("page.html").split("{{")
    pieces = [before]
    for each in rest:
        name, _, after = each.partition("}}")
        pieces += [parts[name], after]
    return "".join(pieces)


def _asset(name: str) -> str:
    return files("sdy_jax.plan.page").joinpath("assets", name).read_text(encoding="utf-8")


def _json(data: Any) -> str:
    """JSON that may stand inside of a script element: nothing in it looks like a tag."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), default=float)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


# A plan where its reader is: the page in a notebook, the text in a terminal.

_HEIGHT = 640
"""Pixels. Chosen: the page's panels are usable, and a cell below is still in sight."""


@api_boundary
def show(plan: Any, height: int = _HEIGHT) -> None:
    """Shows a plan: in a notebook (Jupyter, VS Code, Colab) the page to explore, in a frame; else its text.

    Args:
        plan: a `Plan`, or a `PlanRecord` from `load_plan`. A table of one (`plan.table("values")`) is shown as well.
        height: of the frame in a notebook, in pixels.

    Returns:
        None. The text is printed, in colours where standard output is a terminal and `rich` is installed; notebooks
        that do not show HTML keep it beside the page.

    Raises:
        SdyError: it is nothing of a plan, or a function, whose plan was not asked for.

    Example:
        sdy.show(step.plan(state, batch))

    See also:
        `Plan.to_html`: writes the page to a file.
    """
    if not hasattr(plan, "show"):
        raise SdyError(_refused(plan))
    display = _notebook_display()
    if display is None:
        plan.show()
    elif hasattr(plan, "record"):
        display({"text/html": _frame(plan, height), "text/plain": str(plan)}, raw=True)
    else:
        display(plan)


def _refused(given: object) -> str:
    said = f"show got {with_article(type(given))}; expected a plan"
    if callable(given) and hasattr(given, "plan"):
        name = getattr(given, "__name__", "the function")
        return f"{said}; to fix: sdy.show({name}.plan(...)), with the arguments of a call"
    return f"{said}, made by `plan` of a partitioned function or loaded by `load_plan`"


def _notebook_display() -> Any:
    """IPython's `display`, where a notebook's kernel runs us; None in terminals."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if getattr(shell, "kernel", None) is None:
        return None
    from IPython.display import display

    return display


def _frame(plan: Any, height: int) -> str:
    """The page in a frame of its own: its style does not reach the notebook, nor that of the notebook the page."""
    record = plan if isinstance(plan, PlanRecord) else plan.record(steps=True)
    return (
        f'<iframe srcdoc="{html.escape(page(record))}" sandbox="allow-scripts" title="plan of '
        f'{html.escape(record.name)}" style="width:100%;height:{int(height)}px;border:1px solid #8884"></iframe>'
    )
