"""The parts of a recorded plan, and the plan as their sum: data without what can be asked of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from sdy_jax.plan.record.border import RecordedAnnotation, RecordedBorder, RecordedFrame, RecordedMesh
from sdy_jax.plan.record.choices import RecordedChoices
from sdy_jax.plan.record.pipelines import RecordedPipeline, RecordedTried
from sdy_jax.plan.record.printing import Printed
from sdy_jax.plan.record.program import RecordedCode, RecordedCollective, RecordedMemory, RecordedOp, RecordedValue
from sdy_jax.plan.record.propagation import RecordedPropagation


@dataclass(frozen=True, slots=True)
class RecordedTime:
    """What a call takes by the cost model, in `unit` (seconds, or bytes where the model knows no rates); `origin` says
    where the rates come from."""

    compute: float = 0.0
    communication: float = 0.0
    hidden: float = 0.0
    unit: str = "bytes"
    origin: str = ""

    @property
    def total(self) -> float:
        """Both, one after the other but for what is hidden."""
        return self.compute + self.communication - self.hidden


@dataclass(frozen=True, slots=True)
class RecordedNote:
    """A value or op that could not be split, or a constraint that costs much: what, where, and the message."""

    op: str
    line: str
    message: str
    library: str = ""
    scope: str = ""

    def __str__(self) -> str:
        line = f"{self.line} ({self.library})" if self.library else self.line
        return f"{line}: {f'{self.op} in {self.scope}' if self.scope else self.op}: {self.message}"


@dataclass(frozen=True, slots=True)
class RecordedChange:
    """A value of one line that the planner lays out otherwise than op by op: both types, what the user stated for it,
    the line, the bytes of the global value, and how many are alike."""

    chosen: str
    proposed: str
    stated: str
    line: str
    bytes: float
    count: int


@dataclass(frozen=True, slots=True)
class RecordedLayouts:
    """The choice of layouts for the whole program: costs and what is sent by the cost model, of the choice and of the
    plan op by op; the least that any choice sends, where that is known soon; what repeating work would save; both costs
    without what is hidden, and the bytes that a device would hold op by op, where that would take less."""

    cost: float
    proposed_cost: float
    sent: float
    proposed_sent: float
    bound: float | None
    changed: tuple[RecordedChange, ...] = ()
    repeating: str = ""
    exposed: float = 0.0
    proposed_exposed: float = 0.0
    proposed_held: float = 0.0


@dataclass(frozen=True, slots=True)
class RecordedMeasured:
    """What a plan with some layouts of the border takes beside what is hidden, sends and holds."""

    name: str
    cost: float
    sent: float
    peak: float


@dataclass(frozen=True, slots=True)
class RecordedAutomatic:
    """Layouts of the border that were left to the planner: as they can be stated, what it chose and the usual ones
    beside it, and the limit of memory, None where there is none."""

    stated: tuple[str, ...]
    measured: tuple[RecordedMeasured, ...]
    limit: float | None


@dataclass(frozen=True, slots=True)
class RecordedComparedMesh:
    """A mesh of several of which one was chosen: its axes as `data=2, model=4`, what the plan on it takes, sends and
    holds, and whether a device has as much; `time` is None where no plan fits, and then `peak` that of the least."""

    mesh: str
    time: float | None
    wire_bytes: float
    peak: float
    fits: bool
    chosen: bool


@dataclass(frozen=True, slots=True)
class RecordedPadding:
    """A value in blocks that do not divide it, and the bytes of padding on a device."""

    type: str
    line: str
    bytes: float


@dataclass(frozen=True, slots=True)
class RecordedNotHeld:
    """A value that is computed again instead of being held, where it is made, and its bytes on a device."""

    type: str
    line: str
    bytes: float


@dataclass(frozen=True, slots=True)
class RecordedAgain:
    """An op that runs once more, its line, and the operations of a device for that, per call."""

    op: str
    line: str
    flops: float


@dataclass(frozen=True, slots=True)
class RecordedRecomputed:
    """What is computed again for the sake of memory: the values that need not be held, the ops that run once more, and
    the bytes that a device holds less between a forward and a backward pass."""

    values: tuple[RecordedNotHeld, ...]
    ops: tuple[RecordedAgain, ...]
    bytes: float


@dataclass(frozen=True, slots=True)
class RecordedInParts:
    """The largest value of a group of ops that run part by part, the line that makes it, the dimension that is cut and
    into how many parts, and the bytes that the group's values would take together on a device."""

    type: str
    line: str
    dim: int
    parts: int
    bytes: float


@dataclass(frozen=True)
class RecordedPlan(Printed):
    """The data of a `PlanRecord`, which says what each field is."""

    name: str
    headline: str
    mesh: RecordedMesh
    line: RecordedFrame
    versions: tuple[str, ...]
    options: tuple[str, ...]
    arguments: tuple[RecordedBorder, ...]
    closed_over: tuple[RecordedBorder, ...]
    results: tuple[RecordedBorder, ...]
    annotations: tuple[RecordedAnnotation, ...]
    code: tuple[RecordedCode, ...]
    collectives: tuple[RecordedCollective, ...]
    ops: tuple[RecordedOp, ...]
    values: tuple[RecordedValue, ...]
    memory: RecordedMemory | None
    time: RecordedTime
    notes: tuple[RecordedNote, ...]
    dear: tuple[RecordedNote, ...]
    layouts: RecordedLayouts | None
    automatic: RecordedAutomatic | None
    padding: tuple[RecordedPadding, ...]
    wire_bytes: float
    known: bool
    flops: float
    repeated_flops: float
    fingerprint: str
    recomputed: RecordedRecomputed | None = None
    propagation: RecordedPropagation | None = None
    meshes: tuple[RecordedComparedMesh, ...] = ()
    blocked: tuple[RecordedInParts, ...] = ()
    pipelines: tuple[RecordedPipeline, ...] = ()
    tried: tuple[RecordedTried, ...] = ()
    choices: RecordedChoices | None = field(default=None, compare=False)
    is_edited: bool = field(default=False, compare=False)

    @cached_property
    def value_of(self) -> dict[str, RecordedValue]:
        """The values by their names."""
        return {value.name: value for value in self.values}

    @property
    def counted(self) -> Iterator[RecordedCollective]:
        """The collectives that count, members of buckets one by one."""
        return (one for each in self.collectives for one in each.single if each.counted)
