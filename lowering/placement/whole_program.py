"""Partitioning a program by a plan for all of it.

A copy is walked first, op by op, around the shardings that propagation gave. From there the layouts of the whole
program are planned, and a second walk follows the plan. Where that program holds more than it may, others are tried
that hold less (`within_memory.py`). Of all programs that fit the cheapest one stays. A program that sends nothing as it
is proposed stays so: no plan could send less, and what every device computes was asked for. So does one on many axes.
See docs/explanation/planner.md#from-choice-to-program.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph
from sdy_jax.ir.operations import replace_contents
from sdy_jax.lowering.placement.beside_work import hidden_by_work
from sdy_jax.lowering.placement.combined import combine_collectives
from sdy_jax.lowering.placement.free_border import BorderLayouts, FreeBorder
from sdy_jax.lowering.placement.marks import erase_marks
from sdy_jax.lowering.placement.partitioner import Partitioner, prepared
from sdy_jax.lowering.placement.prefetched import prefetch
from sdy_jax.lowering.placement.program_walks import ProgramWalks
from sdy_jax.lowering.placement.report import ChangedLayout, CollectiveRecord, LayoutChoice, PartitionReport
from sdy_jax.lowering.placement.rings import form_rings
from sdy_jax.lowering.placement.setting import Setting
from sdy_jax.lowering.placement.stated import changed_statements
from sdy_jax.lowering.placement.within_memory import Walk


def partition(module: ir.Operation, setting: Setting) -> PartitionReport:
    """As `partitioner.partition`, with the layouts of the whole program chosen together where the policy says so.

    Raises:
        MemoryLimitError: no program was found that keeps within the memory that the policy states.
    """
    erase_marks(module)
    graph = prepared(module, setting)
    if setting.policy.layouts == "global":
        walks = ProgramWalks(graph, setting)
        return finished(module, walks, walks.fitting(walks.found()))
    walker = Partitioner(graph, setting)
    walker.run()
    return _combined(module, walker, walker.placement.inserted, setting)


def finished(module: ir.Operation, walks: ProgramWalks, fitting: Sequence[Walk]) -> PartitionReport:
    """Rewrites a module as the best of some walks says, with collectives beside what hides them."""
    best, costs = walks.best(fitting), walks.costs
    if walks.can_be_planned:
        best.report.layouts = _choice(walks.graph, best, walks.proposed)
    made, inserted = best.walker.graph.module, best.walker.placement.inserted
    inserted = prefetch(made, inserted, best.report, walks.mesh, costs, walks.limit, walks.setting.target)
    movable = form_rings(made, inserted, best.report, walks.mesh, costs)
    return _combined(module, best.walker, movable, walks.setting)


def _combined(
    module: ir.Operation,
    walker: Partitioner,
    movable: dict[ir.Operation, CollectiveRecord],
    setting: Setting,
) -> PartitionReport:
    """Forms buckets of the collectives that nothing hides, and puts the program into its module."""
    costs, made = setting.costs, walker.graph.module
    if costs.unit == "seconds":
        walker.report.hidden = hidden_by_work(made, movable, walker.mesh, costs, setting.target.compiler)
    combine_collectives(made, movable, walker.report, walker.mesh, setting)
    if made is not module:
        replace_contents(module, made)
    return walker.report


def best_border(module: ir.Operation, setting: Setting, border: FreeBorder, known: float = math.inf) -> BorderLayouts:
    """The layouts of arguments and results with which a program costs least, of those that may have any.

    Args:
        module: a propagated module, from whose border the search starts. It is rewritten.
        setting: as for `partition`; there is no limit of memory but the policy's, and that of the device.
        border: what is free.
        known: what a program costs that is known to fit; dearer ones need not be found.

    Raises:
        MemoryLimitError: no program was found that keeps within the policy's memory.
    """
    if not setting.available:
        setting = replace(setting, policy=replace(setting.policy, memory=math.inf))
    walks = ProgramWalks(prepared(module, setting), setting, border, known)
    best = walks.room.best(walks.fitting(walks.planned()))
    if best.walker.plan is not None:
        return best.walker.plan.border
    walked = best.walker.walked
    return BorderLayouts(
        {n: walked.arguments[n] for n in border.arguments}, {n: walked.results[n] for n in border.results}
    )


def _choice(graph: Graph, best: Walk, proposed: Walk) -> LayoutChoice:
    plan, changed = best.walker.plan, tuple(_changed(graph, best.walker, proposed.walker))
    sent = best.walker.sending_time(), proposed.walker.sending_time()
    written = best.walker.sending_time(("user",))
    return LayoutChoice(best.cost, proposed.cost, changed, *sent, plan.chosen if plan is not None else (), written)


def _changed(graph: Graph, chosen: Partitioner, proposed: Partitioner) -> Iterator[ChangedLayout]:
    """The results that one walk makes in other layouts than another."""
    yield from changed_statements(graph, chosen.walked, proposed.walked)
    for number, decision in chosen.walked.decided.items():
        op, before = graph.ops[number], proposed.walked.shardings_of(number)
        count = len(op.operands)
        for value, new, old in zip(op.results, decision.shardings[count:], before[count:], strict=True):
            if not new.same_layout_as(old) and value.shape:
                yield ChangedLayout(op.name, op.mlir.location, value.dtype, value.shape, new, old)
