"""The parts of a recorded plan, the plan as their sum, and what every plan offers to be read: page, tables,
drawings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from sdy_jax.base.extensions import Extension
from sdy_jax.base.tracebacks import api_boundary
from sdy_jax.plan.record.choices import RecordedChoices
from sdy_jax.plan.record.program import (
    RecordedAnnotation,
    RecordedBorder,
    RecordedCode,
    RecordedCollective,
    RecordedFrame,
    RecordedMemory,
    RecordedMesh,
    RecordedOp,
    RecordedPipeline,
    RecordedPropagation,
    RecordedTried,
    RecordedValue,
)

# What plans and their records offer to be read: the page, tables, drawings, and where these are shown.

TABLE_OF: Extension[Callable[[Any, str], Any]] = Extension("table_of")
DRAWING_OF: Extension[Callable[[Any, str], Any]] = Extension("drawing_of")
SHOW: Extension[Callable[[str], None]] = Extension("show")
COLOURED: Extension[Callable[[str], Any]] = Extension("coloured")
AS_HTML: Extension[Callable[[str], str]] = Extension("as_html")


class Printed:
    """A plan, or the record of one, whose `str` is its page and which `record()` says as plain data."""

    def record(self) -> Any:
        """All that is printed."""
        raise NotImplementedError

    @api_boundary
    def table(self, name: str) -> Any:
        """All rows of one kind, which the page folds.

        Args:
            name: "collectives", "ops", "values", "arguments" (with results), "memory" (at the peak), "meshes" (of
                several those that were compared), or "pipelines" (a row per stage).

        Returns:
            A `Table` to print; iterating over it gives its rows, which are named tuples.

        Raises:
            SdyError: there is no such table.

        Example:
            print(plan.table("collectives"))
            most = max(plan.table("arguments"), key=lambda row: row.bytes)
        """
        return TABLE_OF.function(self.record(), name)

    @api_boundary
    def draw(self, value: str) -> Any:
        """The devices that hold each block of an argument or result, to print.

        Args:
            value: a path, `params['w1']`, or a name in `plan.table("values")`.

        Raises:
            SdyError: there is no such value, or more than two of its dimensions are split.

        Example:
            print(plan.draw("params['w1']"))
        """
        return DRAWING_OF.function(self.record(), value)

    def show(self) -> None:
        """Prints the page, in colours where standard output is a terminal and `rich` is installed."""
        SHOW.function(str(self))

    def __rich__(self) -> Any:
        return COLOURED.function(str(self))

    def _repr_html_(self) -> str:
        return AS_HTML.function(str(self))


# The parts of a recorded plan, and the plan as their sum: data without what can be asked of it.


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
    baseline: str
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
    baseline_cost: float
    sent: float
    baseline_sent: float
    bound: float | None
    changed: tuple[RecordedChange, ...] = ()
    repeating: str = ""
    exposed: float = 0.0
    baseline_exposed: float = 0.0
    baseline_held: float = 0.0


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
