"""In which sharding the users of a value expect it: where it is stated, declared or made.

For every value that has been placed, `self[value]` is that sharding. Where the value really is, `Copies` knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.lowering.placement.copies import Copies
from sdy_jax.lowering.placement.meshes import Meshes
from sdy_jax.lowering.placement.report import CollectiveRecord, PartitionReport
from sdy_jax.lowering.placement.uneven import uneven
from sdy_jax.lowering.planning.factors import dividing_prefix
from sdy_jax.lowering.reshard.cost import CostModel
from sdy_jax.lowering.reshard.plan import ReshardPlan
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.representation.sharding import DimensionSharding, TensorSharding


class Placement:
    """In which shardings the users of a program's values expect them."""

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
        self._even: dict[tuple[TensorSharding, tuple[int, ...]], tuple[TensorSharding, TensorSharding, str | None]] = {}
        self._replicated: dict[int, TensorSharding] = {}
        self._copies = Copies(graph, self._placed, self._plan, rule_of, self._mesh, costs, report)

    def __getitem__(self, value: Value) -> TensorSharding:
        return self._placed[value]

    def of(self, values: Iterable[Value]) -> list[TensorSharding]:
        """Where each of them is."""
        return [self._placed[value] for value in values]

    def copies_of(self, values: Sequence[Value]) -> tuple[tuple[TensorSharding, ...], ...]:
        """Where each of them can be taken from; empty if all are just where they are expected."""
        noted = self._copies.noted
        if noted.isdisjoint(values):
            return ()
        return tuple([self._copies.of(value) if value in noted else () for value in values])

    def free_among(self, values: Sequence[Value]) -> frozenset[int]:
        """Which of them cost nothing in any sharding, by number: they are split, and every device can make them."""
        split = [n for n, value in enumerate(values) if not self[value].is_fully_replicated]
        return frozenset([n for n in split if self._copies.is_free(values[n])])

    def __contains__(self, value: Value) -> bool:
        return value in self._placed

    def place(self, values: Iterable[Value], sharding: TensorSharding) -> None:
        """Notes that values are there, in this sharding."""
        for value in values:
            self._placed[value] = sharding

    # What is stated.

    def replicated(self, value: Value) -> TensorSharding:
        rank = value.rank
        if rank not in self._replicated:
            self._replicated[rank] = TensorSharding.replicated(self._mesh_name, rank)
        return self._replicated[rank]

    def stated(self, value: Value, sharding: TensorSharding | None) -> TensorSharding:
        """A sharding that is stated for a value, as it can be: closed, on a mesh of the program, and cut back to axes
        that divide each dimension; replicated where none is stated, and where there are no elements to split."""
        if sharding is None or value.shape is None or 0 in value.shape:
            return self.replicated(value)
        key = (sharding, value.shape)
        found = self._even.get(key)
        if found is None:
            found = self._even[key] = self._made_even(sharding, value.shape)
        even, settled, lost = found
        if lost:
            self._report.note_value(value, lost if value.defining_op else f"{self._report.name(value)} {lost}")
        if even.axes != settled.axes:
            for message in uneven(self._report.name(value), value.shape, value.dtype, settled, even, self._mesh):
                self._report.note_value(value, message)
        return even

    def _made_even(
        self, sharding: TensorSharding, shape: tuple[int, ...]
    ) -> tuple[TensorSharding, TensorSharding, str | None]:
        """The sharding as it can be, as it was before it was cut back to axes that divide, and what was lost before."""
        settled = self.meshes.settled(sharding, len(shape))
        lost = self.meshes.note(sharding, settled) if settled is not sharding else None
        if settled.rank != len(shape):
            whole = TensorSharding.replicated(self._mesh_name, len(shape))
            return whole, whole, lost
        even = self.meshes.settled(_divided(settled, shape, self._mesh), len(shape))  # what is left may lie on more
        return (sharding if even == sharding else even), settled, lost

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
        """Lets an op use its operands as they are placed, and make its results as they are declared."""
        if not self._copies.noted.isdisjoint(op.operands):
            for number, value in enumerate(op.operands):
                self.require(op, number, self._placed[value])
        for result in op.results:
            self._placed[result] = self._declared[result]

    def require(self, op: Op, number: int, target: TensorSharding) -> None:
        """Makes operand `number` of `op` available in the target sharding."""
        value = op.operands[number]
        current = self._copies.take(value, target, op)
        if current is not value.mlir:
            op.mlir.operands[number] = current

    def forward(self, op: Op, target: TensorSharding) -> None:
        """Lets the operand of an op stand for its result, which its users expect in the target sharding."""
        (operand,), (result,) = op.operands, op.results
        self._placed[result] = target
        if set(target.unreduced_axes) <= set(self._placed[operand].unreduced_axes):
            self._copies.stand_for(result, operand)
        else:  # who asks for terms gets them
            self._copies.note(result, target, self._copies.take(operand, target, op))
        self._copies.state(operand)

    def keep(self, op: Op, record: CollectiveRecord) -> None:
        """Lets a collective of the program's own stay, unless nobody uses its result in the end."""
        self._copies.keep(op, record)

    def settle(self, op: Op, result: Value, produced: TensorSharding, following: Op) -> None:
        """Notes the sharding that an op produces a result in.

        One user takes it as it is. Several expect it as it is declared; a partial result is reduced for all of them,
        right before the op that follows.
        """
        declared = self.declared(result)
        if produced.lies_like(declared):
            self._placed[result] = declared
            return
        self._graph.set_sharding(result, produced)
        self._placed[result] = produced
        if has_one_user(op, result):
            return
        self._copies.note(result, produced, result.mlir)
        if produced.unreduced_axes:
            self._copies.move(result, declared, following, op)
        self._placed[result] = declared

    def sweep(self) -> None:
        """Erases what nobody uses in the end."""
        self._copies.sweep()

    def records_behind(self, value: ir.Value) -> list[CollectiveRecord]:
        """The collectives by which a value came to be where its user takes it."""
        return self._copies.records_behind(value)

    def is_erased(self, op: Op) -> bool:
        """Nobody used it in the end."""
        return self._copies.is_erased(op)

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
