"""Partitioning a program by a plan for all of it.

A copy is partitioned first, op by op, around the shardings that propagation gave. From there the layouts of the whole
program are planned, and a second copy follows the plan. Where that program holds more than it may, others are tried
that hold less (`memory_search.py`). Of all programs that fit the cheapest one stays. A program that sends nothing as it
is proposed stays so: no plan could send less, and what every device computes was asked for. So does one on many axes.
See docs/explanation/planner.md#from-choice-to-program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph
from sdy_jax.ir.operations import replace_contents
from sdy_jax.lowering.insert.partitioner import Partitioner
from sdy_jax.lowering.interface.outcomes import ChangedLayout, LayoutChoice
from sdy_jax.lowering.interface.report import PartitionReport
from sdy_jax.lowering.interface.setting import Setting
from sdy_jax.lowering.memory.peak import Peak, peak_of
from sdy_jax.lowering.model.constraint_candidates import changed_statements
from sdy_jax.lowering.prepare.preparation import prepared
from sdy_jax.lowering.proposal.choices import Partitioned, ProgramChoices
from sdy_jax.lowering.proposal.free_border import BorderLayouts, FreeBorder
from sdy_jax.lowering.proposal.proposal import ProposedLayouts
from sdy_jax.lowering.schedule.buckets import combine_collectives
from sdy_jax.lowering.schedule.hidden_time import hidden_by_work
from sdy_jax.lowering.schedule.marks import Inserted, erase_marks
from sdy_jax.lowering.whole_program.layout_search import LayoutSearch
from sdy_jax.lowering.whole_program.partitioned_program import PartitionedProgram


def partition_whole(module: ir.Operation, setting: Setting) -> Partitioned:
    """As `partition_locally`, with the layouts of the whole program chosen together where the policy says so.

    Returns:
        What was inserted, and what was chosen.

    Raises:
        MemoryLimitError: no program was found that keeps within the memory that the policy states.
    """
    erase_marks(module)
    graph = prepared(module, setting)
    if setting.policy.layouts == "global":
        search = LayoutSearch(graph, setting)
        return finished(module, search, search.fitting(search.found()))
    proposal = Partitioner(graph, setting).run()
    program = PartitionedProgram(proposal, setting)
    proposal.report.hidden = hidden_by_work(proposal, proposal.inserted, setting).time
    return Partitioned(_combined(module, program, proposal.inserted, lambda: program.peak), ProgramChoices())


def finished(module: ir.Operation, search: LayoutSearch, fitting: Sequence[PartitionedProgram]) -> Partitioned:
    """Rewrites a module as the best of some trials says, with collectives beside what hides them."""
    best = search.best(fitting)
    proposal, setting = best.proposal, search.setting
    if search.can_be_planned:
        proposal.report.layouts = _choice(search.graph, best, search.proposed)
    overlap = best.overlap
    exposed = overlap.mark(proposal.inserted, proposal.report)

    def held() -> Peak:
        return peak_of(proposal.partitioned, setting.target) if overlap.ahead else best.peak

    choices = ProgramChoices(best.plan, proposal.layouts.decided if best.plan is None else {})
    return Partitioned(_combined(module, best, exposed, held), choices)


def _combined(
    module: ir.Operation, program: PartitionedProgram, exposed: Inserted, held: Callable[[], Peak]
) -> PartitionReport:
    """Forms buckets of the collectives that nothing hides, and puts the program into its module."""
    proposal, setting = program.proposal, program.setting
    combined = combine_collectives(proposal, exposed, setting, held)
    proposal.report.held = (combined or held()).total if setting.available else 0.0
    if proposal.module is not module:
        replace_contents(module, proposal.module)
    return proposal.report


def best_border(module: ir.Operation, setting: Setting, border: FreeBorder, known: float = math.inf) -> BorderLayouts:
    """The layouts of arguments and results with which a program costs least, of those that may have any.

    Args:
        module: a propagated module, from whose border the search starts. It is rewritten.
        setting: as for `partition_whole`; there is no limit of memory but the policy's, and that of the device.
        border: what is free.
        known: what a program costs that is known to fit; dearer ones need not be found.

    Raises:
        MemoryLimitError: no program was found that keeps within the policy's memory.
    """
    if not setting.available:
        setting = replace(setting, policy=replace(setting.policy, memory=math.inf))
    search = LayoutSearch(prepared(module, setting), setting, border, known)
    best = search.budget.best(search.fitting(search.planned()))
    if best.plan is not None:
        return best.plan.border
    layouts = best.proposal.layouts
    return BorderLayouts(
        {n: layouts.arguments[n] for n in border.arguments}, {n: layouts.results[n] for n in border.results}
    )


def _choice(graph: Graph, best: PartitionedProgram, proposed: PartitionedProgram) -> LayoutChoice:
    plan, changed = best.plan, tuple(_changed(graph, best.proposal.layouts, proposed.proposal.layouts))
    chosen = plan.chosen if plan is not None else ()
    sent, written = (best.sending, proposed.sending), best.sending_of(("user",))
    held = proposed.peak.total if proposed.exposed < best.exposed else 0.0
    return LayoutChoice(best.cost, proposed.cost, changed, *sent, chosen, written, best.exposed, proposed.exposed, held)


def _changed(graph: Graph, chosen: ProposedLayouts, proposed: ProposedLayouts) -> Iterator[ChangedLayout]:
    """The results that are made in other layouts than proposed."""
    yield from changed_statements(graph, chosen, proposed)
    for number, decision in chosen.decided.items():
        op, before = graph.ops[number], proposed.shardings_of(number)
        count = len(op.operands)
        for value, new, old in zip(op.results, decision.shardings[count:], before[count:], strict=True):
            if not new.same_layout_as(old) and value.shape:
                yield ChangedLayout(op.name, op.mlir.location, value.dtype, value.shape, new, old)
