"""Estimates of a plan: sums over its collectives, memory, padding, repeated work, times; and what meshes, or
numbers of microbatches, are compared by.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
from jax.extend.mlir import ir

from sdy_jax.annotate.site import Decisions
from sdy_jax.base.errors import MemoryLimitError
from sdy_jax.ir.custom_ops import Share, StatedWork, stated_work
from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.ir.jax_shardings import bytes_text, seconds_text, type_text
from sdy_jax.ir.locations import source_line
from sdy_jax.ir.meshes import AxisRef, Mesh, axes_size, overlaps
from sdy_jax.ir.operations import manual_axes
from sdy_jax.ir.shardings import OpShardingRule, TensorSharding
from sdy_jax.lowering.ops.emit import value_shardings
from sdy_jax.lowering.planner.facts.factors import split_factors
from sdy_jax.lowering.planner.facts.loops import Executions, executions
from sdy_jax.lowering.planner.memory.live_ranges import peak_of
from sdy_jax.lowering.planner.report import CollectiveRecord
from sdy_jax.lowering.targets.target import Target
from sdy_jax.plan.record.transfers import Transfers, transfers_by_kind, transfers_of
from sdy_jax.shardy.propagation.data_flow import is_data_flow
from sdy_jax.shardy.rules import RuleBook
from sdy_jax.shardy.rules.op_attributes import operations_of

# Sums over the collectives of a plan: what one call sends.


@dataclass(frozen=True, slots=True)
class PlanTotals:
    """What a call of a plan sends per device.

    `counted` are the collectives that count: all, but for those in branches that send less than another branch of the
    same conditional. `known` is False where a loop around one of them has an unknown trip count and was taken for one
    trip: then `wire_bytes` is the least.
    """

    counted: tuple[CollectiveRecord, ...]
    wire_bytes: float
    known: bool

    @classmethod
    def of(cls, records: Sequence[CollectiveRecord]) -> PlanTotals:
        kept = set(map(id, _counted(records, 0)))
        counted = tuple(record for record in records if id(record) in kept)
        known = all(record.times_known for record in records if record.wire_bytes)
        return cls(counted, _wire_bytes(counted), known)

    @property
    def transfers(self) -> Transfers:
        """What is sent in all."""
        return transfers_of(self.counted)

    def by_kind(self) -> dict[str, tuple[int, float]]:
        """Transfers as they run, and their bytes, of each kind that sends, those that send most first."""
        return {kind: (each.count, each.bytes) for kind, each in transfers_by_kind(self.counted).items()}


def _counted(records: Sequence[CollectiveRecord], level: int) -> list[CollectiveRecord]:
    """The records that count, of those that share all branches up to one level: only the largest branches' are kept."""
    found = [record for record in records if len(record.branches) == level]
    branches: dict[int, dict[int, list[CollectiveRecord]]] = {}
    for record in records:
        if len(record.branches) > level:
            conditional, index = record.branches[level]
            branches.setdefault(conditional, {}).setdefault(index, []).append(record)
    for blocks in branches.values():
        found += max([_counted(inside, level + 1) for inside in blocks.values()], key=_wire_bytes)
    return found


def _wire_bytes(records: Iterable[CollectiveRecord]) -> float:
    return sum(record.total_wire_bytes for record in records)


# What a device holds while it runs a plan's program: by estimate, and by what its compiler says.


class HeldValue(NamedTuple):
    """A temporary: its type with axes, the line that makes it, and its bytes on a device."""

    type: str
    source: str
    bytes: float


class MemoryUse(NamedTuple):
    """Bytes that a device holds.

    Attributes:
        arguments, results: of the program's arguments, closed-over arrays included, and results.
        temporaries: of values made in between, when most is live.
        largest: the temporaries that are live then, largest first.
        shared: of results that lie in the memory of donated arguments.
        available: what a device has for the program: `memory=`, else its own memory; 0 where neither is known.
    """

    arguments: float
    results: float
    temporaries: float
    largest: tuple[HeldValue, ...]
    shared: float = 0.0
    available: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether a device has as much, or it is not known how much it has."""
        return not self.available or self.peak <= self.available

    @property
    def own_results(self) -> float:
        """Of results that do not lie in donated arguments."""
        return self.results - self.shared

    @property
    def border(self) -> float:
        """Arguments and results together."""
        return self.arguments + self.own_results

    @property
    def peak(self) -> float:
        """All that a device holds at most."""
        return self.border + self.temporaries


def compiled_memory(compiled: jax.stages.Compiled) -> MemoryUse | None:
    """What a device holds by the compiler, which names no values; None where it says nothing."""
    found = compiled.memory_analysis()
    if found is None:
        return None
    arguments, results, temporaries, shared = (
        getattr(found, f"{name}_size_in_bytes") for name in ("argument", "output", "temp", "alias")
    )
    return MemoryUse(arguments, results, temporaries, (), shared)


def memory_of(graph: Graph, target: Target = Target(), available: float = 0.0) -> MemoryUse:  # noqa: B008
    """What a device holds for a partitioned program, of what it has; `target`: which device that is."""
    peak, shardings = peak_of(graph, target), value_shardings(graph)
    held = [HeldValue(_type(live.value, shardings), live.source, live.bytes) for live in peak.live]
    return MemoryUse(peak.arguments, peak.results, peak.bytes, tuple(held), peak.shared, available)


def _type(value: Value, shardings: Mapping[Value, TensorSharding]) -> str:
    return type_text(value.dtype, value.shape, shardings.get(value))


# What padding holds: values of a partitioned program that lie in blocks which do not divide them.


@dataclass(frozen=True, slots=True)
class PaddedValue:
    """A value in padded blocks: its type with axes, where it is made, and the bytes of padding per device, the average
    over the devices."""

    type: str
    source: str
    bytes: float


def padded_values(graph: Graph) -> tuple[PaddedValue, ...]:
    """The padded values of a partitioned program, in program order."""
    found = []
    for value, sharding in value_shardings(graph).items():
        mesh = graph.meshes.get(str(sharding.mesh))
        if value.shape is None or mesh is None or not _is_padded(value.shape, sharding, mesh):
            continue
        shards = math.prod(sharding.shard_counts(mesh))
        wasted = math.prod(sharding.local_shape(value.shape, mesh)) - math.prod(value.shape) / shards
        op = value.defining_op
        found.append(
            PaddedValue(type_text(value.dtype, value.shape, sharding), op.source if op else "", value.itemsize * wasted)
        )
    return tuple(found)


def _is_padded(shape: tuple[int, ...], sharding: TensorSharding, mesh: Mesh) -> bool:
    return any(n % count for n, count in zip(shape, sharding.shard_counts(mesh), strict=True))


# What is computed more than once: operations of a partitioned program that several devices perform alike.


@dataclass(frozen=True, slots=True)
class Work:
    """The operations of one op, in one execution; `type` is that of its first result, with axes.

    `flops`: those that a device performs. `repeated`: those of them that exceed its part, the whole divided by the
    number of devices; 0 where the op is in as many shards as there are devices. `alike`: the devices that perform the
    same. `is_choice`: the values around the op are split along more axes, but to split the op as well costs more.
    `kernel`: a device's share of the work that a kernel states.
    """

    op: str
    type: str
    location: ir.Location
    flops: float
    repeated: float
    alike: int
    is_choice: bool
    runs: Executions
    kernel: StatedWork | None = None

    @property
    def source(self) -> str:
        """The line of the user's code."""
        return source_line(self.location)


def work_of_ops(graph: Graph, mesh_name: str) -> dict[Op, Work]:
    """What each op of a partitioned program computes, in program order; ops on scalars are left out."""
    return dict(_Reader(graph, graph.meshes[mesh_name], value_shardings(graph)).read())


def flops(work: tuple[Work, ...], repeated: bool = False) -> float:
    """The operations that a device performs in a call: loops count once per trip, the largest branch of conditionals.

    With `repeated` only those that other devices perform as well.
    """
    return _total_work(work, 0, repeated)


def _total_work(work: tuple[Work, ...], level: int, repeated: bool) -> float:
    """The sum over ops that share all branches up to a level."""
    total, branches = 0.0, dict[Block, dict[Block, list[Work]]]()
    for item in work:
        if len(item.runs.branches) > level:
            block = item.runs.branches[level]
            branches.setdefault(block.parent.blocks[0], {}).setdefault(block, []).append(item)
        else:
            total += item.runs.times * (item.repeated if repeated else item.flops)
    return total + sum(
        max(_total_work(tuple(b), level + 1, repeated) for b in found.values()) for found in branches.values()
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    graph: Graph
    mesh: Mesh
    shardings: Mapping[Value, TensorSharding]

    def read(self) -> Iterator[tuple[Op, Work]]:
        rules, runs = RuleBook().without_overrides(), dict[Block, Executions]()
        for op in self.graph.main.walk():
            rule = rules.rule_of(op) if op.block is not None and not _is_sdy(op) else None
            kernel = stated_work(op) if op.name == "stablehlo.custom_call" else None
            whole = operations_of(op) if rule is not None and rule.factor_sizes else 0
            if not (whole or kernel) or rule is None or op.block is None or _is_inside(op):
                continue
            if op.block not in runs:
                runs[op.block] = executions(op)
            yield op, self._work(op, rule, whole, runs[op.block], kernel)

    def _work(self, op: Op, rule: OpShardingRule, whole: float, runs: Executions, kernel: StatedWork | None) -> Work:
        used = split_factors(rule, [self.shardings.get(v) for v in (*op.operands, *op.results)], self.mesh)
        shards = math.prod(axes_size(axes, self.mesh) for axes in used.values())
        counts = [axes_size(used.get(f, ()), self.mesh) for f in range(len(rule.factor_sizes))]
        parts = Share(1.0, rule.factor_sizes, kernel.uneven if kernel is not None else ())(counts)
        devices = self._devices_of(op)
        repeated = whole * parts - whole / devices if shards < devices else 0.0
        value = op.results[0]
        type_ = type_text(value.dtype, value.shape, self.shardings.get(value))
        taken = [axis for axes in used.values() for axis in axes]
        is_choice = repeated > 0 and self._is_split_further(op, taken)
        own = None if kernel is None else replace(kernel, flops=kernel.flops * parts, bytes=kernel.bytes * parts)
        return Work(op.title, type_, op.mlir.location, whole * parts, repeated, devices // shards, is_choice, runs, own)

    def _devices_of(self, op: Op) -> int:
        """The devices that could share the op's work: in manual computations, those along the other axes."""
        count, parent = self.mesh.size, op.parent
        while parent is not None:
            count //= math.prod(self.mesh.sizes[axis] for axis in manual_axes(parent))
            parent = parent.parent
        return count

    def _is_split_further(self, op: Op, taken: list[AxisRef]) -> bool:
        """Whether the operands before, or the results after collectives are split along axes that the op is not."""
        before = (source for value in op.operands for source in _moved_from(value))
        moved = (user for value in op.results for user, _ in value.uses if _is_sdy(user))
        after = (result for user in moved for result in user.results)
        around = [self.shardings[v] for v in (*before, *after) if v in self.shardings]
        return any(not any(overlaps(a, b) for b in taken) for s in around for axes in s.axes for a in axes)


def _is_sdy(op: Op) -> bool:
    return op.name.startswith("sdy.")


def _moved_from(value: Value) -> Iterator[Value]:
    """The values that collectives made this one from."""
    while (op := value.defining_op) is not None and _is_sdy(op) and len(op.operands) == 1:
        value = op.operands[0]
        yield value


def _is_inside(op: Op) -> bool:
    """Whether the op is in the body of another one that counts as a whole: a reduction's, a sort's."""
    return op.parent is not None and op.parent.name != "func.func" and not is_data_flow(op.parent)


# What a plan's program takes, by the cost model.


@dataclass(frozen=True, slots=True)
class EstimatedTime:
    """What a program takes by a cost model: each device's own work, and its collectives, of which so much is `hidden`
    behind work; `unit`: seconds or bytes."""

    compute: float
    communication: float
    unit: str
    hidden: float = 0.0

    @property
    def total(self) -> float:
        """Both, one after the other but for what is hidden."""
        return self.compute + self.communication - self.hidden

    def __str__(self) -> str:
        text = seconds_text if self.unit == "seconds" else bytes_text
        hidden = f", {text(self.hidden)} of it hidden" if self.hidden else ""
        return f"{text(self.total)} ({text(self.compute)} compute, {text(self.communication)} communication{hidden})"


# What the plans of a function take on several meshes, of which the best one is chosen.


class ComparedMesh(NamedTuple):
    """What the plan on a mesh takes.

    Attributes:
        mesh: its axes.
        time: by the cost model; None where no plan was found that keeps within the memory.
        wire_bytes: that a device sends per call.
        peak: the bytes that a device holds at most, of what holds least where no plan fits.
        fits: whether a device has as much.
    """

    mesh: Mesh
    time: EstimatedTime | None
    wire_bytes: float
    peak: float
    fits: bool

    @classmethod
    def refused(cls, mesh: Mesh, error: MemoryLimitError) -> ComparedMesh:
        """A mesh on which nothing fits."""
        return cls(mesh, None, 0.0, error.least, False)

    @property
    def rank(self) -> tuple[bool, float]:
        """By what meshes are compared."""
        return rank_of(self.time, self.peak, self.fits)


def rank_of(time: EstimatedTime | None, peak: float, fits: bool) -> tuple[bool, float]:
    """By what plans are compared: first those that fit, what takes least; then what holds least."""
    return (False, time.total) if fits and time is not None else (True, peak)


# What plans of a function with several numbers of microbatches take, of which the best one is chosen.


class ComparedDecisions(NamedTuple):
    """What the plan with some decisions takes.

    Attributes:
        decisions: as they were tried.
        time, peak, fits: as of `ComparedMesh`.
    """

    decisions: Decisions
    time: EstimatedTime | None
    peak: float
    fits: bool

    @classmethod
    def refused(cls, decisions: Decisions, error: MemoryLimitError) -> ComparedDecisions:
        """Decisions with which nothing fits."""
        return cls(decisions, None, error.least, False)

    @property
    def rank(self) -> tuple[bool, float]:
        """By what they are compared, as meshes are."""
        return rank_of(self.time, self.peak, self.fits)


@dataclass(frozen=True, slots=True)
class Decided:
    """The decisions that a plan was made with, and all that were compared for that; none of a pinned plan."""

    decisions: Decisions = ()
    compared: tuple[ComparedDecisions, ...] = ()


NOTHING_DECIDED = Decided()
"""Of a function that leaves nothing to the planner but layouts."""
