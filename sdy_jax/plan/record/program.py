"""The partitioned program of a recorded plan: ops, values, collectives and memory: see `record.py`."""

from __future__ import annotations

from dataclasses import dataclass

from sdy_jax.plan.record.border import RecordedFrame, RecordedPlace, RecordedTensor


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
        time: of one execution by the cost model.
        hidden: the part of that which runs beside other work.
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

    @property
    def total_wire_bytes(self) -> float:
        """What a device sends in all executions."""
        return self.wire_bytes * self.times

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
    """The memory of a value: from which op to which, both included, by their indices."""

    value: str
    bytes: float
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class RecordedMemory:
    """What a device holds, by estimate.

    `timeline` has the bytes of temporaries that are live while each of the ops runs; `buffers` are those temporaries,
    so that the ones at any op are found; `largest` those at the peak, largest first. `shared` are the bytes of results
    in the memory of donated arguments. `available`: what a device has for the program; 0 where that is not known.
    """

    arguments: float = 0.0
    results: float = 0.0
    temporaries: float = 0.0
    shared: float = 0.0
    timeline: tuple[float, ...] = ()
    buffers: tuple[RecordedBuffer, ...] = ()
    largest: tuple[RecordedBuffer, ...] = ()
    available: float = 0.0

    @property
    def peak(self) -> float:
        """All that a device holds at most."""
        return self.arguments + self.results - self.shared + self.temporaries

    def live(self, op: int) -> list[RecordedBuffer]:
        """The temporaries that are live while an op runs, largest first."""
        return sorted((b for b in self.buffers if b.first <= op <= b.last), key=lambda buffer: -buffer.bytes)


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
