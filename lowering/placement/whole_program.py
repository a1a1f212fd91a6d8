"""Partitioning a program by a plan for all of it.

A copy is walked first, op by op, around the shardings that propagation gave. From there the layouts of the whole
program are planned, and a second walk follows the plan. Where that program holds more than it may, others are tried
that hold less (`within_memory.py`). Of all programs that fit the cheapest one stays. A program that sends nothing as it
is proposed stays so: no plan could send less, and what every device computes was asked for. So does one on many axes.
Source: spec of the planner, sections 9, 12 and 13.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph
from sdy_jax.ir.operations import copied, main_function, replace_contents
from sdy_jax.ir.stored_shardings import set_function_shardings
from sdy_jax.lowering.placement import model_builder
from sdy_jax.lowering.placement.beside_work import hidden_by_work
from sdy_jax.lowering.placement.combined import combine_collectives
from sdy_jax.lowering.placement.free_border import BorderLayouts, FreeBorder
from sdy_jax.lowering.placement.marks import erase_marks
from sdy_jax.lowering.placement.memory_errors import border_too_large, too_large
from sdy_jax.lowering.placement.modelled import ModelledProgram
from sdy_jax.lowering.placement.partitioner import Partitioner, prepared
from sdy_jax.lowering.placement.policy import Policy
from sdy_jax.lowering.placement.prefetched import prefetch
from sdy_jax.lowering.placement.report import ChangedLayout, CollectiveRecord, LayoutChoice, PartitionReport
from sdy_jax.lowering.placement.rings import form_rings
from sdy_jax.lowering.placement.stated import changed_statements
from sdy_jax.lowering.placement.walked import LayoutPlan
from sdy_jax.lowering.placement.within_memory import Room, Walk, best_choice, tried
from sdy_jax.lowering.planning.layout_table import LayoutTable
from sdy_jax.lowering.reshard.cost import CostModel
from sdy_jax.op_rules import RuleBook
from sdy_jax.representation.mesh import AxisRef
from sdy_jax.representation.sharding import TensorSharding

_LEAST_GAIN = 0.005
"""The share of what the proposal sends that a plan has to save in all: a reader looks for few differences, each with
its reason."""

_TOLERATED = 0.01
"""The share of what the proposal holds that a plan may hold more, on devices whose memory is not known: the estimate is
no better than that."""

_HOLDING = 0.04
"""The share of a program's cost that it is worth to hold nothing instead of all that a device has. Weights of an 8B
model that are gathered once before a loop of 32 layers, instead of in each trip, save a hundredth of the time on 256
chips of v5e, and hold twice of what such a chip has (2026-11)."""

_MOST_ATOMS = 4
"""Axes, or parts of axes, up to which a program is planned: each more makes about five times as many layouts."""


def partition(
    module: ir.Operation,
    mesh_name: str,
    costs: CostModel,
    rules: RuleBook | None = None,
    policy: Policy = Policy(),  # noqa: B008 - immutable
    inputs: Sequence[str] = (),
) -> PartitionReport:
    """As `partitioner.partition`, with the layouts of the whole program chosen together where the policy says so.

    Raises:
        MemoryLimitError: no program was found that keeps within the memory that the policy states.
    """
    rules = rules or RuleBook()
    erase_marks(module)
    if policy.layouts != "global":
        walker = Partitioner(prepared(module, mesh_name, rules), mesh_name, costs, rules, policy, inputs)
        walker.run()
        movable = walker.placement.inserted
    else:
        walker, movable = _planned(_Walks(module, mesh_name, costs, rules, policy, inputs), costs, policy)
    made = walker.graph.module
    if costs.unit == "seconds":
        walker.report.hidden = hidden_by_work(made, movable, walker.mesh, costs, policy.compiler)
    combine_collectives(made, movable, walker.report, walker.mesh, costs, policy)
    if made is not module:
        replace_contents(module, made)
    return walker.report


def _planned(
    walks: _Walks, costs: CostModel, policy: Policy
) -> tuple[Partitioner, dict[ir.Operation, CollectiveRecord]]:
    """The walk that follows the best plan for the whole program, with collectives beside what hides them; and those
    that are hidden by nothing."""
    proposed = walks.proposed
    walks.check_border()
    must_plan = proposed.sends or not walks.room.fits(proposed)
    fitting = walks.fitting(walks.planned() if must_plan else [proposed])
    best = walks.room.best(fitting)
    if proposed in fitting and walks.saved(best) < walks.least_gain:
        best = proposed
    if walks.can_be_planned:
        best.report.layouts = _choice(walks.graph, best, proposed)
    made, inserted = best.walker.graph.module, best.walker.placement.inserted
    if costs.unit == "seconds":
        inserted = prefetch(made, inserted, best.report, walks.mesh, costs, walks.limit, policy.compiler)
    return best.walker, form_rings(made, inserted, best.report, walks.mesh, costs)


def best_border(
    module: ir.Operation, mesh_name: str, costs: CostModel, border: FreeBorder, rules: RuleBook, policy: Policy
) -> BorderLayouts:
    """The layouts of arguments and results with which a program costs least, of those that may have any.

    Args:
        module: a propagated module, from whose border the search starts. It is rewritten.
        mesh_name, costs, rules, policy: as for `partition`; there is no limit of memory but the policy's, and that of
            the device.
        border: what is free.

    Raises:
        MemoryLimitError: no program was found that keeps within the policy's memory.
    """
    policy = policy if policy.available else replace(policy, memory=math.inf)
    walks = _Walks(module, mesh_name, costs, rules, policy, (), border)
    best = walks.room.best(walks.fitting(walks.planned()))
    if best.walker.plan is not None:
        return best.walker.plan.border
    walked = best.walker.walked
    return BorderLayouts(
        {n: walked.arguments[n] for n in border.arguments}, {n: walked.results[n] for n in border.results}
    )


class _Walks:
    """The walks over copies of a program; the first one proposes."""

    def __init__(
        self,
        module: ir.Operation,
        mesh_name: str,
        costs: CostModel,
        rules: RuleBook,
        policy: Policy,
        inputs: Sequence[str],
        border: FreeBorder = FreeBorder(),  # noqa: B008 - immutable
    ):
        self._mesh_name, self._costs, self._rules, self._policy = mesh_name, costs, rules, policy
        self._inputs, self._border = inputs, border
        self.graph = prepared(module, mesh_name, rules)
        self.proposed = self._walk(None)
        self.mesh = self.proposed.walker.mesh
        self._atoms = self.proposed.walker.walked.atoms(self.mesh, costs.major_parts)

    def _walk(self, plan: LayoutPlan | None) -> Walk:
        copy = copied(self.graph.module)
        if plan is not None:
            main = main_function(copy)
            set_function_shardings(main, "arg_attrs", plan.border.arguments)
            set_function_shardings(main, "res_attrs", plan.border.results)
        walker = Partitioner(Graph(copy), self._mesh_name, self._costs, self._rules, self._policy, self._inputs, plan)
        return Walk(walker, walker.run(), self._policy.compiler)

    @cached_property
    def limit(self) -> float:
        """The bytes that a device may hold."""
        if self._policy.available:
            return self._policy.limit
        return (1 + _TOLERATED) * self.proposed.peak.total

    def saved(self, walk: Walk) -> float:
        """What a walk saves of what the proposal costs, and holds."""
        proposed = self.proposed
        byte = self.room.byte(min(walk.cost, proposed.cost))
        return proposed.cost - walk.cost + byte * (proposed.peak.total - walk.peak.total)

    @cached_property
    def room(self) -> Room:
        """What the program may hold, and send."""
        return Room(self.limit, self._policy.device_memory, _HOLDING, self._costs.unit == "seconds")

    def check_border(self) -> None:
        """
        Raises:
            MemoryLimitError: arguments and results alone, where they are stated, hold more than what is stated.
        """
        if self._policy.memory is not None and self.proposed.peak.border > self.limit:
            raise border_too_large(self.graph, self.proposed.walker.walked, self._inputs, self.mesh, self.limit)

    @property
    def can_be_planned(self) -> bool:
        """Whether the program is on few enough axes."""
        return len(self._atoms) <= _MOST_ATOMS

    @cached_property
    def least_gain(self) -> float:
        """What a plan has to save."""
        return _LEAST_GAIN * self.proposed.walker.sending_time()

    @property
    def _latency(self) -> float:
        """That of a gather along an axis, the slowest one."""
        axes = [AxisRef(axis.name) for axis in self.mesh.axes if axis.size > 1]
        return max([self._costs.rate("all_gather", (axis,), self.mesh).fixed for axis in axes], default=0.0)

    def planned(self) -> list[Walk]:
        """The walks by plans that were tried, the proposal first. Where the model promises little it is alone."""
        if not self.can_be_planned:
            return [self.proposed]
        program = modelled(self.graph, self.proposed.walker, self._atoms, self._policy, self._border)
        best = best_choice(program, self._latency)
        if self.room.fits(self.proposed) and program.saved(best) < self.least_gain:
            return [self.proposed]
        return tried(program, best, self.proposed, self.room, self._walk)

    def fitting(self, walks: Sequence[Walk]) -> list[Walk]:
        """Those that keep within the limit, and send no more bytes than the proposal where that does, by a model of
        time; if there are none, and the limit is what devices have, the one that holds least.

        Raises:
            MemoryLimitError: there are none, and the limit is stated.
        """
        found = [walk for walk in walks if self.room.allows(walk, self.proposed)]
        if found:
            return found
        least = min(walks, key=lambda walk: walk.peak.total)
        if self._policy.memory is not None:
            raise too_large(least.peak, self.limit)
        return [least]


def _choice(graph: Graph, best: Walk, proposed: Walk) -> LayoutChoice:
    plan, changed = best.walker.plan, tuple(_changed(graph, best.walker, proposed.walker))
    sent = best.walker.sending_time(), proposed.walker.sending_time()
    written = best.walker.sending_time(("user",))
    return LayoutChoice(best.cost, proposed.cost, changed, *sent, plan.chosen if plan is not None else (), written)


def _changed(graph: Graph, chosen: Partitioner, proposed: Partitioner) -> Iterator[ChangedLayout]:
    """The results that one walk makes in other layouts than another."""
    yield from changed_statements(graph, chosen.walked, proposed.walked)
    for number, decision in chosen.walked.decided.items():
        op, before = graph.ops[number], proposed.walked.decided[number]
        count = len(op.operands)
        for value, new, old in zip(op.results, decision.shardings[count:], before.shardings[count:], strict=True):
            if not new.same_layout_as(old) and value.shape:
                yield ChangedLayout(op.name, op.mlir.location, value.dtype, value.shape, new, old)


def modelled(
    graph: Graph,
    proposed: Partitioner,
    atoms: tuple[AxisRef, ...],
    policy: Policy,
    border: FreeBorder = FreeBorder(),  # noqa: B008 - immutable
) -> ModelledProgram:
    """The model of a program of which a copy was walked; `graph` is that of the program itself, `atoms` the parts of
    mesh axes that the walk knows, `border` what may have any layout."""
    meshes = proposed.placement.meshes

    def price(
        costs: CostModel, shape: tuple[int, ...], itemsize: float, source: TensorSharding, target: TensorSharding
    ) -> float:
        return meshes.plan(shape, itemsize, source, target, costs).cost

    table = LayoutTable(meshes.base_name, meshes.base, proposed.walked.inverted(atoms))
    return model_builder.modelled(graph, proposed.walked, table, atoms, proposed.costs, price, policy, border)
