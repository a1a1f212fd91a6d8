"""The layouts in which data-flow edges carry values: as declared or planned, or better ones for stacks and sums."""

from __future__ import annotations

from dataclasses import replace

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.operations import COMPUTATIONS
from sdy_jax.lowering.emission.emit import value_shardings
from sdy_jax.lowering.insert.carried_stacks import LOOP, CarriedStacks
from sdy_jax.lowering.insert.placement import Placement
from sdy_jax.lowering.interface.setting import Setting
from sdy_jax.lowering.proposal.layout_plan import LayoutPlan
from sdy_jax.op_rules.dataflow import DataFlowEdge, accumulator
from sdy_jax.propagation.edge_shardings import EdgeSharding
from sdy_jax.representation.axes import overlaps, sort_and_merge
from sdy_jax.representation.sharding import TensorSharding

OperandSlot = tuple[Op, int]
"""An operand: the op and the operand's index."""


class EdgePlacement:
    """The data-flow edges of a program. `unlike`: the results of loops that come out in other shardings than declared:
    partial sums, stacks."""

    def __init__(self, graph: Graph, placement: Placement, setting: Setting, plan: LayoutPlan | None):
        self._graph, self._placement, self._plan = graph, placement, plan
        rule_of = setting.rules.without_overrides().rule_of
        self._stacks = CarriedStacks(value_shardings(graph), rule_of, placement.meshes.base)
        self._accumulators: dict[Op, tuple[DataFlowEdge, dict[OperandSlot, TensorSharding]]] = {}
        self.unlike: list[Value] = []

    def placed(self, op: Op, number: int, index: int, sided: EdgeSharding) -> EdgeSharding:
        """An edge in the layout in which it is carried."""
        if self._placement.keeps_declared:
            return sided
        return self._settled_stack(op, sided) if self._plan is None else self._planned_edge(op, number, index, sided)

    def _settled_stack(self, op: Op, sided: EdgeSharding) -> EdgeSharding:
        """An edge in another sharding, if it is that of a stack that had better be carried so."""
        moved = self._stacks.moved(op, sided.edge, sided.sources) if op.name == LOOP else None
        if moved is None:
            return sided
        sharding, values = moved
        self._graph.set_shardings([(value, sharding) for value in (sided.edge.owner, *values)])
        self._placement.declare(sided.edge.owner, sided.sources)
        self.unlike.append(sided.edge.owner)
        return EdgeSharding(sided.edge, sharding, sharding)

    def _planned_edge(self, op: Op, number: int, index: int, sided: EdgeSharding) -> EdgeSharding:
        """An edge in the layout that the plan gives it; the users of its owner may expect another."""
        assert self._plan is not None
        planned = self._plan.edges.get(number)
        if op.name in COMPUTATIONS or planned is None or planned[index].same_layout_as(sided.sources):
            return sided
        owner, sharding = sided.edge.owner, planned[index]
        self._graph.set_sharding(owner, sharding)
        self._placement.declare(owner, sided.targets)
        self.unlike.append(owner)
        return EdgeSharding(sided.edge, sharding, sharding)

    def note_accumulator(self, edge: DataFlowEdge, wanted: dict[OperandSlot, TensorSharding]) -> None:
        """Notes an op of a loop that only adds to what the edge carries; `wanted`: the layouts of operands, by slot."""
        adder = accumulator(edge)
        if adder is not None and self._plan is None and not self._placement.keeps_declared:
            self._accumulators[adder] = (edge, wanted)

    def accumulate(self, op: Op) -> None:
        """A loop that only adds partial results up carries a partial sum, which is reduced once, after the loop."""
        if op not in self._accumulators:
            return
        edge, wanted = self._accumulators[op]
        declared, produced = self._placement[edge.owner], [self._placement[v] for v in op.operands]
        partial = sort_and_merge(
            dict.fromkeys(a for s in produced for a in s.unreduced_axes), self._placement.meshes.base
        )
        kinds = {s.reduction for s in produced if s.unreduced_axes}
        meshes = {s.mesh for s in produced if s.unreduced_axes}
        if kinds != {"sum"} or len(meshes) > 1 or not (meshes == {declared.mesh} or declared.is_fully_replicated):
            return
        if any(overlaps(a, b) for a in partial for axes in declared.axes for b in axes):
            return
        sharding = replace(declared, mesh=meshes.pop(), unreduced_axes=partial)
        self._placement.place(edge.targets, sharding)
        wanted.update(dict.fromkeys(edge.slots, sharding))
        self._graph.set_shardings([(edge.owner, sharding), (op.results[0], sharding)])
        self._placement.declare(edge.owner, declared)
        self._placement.declare(op.results[0], sharding)
        self.unlike.append(edge.owner)
