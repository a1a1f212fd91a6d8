"""What the partitioner reports beside rewriting a module: collectives, notes with source lines, and what was chosen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from jax.extend.mlir import ir

from sdy_jax.ir.attributes import itemsize
from sdy_jax.ir.collectives import CollectiveSummary
from sdy_jax.ir.graph import Block, Op, Value
from sdy_jax.ir.jax_shardings import bytes_text, listed_axes, type_text
from sdy_jax.ir.locations import SourcePlace, is_line, place_of, short_source
from sdy_jax.ir.meshes import AxisRef, Mesh, axes_size, braces
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.planner.facts.loops import executions
from sdy_jax.lowering.planner.op_times import NO_TIMES, OpTimes, WorkDone
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.lowering.targets.rates import LastCut

# Records of the collectives of a partitioned program, alone and in buckets.


class Branch(NamedTuple):
    """A branch of a conditional: the index of the conditional in the program, and of the branch in the conditional."""

    conditional: int
    number: int


Origin = Literal["partitioner", "user"]


class Moved(NamedTuple):
    """What a collective says, the sharding of its result, the bytes that a device sends in one execution, how it
    combines values, where it does and that is known (`sum`, `max`), what it does to the last dimension, and whether the
    value is rounded before it is only moved."""

    summary: CollectiveSummary
    result: TensorSharding
    wire_bytes: float
    reduction: str = ""
    cut: LastCut | None = None
    is_rounded: bool = False


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    """A collective of the partitioned program. `wire_bytes` is per device and per execution.

    `axes` are all axes it runs over; `detail` is what it moves, as the dialect writes it (`{"model"}`,
    `[{"x"}: 0->1]`); `dtype` and `shape` are those of the global value (in a manual computation: of the value that is
    global but for the manual axes), `result` its sharding afterwards.
    """

    moved: Moved
    dtype: str
    shape: tuple[int, ...]
    location: ir.Location
    cause: str
    """The op that needed the collective."""
    depth: int
    """The number of loops around the collective."""
    times: int = 1
    """Executions per call: the product of the trip counts of the loops around it. A loop whose count is unknown counts
    as one trip."""
    times_known: bool = True
    """Whether the trip counts of all loops around it are known. Where they are not, it runs `times` or more often."""
    estimated_times: int = 1
    """`times`, with a guess for loops whose count is unknown."""
    origin: Origin = "partitioner"
    """Whether the partitioner inserted it or the program holds it itself (`psum` in the body of a `jax.shard_map`)."""
    branches: tuple[Branch, ...] = ()
    """The branches of conditionals around the collective, outermost first."""
    again: bool = False
    """Whether it makes a copy of a value again, so that the one before need not be held until then."""
    hidden: float = 0.0
    """The time that is saved, by the cost model, because it runs as a ring with the product that takes or makes what it
    moves (by permutes then, which are as many bytes)."""
    is_ahead: bool = False
    """Whether it runs one trip ahead of its loop."""
    bucket: int | None = None
    """The number of the bucket, if it is several collectives that run as one: `members`. Profilers show it as well."""
    members: tuple[CollectiveRecord, ...] = ()
    """The collectives of a bucket. Its own location and cause are those of the first one, its shape is no value's."""

    @property
    def kind(self) -> str:
        return self.moved.summary.kind

    @property
    def axes(self) -> tuple[AxisRef, ...]:
        return self.moved.summary.axes

    @property
    def detail(self) -> str:
        return self.moved.summary.detail

    @property
    def result(self) -> TensorSharding:
        return self.moved.result

    @property
    def wire_bytes(self) -> float:
        return self.moved.wire_bytes

    @property
    def cut(self) -> LastCut | None:
        return self.moved.cut

    def costs(self, model: CostModel) -> CostModel:
        """The model by which its time counts."""
        return model.of_rounded if self.moved.is_rounded else model

    def sending_time(self, model: CostModel, mesh: Mesh) -> float:
        """The time of one execution by a model, where it does not run together with others."""
        return self.costs(model).sending_time(self.kind, self.axes, mesh, self.wire_bytes, self.cut)

    def bytes_time(self, model: CostModel, mesh: Mesh) -> float:
        """Of `sending_time` that in which bytes are sent."""
        return self.costs(model).bytes_time(self.kind, self.axes, mesh, self.wire_bytes, self.cut)

    @property
    def total_wire_bytes(self) -> float:
        """The bytes that a device sends in all executions."""
        return self.wire_bytes * self.times

    @property
    def place(self) -> SourcePlace:
        """Where the op comes from that needed it. MLIR takes long to say it, so it says it only when asked."""
        return place_of(self.location)

    @property
    def source(self) -> str:
        """The line of the user's code that needed it, outside of libraries."""
        return self.place.line

    @property
    def library(self) -> str:
        """The line of the library, in `site-packages`, that wrote the op for `source`; empty where none did."""
        return self.place.library

    @property
    def scope(self) -> str:
        """The name scopes around the op: `Block_2/attention/out`; may be empty."""
        return self.place.scope


def bucket_of(number: int, members: Sequence[CollectiveRecord]) -> CollectiveRecord:
    """The record of collectives that run as one."""
    first = members[0]
    moved = Moved(
        CollectiveSummary(first.kind, first.axes, braces(first.axes)),
        TensorSharding.replicated(first.result.mesh, 0),
        sum(member.wire_bytes for member in members),
        is_rounded=all(member.moved.is_rounded for member in members),
    )
    again = any(member.again for member in members)
    return replace(first, moved=moved, shape=(), again=again, bucket=number, members=tuple(members))


# Notes on values and ops that could not be sharded, with their source lines.


@dataclass(frozen=True, slots=True)
class Note:
    """A value or op that could not be sharded: the message, the op, source line, library line and name scope."""

    op: str
    source: str
    message: str
    library: str = ""
    scope: str = ""

    @classmethod
    def at(cls, op: str, location: ir.Location, message: str) -> Note:
        place = place_of(location)
        return cls(op, place.line, message, place.library, place.scope)

    def is_about(self, value: str) -> bool:
        """Whether it speaks of an argument by its path, or of what a source line (`model.py:42`) does."""
        return f"`{value}`" in self.message or is_line(self.source, value) or is_line(self.library, value)

    def __str__(self) -> str:
        line = f"{self.source} ({short_source(self.library)})" if self.library else self.source
        where = f"{self.op} in {self.scope}" if self.scope else self.op
        return f"{line}: {where}: {self.message}"


# What was chosen for a program, beside its collectives: layouts, what is computed again, what runs in parts.


@dataclass(frozen=True, slots=True)
class ChangedLayout:
    """A result of an op that is made, or expected by a constraint, in another layout than op by op: the op's name and
    location, the value's element type and global shape, and the two shardings."""

    op: str
    location: ir.Location
    dtype: str
    shape: tuple[int, ...]
    chosen: TensorSharding
    baseline: TensorSharding
    stated: str = ""
    """What the user stated for the value: `[{"x"}, {?}]`, or that it is in a group."""

    @property
    def source(self) -> str:
        """The line of the user's code that made the value."""
        return place_of(self.location).line


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """The choice of layouts for a whole program: what it costs by the cost model, what it would have cost op by op
    around the propagated layouts, and where the two differ.

    `sent`, `baseline_sent`: the part of the costs that is not the devices' own work. `chosen`: the choice in the
    program's model; empty where it stayed as the baseline. `written`: the part of `sent` that the user's own
    collectives cost, which no choice changes.

    `exposed`, `baseline_exposed`: the costs without what is hidden beside work. `baseline_held`: the bytes that a
    device would hold op by op; 0 where that would take no less.
    """

    cost: float
    baseline_cost: float
    changed: tuple[ChangedLayout, ...]
    sent: float = 0.0
    baseline_sent: float = 0.0
    chosen: tuple[int, ...] = ()
    written: float = 0.0
    exposed: float = 0.0
    baseline_exposed: float = 0.0
    baseline_held: float = 0.0


class NotHeld(NamedTuple):
    """A value that is computed again instead of being held: its element type, its global shape, the bytes that it would
    take on a device, and the location of what makes it."""

    dtype: str
    shape: tuple[int, ...]
    bytes: float
    location: ir.Location

    @property
    def source(self) -> str:
        """The line of the user's code that made it."""
        return place_of(self.location).line


class RanAgain(NamedTuple):
    """An op that runs once more: its name and location; the floating-point operations and the time of a device for
    that, in all executions."""

    op: str
    location: ir.Location
    flops: float
    seconds: float

    @property
    def source(self) -> str:
        """The line of the user's code that runs once more."""
        return place_of(self.location).line


class Recomputed(NamedTuple):
    """What a program computes again beside what it was written to: the values that it need not hold for that, the ops
    that run once more, and the bytes that a device holds less."""

    values: tuple[NotHeld, ...] = ()
    ops: tuple[RanAgain, ...] = ()
    bytes: float = 0.0


class InParts(NamedTuple):
    """The largest value of a group of ops that run part by part in a loop, so that no device holds all of its own: its
    element type and its global shape, the dimension that is cut and into how many parts, the bytes that the group's
    values would take together on a device, and the location of what makes it."""

    dtype: str
    shape: tuple[int, ...]
    dim: int
    parts: int
    bytes: float
    location: ir.Location

    @property
    def source(self) -> str:
        """The line of the user's code that makes it."""
        return place_of(self.location).line


# Messages about dimensions that were given axes which do not divide them, and keep fewer.


def uneven(
    name: str, shape: tuple[int, ...], dtype: str, stated: TensorSharding, even: TensorSharding, mesh: Mesh
) -> Iterator[str]:
    """A message for each dimension of a value that lost axes of its stated sharding."""
    type_ = type_text(dtype, shape, stated)
    held = bytes_text(math.prod(even.local_shape(shape, mesh)) * itemsize(dtype))
    for dim, (n, axes, left) in enumerate(zip(shape, stated.axes, even.axes, strict=True)):
        shards = axes_size(axes, mesh)
        if not n % shards:
            continue
        now = f"it is split over {listed_axes(left)} only" if left else "it is not split"
        yield (
            f"dim {dim} of {name}, {type_}, cannot be split over {listed_axes(axes)}, because {shards} does not divide "
            f"{n}; {now}, and every device holds {held}. To fix: pad it to {math.ceil(n / shards) * shards}"
        )


# What the partitioner reports beside rewriting the module: the collectives that run, and all else it decided.


@dataclass(slots=True)
class PartitionReport:
    """What the partitioner did beside rewriting the module."""

    inputs: Sequence[str] = ()
    """What the user calls the arguments of the main function."""
    collectives: list[CollectiveRecord] = field(default_factory=list, init=False)
    written: dict[ir.Operation, CollectiveRecord] = field(default_factory=dict, init=False)
    """Those of ops that are collectives by themselves, as the program's author wrote them."""
    notes: dict[Note, None] = field(default_factory=dict, init=False)
    """In order, each once."""
    layouts: LayoutChoice | None = field(default=None, init=False)
    """The choice of layouts, where they were chosen for the whole program."""
    work: float = field(default=0.0, init=False)
    """The time of one device's own work, by the cost model."""
    work_of: dict[int, WorkDone] = field(default_factory=dict, init=False)
    """The same by the numbers of ops in the program before it was partitioned; some may have been folded into others
    since."""
    op_times: OpTimes = field(default=NO_TIMES, init=False)
    """What the ops of the module as it is left take, and which of them send."""
    hidden: float = field(default=0.0, init=False)
    """The time of collectives that the compiler hides by itself: beside that of rings and of those one trip ahead."""
    held: float = field(default=0.0, init=False)
    """What a device holds at most, where that was counted of the module as it is left; else 0."""
    recomputed: Recomputed | None = field(default=None, init=False)
    """What is computed again for the sake of memory."""
    blocked: tuple[InParts, ...] = field(default=(), init=False)
    """The largest value of each group of ops that run part by part for the sake of memory."""
    before: ir.Operation | None = field(default=None, init=False)
    """Where something is computed again, or in parts, the program that was partitioned, in which it is."""
    _conditionals: dict[Op, int] = field(default_factory=dict, init=False)
    _added: dict[int, tuple[CollectiveRecord, Op]] = field(default_factory=dict, init=False)
    """By the identities of records, what they were when they were added, and the op beside which that was."""

    def add(
        self,
        moved: Moved,
        value: Value,
        at: Op,
        cause: Op,
        origin: Origin = "partitioner",
        again: bool = False,
        instead: str = "",
    ) -> CollectiveRecord:
        """Records a collective that moves a value, beside the op `at`, because of another. `instead`: the op of the
        program's own, inside of the other, in whose place it is."""
        runs = executions(at)
        record = CollectiveRecord(
            moved,
            value.dtype,
            value.shape or (),
            cause.mlir.location,
            instead or cause.title,
            runs.depth,
            runs.times,
            runs.known,
            runs.estimate,
            origin,
            tuple([self._branch(block) for block in runs.branches]),
            again,
        )
        self.collectives.append(record)
        self._added[id(record)] = record, at
        return record

    def added(self, record: CollectiveRecord) -> tuple[CollectiveRecord, Op]:
        """A collective's record as it was added, before others stood in its place, and beside which op that was."""
        return self._added[id(record)]

    def _branch(self, block: Block) -> Branch:
        conditional = self._conditionals.setdefault(block.parent, len(self._conditionals))
        return Branch(conditional, block.parent.blocks.index(block))

    def drop(self, records: Iterable[CollectiveRecord]) -> None:
        """Removes the records of collectives that were erased."""
        dropped = set(map(id, records))
        self.collectives = [record for record in self.collectives if id(record) not in dropped]

    def exchange(self, records: Mapping[int, CollectiveRecord]) -> None:
        """Puts records in the place of others, which are given by their identities."""
        for key, record in records.items():
            if key in self._added:
                self._added[id(record)] = self._added[key]
        self.collectives = [records.get(id(record), record) for record in self.collectives]

    def combine(self, buckets: Sequence[Sequence[CollectiveRecord]]) -> None:
        """Makes one record of those of each bucket, in the place of its first one."""
        place = {id(record): n for n, record in enumerate(self.collectives)}
        firsts = [min(members, key=lambda record: place[id(record)]) for members in buckets]
        found = {id(first): bucket_of(n, buckets[n]) for n, first in enumerate(firsts)}
        self.drop(member for members in buckets for member in members if id(member) not in found)
        self.exchange(found)

    def note(self, op: Op, message: str) -> None:
        """Notes an op that could not be split."""
        self.notes[Note.at(op.title, op.mlir.location, message)] = None

    def note_value(self, value: Value, message: str) -> None:
        """Notes a value that could not be split."""
        if is_input(value):
            self.notes[Note("argument", "", message)] = None
            return
        op = value.owning_op
        place = place_of(op.mlir.location)
        self.notes[Note(place.primitive or op.name, place.line, message, place.library, place.scope)] = None

    def name(self, value: Value) -> str:
        """A user's name for a value: the path of an argument, or the op that makes it."""
        if is_input(value):
            return f"`{self.inputs[value.index]}`" if self.inputs else f"argument {value.index}"
        op = value.owning_op
        place = place_of(op.mlir.location)
        made = f"{place.primitive or op.name} at {short_source(place.line)}"
        return f"the result of {made}" if op is value.owner else f"a value that {made} passes into its body"


def is_input(value: Value) -> bool:
    """The value is an argument of a function."""
    return isinstance(value.owner, Block) and value.owner.parent.name == "func.func"
