"""What the partitioner did beside rewriting the module: the collectives it inserted, and what it could not split.

Collectives that the program holds itself (`psum` and others in the body of a `jax.shard_map`) are the user's: they stay
where they are written and are not among the inserted ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.graph import Op, Value, source_line
from sdy_jax.representation.mesh import AxisRef
from sdy_jax.representation.sharding import TensorSharding


@dataclass(frozen=True, slots=True)
class InsertedCollective:
    """A collective that the partitioner inserted. `wire_bytes` is per device and per execution.

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
    """What an inserted collective moves, as in `InsertedCollective`."""

    kind: str
    axes: tuple[AxisRef, ...]
    detail: str
    result: TensorSharding
    wire_bytes: float


@dataclass(slots=True)
class PartitionReport:
    """What the partitioner did beside rewriting the module."""

    collectives: list[InsertedCollective] = field(default_factory=list)
    notes: dict[Note, None] = field(default_factory=dict)
    """In order, each once."""

    def add(self, moved: Moved, value: Value, at: Op, cause: Op) -> InsertedCollective:
        """Notes a collective that moves a value, beside the op `at`, because of another."""
        kind, axes, detail, result, wire_bytes = moved
        shape, depth = value.shape or (), _loop_depth(at)
        record = InsertedCollective(
            kind, axes, detail, value.dtype, shape, result, wire_bytes, cause.mlir.location, cause.name, depth
        )
        self.collectives.append(record)
        return record

    def drop(self, records: Iterable[InsertedCollective]) -> None:
        """Forgets collectives that turned out not to be needed."""
        dropped = set(map(id, records))
        self.collectives = [record for record in self.collectives if id(record) not in dropped]

    def note(self, op: Op | None, message: str) -> None:
        """Notes what could not be split; `op` is None for an argument."""
        self.notes[Note(op.name, op.source, message) if op else Note("argument", "", message)] = None


def _loop_depth(op: Op) -> int:
    return sum(1 for parent in _parents(op) if parent.name == "stablehlo.while")


def _parents(op: Op) -> Iterator[Op]:
    while op.parent is not None:
        op = op.parent
        yield op
