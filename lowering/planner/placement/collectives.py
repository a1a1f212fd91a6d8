"""The collectives of a partitioned program: inserted ones with records, planned reshards, those of the user."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from jax.extend.mlir import ir

from sdy_jax.base.errors import ShardingError
from sdy_jax.ir.attributes import attribute_from_text, reduction_from_attributes, sharding_to_attribute
from sdy_jax.ir.collectives import (
    APPENDING,
    BY_STRIPS,
    COLLECTIVE_OPS,
    FLAT,
    REDUCING,
    REDUCING_OPS,
    SdyCollective,
    collective_from_attributes,
    leads_to_blocks,
    sharding_after,
    verify_counted_once,
)
from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.meshes import Axes, Mesh, axes_size, set_difference
from sdy_jax.ir.operations import has_users
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.ops.collectives.packing import sent_by_step
from sdy_jax.lowering.ops.re_emission import collective_attributes
from sdy_jax.lowering.planner.facts.factors import ProgramMeshes
from sdy_jax.lowering.planner.facts.fusion import rounded_values
from sdy_jax.lowering.planner.report import CollectiveRecord, Moved, Origin, PartitionReport
from sdy_jax.lowering.planner.setting import Setting
from sdy_jax.lowering.reshard.planner import Collective, Lines, ReshardPlan, along_lines
from sdy_jax.lowering.reshard.problem import padded_block
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.lowering.targets.rates import last_cut, wire_bytes

# The ops that are inserted into a program, with their records; those that end up without users are erased again.


_OWN_SUM = "stablehlo.all_reduce"
"""What takes the sums of a program's own."""


class InsertedOps:
    """Collectives and rematerialized ops, and what their report says of them. `sums`: the values of which the program
    takes the sum itself."""

    def __init__(self, report: PartitionReport, sums: Collection[Value]):
        self._report, self._sums = report, sums
        self._spare: list[tuple[ir.Operation, CollectiveRecord | None]] = []
        """Ops to erase if they end up without users: collectives, rematerialized ops, and the originals of these."""
        self._inside: dict[int, list[CollectiveRecord]] = {}
        """What ops send themselves, which is dropped with them; by identity, as an op's hash is that of its content."""
        self._made: dict[ir.Operation, CollectiveRecord | None] = {}
        """The collectives (with their records) and the rematerialized ops (with None)."""
        self._erased: set[int] = set()

    def __contains__(self, op: ir.Operation) -> bool:
        return op in self._made

    def record(self, moved: Moved, value: Value, before: Op, cause: Op, again: bool) -> CollectiveRecord:
        """The record of a collective that is inserted before an op, because of another or of a sum that the program
        takes."""
        kind = moved.summary.kind
        is_own = kind in REDUCING and value in self._sums
        origin: Origin = "user" if is_own and kind == "all_reduce" else "partitioner"
        return self._report.add(moved, value, before, cause, origin, again, _OWN_SUM if is_own else "")

    def add(self, op: ir.Operation, record: CollectiveRecord | None = None) -> None:
        """Adds a collective with its record, or an op that runs once more."""
        self.may_erase(op, record)
        self._made[op.operation] = record

    def may_erase(self, op: ir.Operation, record: CollectiveRecord | None = None) -> None:
        """An op of the program is erased, and its record dropped, if it has no users in the end."""
        self._spare.append((op, record))

    def keep_inside(self, op: Op, record: CollectiveRecord) -> None:
        """Records a collective that an op performs itself, as long as the op is there."""
        self._inside.setdefault(id(op.mlir), []).append(record)

    def sweep(self) -> None:
        """Erases ops without users: those rematerialized for all of their users, and reshards made for them."""
        dropped = []
        for op, record in reversed(self._spare):
            if id(op) in self._erased or has_users(op):
                continue
            self._erased.add(id(op))
            self._made.pop(op, None)
            dropped += self._inside.pop(id(op), [])
            op.erase()
            if record is not None:
                dropped.append(record)
        self._report.drop(dropped)

    @property
    def collectives(self) -> dict[ir.Operation, CollectiveRecord]:
        """The collectives that were inserted and are there, but for those that the program holds itself."""
        return {op: record for op, record in self._made.items() if record is not None}

    def is_erased(self, op: Op) -> bool:
        """Whether an op was erased because nothing used it."""
        return id(op.mlir) in self._erased

    def records_behind(self, value: ir.Value) -> list[CollectiveRecord]:
        """The collectives that produced a value, including those before a rematerialized op."""
        owner = value.owner
        if isinstance(owner, ir.Block) or (owner := owner.operation) not in self._made:
            return []
        found = [record for operand in owner.operands for record in self.records_behind(operand)]
        record = self._made[owner]
        return found if record is None else [*found, record]


def create_collective(step: Collective, operand: ir.Value, location: ir.Location, ip: ir.InsertionPoint) -> ir.Value:
    """Creates the sdy op of one step of a reshard."""
    context = operand.context
    attributes = {name: attribute_from_text(text, context) for name, text in collective_attributes(step).items()}
    attributes["sharding" if step.kind == BY_STRIPS else "out_sharding"] = sharding_to_attribute(step.result, context)
    op = ir.Operation.create(
        f"sdy.{step.kind}", results=[operand.type], operands=[operand], attributes=attributes, loc=location, ip=ip
    )
    return op.results[0]


# The reshards of a program's values: their plans, and the collectives of these as they run.


@dataclass(frozen=True, slots=True)
class Reshards:
    """What decides how values are moved.

    `rounded`: the values that are rounded before they are moved. `lines`: as a reduce-scatter runs on a torus.
    """

    meshes: ProgramMeshes
    costs: CostModel
    rounded: frozenset[Value]
    lines: Lines

    @classmethod
    def of(cls, graph: Graph, meshes: ProgramMeshes, setting: Setting) -> Reshards:
        """Those of the values of a program."""
        costs = setting.costs
        return cls(meshes, costs, rounded_values(graph, costs), setting.target.parts_of_axes)

    def plan(self, value: Value, source: TensorSharding, target: TensorSharding) -> ReshardPlan:
        """The cheapest collectives that bring a value from one sharding to another."""
        costs = self.costs.of_rounded if value in self.rounded else self.costs
        return self.meshes.plan(value.shape or (), value.itemsize, source, target, costs)

    def steps(self, value: Value, source: TensorSharding, target: TensorSharding) -> Iterator[Collective]:
        """The steps of a reshard, as they run."""
        shape, before = value.shape or (), source
        for step in self.plan(value, source, target).steps:
            yield from along_lines(step, before, shape, value.itemsize, self.lines, self.meshes.base)
            before = step.result

    def moves(self, value: Value, source: TensorSharding, target: TensorSharding) -> Iterator[tuple[Collective, Moved]]:
        """The steps of a reshard, as they run, each with what its record says."""
        mesh, shape, before = self.meshes.base, value.shape or (), source
        for step in self.steps(value, source, target):
            reduction = step.reduction if step.op.kind in REDUCING else ""
            cut = last_cut(shape, before.shard_counts(mesh), step.result.shard_counts(mesh))
            sent = sent_by_step(step, value, mesh)
            yield step, Moved(step.op.summary, step.result, sent, reduction, cut, value in self.rounded)
            before = step.result


# The sdy collectives that the user wrote: they keep their place and kind.
#
# Each runs from the sharding stated for its operand to its own `out_sharding`. One that cannot (a size that does not
# divide, a reduction whose operand is not stated to be unreduced) only states the sharding of its result.


@dataclass(frozen=True, slots=True)
class UserCollective:
    """A user's collective as it runs: the collective, the sharding of its operand, and that of its result."""

    collective: SdyCollective
    source: TensorSharding
    target: TensorSharding

    def moved(self, value: Value, mesh: Mesh) -> Moved:
        """The record of the collective for a value."""
        collective, shape = self.collective, value.shape or ()
        cut = padded_block(shape, self.source.shard_counts(mesh), self.target.shard_counts(mesh))
        before, after = (value.itemsize * math.prod(s) for s in (cut, self.target.local_shape(shape, mesh)))
        axes = (
            collective.all_axes
            if collective.kind != "collective_permute"
            else _permuted(self.source, self.target, mesh)
        )
        wire = wire_bytes(collective.kind, axes_size(axes, mesh), before, after)
        step = Collective(collective, self.target, wire, self.source.reduction)
        reduction = step.reduction if collective.kind in REDUCING else ""
        last = last_cut(shape, self.source.shard_counts(mesh), self.target.shard_counts(mesh))
        return Moved(collective.summary, self.target, sent_by_step(step, value, mesh), reduction, last)


def is_user_collective(op: Op) -> bool:
    """Whether the op is one of the sdy collectives."""
    return op.name in COLLECTIVE_OPS


def is_reduction(op: Op) -> bool:
    """Whether the op reduces values of several devices."""
    return op.name in REDUCING_OPS


def user_collective(
    op: Op, sources: Iterable[TensorSharding], target: TensorSharding, mesh: Mesh
) -> UserCollective | None:
    """A collective with the stated result `target`, from the first of `sources` that it fits; None if it fits none."""
    collective = _without_size_one(collective_from_attributes(op.name, op.attributes), mesh)
    if not collective.all_axes and collective.kind != "collective_permute":
        return None
    combines = reduction_from_attributes(op.attributes)
    for source in sources:
        for each in (collective, _restated(collective, source, target, mesh)):
            if _leads(each, combines, source, target, mesh) and _joins_blocks(op.results[0], source, target, mesh):
                return UserCollective(each, source, target)
    return None


def _restated(collective: SdyCollective, source: TensorSharding, target: TensorSharding, mesh: Mesh) -> SdyCollective:
    """The collective of this kind between two shardings. It says its axes in those of another mesh, if the shardings
    were on that before they were expressed on this one."""

    def less(axes: Axes, others: Axes) -> Axes:
        return set_difference(axes, others, mesh)

    if collective.kind == "all_reduce":
        return replace(collective, axes=less(source.unreduced_axes, target.unreduced_axes))
    if collective.kind == "replicated_to_unreduced":
        return replace(collective, axes=less(target.unreduced_axes, source.unreduced_axes))
    before, after = (target, source) if collective.kind in APPENDING else (source, target)
    lists = tuple(map(less, before.axes, after.axes))
    params = tuple((lists[dim], dim, to) for _, dim, to in collective.params)
    return replace(collective, axes=lists if collective.axes else (), params=params)


def _without_size_one(collective: SdyCollective, mesh: Mesh) -> SdyCollective:
    """Without axes of size one, which shardings are rid of."""

    def larger(axes: Axes) -> Axes:
        return tuple(axis for axis in axes if axis.name not in mesh.axis_names or axis.size(mesh) > 1)

    if collective.kind in FLAT:
        return replace(collective, axes=larger(collective.axes))
    params = tuple((axes, a, b) for given, a, b in collective.params if (axes := larger(given)))
    return replace(collective, axes=tuple(map(larger, collective.axes)), params=params)


def _leads(
    collective: SdyCollective, combines: str, source: TensorSharding, target: TensorSharding, mesh: Mesh
) -> bool:
    """Whether the collective takes one sharding to the other without adding any partial sum twice."""
    if collective.kind == "collective_permute":
        same = source.unreduced_axes == target.unreduced_axes and source.reduction == target.reduction
        return same and source.shard_counts(mesh) == target.shard_counts(mesh)
    if source.mesh != target.mesh or (collective.kind in REDUCING and combines != source.reduction):
        return False
    if source.unreduced_axes and target.unreduced_axes and source.reduction != target.reduction:
        return False
    try:
        verify_counted_once(collective, source, mesh, "")
        after = sharding_after(collective, source, mesh)
    except ShardingError:
        return False
    return after.axes == target.axes and after.unreduced_axes == target.unreduced_axes


def _joins_blocks(value: Value, source: TensorSharding, target: TensorSharding, mesh: Mesh) -> bool:
    counts = zip(value.shape or (), source.shard_counts(mesh), target.shard_counts(mesh), strict=True)
    return all(leads_to_blocks(*each) for each in counts)


def _permuted(source: TensorSharding, target: TensorSharding, mesh: Mesh) -> Axes:
    """The axes along which a permutation moves blocks; none if every block stays."""
    if source.same_layout_as(target):
        return ()
    lists = [axes for sharding in (source, target) for axes in (*sharding.axes, sharding.unreduced_axes)]
    return tuple(dict.fromkeys(axis for axes in lists for axis in axes))
