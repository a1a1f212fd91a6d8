"""The program of a recorded plan: mesh, lines of source, arguments and results, ops, values, collectives, memory,
pipelines, and the steps of propagation. See `record.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

# The mesh, lines of source, arguments, results and annotations of a recorded plan: see `record.py`.


@dataclass(frozen=True, slots=True)
class RecordedFrame:
    """A line of the user's code: `file.py:42`, its text, and the function that it is in."""

    line: str
    text: str = ""
    function: str = ""


@dataclass(frozen=True, slots=True)
class RecordedPlace:
    """Where an op comes from.

    Attributes:
        line, text, function: of the innermost frame in a file of the user's.
        library: the line of the library that made the op for it; may be empty.
        scope: the name scopes around it, `Block_2/attention/out`; may be empty.
        primitive: what jax calls the op; may be empty.
        backward: it belongs to a derivative's backward pass.
        callers: the user's frames around `line`, inner ones first.
    """

    line: str
    text: str = ""
    function: str = ""
    library: str = ""
    scope: str = ""
    primitive: str = ""
    backward: bool = False
    callers: tuple[RecordedFrame, ...] = ()

    @property
    def frames(self) -> tuple[RecordedFrame, ...]:
        """All of the user's frames, inner ones first."""
        return RecordedFrame(self.line, self.text, self.function), *self.callers

    @property
    def lines(self) -> str:
        """`model.py:42 (flax/linen/linear.py:287)`."""
        return f"{self.line} ({self.library})" if self.library else self.line


@dataclass(frozen=True, slots=True)
class RecordedAxis:
    """A mesh axis and the number of devices along it."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class RecordedMesh:
    """The mesh: its axes, the devices where these are not in order, and what the devices call themselves."""

    axes: tuple[RecordedAxis, ...]
    device_ids: tuple[int, ...] = ()
    device_kind: str = ""

    @property
    def size(self) -> int:
        """The number of devices."""
        count = 1
        for axis in self.axes:
            count *= axis.size
        return count

    def __str__(self) -> str:
        return ", ".join(f"{axis.name}={axis.size}" for axis in self.axes)


@dataclass(frozen=True, slots=True)
class RecordedTensor:
    """A value as devices hold it.

    Attributes:
        type: as jax prints it, with axes: `f32[8@data,4]{U:model}`.
        dtype: jax's short name, `f32`.
        shape: the global shape.
        axes: the axes that split each dimension, major to minor; parts of axes as `model:(1)2`.
        unreduced: the axes along which devices hold terms of it.
        local_shape: the shape of one device's block, padding included.
        bytes: of that block.
    """

    type: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    axes: tuple[tuple[str, ...], ...] = ()
    unreduced: tuple[str, ...] = ()
    local_shape: tuple[int, ...] = ()
    bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class RecordedBorder:
    """An argument, a closed-over array or a result.

    Attributes:
        path: `params['w1']`, `constant 0`, `result[0]`.
        tensor: its layout.
        origin: where the layout comes from: "stated" (`in_shardings`, `out_shardings`, or the module's own), "passed"
            (the array that was passed has it), "planner" (`AUTO`), or "propagation".
        stated: what was stated, `P('data')`; empty where nothing was.
        line: where that is said.
        move: the layout in which the argument comes, where it is moved on entry; and the bytes that a device receives
            then at least.
    """

    path: str
    tensor: RecordedTensor
    origin: str = "propagation"
    stated: str = ""
    line: str = ""
    move: str = ""
    moved_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class RecordedAnnotation:
    """A sharding that the user wrote inside of the function.

    Attributes:
        kind: "sharding_constraint", "reshard", "manual_computation", or the name of a collective.
        text: what it says: `P('data', None)`, or the shardings of a manual computation.
        type: of the value that it is written on, without axes.
        place: where.
    """

    kind: str
    text: str
    type: str
    place: RecordedPlace


# The partitioned program of a recorded plan: ops, values, collectives and memory: see `record.py`.


@dataclass(frozen=True, slots=True)
class RecordedBranch:
    """A branch of a conditional: the index of the conditional, and of the branch in it."""

    conditional: int
    number: int


@dataclass(frozen=True, slots=True)
class RecordedCollective:
    """A collective of the partitioned program, or several that run as one: `members`.

    Attributes:
        kind, axes: what it is and the mesh axes that it runs over.
        detail: what it moves as the SDY dialect writes it, `[{"x"}: 0->1]`.
        reduction: how it combines values, where it does.
        type: of its result, with axes.
        dtype, shape: of the global value.
        wire_bytes: that a device sends in one execution.
        times: executions per call; loops whose trips are unknown count as one trip, and `times_known` is False.
        time: of one execution by the cost model; of a member its share of its bucket's.
        hidden: the part of that which a ring hides.
        depth, branches: the loops and conditionals that it stands in.
        counted: False in a branch that sends less than another one of the same conditional.
        origin: "partitioner", or "user" where the program holds it itself.
        cause: what users call the op that needed it.
        place: of that op.
        op: the index of the collective in `PlanRecord.ops`; None where an op sends by itself, or is not there.
        value, result: the names of what it moves and of what it makes; may be empty.
        serves: the index of the op that needed it; None where it is not known.
        again: it makes a copy once more, so that the one before need not be held.
        is_ahead: it runs one trip ahead of its loop.
        bucket: the number of the bucket whose members it has.
        estimated_times: `times`, with a guess for loops whose trips are unknown: by it times count.
    """

    kind: str
    axes: tuple[str, ...]
    detail: str
    reduction: str
    type: str
    dtype: str
    shape: tuple[int, ...]
    wire_bytes: float
    place: RecordedPlace
    cause: str
    times: int = 1
    times_known: bool = True
    time: float = 0.0
    hidden: float = 0.0
    depth: int = 0
    branches: tuple[RecordedBranch, ...] = ()
    counted: bool = True
    origin: str = "partitioner"
    op: int | None = None
    value: str = ""
    result: str = ""
    serves: int | None = None
    again: bool = False
    is_ahead: bool = False
    bucket: int | None = None
    members: tuple[RecordedCollective, ...] = ()
    estimated_times: int = 1

    @property
    def total_wire_bytes(self) -> float:
        """What a device sends in all executions."""
        return self.wire_bytes * self.times

    @property
    def total_time(self) -> float:
        """What all executions take by the cost model."""
        return self.time * self.estimated_times

    @property
    def single(self) -> tuple[RecordedCollective, ...]:
        """Its members, or itself."""
        return self.members or (self,)


@dataclass(frozen=True, slots=True)
class RecordedValue:
    """A value of the partitioned program: its name, its layout as chosen, the one that propagation proposed (a type;
    empty where the planner made the value), and the index of the op that makes it; None for arguments."""

    name: str
    tensor: RecordedTensor
    proposed: str = ""
    op: int | None = None


@dataclass(frozen=True, slots=True)
class RecordedKernel:
    """What one execution of a kernel takes on a device.

    Attributes:
        title: the name of the kernel.
        bytes: those that it reads from the device's memory and writes to it.
        seconds: its time by the cost model; 0 where that knows none.
        basis: where the figures are from, in words.
    """

    title: str
    bytes: float = 0.0
    seconds: float = 0.0
    basis: str = ""


@dataclass(frozen=True, slots=True)
class RecordedOp:
    """An op of the partitioned program.

    Attributes:
        kind: its name in its dialect, `stablehlo.dot_general`.
        place: where it comes from.
        operands, results: names of values.
        parent, region: the index of the op in whose region it is, and of the region; None and 0 at the top.
        flops: operations that a device performs in one execution.
        repeated: those of them that other devices perform as well: the same on so many devices, `alike`.
        is_choice: the values around it are split further, but to split the op as well costs more.
        times, times_known: as of a collective.
        kernel: what it takes where it is one.
    """

    kind: str
    place: RecordedPlace
    operands: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    parent: int | None = None
    region: int = 0
    flops: float = 0.0
    repeated: float = 0.0
    alike: int = 1
    is_choice: bool = False
    times: int = 1
    times_known: bool = True
    kernel: RecordedKernel | None = None

    @property
    def title(self) -> str:
        """What users call it."""
        return self.kind if self.kernel is None else self.kernel.title


@dataclass(frozen=True, slots=True)
class RecordedBuffer:
    """The memory of a value.

    Attributes:
        value: its name.
        bytes: on a device.
        first, last: from which op to which it is held, both included, by their indices.
        kind: "activations" that are kept for the backward pass, "recomputed" in it, "gathered" from other devices,
            "gradients" until the update, else "temporaries".
        op: the index of the op that makes it.
    """

    value: str
    bytes: float
    first: int
    last: int
    kind: str = "temporaries"
    op: int | None = None


@dataclass(frozen=True, slots=True)
class RecordedHeld:
    """What is held all the time: "weights", "optimizer state" (what the update alone reads), other "arguments", and
    "results" that do not lie in donated arguments."""

    kind: str
    bytes: float


@dataclass(frozen=True, slots=True)
class RecordedMemory:
    """What a device holds, by estimate.

    `timeline` has the bytes of temporaries that are live while each of the ops runs; `buffers` are those temporaries,
    so that the ones at any op are found; `largest` those at the peak, largest first. `results` are the bytes of all
    results, `shared` those of them in the memory of donated arguments. `available`: what a device has for the program;
    0 where that is not known. `always`: arguments and results by kind.
    """

    arguments: float = 0.0
    results: float = 0.0
    temporaries: float = 0.0
    shared: float = 0.0
    timeline: tuple[float, ...] = ()
    buffers: tuple[RecordedBuffer, ...] = ()
    largest: tuple[RecordedBuffer, ...] = ()
    available: float = 0.0
    always: tuple[RecordedHeld, ...] = ()

    @property
    def border_by_kind(self) -> tuple[RecordedHeld, ...]:
        """`always`; of plans that were saved before there were kinds, arguments and results."""
        both = RecordedHeld("arguments", self.arguments), RecordedHeld("results", self.own_results)
        return self.always or tuple(held for held in both if held.bytes)

    def held_at(self, op: int) -> float:
        """All that a device holds while an op runs. What the op takes and what it makes are not all there at one moment
        of it: never more than the peak."""
        return self.peak - self.temporaries + min(self.timeline[op], self.temporaries)

    def temporaries_by(self, label: Callable[[RecordedBuffer], str]) -> dict[str, tuple[float, ...]]:
        """The temporaries that are held while each of the ops runs, by some label: together with arguments and results
        as much as `held_at` says. Where an op's are not all there at one moment, each label has its share."""
        changes: dict[str, list[float]] = {}
        for buffer in self.buffers:
            own = changes.setdefault(label(buffer), [0.0] * (len(self.timeline) + 1))
            own[buffer.first] += buffer.bytes
            own[buffer.last + 1] -= buffer.bytes
        shares = [self.temporaries / size if size > self.temporaries else 1.0 for size in self.timeline]
        return {
            name: tuple(size * share for size, share in zip(accumulate(own[:-1]), shares, strict=True))
            for name, own in changes.items()
        }

    @property
    def own_results(self) -> float:
        """Of results that do not lie in donated arguments."""
        return self.results - self.shared

    @property
    def border(self) -> float:
        """Arguments and results together."""
        return self.arguments + self.own_results

    @property
    def peak(self) -> float:
        """All that a device holds at most."""
        return self.border + self.temporaries

    def live(self, op: int) -> list[RecordedBuffer]:
        """The temporaries that are live while an op runs, largest first."""
        return sorted((b for b in self.buffers if b.first <= op <= b.last), key=lambda buffer: -buffer.bytes)


@dataclass(frozen=True, slots=True)
class RecordedHostMemory:
    """What lies in the memory of the host, or moves from or to it.

    Attributes:
        what: "argument" or "result", which lie there; "to the host" or "to devices", which move.
        path: of an argument or result.
        type: with axes where the layout is known.
        bytes: of a device's block; 0 where the layout is not known.
        line: which moves it.
        times, times_known: as of a collective; 0 of what lies there and is moved by what stands for itself.
        backward: it moves in a derivative's backward pass.
        op: the index of the op behind which it moves to the host, or before which to devices; None before the program,
            and behind it.
    """

    what: str
    path: str
    type: str
    bytes: float
    line: str = ""
    times: int = 1
    times_known: bool = True
    backward: bool = False
    op: int | None = None

    @property
    def total(self) -> float:
        """The bytes that it moves per call."""
        return self.bytes * self.times

    @property
    def leaves(self) -> bool:
        """Whether it moves to the host; else it comes to devices."""
        return self.what in ("result", "to the host")

    @property
    def title(self) -> str:
        """Which way it moves."""
        return "to the host" if self.leaves else "to devices"


@dataclass(frozen=True, slots=True)
class RecordedCount:
    """So many ops that jax calls by a name."""

    name: str
    count: int


@dataclass(frozen=True, slots=True)
class RecordedCode:
    """The ops of one line: the user's frames around them, inner ones first, and what they are."""

    frames: tuple[RecordedFrame, ...]
    ops: tuple[RecordedCount, ...]


# The pipelines of a recorded plan.


@dataclass(frozen=True, slots=True)
class RecordedRow:
    """What all stages do at once: work of one kind ("forward", "backward", "weight gradient"), in a trip of the loop.

    `microbatches` and `rounds` say on what, by stage; -1 in the bubble.
    """

    trip: int
    kind: str
    microbatches: tuple[int, ...]
    rounds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RecordedPipeline:
    """A run of a pipeline: all rows of its schedule, or those of one pass.

    Attributes:
        schedule: its name.
        axis: the mesh axis of the stages.
        stages, microbatches, rounds, layers: how many there are.
        trips: of the loop.
        bubble: the share of the time in which a stage does nothing, by what rows compute and what they send inside of a
            stage.
        place: where it is called.
        forward_bytes, backward_bytes: that a device sends to the next stage, or back, for one microbatch.
        sent: what two neighbours send to each other in all trips, of those that send most.
        durations: what a row of each of `kinds` takes by the cost model, but for what it sends along the axis; in
            the unit of `PlanRecord.time`, empty where that is not known.
        stacks: the bytes of a stage's weights on a device; of a backward pass apart, with what its forward pass kept.
        carried: the bytes that a device carries from trip to trip: microbatches on their way, sums of gradients.
        held: by stage, the microbatches of a group between their forward and backward rows at most; empty of a run
            without backward rows.
        groups: by stage, its layers: `0-1, 8-9`.
        rows: the timeline.
        times: how often it runs per call.
        op: the index in `PlanRecord.ops` of the computation that is manual on the axis.
    """

    schedule: str
    axis: str
    stages: int
    microbatches: int
    rounds: int
    layers: int
    trips: int
    bubble: float
    place: RecordedPlace
    forward_bytes: float
    backward_bytes: float
    sent: float
    durations: tuple[float, ...]
    stacks: float
    carried: float
    held: tuple[int, ...]
    groups: tuple[str, ...]
    rows: tuple[RecordedRow, ...]
    times: int = 1
    op: int | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Those of its rows."""
        return tuple(dict.fromkeys(row.kind for row in self.rows))


@dataclass(frozen=True, slots=True)
class RecordedTried:
    """Numbers of microbatches that were tried, one for each line of a pipeline that gives several, with those lines;
    what the plan with them takes by the cost model and holds at most, and whether a device has as much. `time` is None
    where no plan fits, and then `peak` that of the least."""

    microbatches: tuple[int, ...]
    lines: tuple[str, ...]
    time: float | None
    peak: float
    fits: bool
    chosen: bool


# How propagation gave values their axes, step by step: see `record.py`.


@dataclass(frozen=True, slots=True)
class RecordedStart:
    """A value whose layout was stated: its type before propagation, and the way to the annotation in words."""

    value: str
    type: str
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordedSpread:
    """A value got an axis.

    Attributes:
        step: the number of the step, in which one op propagates; from 0.
        value, dim, axis: what got it, and where.
        type: of the value after the step.
        source, source_dim: the value and dimension that had the axis; an empty name where no single value had it.
        op, place: the op that propagated.
        level, priority: the op priority (0 to 4) and the user priority.
    """

    step: int
    value: str
    dim: int
    axis: str
    type: str
    source: str
    source_dim: int
    op: str
    place: RecordedPlace
    level: int = 0
    priority: int = 0


@dataclass(frozen=True, slots=True)
class RecordedPropagation:
    """What values began with, and what each step gave them, in order."""

    starts: tuple[RecordedStart, ...] = ()
    spreads: tuple[RecordedSpread, ...] = ()
