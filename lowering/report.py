"""What the partitioner did beside rewriting the module: the collectives it inserted, and what it could not split.

Collectives that the program holds itself (`psum` and others in the body of a `jax.shard_map`) are the user's: they stay
where they are written and are not among the inserted ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
    source: str
    cause: str
    """The op that needed it."""
    depth: int
    """How many loops it is inside."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something that could not be split: what, at which op and source line."""

    op: str
    source: str
    message: str

    def __str__(self) -> str:
        return f"{self.source}: {self.op}: {self.message}"


@dataclass(slots=True)
class PartitionReport:
    """What the partitioner did beside rewriting the module."""

    collectives: list[InsertedCollective] = field(default_factory=list)
    notes: dict[Note, None] = field(default_factory=dict)
    """In order, each once."""
