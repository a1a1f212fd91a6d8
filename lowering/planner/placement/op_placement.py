"""The placement of plain ops and of data-flow edges: operands in layouts decided, stacks split to send less."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.ir.meshes import Axes, Mesh, axes_size, overlaps, sort_and_merge
from sdy_jax.ir.operations import COMPUTATIONS
from sdy_jax.ir.shardings import DimensionSharding, OpShardingRule, TensorSharding
from sdy_jax.lowering.ops.emit import value_shardings
from sdy_jax.lowering.ops.registry import PARTIAL_ACCESS, Refused, Taken, taken_by
from sdy_jax.lowering.planner.facts.loops import trips
from sdy_jax.lowering.planner.placement.decisions import Decisions
from sdy_jax.lowering.planner.placement.op_reports import OpReports
from sdy_jax.lowering.planner.placement.value_placement import ValuePlacement
from sdy_jax.lowering.planner.problem.layout_plan import LayoutPlan, PlacedLayouts
from sdy_jax.lowering.planner.problem.op_problem import Decision
from sdy_jax.lowering.planner.rewrites.preparation import CommonSubexpressions
from sdy_jax.lowering.planner.setting import Setting
from sdy_jax.shardy.propagation.data_flow import DataFlowEdge, EdgeSharding, accumulator
from sdy_jax.shardy.rules import has_no_rule_silently

# The placement of plain ops: their operands are brought to the layouts that were decided, their results settled.


class OpPlacement:
    """Places the ops of a program, in order.

    `repeated`: the numbers of those that an op before computes, too. `taken`: the decisions of those that run in other
    layouts than were chosen, by number.
    """

    def __init__(self, placement: ValuePlacement, setting: Setting, reports: OpReports, layouts: PlacedLayouts):
        self._placement, self._reports, self._layouts = placement, reports, layouts
        self._decisions, self._mesh = Decisions(placement, setting), placement.meshes.base
        self._known = CommonSubexpressions(placement.origin)
        self.repeated: set[int] = set()
        self.taken: dict[int, Decision] = {}

    def place(self, op: Op, number: int, planned: Decision | None, following: Op) -> bool:
        """Places an op, as planned where it is, and says whether the results of an op before stand for its own."""
        decision = self._decisions.of(op, planned)
        if decision is None:
            self._place_unruled(op, number, following)
            return False
        taken = self._taken(op, decision.shardings)
        if taken is not None and taken.shardings != decision.shardings:
            self._place_taken(op, number, decision, taken, following)
            return False
        self._layouts.decided[number] = decision
        if taken is not None and not decision.at_rest:
            self._note_refusal(op, decision)
        if decision.at_rest:
            self._placement.rest(op)
            if self._is_repeated(op, number, decision):
                return True
            self._reports.sent(op, decision.shardings)
            return False
        self._require_operands(op, decision.shardings)
        if self._is_repeated(op, number, decision):
            return True
        self._reports.decided(op, decision)
        self._reports.sent(op, decision.shardings)
        self._settle_results(op, decision.shardings, following)
        return False

    def _taken(self, op: Op, shardings: Sequence[TensorSharding]) -> Taken | None:
        """The layouts in which an op runs that has a say of its own in them; those with nothing split where it refuses
        these. None for other ops.

        Raises:
            ShardingError: it refuses those too.
        """
        taken = taken_by(op, self._mesh, shardings)
        if isinstance(taken, Refused):
            self._reports.replication.add_refused(op, taken)
            taken = taken_by(op, self._mesh, [self._placement.replicated(v) for v in (*op.operands, *op.results)])
        if isinstance(taken, Refused):
            raise taken.failure()
        return taken

    def _note_refusal(self, op: Op, decision: Decision) -> None:
        """Notes why an op that is asked is not split as its operands are, where no other note says that."""
        around = [*self._placement.of(op.operands), *map(self._placement.declared, op.results)]
        asks = (strategy.ask for strategy in decision.kind.strategies if strategy.ask is not None)
        refused = [answer for ask in asks if isinstance(answer := ask(self._mesh, around), Refused)]
        if refused and not decision.gathered:
            self._reports.replication.add_refused(op, refused[0])

    def _place_taken(self, op: Op, number: int, decision: Decision | None, taken: Taken, following: Op) -> None:
        """An op that runs in other layouts than any that it could be asked for by a rule: it has no choice."""
        self._layouts.fixed[number] = taken.shardings
        if decision is not None:
            self.taken[number] = decision._replace(shardings=taken.shardings)
        if decision is not None and decision.gathered:
            self._reports.replication.add(op, decision)
        self._require_operands(op, taken.shardings)
        self._reports.taken(op, taken)
        self._settle_results(op, taken.shardings, following)

    def _require_operands(self, op: Op, shardings: Sequence[TensorSharding]) -> None:
        for index, sharding in enumerate(shardings[: len(op.operands)]):
            self._placement.require(op, index, sharding)

    def _settle_results(self, op: Op, shardings: Sequence[TensorSharding], following: Op) -> None:
        for result, sharding in zip(op.results, shardings[len(op.operands) :], strict=True):
            self._placement.settle(op, result, sharding, following)

    def _is_repeated(self, op: Op, number: int, decision: Decision) -> bool:
        """Whether an op before computes the same; then the results of that one stand for its own."""
        twin = self._known.of(op, decision)
        if twin is None:
            return False
        for result, other in zip(op.results, twin.results, strict=True):
            self._placement.stand_in(result, other)
        self.repeated.add(number)
        return True

    def _place_unruled(self, op: Op, number: int, following: Op) -> None:
        """No rule: free-standing producers take their declared sharding, everything else is computed replicated."""
        placement = self._placement
        here = (*placement.of(op.operands), *map(placement.declared, op.results))
        taken = self._taken(op, here)
        if taken is not None:
            self._place_taken(op, number, None, taken, following)
            return
        silent = has_no_rule_silently(op.name, op.text("call_target_name"))
        free = silent and not op.operands
        for index, value in enumerate(op.operands):
            placement.require(op, index, placement.replicated(value))
        self._reports.sent(op, [placement.replicated(value) for value in (*op.operands, *op.results)])
        has_elements = any(value.shape and 0 not in value.shape for value in (*op.operands, *op.results))
        if has_elements and not (silent and all(placement[v].is_fully_replicated for v in op.operands)):
            self._reports.replication.add_unruled(op)
        made = [placement.declared(result) if free else placement.replicated(result) for result in op.results]
        # Every device computes the whole value, so it is not unreduced, even where it is declared to be.
        made = [replace(each, unreduced_axes=()) if each.unreduced_axes else each for each in made]
        self._layouts.fixed[number] = (*map(placement.replicated, op.operands), *made)
        for result, whole in zip(op.results, made, strict=True):
            placement.settle(op, result, whole, following)


# Stacks that loops carry: split by layers, they are carried split along another dimension where that sends less.
#
# A loop that writes a layer of gradients per trip into a stack, or reads and writes layers of a state, needs every
# layer on the devices that own it. Where the layer is a partial sum, or split already, or read by all devices, it
# must be whole to be written to one owner, or broadcast from it. Along another dimension every device keeps its part
# of each layer: a partial sum is reduce-scattered to it, and a reader gathers one layer. The stack moves before and
# after the loop, by an all_to_all.

LOOP = "stablehlo.while"
_DEPTH = 6
"""How many ops back from a layer a partial sum is looked for. Guessed, a guard: a transposition, a conversion and a
reshape may stand between; what is farther back is reduced before it is stacked."""


@dataclass(frozen=True, slots=True)
class CarriedStacks:
    """What is known for the decision: the shardings of values, the rules of ops, and the mesh."""

    shardings: Mapping[Value, TensorSharding]
    rule_of: Callable[[Op], OpShardingRule | None]
    mesh: Mesh

    def moved(
        self, loop: Op, edge: DataFlowEdge, sharding: TensorSharding
    ) -> tuple[TensorSharding, list[Value]] | None:
        """The sharding in which a loop had better carry a stack, and the values in its body that are the stack."""
        accesses, values = _accesses(edge)
        if not accesses:
            return None
        cut = {d for op in accesses for d in _cut_dims(op)}
        split = [d for d in cut if sharding.axes[d]]
        if len(split) != 1 or sharding.unreduced_axes:
            return None
        shape, axes = edge.owner.shape or (), sharding.axes[split[0]]
        shards = axes_size(axes, self.mesh)
        dims = [d for d, n in enumerate(shape) if d not in cut and not sharding.axes[d] and not n % shards and n]
        preferred = {d for op in accesses for d in self._dims_of_layer(op, axes)}
        if not dims or not self._saves(loop, edge, accesses, axes):
            return None
        best = max(dims, key=lambda d: (d in preferred, shape[d], -d))
        new = {split[0]: DimensionSharding(()), best: DimensionSharding(axes)}
        return replace(sharding, dimensions=tuple(new.get(d, s) for d, s in enumerate(sharding.dimensions))), values

    def _saves(self, loop: Op, edge: DataFlowEdge, accesses: list[Op], axes: Axes) -> bool:
        """Whether the layers that need not be whole or broadcast outweigh the moves of the stack."""
        stack = math.prod(edge.owner.shape or ())
        saved = trips(loop) * sum(_layer_size(op) for op in accesses if self._is_scattered(op, axes))
        moves = len(edge.owner.uses) > 0, not _is_filled(edge.sources[0])
        return saved > sum(moves) * stack / axes_size(axes, self.mesh)

    def _is_scattered(self, op: Op, axes: Axes) -> bool:
        """Whether an access sends less where every device has a part of each layer: reads do, and writes of layers that
        are partial sums along the axes, or split along them."""
        if _is_read(op):
            return True
        return bool(self._dims_of_layer(op, axes)) or self._is_summed(op.operands[1], axes, _DEPTH)

    def _dims_of_layer(self, op: Op, axes: Axes) -> list[int]:
        """The dimensions along which a layer that is written is split along the axes."""
        sharding = None if _is_read(op) else self.shardings.get(op.operands[1])
        return [d for d, found in enumerate(sharding.axes) if found == axes] if sharding else []

    def _is_summed(self, value: Value, axes: Axes, depth: int) -> bool:
        op = value.defining_op
        rule = self.rule_of(op) if op is not None and depth else None
        if op is None or rule is None:
            return False
        for operand, mapping in zip(op.operands, rule.operand_mappings, strict=True):
            sharding = self.shardings.get(operand)
            found = zip(sharding.axes, mapping, strict=True) if sharding else ()
            if any(rule.reduction.intersection(factors) and _overlap(split, axes) for split, factors in found):
                return True
        return not rule.reduction and any(self._is_summed(v, axes, depth - 1) for v in op.operands)


def _accesses(edge: DataFlowEdge) -> tuple[list[Op], list[Value]]:
    """The ops that read and write parts of what a loop carries, and the values that these make of it; none if others
    use it too."""
    found, values = list[Op](), list[Value]()
    waiting = [value for value in edge.targets if isinstance(value.owner, Block)]
    while waiting:
        value = waiting.pop()
        for op, index in value.uses:
            if (op, index) in edge.slots:
                continue
            if op.name not in PARTIAL_ACCESS or index:
                return [], []
            found.append(op)
            if not _is_read(op):
                values.append(op.results[0])
                waiting.append(op.results[0])
    return found, values


def _is_read(op: Op) -> bool:
    return PARTIAL_ACCESS[op.name] == "read"


def _cut_dims(op: Op) -> Iterator[int]:
    layer = op.results[0] if _is_read(op) else op.operands[1]
    sizes = zip(op.operands[0].shape or (), layer.shape or (), strict=True)
    return (d for d, (whole, part) in enumerate(sizes) if whole != part)


def _layer_size(op: Op) -> int:
    return math.prod((op.results[0] if _is_read(op) else op.operands[1]).shape or ())


def _is_filled(value: Value) -> bool:
    """Whether the stack is made of one number, which every device has."""
    op = value.defining_op
    return op is not None and all(operand.rank == 0 for operand in op.operands)


def _overlap(some: Axes, others: Axes) -> bool:
    return any(overlaps(a, b) for a in some for b in others)


# The layouts in which data-flow edges carry values: as declared or planned, or better ones for stacks and sums.

OperandSlot = tuple[Op, int]
"""An operand: the op and the operand's index."""


class EdgePlacement:
    """The data-flow edges of a program. `unlike`: the results of loops that come out in other shardings than declared:
    partial sums, stacks."""

    def __init__(self, graph: Graph, placement: ValuePlacement, setting: Setting, plan: LayoutPlan | None):
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
