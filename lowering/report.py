"""What the partitioner reports beside rewriting the module: the collectives that run, and what could not be split."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from jax.extend.mlir import ir

from sdy_jax.graph import Block, Op, Value, source_line
from sdy_jax.lowering.trips import executions
from sdy_jax.representation.mesh import AxisRef
from sdy_jax.representation.sharding import TensorSharding


class Branch(NamedTuple):
    """A branch of a conditional, by their numbers: that of the conditional in the program, and that of the branch."""

    conditional: int
    number: int


Origin = Literal["partitioner", "user"]


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    """A collective of the partitioned program. `wire_bytes` is per device and per execution.

    `axes` are all axes it runs over; `detail` is what it moves, as the dialect writes it (`{"model"}`,
    `[{"x"}: 0->1]`); `dtype` and `shape` are those of the global value (in a manual computation: of the value that is
    global but for the manual axes), `result` its sharding afterwards.
    """

    kind: str
    axes: tuple[AxisRef, ...]
    detail: str
    dtype: str
    shape: tuple[int, ...]
    result: TensorSharding
    wire_bytes: float
    location: ir.Location
    cause: str
    """The op that needed it."""
    depth: int
    """How many loops it is inside."""
    times: int = 1
    """Executions per call: the product of the trip counts of the loops around it. A loop whose count is unknown counts
    as one trip."""
    times_known: bool = True
    """Whether the trip counts of all loops around it are known. Where they are not, it runs `times` or more often."""
    origin: Origin = "partitioner"
    """Whether the partitioner inserted it or the program holds it itself (`psum` in the body of a `jax.shard_map`)."""
    branches: tuple[Branch, ...] = ()
    """The branches that it is in, outermost first."""

    @property
    def total_wire_bytes(self) -> float:
        """Bytes that a device sends in all executions."""
        return self.wire_bytes * self.times

    @property
    def source(self) -> str:
        """The line of the user's code that needed it. MLIR takes long to say it, so it says it only when asked."""
        return source_line(self.location)


@dataclass(frozen=True, slots=True)
class Note:
    """Something that could not be split: what, at which op and source line."""

    op: str
    source: str
    message: str

    def __str__(self) -> str:
        return f"{self.source}: {self.op}: {self.message}"


class Moved(NamedTuple):
    """What a collective moves, as in `CollectiveRecord`."""

    kind: str
    axes: tuple[AxisRef, ...]
    detail: str
    result: TensorSharding
    wire_bytes: float


@dataclass(slots=True)
class PartitionReport:
    """What the partitioner did beside rewriting the module."""

    collectives: list[CollectiveRecord] = field(default_factory=list)
    notes: dict[Note, None] = field(default_factory=dict)
    """In order, each once."""
    _conditionals: dict[Op, int] = field(default_factory=dict)

    def add(self, moved: Moved, value: Value, at: Op, cause: Op, origin: Origin = "partitioner") -> CollectiveRecord:
        """Records a collective that moves a value, beside the op `at`, because of another."""
        runs = executions(at)
        record = CollectiveRecord(
            moved.kind,
            moved.axes,
            moved.detail,
            value.dtype,
            value.shape or (),
            moved.result,
            moved.wire_bytes,
            cause.mlir.location,
            cause.name,
            runs.depth,
            runs.times,
            runs.known,
            origin,
            tuple([self._branch(block) for block in runs.branches]),
        )
        self.collectives.append(record)
        return record

    def _branch(self, block: Block) -> Branch:
        conditional = self._conditionals.setdefault(block.parent, len(self._conditionals))
        return Branch(conditional, block.parent.blocks.index(block))

    def drop(self, records: Iterable[CollectiveRecord]) -> None:
        """Forgets collectives that turned out not to be needed."""
        dropped = set(map(id, records))
        self.collectives = [record for record in self.collectives if id(record) not in dropped]

    def note(self, op: Op | None, message: str) -> None:
        """Notes what could not be split; `op` is None for an argument."""
        self.notes[Note(op.name, op.source, message) if op else Note("argument", "", message)] = None
