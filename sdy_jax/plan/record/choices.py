"""The choices of a recorded plan: all that was searched for, from which the program is partitioned again: see
`record.py`."""

from __future__ import annotations

from dataclasses import dataclass


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
    rounds: float = 1.0
    moved: float = 1.0
    machine: str = ""
    origin: str = ""


@dataclass(frozen=True, slots=True)
class RecordedLine:
    """A mesh axis, and its parts along the dimensions of a torus: size and dimension, one after the other."""

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
    """A rewrite of the program for the sake of memory: the fields of `Rewrite`, and the layouts by which values were
    priced for it."""

    kind: str
    memory_multiplier: float = 0.0
    keeps_named: bool = False
    in_parts: bool = True
    shared: float = 0.0
    size: float = 0.0
    layouts: RecordedLayoutPlan = RecordedLayoutPlan()


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
