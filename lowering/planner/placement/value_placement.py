"""The sharding in which the users of each value expect it: the stated one, the declared one, or the one it is made in.

For every value that has been placed, `self[value]` is that sharding. The layouts in which a value is materialized are
those of `MaterializedLayouts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from sdy_jax.base.errors import ShardingError
from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.meshes import Axes, Mesh
from sdy_jax.ir.shardings import DimensionSharding, TensorSharding
from sdy_jax.lowering.planner.facts.factors import Cuts, ProgramMeshes, block_prefix, dividing_prefix, leading_uncut
from sdy_jax.lowering.planner.placement.collectives import InsertedOps, Reshards
from sdy_jax.lowering.planner.placement.materialized_layouts import MaterializedLayouts
from sdy_jax.lowering.planner.problem.layout_plan import PlannedUse
from sdy_jax.lowering.planner.report import CollectiveRecord, PartitionReport, uneven
from sdy_jax.lowering.planner.rewrites.region_borders import taken_outside
from sdy_jax.lowering.planner.setting import Setting

Cut = Callable[[int, Axes, Mesh], Axes]
"""`cut(size, axes, mesh)`: the leading axes along which a dimension can be split."""

Stated = Callable[[Value, TensorSharding | None], TensorSharding]


class ValuePlacement:
    """The sharding in which users expect each value of a program, and the reshards that bring it there."""

    def __init__(self, graph: Graph, setting: Setting, report: PartitionReport):
        self._uneven = setting.policy.uneven
        self.keeps_declared = setting.policy.keeps_declared
        """Each value is brought to its declared sharding right where it is made, and exists in no other before."""
        self.meshes, self.cuts = ProgramMeshes(graph, setting.mesh_name), setting.cuts
        self.ops = InsertedOps(report, taken_outside(graph))
        self._graph, self._report = graph, report
        self._mesh_name, self._mesh = setting.mesh_name, self.meshes.base
        self._placed: dict[Value, TensorSharding] = {}
        self._declared: dict[Value, TensorSharding] = {}
        self._stated: dict[object, tuple[TensorSharding, TensorSharding, str | None]] = {}
        self._replicated: dict[int, TensorSharding] = {}
        reshards = Reshards.of(graph, self.meshes, setting)
        self._layouts = MaterializedLayouts(graph, self._placed, reshards, self.ops, setting)

    def __getitem__(self, value: Value) -> TensorSharding:
        return self._placed[value]

    def of(self, values: Iterable[Value]) -> list[TensorSharding]:
        """The sharding in which users expect each of the values."""
        return [self._placed[value] for value in values]

    def materialized_layouts_of(self, values: Sequence[Value]) -> tuple[tuple[TensorSharding, ...], ...]:
        """The materialized layouts of each value; empty if every value has just the one in which users expect it."""
        tracked = self._layouts.tracked
        if tracked.isdisjoint(values):
            return ()
        return tuple([self._layouts.of(value) if value in tracked else () for value in values])

    def free_among(self, values: Sequence[Value]) -> frozenset[int]:
        """The indices of sharded values that every device can compute in any sharding without communication."""
        split = [n for n, value in enumerate(values) if not self[value].is_fully_replicated]
        return frozenset([n for n in split if self.is_free(values[n])])

    def is_free(self, value: Value) -> bool:
        """Whether every device can compute a value in any sharding without communication."""
        return self._layouts.is_free(value)

    def __contains__(self, value: Value) -> bool:
        return value in self._placed

    def place(self, values: Iterable[Value], sharding: TensorSharding) -> None:
        """Records that users expect these values in this sharding."""
        for value in values:
            self._placed[value] = sharding

    # Stated and declared shardings.

    def replicated(self, value: Value) -> TensorSharding:
        rank = value.rank
        if rank not in self._replicated:
            self._replicated[rank] = TensorSharding.replicated(self._mesh_name, rank)
        return self._replicated[rank]

    def stated(self, value: Value, sharding: TensorSharding | None) -> TensorSharding:
        """The sharding stated for a value, in a form that can run.

        It is closed, on a mesh of the program, and cut back to axes that make its blocks smaller, and may be cut so.
        Replicated where none is stated and where the value has no elements.
        """
        found = self._runnable(value, sharding, block_prefix if self._uneven == "pad" else dividing_prefix)
        return found if self.cuts is None else self._uncut(found, self.cuts)

    def _uncut(self, sharding: TensorSharding, cuts: Cuts) -> TensorSharding:
        if sharding.mesh != self._mesh_name:
            return sharding
        kept = [leading_uncut(axes, cuts, self._mesh) for axes in sharding.axes]
        whole = TensorSharding.closed(self._mesh_name, kept, sharding.unreduced_axes, sharding.reduction)
        return sharding if whole.same_layout_as(sharding) else whole

    def evenly(self, value: Value, sharding: TensorSharding | None) -> TensorSharding:
        """As `stated`, cut back to axes that divide each dimension: jax's arrays lie in equal blocks."""
        return self._runnable(value, sharding, dividing_prefix)

    def _runnable(self, value: Value, sharding: TensorSharding | None, cut: Cut) -> TensorSharding:
        if sharding is None or value.shape is None or 0 in value.shape:
            return self.replicated(value)
        key = (sharding, value.shape, cut)
        found = self._stated.get(key)
        if found is None:
            found = self._stated[key] = self._cut_back(sharding, value.shape, cut)
        kept, settled, lost = found
        if lost:
            self._report.note_value(value, lost if value.defining_op else f"{self._report.name(value)} {lost}")
        if cut is dividing_prefix and kept.axes != settled.axes:
            for message in uneven(self._report.name(value), value.shape, value.dtype, settled, kept, self._mesh):
                if self._uneven == "error":
                    where = f"{value.defining_op.source}: " if value.defining_op else ""
                    raise ShardingError(f"{where}{message}, or leave uneven='pad'")
                self._report.note_value(value, message)
        return kept

    def _cut_back(
        self, sharding: TensorSharding, shape: tuple[int, ...], cut: Cut
    ) -> tuple[TensorSharding, TensorSharding, str | None]:
        """The sharding cut back, the one before that, and a note on axes lost between meshes."""
        settled = self.meshes.settled(sharding, len(shape))
        lost = self.meshes.note(sharding, settled) if settled is not sharding else None
        if settled.rank != len(shape):
            whole = TensorSharding.replicated(self._mesh_name, len(shape))
            return whole, whole, lost
        # Settled again: the base mesh may have the axes that are left.
        kept = self.meshes.settled(_cut(settled, shape, self._mesh, cut), len(shape))
        return (sharding if kept == sharding else kept), settled, lost

    def enter(self, argument: Value) -> None:
        """Places an argument of the program, which lies in equal blocks."""
        self._declared[argument] = self._placed[argument] = self._declaration(argument, self.evenly)

    def declared(self, value: Value) -> TensorSharding:
        """The sharding that propagation gave a value; replicated where it gave none."""
        if value not in self._declared:
            self._declared[value] = self._declaration(value, self.stated)
        return self._declared[value]

    def _declaration(self, value: Value, stated: Stated) -> TensorSharding:
        sharding = stated(value, value.sharding)
        if value.sharding is not None and sharding is not value.sharding and sharding != value.sharding:
            self._graph.set_sharding(value, sharding)
        return sharding

    def declare(self, value: Value, sharding: TensorSharding) -> None:
        """Replaces what propagation gave a value."""
        self._declared[value] = sharding

    # Values in the shardings that ops need.

    def rest(self, op: Op) -> None:
        """Records an op that takes its operands as they are placed and makes its results as they are declared."""
        if not self._layouts.tracked.isdisjoint(op.operands):
            for index, value in enumerate(op.operands):
                self.require(op, index, self._placed[value])
        for result in op.results:
            self._placed[result] = self._declared[result]

    def require(self, op: Op, index: int, target: TensorSharding) -> None:
        """Makes operand `index` of `op` available in the target sharding."""
        value = op.operands[index]
        current = self._layouts.take(value, target, op)
        if current is not value.mlir:
            op.mlir.operands[index] = current

    def forward(self, op: Op, target: TensorSharding, strictly: bool) -> None:
        """Lets the operand of an op stand for its result, which its users expect in the target sharding; where that is
        meant `strictly`, they take it from there only."""
        (operand,), (result,) = op.operands, op.results
        self._placed[result] = target
        shared = set(target.unreduced_axes) <= set(self._placed[operand].unreduced_axes)
        if shared and not (strictly or self.keeps_declared):
            self._layouts.alias(result, operand)
        else:  # the members of a group; what is unreduced along more axes than the operand: the user asks for it
            self._layouts.track(result, target, self._layouts.take(operand, target, op))
        self._layouts.state(operand)

    def origin(self, value: Value) -> Value:
        """The value that another one is an alias of; else itself."""
        return self._layouts.origin(value)

    def stand_in(self, value: Value, other: Value) -> None:
        """Lets another value stand for one, in the sharding in which its users expect it."""
        self._placed[value] = self._placed[other]
        self._layouts.alias(value, other)

    def keep(self, op: Op, record: CollectiveRecord) -> None:
        """Keeps a collective that the program holds itself, unless its result has no users in the end."""
        self._layouts.state(self._layouts.origin(op.operands[0]))
        self.ops.may_erase(op.mlir, record)

    def settle(self, op: Op, result: Value, produced: TensorSharding, following: Op) -> None:
        """Records the sharding in which an op produces a result.

        A single user takes the result in that sharding. Several users expect the declared one: an unreduced result is
        then reduced once for all of them, right before the op `following`.

        Where values keep their declared sharding, every result is moved there before that op, and taken from there.
        """
        declared = self.declared(result)
        if produced.same_layout_as(declared):
            self._placed[result] = declared
            return
        self._graph.set_sharding(result, produced)
        self._placed[result] = produced
        if has_one_user(op, result) and not self.keeps_declared:
            return
        self._layouts.track(result, produced, result.mlir)
        if self.keeps_declared:
            self._layouts.track(result, declared, self._layouts.moved(result, declared, following, op))
        elif produced.unreduced_axes:
            self._layouts.moved(result, declared, following, op)
        self._placed[result] = declared

    def follow_copies(self, planned: Mapping[PlannedUse, int], all_wait: bool) -> None:
        """Lets uses take the copies that are planned."""
        self._layouts.copies.follow(self._graph, planned, all_wait)


def has_one_user(op: Op, result: Value) -> bool:
    """Whether a result has one user, in the same block: in a loop, a user would reduce it in every iteration."""
    return len(result.uses) == 1 and result.uses[0][0].block is op.block


def _cut(sharding: TensorSharding, shape: tuple[int, ...], mesh: Mesh, cut: Cut) -> TensorSharding:
    dims = tuple(DimensionSharding(cut(n, axes, mesh)) for n, axes in zip(shape, sharding.axes, strict=True))
    return replace(sharding, dimensions=dims, replicated_axes=())
