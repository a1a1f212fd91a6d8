"""The parts of a recorded plan, its choices among them, their sum, and what every plan offers to be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from sdy_jax.base.extensions import Extension
from sdy_jax.base.jax_calls import api_boundary
from sdy_jax.plan.record.program import (
    RecordedAnnotation,
    RecordedBorder,
    RecordedCode,
    RecordedCollective,
    RecordedFrame,
    RecordedHostMemory,
    RecordedMemory,
    RecordedMesh,
    RecordedOp,
    RecordedPipeline,
    RecordedPropagation,
    RecordedTried,
    RecordedValue,
)
from sdy_jax.plan.record.timeline import NO_TIMELINE, RecordedRoofline, RecordedRun, RecordedTimeline
from sdy_jax.plan.record.transfers import Transfers, transfers_by_kind, transfers_of

# The choices of a recorded plan: all that was searched for, from which the program is partitioned again: see
# `record.py`.


@dataclass(frozen=True, slots=True)
class RecordedLayout:
    """How a value is split: its axes by dimension as the dialect writes them, `[{"x"}, {}]`; those along which it is
    unreduced, and how that combines; the mesh, where it is not the program's."""

    axes: str
    unreduced: str = ""
    reduction: str = "sum"
    mesh: str = ""


@dataclass(frozen=True, slots=True)
class RecordedInside:
    """A collective that an op performs itself, on a block of one of its tensors: see `InsideCollective`."""

    kind: str
    axes: str
    tensor: int
    wire_bytes: float
    time: float
    is_exact: bool = False


@dataclass(frozen=True, slots=True)
class RecordedChoice:
    """What was chosen for an op.

    Attributes:
        kind, types: what it is: its name in its dialect, the global types of operands, then of results.
        layouts: in which it runs, likewise; none where it has no choice.
        strategy: the name of that which runs it, where it is not the one that the op alone would take.
        number: of the strategy, among those of the op.
        gathered: the factors along which operands are gathered for it.
        inside: the collectives that it performs itself.
        shared: per result, the layout in which its users expect it, where that is stated.
        edges: the layouts of its data-flow edges.
        operand: the layout from which the user's own collective runs.
    """

    kind: str
    types: tuple[str, ...] = ()
    layouts: tuple[RecordedLayout, ...] = ()
    strategy: str = ""
    number: int = 0
    gathered: tuple[int, ...] = ()
    inside: tuple[RecordedInside, ...] = ()
    shared: tuple[RecordedLayout | None, ...] = ()
    edges: tuple[RecordedLayout, ...] = ()
    operand: RecordedLayout | None = None


@dataclass(frozen=True, slots=True)
class RecordedCopy:
    """Which copy of a value a use takes: the index of the op that makes it (None: an argument), of its result or of the
    argument, and of the op that uses it; and the copy's number."""

    maker: int | None
    index: int
    user: int
    number: int


@dataclass(frozen=True, slots=True)
class RecordedRate:
    """A number of one mesh axis; of all, where it is empty."""

    axis: str
    value: float


@dataclass(frozen=True, slots=True)
class RecordedCosts:
    """The cost model that the plan was made with: the fields of `CostModel`."""

    latency: tuple[RecordedRate, ...] = ()
    flop: float = 0.0
    bandwidth: tuple[RecordedRate, ...] = ()
    repeat_work: bool = False
    start: tuple[RecordedRate, ...] = ()
    memory: float = 0.0
    launch: float = 0.0
    product_launch: float = 0.0
    copies: tuple[float, ...] = ()
    combines: tuple[str, ...] = ()
    torus: tuple[str, ...] = ()
    network: tuple[str, ...] = ()
    peers: tuple[RecordedRate, ...] = ()
    rounds: float = 1.0
    moved: float = 1.0
    machine: str = ""
    origin: str = ""


@dataclass(frozen=True, slots=True)
class RecordedLine:
    """A mesh axis, and its parts along the dimensions of a torus: size, dimension, and how far the next chip is."""

    axis: str
    parts: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class RecordedTarget:
    """The devices for which it was made: the platform, the bytes of one, and how axes lie on a torus."""

    family: str = ""
    memory: float = 0.0
    lines: tuple[RecordedLine, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordedPolicy:
    """What the user decided about partitioning: the fields of `Policy` and `Combining`; -1 where nothing is said."""

    optimize_collectives: bool = False
    uneven: str = "pad"
    layouts: str = "global"
    memory: float = -1.0
    recompute: bool = True
    effort: int = -1
    halo_exchange: bool = True
    combined: tuple[str, ...] = ()
    packed: tuple[str, ...] = ()
    stacked: tuple[str, ...] = ()
    sent: float = -1.0
    constraints: str = "kept"


@dataclass(frozen=True, slots=True)
class RecordedBorderLayout:
    """The layout of an argument or result."""

    path: str
    layout: RecordedLayout


@dataclass(frozen=True, slots=True)
class RecordedLayoutPlan:
    """The layouts of a program that was about to be partitioned.

    Attributes:
        is_planned: whether they were chosen for the whole program; else they are those op by op.
        ops: of the program, in order; of one that was rewritten on the way, those that have a choice.
        chosen: the numbers of the candidates in the planner's model, for questions why.
        copies: where copies of values are freed and made again.
    """

    is_planned: bool = False
    ops: tuple[RecordedChoice, ...] = ()
    chosen: tuple[int, ...] = ()
    copies: tuple[RecordedCopy, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordedRewrite:
    """A rewrite of the program: the fields of `Rewrite`, and the layouts by which values were priced for it."""

    kind: str
    memory_multiplier: float = 0.0
    keeps_named: bool = False
    in_parts: bool = True
    shared: float = 0.0
    size: float = 0.0
    layouts: RecordedLayoutPlan = RecordedLayoutPlan()
    limit: float = 0.0
    axes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordedChoices:
    """All choices of a plan.

    Attributes:
        program, partitioned: digests of the program before and after, without source lines.
        layouts: of the program, once it was rewritten.
        names: of its ops, as of `RecordedValue`s.
        rewrites: what was rewritten before, in order.
        saved: the bytes that are held less, of what is computed again.
        arguments, results: their layouts.
    """

    program: str
    partitioned: str
    costs: RecordedCosts
    target: RecordedTarget
    policy: RecordedPolicy
    layouts: RecordedLayoutPlan
    names: tuple[str, ...] = ()
    rewrites: tuple[RecordedRewrite, ...] = ()
    saved: float = 0.0
    arguments: tuple[RecordedBorderLayout, ...] = ()
    results: tuple[RecordedBorderLayout, ...] = ()


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
    the line, the bytes of the global value, and how many are alike; and the mesh axes that split a dimension op by op
    which they do not as it is."""

    chosen: str
    baseline: str
    stated: str
    line: str
    bytes: float
    count: int
    unused: tuple[str, ...] = ()


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
class RecordedMark:
    """What tells values: the line of the op that makes them and their type without axes; of arguments and results no
    line, and their path."""

    line: str
    what: str


@dataclass(frozen=True, slots=True)
class RecordedReason:
    """Why values have other layouts than op by op: one choice for all of them, which saves and costs something beside
    what the program would pay if they were as op by op, and what is around them made the best of that; how many such
    choices there are, as in layers that are alike."""

    values: tuple[RecordedMark, ...]
    saves: str
    costs: str
    times: int = 1


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
    """An op that runs once more, its line, and the floating-point operations of a device for that, per call."""

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


@dataclass(frozen=True, slots=True)
class RecordedLocalSort:
    """A sort of so many rows of which each device sorts its own along some axes, and its line."""

    rows: int
    axes: tuple[str, ...]
    line: str


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
    local_sorts: tuple[RecordedLocalSort, ...] = ()
    pipelines: tuple[RecordedPipeline, ...] = ()
    tried: tuple[RecordedTried, ...] = ()
    timeline: RecordedTimeline = NO_TIMELINE
    roofline: RecordedRoofline | None = None
    host: tuple[RecordedHostMemory, ...] = ()
    reasons: tuple[RecordedReason, ...] = ()
    run: RecordedRun | None = field(default=None, compare=False)
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

    @property
    def transfers(self) -> Transfers:
        """What is sent in a call."""
        return transfers_of(each for each in self.collectives if each.counted)

    @property
    def transfers_by_kind(self) -> dict[str, Transfers]:
        """The same by kind, those that send most first."""
        return transfers_by_kind(each for each in self.collectives if each.counted)
