"""From a propagated program to a partitioned one: every communication becomes an sdy collective.

The module keeps its global shapes. Each op is given the shardings it runs with (`choose`), and where a value is not in
the sharding that its user needs, the cheapest collectives (`plan_reshard`) are inserted in between. Nothing here knows
an op by name: rules, data-flow edges and strategies say how ops behave.

Invariant: when an op has been visited, each of its operands is the MLIR value that has the sharding it needs, and each
of its results has, for all later users, its declared sharding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from jax.extend.mlir import ir

from sdy_jax.errors import UnsupportedError
from sdy_jax.ir.custom_ops import AFTER
from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.ir.operations import COMPUTATIONS, manual_axes, module_meshes
from sdy_jax.ir.statements import STATEMENTS, group_of
from sdy_jax.lowering.emission.emit import value_shardings
from sdy_jax.lowering.emission.sent import reduce_by_bytes, sent_at_border
from sdy_jax.lowering.placement.copies import tie
from sdy_jax.lowering.placement.dead_code import erase_dead_code
from sdy_jax.lowering.placement.decisions import Decision, Decisions
from sdy_jax.lowering.placement.fold import fold, fold_settled
from sdy_jax.lowering.placement.in_place import change_in_place
from sdy_jax.lowering.placement.invariants import use_invariants_from_outside
from sdy_jax.lowering.placement.joined import join_pieces
from sdy_jax.lowering.placement.kinds import launch_time, operations_done, work_time
from sdy_jax.lowering.placement.narrowed import narrow_stacks, narrowed, widen_stacks
from sdy_jax.lowering.placement.placement import Placement
from sdy_jax.lowering.placement.promptly import compute_promptly
from sdy_jax.lowering.placement.reduced_early import reduce_early
from sdy_jax.lowering.placement.report import Moved, PartitionReport
from sdy_jax.lowering.placement.scalar_regions import forget_shardings_inside
from sdy_jax.lowering.placement.sent_times import SentTimes
from sdy_jax.lowering.placement.setting import Setting
from sdy_jax.lowering.placement.stacks import LOOP, Stacks
from sdy_jax.lowering.placement.sunk import sink_into_loops
from sdy_jax.lowering.placement.trips import executions
from sdy_jax.lowering.placement.twins import Twins
from sdy_jax.lowering.placement.unsplit import Unsplit
from sdy_jax.lowering.placement.walked import LayoutPlan, Walked, WalkedEdge
from sdy_jax.lowering.placement.written import as_written, is_reduction, is_written_collective
from sdy_jax.lowering.strategies.registry import Taken, is_forwarding, rejection, sent_by, taken_by
from sdy_jax.op_rules import has_no_rule_silently
from sdy_jax.op_rules.dataflow import DataFlowEdge, accumulator, is_data_flow
from sdy_jax.propagation.edge_shardings import EdgeSharding, settle_edges, state_edges
from sdy_jax.representation.attributes import attribute_from_text
from sdy_jax.representation.axes import braces, overlaps, sort_and_merge, sort_axes
from sdy_jax.representation.mesh import axes_size
from sdy_jax.representation.sdy_collectives import CollectiveSummary
from sdy_jax.representation.sharding import TensorSharding

PREPARED = "sdy_jax.prepared"
"""The attribute of a module that was prepared for the walk, and may have been changed then."""

OperandSlot = tuple[Op, int]
"""An operand: the op and the operand's index."""


def partition(module: ir.Operation, setting: Setting) -> PartitionReport:
    """Rewrites a propagated module in place.

    Args:
        module: a `builtin.module` with closed shardings.
        setting: what it is planned with.

    Returns:
        What was inserted.
    """
    return Partitioner(prepared(module, setting), setting).run()


def prepared(module: ir.Operation, setting: Setting) -> Graph:
    """The graph of a propagated module that is about to be walked: joined, folded, and without dead code; that of one
    that was prepared before as it is."""
    graph = Graph(module)
    if PREPARED in module.attributes:
        return graph
    use_invariants_from_outside(graph)
    graph = _changed(sink_into_loops, erase_dead_code(fold(graph)))
    graph = narrow_stacks(_changed(change_in_place, graph))
    mesh_name, rule_of = setting.mesh_name, setting.rules.without_overrides().rule_of
    return _changed(lambda graph: join_pieces(graph, mesh_name, graph.meshes[mesh_name], rule_of), graph)


def _changed(change: Callable[[Graph], Graph], graph: Graph) -> Graph:
    """The graph after a change, without what is dead then."""
    changed = change(graph)
    return graph if changed is graph else erase_dead_code(changed)


class Partitioner:
    """One walk over a prepared program, which follows a plan where there is one. `walked` is what it decided."""

    def __init__(self, graph: Graph, setting: Setting, plan: LayoutPlan | None = None):
        rules, policy, costs = setting.rules.without_overrides(), setting.policy, setting.costs
        self.plan, self.walked, self.number = plan, Walked(), {op: n for n, op in enumerate(graph.ops)}
        self.graph, self.optimize_collectives = graph, policy.optimize_collectives
        self.costs, self.target, order = costs, setting.target, setting.target.compiler.order
        self.all_copies_wait, self._memory = order.runs_early, setting.limit if setting.available else 0.0
        self.report = PartitionReport(setting.inputs)
        keeps = policy.layouts == "propagated"
        self.placement = Placement(
            graph,
            setting.mesh_name,
            costs,
            rules.rule_of,
            self.report,
            policy.uneven,
            keeps,
            order.keeps_whole,
            setting.target.parts_of_axes,
            setting.cuts,
        )
        self.decisions = Decisions(self.placement, rules, costs, policy, setting.target)
        self.mesh = self.placement.meshes.base
        self.unsplit = Unsplit(self.placement, self.report, self.mesh)
        self.accumulators: dict[Op, tuple[DataFlowEdge, dict[OperandSlot, TensorSharding]]] = {}
        self.stacks = Stacks(value_shardings(graph), rules.rule_of, self.mesh)
        self.unlike: list[Value] = []
        """Results of loops that come out in other shardings than declared: partial sums, stacks."""
        self.unneeded: list[Op] = []
        self._narrowed = narrowed(graph)
        self._waiting = [op for op in graph.ops if op.key == AFTER]
        self.twins, self.repeated = Twins(self.placement.origin), set[int]()

    def run(self) -> PartitionReport:
        """Rewrites the module, and says what was inserted."""
        if self.plan is not None:
            self._state_homes(self.plan)
            self.placement.follow_copies(self.plan.copies, self.all_copies_wait)
        for argument in self.graph.arguments:
            self.placement.enter(argument)
        block, arguments = self.graph.main.blocks[0], self.graph.arguments
        self.walked.arguments = self.placement.of(arguments)
        self._report_border(arguments, self.walked.arguments, block.ops[0], self.graph.main)
        self._visit_block(block)
        self._return(block.terminator)
        for op in reversed(self.unneeded):
            op.mlir.erase()
        self.placement.sweep()
        self._widen_stacks()
        reduce_early(self.placement.inserted)
        self._fold_settled()
        self.unsplit.report_notes()
        self.report.work = self._work_time()
        if self._waiting or (self.plan is not None and self.plan.copies):
            tie(self.graph.module)
            self.unneeded += self._waiting
        if self.target.compiler.order.runs_late:
            compute_promptly(self.graph.module, self._memory, self.target.arrays)
        return self.report

    def _widen_stacks(self) -> None:
        """Rounds layers in their loops again where stacks lie there as before."""
        gone = set(self.unneeded)
        unused = widen_stacks(op for op in self._narrowed if op not in gone and not self.placement.is_erased(op))
        for op in unused:
            op.mlir.erase()
        self.unneeded += unused

    def _fold_settled(self) -> None:
        """Folds what became one op on shards."""
        gone = set(self.unneeded)
        left = [op for op in self.graph.ops if op not in gone and not self.placement.is_erased(op)]
        taken_over = list(fold_settled(left))
        self.unneeded += [op for op in left if taken_over and op.mlir in taken_over]
        for op in taken_over:
            op.erase()

    @property
    def remaining(self) -> dict[ir.Operation, int]:
        """The numbers of the ops that the walk left in the module."""
        unneeded, found = set(self.unneeded), dict[ir.Operation, int]()
        waiting = list(self.graph.functions.values())
        while waiting:
            op = waiting.pop()
            if op not in unneeded and not self.placement.is_erased(op):
                found[op.mlir] = self.number[op]
                waiting += [inner for block in op.blocks for inner in block.ops]
        return found

    def cost(self) -> float:
        """The time of what was inserted and of each device's own work, by the cost model."""
        return self.report.work + self.sending_time()

    def _work_time(self) -> float:
        """The time of the operations that one device performs, but for those of constants."""
        work, known, times = 0.0, dict[int, float](), dict[Block | None, int]()
        for number, decision in self.walked.decided.items():
            op = self.graph.ops[number]
            if number in self.repeated or all(map(self.placement.is_free, op.results)):
                continue
            if id(decision) not in known:  # equal ops share one
                known[id(decision)] = self.work_of(decision)
            if op.block not in times:
                times[op.block] = executions(op).estimate
            work += times[op.block] * known[id(decision)]
        return work

    def work_of(self, decision: Decision) -> float:
        """The time of one execution of an op."""
        kind, shardings = decision.kind, decision.shardings
        own = work_time(kind, operations_done(kind, shardings, self.mesh), shardings, self.costs, self.mesh)
        return own + launch_time(kind, self.costs)

    def sending_time(self, origins: Collection[str] = ("partitioner", "user")) -> float:
        """The time of the collectives: of those that were inserted, and of those that the program holds itself."""
        records = [record for record in self.report.collectives if record.origin in origins]
        return self._sent_times.of(records)

    @cached_property
    def _sent_times(self) -> SentTimes:
        """The times of collectives, after the walk."""
        return SentTimes(self.graph.module, self.placement.inserted, self.costs, self.mesh)

    def _state_homes(self, plan: LayoutPlan) -> None:
        """Writes to the module where users of values expect them by the plan."""
        homes = ((self.graph.ops[number].results[index], home) for (number, index), home in plan.homes.items())
        self.graph.set_shardings(homes)

    def _return(self, terminator: Op) -> None:
        wanted = self.graph.result_shardings(self.graph.main)
        targets = [self.placement.evenly(v, s) for v, s in zip(terminator.operands, wanted, strict=True)]
        self.walked.results = targets
        self.graph.set_result_shardings(self.graph.main, dict(enumerate(targets)))
        for index, target in enumerate(targets):
            self.placement.require(terminator, index, target)
        self._report_border(terminator.operands, targets, terminator, terminator)

    def _visit_block(self, block: Block) -> None:
        for op, following in itertools.pairwise(block.ops):
            self._visit(op, following)

    def _visit(self, op: Op, following: Op) -> None:
        reason = rejection(op, self.mesh)
        if reason:
            raise UnsupportedError(f"{op.source}: {reason}")
        if is_data_flow(op):
            self._visit_data_flow(op, following)
        elif is_written_collective(op) and not self.optimize_collectives:
            self._run_as_written(op)
        elif is_forwarding(op):
            self._forward(op)
        else:
            self._visit_plain(op, following)

    def _visit_data_flow(self, op: Op, following: Op) -> None:
        """Brings every source of an edge to the edge's sharding; operands and results on no edge are replicated."""
        placement, wanted = self.placement, dict[OperandSlot, TensorSharding]()
        # Blocks along manual axes are written for: they are equal.
        stated = placement.evenly if manual_axes(op) else placement.stated
        if self.plan is not None and op.name in COMPUTATIONS:
            state_edges(self.graph, op, self.plan.edges.get(self.number[op], ()))
        edges = settle_edges(self.graph, op, stated)
        for index, sided in enumerate(edges):
            sided = self._placed_edge(op, index, sided)
            placement.place(sided.edge.targets, sided.targets)
            wanted.update(dict.fromkeys(sided.edge.slots, sided.sources))
            adder = accumulator(sided.edge)
            if adder is not None and self.plan is None and not placement.keeps_declared:
                self.accumulators[adder] = (sided.edge, wanted)
        for value in (*op.results, *(a for block in op.blocks for a in block.arguments)):
            if value not in placement:
                placement.place([value], placement.replicated(value))
        for block in op.blocks:
            self._visit_block(block)
            self._require_all(block.terminator, wanted)
        self._require_all(op, wanted)
        self.walked.edges[self.number[op]] = [
            WalkedEdge(wanted[sided.edge.slots[0]], placement[sided.edge.targets[-1]]) for sided in edges
        ]
        for result in op.results:
            if result in self.unlike:
                placement.settle(op, result, placement[result], following)
        for name in STATEMENTS.intersection(op.mlir.attributes):
            del op.mlir.attributes[name]

    def _placed_edge(self, op: Op, index: int, sided: EdgeSharding) -> EdgeSharding:
        """An edge in the layout in which it is carried."""
        if self.placement.keeps_declared:
            return sided
        return self._settled_stack(op, sided) if self.plan is None else self._planned_edge(op, index, sided)

    def _settled_stack(self, op: Op, sided: EdgeSharding) -> EdgeSharding:
        """An edge in another sharding, if it is that of a stack that had better be carried so."""
        moved = self.stacks.moved(op, sided.edge, sided.sources) if op.name == LOOP else None
        if moved is None:
            return sided
        sharding, values = moved
        self.graph.set_shardings([(value, sharding) for value in (sided.edge.owner, *values)])
        self.placement.declare(sided.edge.owner, sided.sources)
        self.unlike.append(sided.edge.owner)
        return EdgeSharding(sided.edge, sharding, sharding)

    def _planned_edge(self, op: Op, index: int, sided: EdgeSharding) -> EdgeSharding:
        """An edge in the layout that the plan gives it; the users of its owner may expect another."""
        assert self.plan is not None
        planned = self.plan.edges.get(self.number[op])
        if op.name in COMPUTATIONS or planned is None or planned[index].same_layout_as(sided.sources):
            return sided
        owner, sharding = sided.edge.owner, planned[index]
        self.graph.set_sharding(owner, sharding)
        self.placement.declare(owner, sided.targets)
        self.unlike.append(owner)
        return EdgeSharding(sided.edge, sharding, sharding)

    def _require_all(self, op: Op, wanted: Mapping[OperandSlot, TensorSharding]) -> None:
        for index, value in enumerate(op.operands):
            self.placement.require(op, index, wanted.get((op, index)) or self.placement.replicated(value))

    def _forward(self, op: Op) -> None:
        """Removes an op that only states a sharding: its result becomes an alias of its operand."""
        result = op.results[0]
        is_wanted = result.sharding is not None and result.uses
        target = self.placement.declared(result) if is_wanted else self.placement[op.operands[0]]
        if is_wanted:
            self.walked.fixed[self.number[op]] = (target, target)
        else:
            self.walked.passed.add(self.number[op])
        self.placement.forward(op, target, strictly=group_of(op) is not None)
        self.unneeded.append(op)

    def _run_as_written(self, op: Op) -> None:
        """Keeps a collective that the user wrote, between the shardings that it states."""
        placement, operand, result = self.placement, op.operands[0], op.results[0]
        declared = () if operand.sharding is None else (placement.declared(operand),)
        target = placement.declared(result)
        planned = self.plan.written.get(self.number[op]) if self.plan is not None else None
        sources = (*([planned] if planned is not None else []), *declared, placement[operand])
        written = as_written(op, sources, target, self.mesh)
        if written is None:
            self._note_replaced(op)
            self._forward(op)
            return
        self.walked.fixed[self.number[op]] = (written.source, target)
        placement.require(op, 0, written.source)
        placement.place([result], target)
        for name, text in written.collective.attributes.items():
            op.mlir.attributes[name] = attribute_from_text(text, op.mlir.context)
        moved = written.moved(operand, self.mesh)
        placement.keep(op, self.report.add(moved, operand, op, op, origin="user"))

    def _note_replaced(self, op: Op) -> None:
        """Notes a collective that cannot run as written; no reduction, which the op before it performs instead."""
        source, target = self.placement[op.operands[0]], self.placement.declared(op.results[0])
        if not is_reduction(op) and not source.same_layout_as(target):
            self.report.note(op, f"cannot lead from <{source}> to <{target}>; other collectives run in its place")

    def _visit_plain(self, op: Op, following: Op) -> None:
        if op.blocks:
            forget_shardings_inside(op)
        if op in self.accumulators:
            self._accumulate(op, *self.accumulators[op])
        decision = self.decisions.of(op, self.plan.ops.get(self.number[op]) if self.plan else None)
        if decision is None:
            self._visit_unruled(op, following)
            return
        taken = taken_by(op, self.mesh, decision.shardings)
        if taken is not None:
            self._visit_taken(op, decision, taken, following)
            return
        self.walked.decided[self.number[op]] = decision
        if decision.at_rest:
            self.placement.rest(op)
            if not self._is_repeated(op, decision):
                self._report_sent(op, decision.shardings)
            return
        self._require_operands(op, decision.shardings)
        if self._is_repeated(op, decision):
            return
        self._report(op, decision)
        self._report_sent(op, decision.shardings)
        self._settle_results(op, decision.shardings, following)

    def _visit_taken(self, op: Op, decision: Decision | None, taken: Taken, following: Op) -> None:
        """An op that has a say in the layouts in which it runs: where those are others, it has no choice."""
        if decision is not None and decision.shardings == taken.shardings:
            self.walked.decided[self.number[op]] = decision
        else:
            self.walked.fixed[self.number[op]] = taken.shardings
        if decision is not None and decision.choice.gathered:
            self.unsplit.add(op, decision)
        self._require_operands(op, taken.shardings)
        axes = sort_axes(dict.fromkeys(a for s in taken.shardings for axes in s.axes for a in axes), self.mesh)
        for kind, sent in taken.sent.items():
            moved = Moved(CollectiveSummary(kind, axes, braces(axes)), taken.shardings[-1], sent)
            self.placement.keep_inside(op, self.report.add(moved, op.results[-1], op, op))
        self._settle_results(op, taken.shardings, following)

    def _require_operands(self, op: Op, shardings: Sequence[TensorSharding]) -> None:
        for index, sharding in enumerate(shardings[: len(op.operands)]):
            self.placement.require(op, index, sharding)

    def _settle_results(self, op: Op, shardings: Sequence[TensorSharding], following: Op) -> None:
        for result, sharding in zip(op.results, shardings[len(op.operands) :], strict=True):
            self.placement.settle(op, result, sharding, following)

    def _is_repeated(self, op: Op, decision: Decision) -> bool:
        """Whether an op before computes the same; then the results of that one stand for its own."""
        twin = self.twins.of(op, decision)
        if twin is None:
            return False
        for result, other in zip(op.results, twin.results, strict=True):
            self.placement.stand_in(result, other)
        self.repeated.add(self.number[op])
        self.unneeded.append(op)
        return True

    def _visit_unruled(self, op: Op, following: Op) -> None:
        """No rule: free-standing producers take their declared sharding, everything else is computed replicated."""
        placement = self.placement
        here = (*placement.of(op.operands), *map(placement.declared, op.results))
        taken = taken_by(op, self.mesh, here)
        if taken is not None:
            self._visit_taken(op, None, taken, following)
            return
        silent = has_no_rule_silently(op.name, op.text("call_target_name"))
        free = silent and not op.operands
        for index, value in enumerate(op.operands):
            placement.require(op, index, placement.replicated(value))
        self._report_sent(op, [placement.replicated(value) for value in (*op.operands, *op.results)])
        has_elements = any(value.shape and 0 not in value.shape for value in (*op.operands, *op.results))
        if has_elements and not (silent and all(placement[v].is_fully_replicated for v in op.operands)):
            self.unsplit.add_unruled(op)
        made = [placement.declared(result) if free else placement.replicated(result) for result in op.results]
        # Every device computes the whole value, so it is not unreduced, even where it is declared to be.
        made = [replace(each, unreduced_axes=()) if each.unreduced_axes else each for each in made]
        self.walked.fixed[self.number[op]] = (*map(placement.replicated, op.operands), *made)
        for result, whole in zip(op.results, made, strict=True):
            placement.settle(op, result, whole, following)

    def _accumulate(self, op: Op, edge: DataFlowEdge, wanted: dict[OperandSlot, TensorSharding]) -> None:
        """A loop that only adds partial results up carries a partial sum, which is reduced once, after the loop."""
        declared, produced = self.placement[edge.owner], [self.placement[v] for v in op.operands]
        partial = sort_and_merge(dict.fromkeys(a for s in produced for a in s.unreduced_axes), self.mesh)
        kinds = {s.reduction for s in produced if s.unreduced_axes}
        meshes = {s.mesh for s in produced if s.unreduced_axes}
        if kinds != {"sum"} or len(meshes) > 1 or not (meshes == {declared.mesh} or declared.is_fully_replicated):
            return
        if any(overlaps(a, b) for a in partial for axes in declared.axes for b in axes):
            return
        sharding = replace(declared, mesh=meshes.pop(), unreduced_axes=partial)
        self.placement.place(edge.targets, sharding)
        wanted.update(dict.fromkeys(edge.slots, sharding))
        self.graph.set_shardings([(edge.owner, sharding), (op.results[0], sharding)])
        self.placement.declare(edge.owner, declared)
        self.placement.declare(op.results[0], sharding)
        self.unlike.append(edge.owner)

    def _report(self, op: Op, decision: Decision) -> None:
        """Reports the collectives of the op's emitter, and the dimensions along which the op could not be sharded."""
        choice, values = decision.choice, (*op.operands, *op.results)
        if choice.gathered:
            self.unsplit.add(op, decision)
        for inside in choice.inside:
            sharding = decision.shardings[inside.tensor]
            value, size = values[inside.tensor], axes_size(inside.axes, self.mesh)
            shape, sent = sharding.local_shape(value.shape or (), self.mesh), inside.wire_bytes
            if not inside.is_exact:
                sent = reduce_by_bytes(shape, value.itemsize, size, is_used=bool(value.uses))
            moved = Moved(CollectiveSummary(inside.kind, inside.axes, braces(inside.axes)), sharding, sent)
            self.placement.keep_inside(op, self.report.add(moved, value, op, op))

    def _report_sent(self, op: Op, shardings: Sequence[TensorSharding]) -> None:
        """Reports an op that is a collective by itself, as the program's author wrote it."""
        count = len(op.operands)
        for sent in sent_by(op, self.mesh, shardings[:count]):
            value, sharding = op.results[sent.result], shardings[count + sent.result]
            if value.uses:
                self.report.add(Moved(sent.summary, sharding, sent.wire_bytes), value, op, op, "user")

    def _report_border(self, values: Sequence[Value], shardings: Sequence[TensorSharding], at: Op, cause: Op) -> None:
        """Reports the permutes that bring arguments to a mesh with the devices in another order, and results back."""
        base = self.placement.meshes.base_name
        away = [pair for pair in zip(values, shardings, strict=True) if pair[1].mesh != base]
        meshes = module_meshes(self.graph.module) if away else {}
        for value, sharding in away:
            sent = sent_at_border(value, sharding, self.mesh, meshes)
            if sent and value.uses:
                self.report.add(Moved(CollectiveSummary("collective_permute"), sharding, sent), value, at, cause)
