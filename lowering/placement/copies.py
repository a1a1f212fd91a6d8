"""Where the values of a program are: where their ops make them, and where reshards have brought them.

Each user takes the copy that is nearest. A value that only stands for another, as the result of a sharding constraint
does, is wherever that one is. What nobody uses in the end is swept away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.lowering.emission.names import collective_attributes
from sdy_jax.lowering.emission.sent import sent_by_step
from sdy_jax.lowering.placement.recompute import Known, Recomputation, is_made_of_nothing, recomputation
from sdy_jax.lowering.placement.report import CollectiveRecord, Moved, PartitionReport
from sdy_jax.lowering.reshard.cost import CostModel
from sdy_jax.lowering.reshard.plan import Collective, ReshardPlan
from sdy_jax.propagation.edge_shardings import state_body_arguments
from sdy_jax.representation.attributes import attribute_from_text, sharding_to_attribute, shardings_to_attribute
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.rules.dataflow import edges_of

Plan = Callable[[Value, TensorSharding, TensorSharding], ReshardPlan]


class Copy(NamedTuple):
    """A sharding in which a value is there, and the MLIR value that is it."""

    sharding: TensorSharding
    mlir: ir.Value


class Copies:
    """The copies of a program's values.

    `placed` says in which sharding users expect a value. As long as nothing else is noted here, that is where it is.
    """

    def __init__(
        self,
        graph: Graph,
        placed: Mapping[Value, TensorSharding],
        plan: Plan,
        rule_of: Callable[[Op], OpShardingRule | None],
        mesh: Mesh,
        costs: CostModel,
        report: PartitionReport,
    ):
        self._graph, self._placed, self._plan, self._report, self._mesh = graph, placed, plan, report, mesh
        self._known = Known(self._origin, placed.__getitem__, rule_of, self._cost, mesh, costs)
        self._origins: dict[Value, Value] = {}
        self._free: dict[Value, bool] = {}
        self._by_layout: dict[Value, dict[object, Copy]] = {}
        self.noted: set[Value] = set()
        """The values that may be elsewhere than where users expect them."""
        self._spare: list[tuple[ir.Operation, CollectiveRecord | None]] = []
        """Ops that may have no users in the end: collectives, ops that run again, and what they stand in for."""
        self._made: dict[ir.Operation, CollectiveRecord | None] = {}
        """The collectives among them and the ops that run again."""
        self._erased: set[int] = set()

    def note(self, value: Value, sharding: TensorSharding, mlir: ir.Value) -> None:
        """Notes as what and where a value is, which is not as it is placed, or not as what its op makes."""
        self._by_layout[value] = {sharding.layout: Copy(sharding, mlir)}
        self.noted.add(value)

    def stand_for(self, value: Value, other: Value) -> None:
        """Notes that a value is nothing but another one."""
        self._origins[value] = self._origin(other)
        self.noted.add(value)

    def take(self, value: Value, target: TensorSharding, user: Op) -> ir.Value:
        """The copy in the target sharding. If there is none it is made, by moving another or by making it anew."""
        origin = self._origin(value)
        if value.shape is None:
            return origin.mlir
        if value not in self.noted and self._placed[value].lies_like(target):
            return value.mlir
        copies = self._copies(value)
        if target.layout not in copies:
            if self._has_to_be_reduced_first(value, target):
                self.take(value, self._placed[value], user)
            # Beside the value, before the op that (perhaps deep inside) uses it: loop invariants move once.
            before = _ancestor_in(origin, user)
            again = recomputation(origin, target, self._known)
            if again is None:
                self.move(value, target, before, user)
            else:
                copies[target.layout] = Copy(target, self._made_anew(again, target, before))
        return copies[target.layout].mlir

    def move(self, value: Value, target: TensorSharding, before: Op, cause: Op) -> None:
        """Inserts the collectives that bring a value to the target sharding."""
        nearest, producer = self._nearest(value, target), self._origin(value).defining_op
        self.state(self._origin(value))
        if nearest.sharding.unreduced_axes and producer is not None:
            cause = producer
        current = nearest.mlir
        for step in self._plan(value, nearest.sharding, target).steps:
            said = step.op
            sent = sent_by_step(step, value, self._mesh)
            moved = Moved(step.kind, said.all_axes, str(said), step.result, sent)
            record = self._report.add(moved, value, before, cause)
            current = _create(step, current, cause, before)
            self._spare.append((current.owner, record))
            self._made[current.owner.operation] = record
        self._copies(value)[target.layout] = Copy(target, current)

    def keep(self, op: Op, record: CollectiveRecord) -> None:
        """Notes a collective that stays where it is, between values that state their shardings."""
        self.state(self._origin(op.operands[0]))
        self._spare.append((op.mlir, record))

    def of(self, value: Value) -> tuple[TensorSharding, ...]:
        """Where a value of which something is noted can be taken from."""
        return tuple([copy.sharding for copy in self._usable(value)])

    def is_free(self, value: Value) -> bool:
        """Whether a value costs nothing in any sharding, because every device can make it."""
        origin = self._origin(value)
        if origin not in self._free:
            self._free[origin] = is_made_of_nothing(origin)
        return self._free[origin]

    def state(self, value: Value) -> None:
        """States where a value lies if nothing does: the dialect wants to see it on what a collective takes."""
        sharding, value = self._placed[value], _owner(value)
        producer = value.defining_op
        if value.sharding is None and (producer is None or producer.attribute("out_shardings") is None):
            self._graph.set_sharding(value, sharding)
        if isinstance(value.owner, Block):
            state_body_arguments(self._graph, value.owner.parent, self._placed.__getitem__)

    def sweep(self) -> None:
        """Erases what nobody uses: values that were made anew for all their users, and what was moved for them."""
        dropped = []
        for op, record in reversed(self._spare):
            if id(op) in self._erased or any(True for result in op.results for _ in result.uses):
                continue
            self._erased.add(id(op))
            self._made.pop(op, None)
            op.erase()
            if record is not None:
                dropped.append(record)
        self._report.drop(dropped)

    def is_erased(self, op: Op) -> bool:
        return id(op.mlir) in self._erased

    def records_behind(self, value: ir.Value) -> list[CollectiveRecord]:
        """The collectives by which a value came to be where its user takes it, those of what was made anew included."""
        owner = value.owner
        if isinstance(owner, ir.Block) or (owner := owner.operation) not in self._made:
            return []
        found = [record for operand in owner.operands for record in self.records_behind(operand)]
        record = self._made[owner]
        return found if record is None else [*found, record]

    def _origin(self, value: Value) -> Value:
        return self._origins.get(value, value)

    def _copies(self, value: Value) -> dict[object, Copy]:
        origin = self._origin(value)
        if origin not in self._by_layout:
            self.note(origin, self._placed[origin], origin.mlir)
        return self._by_layout[origin]

    def _nearest(self, value: Value, target: TensorSharding) -> Copy:
        """The copy from which the target costs least."""
        copies = self._usable(value)
        return min(copies, key=lambda copy: self._plan(value, copy.sharding, target).cost)

    def _usable(self, value: Value) -> list[Copy]:
        """Partial copies only where there is no whole one."""
        copies = list(self._copies(value).values())
        return [copy for copy in copies if not copy.sharding.unreduced_axes] or copies

    def _cost(self, value: Value, target: TensorSharding) -> float:
        """What it costs to have a value in a sharding."""
        if target.layout in self._copies(value):
            return 0.0
        return self._plan(value, self._nearest(value, target).sharding, target).cost

    def _has_to_be_reduced_first(self, value: Value, target: TensorSharding) -> bool:
        """A value that is partial as yet, but whole for its users, is reduced once for all of them."""
        placed = self._placed[value]
        if placed.unreduced_axes or placed.lies_like(target) or len(value.uses) == 1:
            return False
        return all(copy.sharding.unreduced_axes for copy in self._copies(value).values())

    def _made_anew(self, again: Recomputation, target: TensorSharding, before: Op) -> ir.Value:
        operands = [self.take(v, s, before) for v, s in zip(again.op.operands, again.operands, strict=False)]
        clone = again.op.mlir.clone(ir.InsertionPoint(before.mlir)).operation
        for number, operand in enumerate(operands):
            clone.operands[number] = operand
        clone.attributes["sdy.sharding"] = shardings_to_attribute((target,), clone.context)
        self._spare += [(clone, None), (again.op.mlir, None)]
        self._made[clone] = None
        return clone.results[0]


def _create(step: Collective, operand: ir.Value, cause: Op, before: Op) -> ir.Value:
    """The sdy op of one step, before another op, at the location of the op that needed it."""
    context = cause.mlir.context
    attributes = {name: attribute_from_text(text, context) for name, text in collective_attributes(step).items()}
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
