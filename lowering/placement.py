"""Where the values of a program are available, in which shardings, and how they get there.

Invariant: for every value that has been placed, `self[value]` is the sharding of the MLIR value that stands for it: its
own, or what a reshard made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from jax.extend.mlir import ir

from sdy_jax.graph import Block, Graph, Op, Value
from sdy_jax.lowering.cost import CostModel
from sdy_jax.lowering.factors import dividing_prefix
from sdy_jax.lowering.meshes import Meshes
from sdy_jax.lowering.recompute import Known, Recomputation, recomputation
from sdy_jax.lowering.report import Moved, PartitionReport
from sdy_jax.lowering.resharding import Collective, ReshardPlan
from sdy_jax.lowering.strategies.manual import state_body_arguments
from sdy_jax.lowering.text import axes_of, collective_attributes
from sdy_jax.representation.attributes import sharding_to_attribute, shardings_to_attribute
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.representation.sharding import DimensionSharding, TensorSharding
from sdy_jax.rules.dataflow import edges_of


class Placement:
    """The shardings of a program's values, and the reshards between them."""

    def __init__(
        self,
        graph: Graph,
        mesh_name: str,
        costs: CostModel,
        rule_of: Callable[[Op], OpShardingRule | None],
        report: PartitionReport,
    ):
        self.meshes = Meshes(graph, mesh_name)
        self._graph, self._costs, self._report = graph, costs, report
        self._mesh_name, self._mesh = mesh_name, self.meshes.base
        self._placed: dict[Value, TensorSharding] = {}
        self._declared: dict[Value, TensorSharding] = {}
        self._stand_ins: dict[Value, ir.Value] = {}
        self._copies: dict[tuple[Value, object], ir.Value] = {}
        self._even: dict[tuple[TensorSharding, tuple[int, ...]], tuple[TensorSharding, list[str]]] = {}
        self._known = Known(self._placed.__getitem__, rule_of, self._plan, self._mesh, costs)

    def __getitem__(self, value: Value) -> TensorSharding:
        return self._placed[value]

    def __contains__(self, value: Value) -> bool:
        return value in self._placed

    def place(self, values: Iterable[Value], sharding: TensorSharding) -> None:
        """Notes that values are there, in this sharding."""
        for value in values:
            self._placed[value] = sharding

    # What is stated.

    def replicated(self, value: Value) -> TensorSharding:
        return TensorSharding.replicated(self._mesh_name, value.rank)

    def stated(self, value: Value, sharding: TensorSharding | None) -> TensorSharding:
        """A sharding that is stated for a value, as it can be: closed, on a mesh of the program, and cut back to axes
        that divide each dimension; replicated where none is stated."""
        if sharding is None or value.shape is None:
            return self.replicated(value)
        key = (sharding, value.shape)
        if key not in self._even:
            self._even[key] = self._made_even(sharding, value.shape)
        even, lost = self._even[key]
        for message in lost:
            self._report.note(value.defining_op, message)
        return even

    def _made_even(self, sharding: TensorSharding, shape: tuple[int, ...]) -> tuple[TensorSharding, list[str]]:
        """The sharding as it can be, and what it has lost."""
        lost = []
        settled = self.meshes.settled(sharding, len(shape))
        if settled is not sharding and (message := self.meshes.note(sharding, settled)):
            lost.append(message)
        if settled.rank != len(shape):
            return TensorSharding.replicated(self._mesh_name, len(shape)), lost
        even = self.meshes.settled(_divided(settled, shape, self._mesh), len(shape))  # what is left may lie on more
        if even.axes != settled.axes:
            counts = (s.shard_counts(self._mesh) for s in (even, settled))
            lost.append("shape {} is split {} instead of {} ways, which do not divide it".format(shape, *counts))
        return (sharding if even == sharding else even), lost

    def declared(self, value: Value) -> TensorSharding:
        """The sharding that propagation gave a value; replicated where it gave none."""
        if value in self._declared:
            return self._declared[value]
        sharding = self.stated(value, value.sharding)
        if value.sharding is not None and sharding is not value.sharding and sharding != value.sharding:
            self._graph.set_sharding(value, sharding)
        self._declared[value] = sharding
        return sharding

    def declare(self, value: Value, sharding: TensorSharding) -> None:
        """Replaces what propagation gave a value."""
        self._declared[value] = sharding

    # Bringing values to where they are needed.

    def rest(self, op: Op) -> None:
        """Lets an op use its operands as they are available, and make its results as they are declared."""
        for number, value in enumerate(op.operands):
            if value in self._stand_ins:
                op.mlir.operands[number] = self._stand_ins[value]
        for result in op.results:
            self._placed[result] = self._declared[result]

    def require(self, op: Op, number: int, target: TensorSharding) -> None:
        """Makes operand `number` of `op` available in the target sharding."""
        value = op.operands[number]
        current = self._resharded(value, target, op)
        if current is not value.mlir:
            op.mlir.operands[number] = current

    def forward(self, op: Op, target: TensorSharding) -> None:
        """Lets the operand of an op, in the target sharding, stand for its result."""
        (operand,), (result,) = op.operands, op.results
        self._placed[result] = target
        self._stand_ins[result] = self._resharded(operand, target, op)
        self._write(operand)

    def settle(self, op: Op, result: Value, produced: TensorSharding, following: Op) -> None:
        """Notes the sharding that an op produces a result in, and brings it to the declared one for all users, right
        before the op that follows.

        A partial result with one user waits for it: there it is reduced, or passes on as it is.
        """
        declared = self.declared(result)
        if produced.lies_like(declared):
            self._placed[result] = declared
            return
        self._placed[result] = produced
        self._graph.set_sharding(result, produced)
        if produced.unreduced_axes and has_one_user(op, result):
            return
        self._stand_ins[result] = self._inserted(result, declared, following, op)
        self._placed[result] = declared

    def remove(self, op: Op) -> None:
        """Erases an op for whose results others stand."""
        for result in op.results:
            result.mlir.replace_all_uses_with(self._stand_ins[result])
        op.mlir.erase()

    def _resharded(self, value: Value, target: TensorSharding, user: Op) -> ir.Value:
        source = self._placed[value]
        if value.shape is None or source is target or source.lies_like(target):
            return self._stand_ins.get(value, value.mlir)
        key = (value, target.layout)
        if key not in self._copies:
            # Beside the value, before the op that (perhaps deep inside) uses it: loop invariants move once.
            before = _ancestor_in(value, user)
            again = recomputation(value, target, self._known)
            self._copies[key] = (
                self._inserted(value, target, before, user) if again is None else self._made_anew(again, target, before)
            )
        return self._copies[key]

    def _made_anew(self, again: Recomputation, target: TensorSharding, before: Op) -> ir.Value:
        operands = [self._resharded(v, s, before) for v, s in zip(again.op.operands, again.operands, strict=False)]
        clone = again.op.mlir.clone(ir.InsertionPoint(before.mlir)).operation
        for number, operand in enumerate(operands):
            clone.operands[number] = operand
        clone.attributes["sdy.sharding"] = shardings_to_attribute((target,), clone.context)
        return clone.results[0]

    def _inserted(self, value: Value, target: TensorSharding, before: Op, cause: Op) -> ir.Value:
        """What the collectives make of a value that take it to the target sharding."""
        source = self._placed[value]
        producer = value.defining_op
        self._write(value)
        if source.unreduced_axes and producer is not None:
            cause = producer
        current = self._stand_ins.get(value, value.mlir)
        for step in self._plan(value, source, target).steps:
            moved = Moved(step.kind, axes_of(step), str(step), step.result, step.wire_bytes)
            self._report.add(moved, value, before, cause)
            current = _create(step, current, cause, before)
        return current

    def _write(self, value: Value) -> None:
        """States where a value lies if nothing does: the dialect wants to see it on what a collective takes."""
        sharding, value = self._placed[value], _owner(value)
        producer = value.defining_op
        if value.sharding is None and (producer is None or producer.attribute("out_shardings") is None):
            self._graph.set_sharding(value, sharding)
        if isinstance(value.owner, Block):
            state_body_arguments(self._graph, value.owner.parent, self._placed.__getitem__)

    def _plan(self, value: Value, source: TensorSharding, target: TensorSharding) -> ReshardPlan:
        return self.meshes.plan(value.shape or (), value.itemsize, source, target, self._costs)


def has_one_user(op: Op, result: Value) -> bool:
    """One, and in the same block: a partial result that enters a loop would be reduced in every iteration."""
    return len(result.uses) == 1 and result.uses[0][0].block is op.block


def _divided(sharding: TensorSharding, shape: tuple[int, ...], mesh: Mesh) -> TensorSharding:
    dims = tuple(
        DimensionSharding(dividing_prefix(n, axes, mesh)) for n, axes in zip(shape, sharding.axes, strict=True)
    )
    return replace(sharding, dimensions=dims, replicated_axes=())


def _create(step: Collective, operand: ir.Value, cause: Op, before: Op) -> ir.Value:
    """The sdy op of one step, before another op, at the location of the op that needed it."""
    context = cause.mlir.context
    attributes = {name: ir.Attribute.parse(text, context) for name, text in collective_attributes(step).items()}
    attributes["out_sharding"] = sharding_to_attribute(step.result, context)
    op = ir.Operation.create(
        f"sdy.{step.kind}",
        results=[operand.type],
        operands=[operand],
        attributes=attributes,
        loc=cause.mlir.location,
        ip=ir.InsertionPoint(before.mlir),
    )
    return op.results[0]


def _owner(value: Value) -> Value:
    """The value that carries the sharding: what owns the edge by which a loop passes a value into its body."""
    if not isinstance(value.owner, Block):
        return value
    return next((edge.owner for edge in edges_of(value.owner.parent) if value in edge.targets), value)


def _ancestor_in(value: Value, op: Op) -> Op:
    """The op in the block of `value` that is, or contains, `op`."""
    home = value.owner if isinstance(value.owner, Block) else value.owner.block
    while op.block is not home:
        assert op.parent is not None
        op = op.parent
    return op
