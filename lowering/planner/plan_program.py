"""The entry of planning: a program partitioned by a plan for all of it, in the form (parts, reruns) that costs least.

See docs/explanation/planner.md#from-choice-to-program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from jax.extend.mlir import ir

from sdy_jax.base.errors import MemoryLimitError
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.jax_shardings import bytes_text, seconds_text
from sdy_jax.ir.meshes import Axes, AxisRef
from sdy_jax.ir.operations import copied, replace_contents
from sdy_jax.lowering.planner.memory.live_ranges import Peak, peak_of
from sdy_jax.lowering.planner.placement.program_placement import ProgramPlacement
from sdy_jax.lowering.planner.problem.candidates import changed_statements
from sdy_jax.lowering.planner.problem.layout_plan import (
    BorderLayouts,
    Follow,
    FreeBorder,
    Keep,
    Partitioned,
    PlacedLayouts,
    ProgramChoices,
    Rewrite,
)
from sdy_jax.lowering.planner.report import ChangedLayout, InParts, LayoutChoice, Note, PartitionReport
from sdy_jax.lowering.planner.rewrites.blocked_loops import run_in_parts
from sdy_jax.lowering.planner.rewrites.blocking_choice import BlockingCandidate, BlockingCandidates, Sizes, tell_apart
from sdy_jax.lowering.planner.rewrites.blocking_groups import Cut, Growth, RuleOf
from sdy_jax.lowering.planner.rewrites.local_sorts import sort_axes, with_local_sorts
from sdy_jax.lowering.planner.rewrites.preparation import (
    PREPARED,
    erase_dead_code,
    in_order,
    prepared,
    without_constraints,
)
from sdy_jax.lowering.planner.rewrites.recomputation import ProgramForm, best_program, rewritten
from sdy_jax.lowering.planner.rewrites.recomputation_prices import Mark, ProgramPrices
from sdy_jax.lowering.planner.schedule.buckets import combine_collectives
from sdy_jax.lowering.planner.schedule.hidden_time import Inserted, erase_marks
from sdy_jax.lowering.planner.schedule.timeline import NumberedOps, Timing
from sdy_jax.lowering.planner.search.layout_search import LayoutSearch
from sdy_jax.lowering.planner.search.memory_search import FEW, GivenUp, too_large
from sdy_jax.lowering.planner.search.partitioned_program import PartitionedProgram
from sdy_jax.lowering.planner.setting import Setting
from sdy_jax.shardy.rules import RuleBook

# Partitioning a program by a plan for all of it.
#
# A copy is partitioned first, op by op, around the shardings that propagation gave. From there the layouts of the
# whole program are planned, and a second copy follows the plan. Where that program holds more than it may, others are
# tried that hold less (`memory_search.py`). Of all programs that fit the cheapest one stays. A program that sends
# nothing in the baseline stays so: no plan could send less, and what every device computes was asked for. So does
# one on many axes. See docs/explanation/planner.md#from-choice-to-program.


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
        form = _better_written(ProgramForm(LayoutSearch(graph, setting)))
        return _finished(module, form, form.search.fitting(form.found))
    placed = ProgramPlacement(graph, setting).run()
    program = PartitionedProgram(placed, setting)
    return Partitioned(_combined(module, program, placed.inserted, lambda: program.peak), ProgramChoices())


def finished(module: ir.Operation, search: LayoutSearch, fitting: Sequence[PartitionedProgram]) -> Partitioned:
    """Rewrites a module as the best of some trials says, with collectives beside what hides them."""
    best = search.best(fitting)
    placed, setting = best.placed, search.setting
    if search.can_be_planned:
        placed.report.layouts = _choice(search.graph, best, search.baseline)
    overlap = best.overlap
    exposed = overlap.mark(placed.inserted, placed.report)

    def held() -> Peak:
        return peak_of(placed.partitioned, setting.target) if overlap.ahead else best.peak

    choices = ProgramChoices(best.plan, placed.layouts.decided if best.plan is None else {})
    return Partitioned(_combined(module, best, exposed, held), choices)


def _combined(
    module: ir.Operation, program: PartitionedProgram, exposed: Inserted, held: Callable[[], Peak]
) -> PartitionReport:
    """Forms buckets of the collectives that nothing hides, and puts the program into its module."""
    placed, setting, report = program.placed, program.setting, program.placed.report
    numbered = NumberedOps(placed)
    combined = combine_collectives(placed, exposed, setting, held)
    report.held = (combined.held if combined is not None else held()).total if setting.available else 0.0
    report.op_times = numbered.times(combined.order if combined is not None else None)
    if setting.costs.unit == "seconds":  # what runs as one takes less, and starts when all of it is there
        graph = placed.partitioned if combined is None else Graph(placed.module)
        compiler = setting.target.compiler.collectives
        timing = Timing(graph, report.op_times, report.collectives, placed.mesh, setting.costs, compiler)
        report.hidden = timing.ran.hidden
    if placed.module is not module:
        replace_contents(module, placed.module)
    return report


def best_border(
    module: ir.Operation, setting: Setting, border: FreeBorder, incumbent: float = math.inf
) -> BorderLayouts:
    """The layouts of arguments and results with which a program costs least, of those that may have any.

    Args:
        module: a propagated module, from whose border the search starts. It is rewritten.
        setting: as for `partition_whole`; there is no limit of memory but the policy's, and that of the device.
        border: what is free.
        incumbent: the cost of a program that fits; dearer ones need not be found.

    Raises:
        MemoryLimitError: no program was found that keeps within the policy's memory.
    """
    if not setting.available:
        setting = replace(setting, policy=replace(setting.policy, memory=math.inf))
    search = LayoutSearch(prepared(module, setting), setting, border, incumbent)
    search = _better_written(ProgramForm(search)).search
    best = search.budget.best(search.fitting(search.planned()))
    if best.plan is not None:
        return best.plan.border
    layouts = best.placed.layouts
    return BorderLayouts(
        {n: layouts.arguments[n] for n in border.arguments}, {n: layouts.results[n] for n in border.results}
    )


def _choice(graph: Graph, best: PartitionedProgram, baseline: PartitionedProgram) -> LayoutChoice:
    plan, changed = best.plan, tuple(_changed(graph, best.placed.layouts, baseline.placed.layouts))
    chosen = plan.chosen if plan is not None else ()
    sent, written = (best.sending, baseline.sending), best.sending_as_written
    held = baseline.peak.total if baseline.exposed < best.exposed else 0.0
    return LayoutChoice(best.cost, baseline.cost, changed, *sent, chosen, written, best.exposed, baseline.exposed, held)


def _changed(graph: Graph, chosen: PlacedLayouts, baseline: PlacedLayouts) -> Iterator[ChangedLayout]:
    """The results that are made in other layouts than in the baseline."""
    yield from changed_statements(graph, chosen, baseline)
    for number, decision in chosen.decided.items():
        op, before = graph.ops[number], baseline.shardings_of(number)
        count = len(op.operands)
        for value, new, old in zip(op.results, decision.shardings[count:], before[count:], strict=True):
            if not new.same_layout_as(old) and value.shape:
                yield ChangedLayout(op.name, op.mlir.location, value.dtype, value.shape, new, old)


Trials = Sequence[PartitionedProgram]

# Partitioning a program that may compute again what it would else hold, and work on its largest values in parts.

_TRIES = 4
"""Programs with more and more parts that are planned, at most. Guessed: each is a plan; the last one that holds less is
taken, so fewer may end above the limit."""

_MORE = 1.1
"""How much less large values may take than the last program held too much: what is around them changes, too. Guessed:
with 1, the next try misses the limit by little again; with more, there are more parts than need be."""

_SAVED = 0.01
"""The share of what a program holds too much that more parts have to save. Measured (2026-11, `scripts/bench_models`):
an 8B step on 32768 tokens, 64 chips of v5e, constrained, takes 76 s in 64 parts of queries, and 82 s in 256, which hold
16 KiB less of 15.5 GiB, as the most is held elsewhere. With less, such parts are taken; with much more, a search ends
that more parts would end as well."""

_SHARED = 1 / 16
"""The share of what the program holds too much from which on a value that two groups share is recomputed. Guessed: with
less, small values are computed twice for nothing; with more, groups stay joined and cannot be cut."""

_AS_MUCH = 2
"""How many times as much as its largest group's values a program may hold too much, so that parts may help. Guessed: a
search that is spared; with less, programs that would fit in parts are given up."""

_OF_LIMIT = 1 / 8
"""The share of what a device may hold that the values of a group may take: more parts cost little, and what compilers
rearrange of them is not known. Measured (2026-11, libtpu 0.0.51): with as much as was left, an 8B model's step on 32768
tokens per chip of v5e was estimated at 13.9 GiB and took 16.9."""

_FINER = 1.1
"""How many times a smaller limit the next one is, where a limit is not met. Guessed: what a search frees depends on how
much is too much, and with steps that are larger it misses limits that a smaller one meets; with finer ones it takes
longer to say that nothing fits."""

_SMALLER = 6
"""Smaller limits that are tried. Guessed, a guard of planning time: each is a search."""

_NO_LESS = 2
"""Smaller limits in a row that may find nothing that holds less than what was found. Measured (2026-11, gradients of
`cumsum` and its like, and of conjugate gradients, of less than 6 KiB): after two no further one does, and each takes as
long as a plan's search; with 1, a limit that the next but one would meet is refused."""

_LEAST = 1 / 64
"""The share of what a device may hold that they may take at least: in more parts, other values are in the way.
Guessed: with less, there are loops of many short trips."""


def partition(
    module: ir.Operation,
    setting: Setting,
    named: Collection[Mark] = (),
    follow: Follow | None = None,
    kept: Keep | None = None,
    incumbent: float = math.inf,
) -> Partitioned:
    """As `partition_whole`. Where the cheapest program does not fit, values that are held between a forward and
    a backward pass are computed again, and where that does not suffice, the largest values are made part by part.

    Args:
        named: the lines and types of values that are held where anything fits by that.
        follow: gives choices that are known, in place of a search.
        kept: gives those that are known for some ops, which are kept where a program fits so.
        incumbent: the cost of another program that fits. One that does not as it is written is given up if it has to
            cost more for that; what is found is the same whatever the incumbent.

    Raises:
        MemoryLimitError: no program was found that keeps within the memory that the policy states.
        GivenUp: what would be found costs more than the incumbent.
    """
    if follow is not None and setting.policy.layouts == "global":
        return _followed(module, setting, named, follow)
    if kept is not None and setting.policy.layouts == "global":
        found = _keeping(module, setting, kept)
        if found is not None:
            return found
    if setting.policy.layouts != "global" or not setting.available:
        return partition_whole(module, setting)
    erase_marks(module)
    search = LayoutSearch(prepared(module, setting), setting)
    if setting.policy.memory is None and not search.can_fit:  # other layouts inside, reruns and parts do not help
        return finished(module, search, search.fitting(search.found(FEW)))
    written = _better_written(ProgramForm(search, multipliers=FEW, incumbent=incumbent))
    program = _best(written, named)
    if program.fits or setting.policy.memory is None:
        return _finished(module, program, program.search.fitting(program.found))
    return _finished(module, *_below(written, program, named))


def _better_written(written: ProgramForm) -> ProgramForm:
    """A prepared program, or the same without constraints, where these are hints, with sorts by devices, or with the
    merged dimensions that loops carry in order, whichever has the better plan."""
    for otherwise in (_without_constraints, _with_local_sorts, _in_order):
        found = otherwise(written)
        written = min([written, found], key=ProgramForm.rank) if found is not None else written
    return written


def _without_constraints(written: ProgramForm) -> ProgramForm | None:
    """A prepared program without constraints; None where there are none, or they are kept."""
    search = written.search
    are_hints = search.policy.constraints == "hints" and search.can_be_planned
    graph = without_constraints(search.graph, search.setting) if are_hints else None
    return _otherwise(written, graph, Rewrite("unconstrained"))


def _otherwise(written: ProgramForm, graph: Graph | None, rewrite: Rewrite) -> ProgramForm | None:
    if graph is None:
        return None
    return replace(written, search=written.search.of(graph), rewrites=(*written.rewrites, (rewrite, None)))


def _with_local_sorts(written: ProgramForm) -> ProgramForm | None:
    """The best prepared program in which devices sort their own rows; None where there is none."""
    search = written.search
    axes = sort_axes(search.graph, search.setting.mesh_name) if search.can_be_planned else []
    found = filter(None, (_sorting_along(written, each) for each in axes))
    return min(found, key=ProgramForm.rank, default=None)


def _sorting_along(written: ProgramForm, axes: Axes) -> ProgramForm | None:
    """A prepared program in which devices sort their own rows along some axes."""
    graph = with_local_sorts(written.search.graph, written.search.setting.mesh_name, axes, _rules())
    return _otherwise(written, graph, Rewrite("local_sorts", axes=tuple(axis.name for axis in axes)))


def _in_order(written: ProgramForm) -> ProgramForm | None:
    """A prepared program with the merged dimensions that loops carry in order; None where there are none."""
    graph = in_order(written.search.graph, written.search.setting) if written.search.can_be_planned else None
    return _otherwise(written, graph, Rewrite("order"))


def _below(written: ProgramForm, program: ProgramForm, named: Collection[Mark]) -> tuple[ProgramForm, Trials]:
    """The first program of those that are found for smaller limits which keeps within the limit, and its trials that
    do. The smaller limits are the same ones for all requests, so that what is said to be the least is found again.

    Raises:
        MemoryLimitError: there is none.
    """
    limit, least, idle = written.search.setting.limit, program.least.peak, 0
    first = math.floor(math.log(limit, _FINER))
    for power in range(first, first - _SMALLER, -1):
        if idle == _NO_LESS:
            break
        try:
            smaller = written.search.within(_FINER**power)
            program = _best(replace(written, search=smaller, incumbent=math.inf), named)
        except MemoryLimitError:  # arguments and results alone hold more
            break
        fitting = [trial for trial in program.found if trial.peak.total <= limit and not trial.is_forgotten]
        if fitting:
            return program, fitting
        idle = 0 if program.least.peak.total < least.total else idle + 1
        least = min(least, program.least.peak, key=lambda peak: peak.total)
    raise too_large(least, limit)


def _finished(module: ir.Operation, program: ProgramForm, fitting: Trials) -> Partitioned:
    """Rewrites a module as the best of some trials of a program says."""
    before = _stage(program.search.graph) if program.rewrites else None
    report, choices = finished(module, program.search, fitting)
    report.recomputed, report.blocked, report.before = program.what, program.blocked, before
    saved = program.what.bytes if program.what is not None else 0.0
    return Partitioned(report, replace(choices, rewrites=program.rewrites, saved=saved))


def _followed(module: ir.Operation, setting: Setting, named: Collection[Mark], follow: Follow) -> Partitioned:
    """As `partition`, by choices that are known."""
    erase_marks(module)
    program = ProgramForm(LayoutSearch(prepared(module, setting), setting))
    for number, rewrite in enumerate(follow.rewrites):
        program.found = [_trial(program.search, follow, number)]
        program = _rewritten(program, rewrite, named)
    if program.what is not None:
        program.what = program.what._replace(bytes=follow.saved)
    return _finished(module, program, [_trial(program.search, follow, len(follow.rewrites))])


def _keeping(module: ir.Operation, setting: Setting, kept: Keep) -> Partitioned | None:
    """As `partition`, with some choices that are known; None, and nothing done, where that does not fit."""
    erase_marks(module)
    search = LayoutSearch(prepared(copied(module), setting), setting)
    trial = search.keeping(kept.plan(search.graph, search.setting))
    if trial is None:
        return None
    if kept.is_compared:
        _compare(trial, search)
    return finished(module, search, [trial])


def _compare(trial: PartitionedProgram, search: LayoutSearch) -> None:
    """Notes what a trial that keeps choices of another plan costs more than one that keeps none."""
    free = search.best(search.allowed(search.found()) or [trial])
    if trial.cost - free.cost > search.least_gain:
        text = seconds_text if search.costs.unit == "seconds" else bytes_text
        message = (
            f"layouts of the plan that like= gives are kept: the program costs {text(trial.cost)} on each device, by "
            f"the cost model, and {text(free.cost)} where all of them are chosen anew"
        )
        trial.placed.report.notes[Note("layouts", "", message)] = None


def _trial(search: LayoutSearch, follow: Follow, number: int) -> PartitionedProgram:
    plan = follow.plan(number, search.graph, search.setting)
    return search.baseline if plan is None else search.trial(plan)


def _rewritten(program: ProgramForm, rewrite: Rewrite, named: Collection[Mark]) -> ProgramForm:
    """A program with something that is computed again, or in parts; itself where that is nothing."""
    if rewrite.kind == "order":
        return _in_order(program) or program
    if rewrite.kind == "unconstrained":
        return _without_constraints(program) or program
    if rewrite.kind == "local_sorts":
        return _sorting_along(program, tuple(map(AxisRef, rewrite.axes))) or program
    if rewrite.kind == "parts":
        return _cut(program, rewrite) or program
    found = rewritten(program, rewrite, named)
    if found is None:
        return program
    return ProgramForm(program.search.of(found[0]), found[1], blocked=program.blocked, rewrites=program.after(rewrite))


def _best(written: ProgramForm, named: Collection[Mark]) -> ProgramForm:
    """The best form of a program, the first that fits of these: with something that is computed again, or, where that
    is dear, the cheaper one of it and the next; in parts; in parts, with something that is computed again; and of that,
    more in parts, as its layouts are others. `written`: as it is, with trials at few multipliers."""
    if not written.fits and written.cheapest.cost > written.incumbent:
        raise GivenUp
    tried = [_again(written, named)]
    if not tried[-1].fits:
        tried += _in_parts(written)
    elif tried[-1].is_dear_beside(written):
        tried += _cheaper_in_parts(written)
    if not any(program.fits for program in tried):
        parts = min(tried[1:] or tried, key=ProgramForm.rank)
        again = _again(replace(parts, multipliers=FEW), named) if parts.blocked else parts
        tried += [again, *_in_parts(again)] if again.blocked or again.what is not None else []
    return min(tried, key=ProgramForm.rank)


def _cheaper_in_parts(written: ProgramForm) -> Iterator[ProgramForm]:
    """As `_in_parts`, for a smaller limit than that of a form that fits, which is not to have the quicker program."""
    try:
        yield from _in_parts(written, min(written.search.limit, written.least.peak.total / _FINER))
    except GivenUp:
        return


def _again(program: ProgramForm, named: Collection[Mark]) -> ProgramForm:
    """A program, with trials at few multipliers, that may compute something again; at all of them else."""
    if not program.search.policy.recompute:
        return program.at_all_multipliers
    found = best_program(program, named)
    found.blocked = program.blocked
    return found


def _stage(graph: Graph) -> ir.Operation:
    """A program as it is before it is partitioned."""
    module = copied(graph.module)
    module.attributes[PREPARED] = ir.UnitAttr.get(module.context)
    return module


def _in_parts(program: ProgramForm, least: float = 0.0) -> Iterator[ProgramForm]:
    """Programs that make their largest values in more and more parts; the last one fits, if there is such. `least`: the
    bytes that they are to hold where more would fit."""
    limit = least or program.search.limit
    too_much = program.least.peak.total - least if least else program.too_much
    shared = _SHARED * max(too_much, 0.0)
    graph, candidates = _candidates(program, _rules(), shared, limit)
    most = candidates.most
    if too_much > _AS_MUCH * most:
        return
    size, before, last = min(most - too_much, _OF_LIMIT * limit), None, math.inf
    for _ in range(_TRIES):
        size = max(size, _LEAST * program.search.limit)
        chosen = _chosen(candidates, size)
        if not chosen or [cut for _, cut in chosen] == before:
            return
        before = [cut for _, cut in chosen]
        less = _in_loops(program, graph, chosen, Rewrite("parts", shared=shared, size=size, limit=least))
        if not less.fits and less.too_much > (1 - _SAVED) * last:
            return
        less.give_up_if_dear()
        yield less
        if less.fits:
            return
        last = less.too_much
        size = min(size / 2, size - _MORE * less.too_much)


_Chosen = list[tuple[BlockingCandidate, Cut]]


def _rules() -> RuleOf:
    return RuleBook(conservative=True).without_overrides().rule_of


def _cut(program: ProgramForm, rewrite: Rewrite) -> ProgramForm | None:
    """A program that makes its largest values in parts; None where there is nothing to cut."""
    graph, candidates = _candidates(program, _rules(), rewrite.shared, rewrite.limit or program.search.limit)
    chosen = _chosen(candidates, rewrite.size)
    return _in_loops(program, graph, chosen, rewrite) if chosen else None


def _chosen(candidates: BlockingCandidates, size: float) -> _Chosen:
    """The groups that run in parts, so that none takes more than so many bytes, if possible."""
    return [(each, cut) for each in candidates.above(size) if (cut := each.cut(size)) is not None]


def _in_loops(program: ProgramForm, graph: Graph, chosen: _Chosen, rewrite: Rewrite) -> ProgramForm:
    """A program with some groups of a copy of it in loops."""
    what, rule_of, copy = tuple(_in_report(*each) for each in chosen), _rules(), Graph(copied(graph.module))
    same = dict(zip(graph.ops, copy.ops, strict=True))
    for each, cut in chosen:
        run_in_parts(each.group.among(same), cut, rule_of)
    search = program.search.of(erase_dead_code(Graph(copy.module)), program.incumbent)
    blocked = (*program.blocked, *what)
    return ProgramForm(
        search, program.what, blocked=blocked, rewrites=program.after(rewrite), incumbent=program.incumbent
    )


def _candidates(program: ProgramForm, rule_of: RuleOf, shared: float, limit: float) -> tuple[Graph, BlockingCandidates]:
    """A copy of a program, in which groups share no values of so many bytes, and what of it could run in parts."""
    search, graph = program.search, Graph(copied(program.search.graph.module))
    target = search.setting.target
    prices = ProgramPrices(graph, program.least, target.arrays)
    origins = tell_apart(graph, Growth(rule_of, prices.bytes_of), shared)
    sizes, graph = Sizes(graph, prices, origins), Graph(graph.module) if origins else graph
    return graph, BlockingCandidates(graph, sizes, search.mesh, rule_of, target.compiler.fusion, limit)


def _in_report(candidate: BlockingCandidate, cut: Cut) -> InParts:
    value, dim = candidate.value, candidate.span.dim
    assert value.defining_op is not None and value.shape is not None
    return InParts(value.dtype, value.shape, dim, cut.parts, candidate.inside, value.defining_op.mlir.location)
