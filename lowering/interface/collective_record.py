"""Records of the collectives of a partitioned program, alone and in buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from jax.extend.mlir import ir

from sdy_jax.ir.locations import SourcePlace, place_of
from sdy_jax.lowering.costs.cost_model import CostModel
from sdy_jax.lowering.targets.tiles import LastCut
from sdy_jax.representation.axes import braces
from sdy_jax.representation.mesh import AxisRef, Mesh
from sdy_jax.representation.sdy_collectives import CollectiveSummary
from sdy_jax.representation.sharding import TensorSharding


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
    moves (by permutes then, which are as many bytes), or one trip of a loop ahead."""
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
