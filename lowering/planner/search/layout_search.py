"""The search for a program's layouts: copies are placed by plans, with kept choices and Lagrange multipliers of work.

See docs/explanation/planner.md#from-choice-to-program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

from sdy_jax.ir.graph import Graph
from sdy_jax.ir.meshes import AxisRef
from sdy_jax.ir.operations import copied, main_function
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.stored_shardings import set_function_shardings
from sdy_jax.lowering.planner.placement.program_placement import ProgramPlacement
from sdy_jax.lowering.planner.problem.candidates import Candidate
from sdy_jax.lowering.planner.problem.layout_plan import FreeBorder, LayoutPlan
from sdy_jax.lowering.planner.problem.op_problem import Decision
from sdy_jax.lowering.planner.problem.planning_problem import PlanningProblem, planning_problem
from sdy_jax.lowering.planner.problem.program_model import Chosen, ProgramModel
from sdy_jax.lowering.planner.search.baseline import baseline_of
from sdy_jax.lowering.planner.search.memory_search import (
    FEW,
    MULTIPLIERS,
    MemoryBudget,
    ProgramsTried,
    border_too_large,
    too_large,
)
from sdy_jax.lowering.planner.search.partitioned_program import PartitionedProgram, plan_of
from sdy_jax.lowering.planner.setting import Setting
from sdy_jax.lowering.planner.solve.improvement import Improver

# Choices that are kept while all others are made: the nodes that they speak of have no other candidate.


@contextmanager
def keeping(program: PlanningProblem, kept: LayoutPlan) -> Iterator[Callable[[Chosen], Chosen]]:
    """Leaves nodes meanwhile the candidates that a plan gives them, where they have these. What it gives says which
    candidates of all a choice among those is."""
    nodes = program.model.nodes
    before = [node.candidates for node in nodes]
    _keep(program, kept)
    left = [node.candidates for node in nodes]
    yield lambda chosen: [every.index(some[n]) for every, some, n in zip(before, left, chosen, strict=True)]
    for node, candidates in zip(nodes, before, strict=True):
        node.candidates = candidates


def _keep(program: PlanningProblem, kept: LayoutPlan) -> None:
    """Leaves nodes the candidates that a plan gives them, where they have these. The first candidate is where a search
    starts, so it starts from there."""
    nodes = program.model.nodes
    for number, decision in kept.ops.items():
        node = program.decided.get(number)
        found = _alike(program, nodes[node].candidates, decision) if node is not None else None
        if node is not None and found is not None:
            nodes[node].candidates = [found]
    for (number, index), node in program.edges.items():
        planned, slot = kept.edges.get(number, ()), -1 if node in program.made_outside else 0
        if index < len(planned):
            same = [c for c in nodes[node].candidates if _is_same(program, c.layouts[slot], planned[index])]
            nodes[node].candidates = same[:1] or nodes[node].candidates


def _alike(program: PlanningProblem, candidates: Sequence[Candidate], decision: Decision) -> Candidate | None:
    """The candidate that runs an op as it is decided."""
    for candidate in candidates:
        pairs = zip(candidate.layouts, decision.shardings, strict=False)
        if all(_is_same(program, layout, sharding) for layout, sharding in pairs):
            return candidate
    return None


def _is_same(program: PlanningProblem, layout: int, sharding: TensorSharding) -> bool:
    return program.table.shardings[layout].same_layout_as(sharding)


# The best choice of layouts where work has a Lagrange multiplier: it rises until ops perform hardly more than in the
# baseline.

_WORTH = 1 / 16
"""The share of what the baseline's reshards cost on average that another one has to save: each is time to compile, and
latency that a model of bytes does not know. Measured (2026-11, `scripts/bench_bytes`): without it a transformer's step
with replicated weights on 2 x 4 has 94 collectives, with it 77 for 0.6 percent more cost. Half as much would have the
data-parallel step of twelve flax layers compile for 1.4 as long, with 226 instead of 200 collectives for 1 percent
less."""

_LATENCIES = 0.25
"""The latencies that it has to save at most, where the model knows them. Measured (2026-11, `scripts/bench_models`):
the baseline for an 8B model on 256 chips moves whole activations, 0.1 s each on average; a sixteenth of that for each
gather of a layer had stacks gathered before the loops, which held twice of what a chip has."""

_LEAST_WORTH = 2048.0
"""The bytes that it has to save at least, where the model knows bytes alone: the step of one token is all latency.
Measured (2026-11, plans for CPUs): without it tokens of a dense model and of latent attention on 2 x 4 take 50 and 37
collectives, 1.8 and 1.5 of the bytes, to save a tenth of the work; with it 11 and 15. No step of `scripts/bench_bytes`
sends more; with four times as much a perceptron's sends 1.09."""

_TRIES = 8
"""Multipliers of work that are tried. Guessed, a guard: the last is 4^7 times the first by then, or what it has to
be."""

_DEARER = 4.0
"""By how much the multiplier of work rises from try to try. Guessed: with less, more tries; with more, bytes are paid
for work that a lower one would have saved as well. It rises faster where the last one would be too low for what the
first choice saves, as by a model of latencies in which work costs next to nothing."""


def best_choice(improver: Improver, latency: float = 0.0, least_worth: float = 0.0) -> Chosen:
    """The best choice that was found, if memory costs nothing; of those that do not do too much work, at a
    multiplier of work that rises where the best one does. `latency`: that of a collective; 0 where that is not known.
    `least_worth`: what each has to save then, at least."""
    program = improver.program
    model, start = program.model, program.start
    worth = _WORTH * model.mean_reshard(start)
    model.charge_each_reshard(min(worth, _LATENCIES * latency) if latency else max(worth, least_worth))
    dearer = _DEARER
    for number in range(1, _TRIES + 1):
        found = improver.improved(start)
        if model.operations(found) <= program.most_operations:
            return found
        if number == 1:
            dearer = max(dearer, _worthless_from(model, start, found) ** (1 / (_TRIES - 1)))
        model.set_work_multiplier(dearer**number)
    return start


def _worthless_from(model: ProgramModel, start: Chosen, found: Chosen) -> float:
    """The multiplier of work, as a multiple of today's, at which a choice costs as much as the one before it."""
    more = model.work(found) - model.work(start)
    return 1 + (model.cost(start) - model.cost(found)) / more if more > 0 else 1.0


# The search for the layouts of a program: copies of it are partitioned, the first op by op (the baseline), others by
# plans.
#
# See docs/explanation/planner.md#from-choice-to-program.

_LEAST_GAIN = 0.005
"""The share of what the baseline sends that a plan has to save in all. Guessed: a reader looks for few differences,
each with its reason; with less, plans differ from what propagation said for nothing that a clock shows."""

_TOLERATED = 0.25
"""The share of what the baseline holds that a plan may hold more, on devices whose memory is not known. Measured
(2026-11, six models of `scripts/bench_models` at toy sizes on eight CPU devices): with a hundredth, a scanned Llama has
89 collectives for 48, experts by capacity send 1.13 of the bytes, and planning takes 3.5 and 5 times as long, as most
plans are searched at rising multipliers of memory; these hold 1.13 and 1.09 of it then, four others as much."""

_NEGLIGIBLE = 65536.0
"""The bytes that a plan may hold there anyway. Measured (2026-11, eight CPU devices along three axes): the gradient of
`expm` of 8 x 8 holds 10 KiB; to look for what holds less takes 8 of 10 CPU s."""

_MEMORY_WORTH = 0.04
"""The share of a program's cost that it is worth to hold nothing instead of all that a device has. Measured (2026-11,
`scripts/bench_models`, 8B model, 256 chips of v5e): weights that are gathered once before a loop of 32 layers, instead
of in each trip, save a hundredth of the time, and hold twice of what such a chip has. With less, they are gathered
before it."""


_PROMISED = 0.03
"""The share of a program's cost that the model promises where products repeat work, from which on a trial tells whether
it is so. Measured (2026-11): of an 8B model on 16 x 16 chips of v5e the model promises hundredths, and the program
takes as many more."""

_REPEATING = 0.15
"""The share of a program's cost that repeated work of products has to save in a trial. Measured (2026-11, v5e, 2 x 4,
by the compiler): an MLP that saves 0.19 so takes 0.98 of jit's time, a transformer that saves 0.10 takes 1.05, and 1.00
without; a chain of products of small split matrices saves from a quarter on, where these are gathered first."""

_QUICKER = 0.025
"""The share that a program has to save if it is planned as if no collectives shared latency. Measured (2026-11, eight
H100s): to save 0.02 of 16 us, the solution of a small system gathers 80 KiB in place of 4 bytes."""

_FEW = 500
"""Nodes of a program up to which it is also planned as if no collectives shared latency: how many there are to share
it is known only where layouts are. Measured (2026-11, 2 x 4, as compiled for v5e): ten of eleven programs of 34 to 116
nodes take 0.37 to 0.99 of the time by that, one as long; of 8B models it changes a thousandth."""


class _Tried:
    """The programs that choices make, by choice; the first one is the baseline."""

    def __init__(self, program: PlanningProblem, search: LayoutSearch):
        self._program, self._search = program, search
        self.programs: dict[object, PartitionedProgram] = {tuple(program.start): search.baseline}

    def best(self, choices: Sequence[Chosen]) -> Chosen:
        """The first choice, or the baseline, unless the program of another one fits better, or costs less by a share.
        The only one needs no trial."""
        first, *others = choices
        if all(other == first for other in others):
            return first
        found = min(self._program.start, first, key=self._rank)
        for other in sorted(others, key=self.repeats):
            (misfits, cost), (other_misfits, other_cost) = self._rank(found), self._rank(other)
            least = _REPEATING if self.repeats(other) and not self.repeats(found) else _QUICKER
            if other_cost < (1 - least) * cost if misfits == other_misfits else misfits:
                found = other
        return found

    def repeats(self, choice: Chosen) -> bool:
        """Whether products repeat work."""
        nodes = self._program.model.nodes
        return any(node.candidates[candidate].repeats for node, candidate in zip(nodes, choice, strict=True))

    def _rank(self, choice: Chosen) -> tuple[bool, float]:
        key = tuple(choice)
        if key not in self.programs:
            self.programs[key] = self._search.trial(plan_of(self._program, choice))
        return not self._search.budget.fits(self.programs[key]), self.programs[key].exposed


class LayoutSearch:
    """The trials over copies of a prepared program; the first one is the baseline.

    Args:
        graph: the program.
        setting: what it is planned with.
        border: the arguments and results that may have any layout.
        incumbent: the cost of a program that fits; dearer ones need not be found.
    """

    def __init__(
        self,
        graph: Graph,
        setting: Setting,
        border: FreeBorder = FreeBorder(),  # noqa: B008 - immutable
        incumbent: float = math.inf,
    ):
        self.graph, self._border, self._incumbent = graph, border, incumbent
        self._start = start = baseline_of(graph, setting)
        self.setting, self.costs, self.policy = start.setting, setting.costs, setting.policy
        self.baseline = PartitionedProgram(start.placed, self.setting, limit=lambda: self.limit)
        self.mesh = start.placed.mesh

    def of(self, graph: Graph, incumbent: float = math.inf) -> LayoutSearch:
        """The trials over another form of the program; `incumbent`: the cost of a program that fits."""
        return LayoutSearch(graph, self.setting, self._border, min(self._incumbent, incumbent))

    def within(self, memory: float) -> LayoutSearch:
        """The trials over the same program with another limit of memory."""
        policy = replace(self.policy, memory=memory)
        return LayoutSearch(self.graph, replace(self.setting, policy=policy), self._border)

    def trial(self, plan: LayoutPlan) -> PartitionedProgram:
        """A copy of the program, partitioned by a plan."""
        copy = copied(self.graph.module)
        main = main_function(copy)
        set_function_shardings(main, "arg_attrs", plan.border.arguments)
        set_function_shardings(main, "res_attrs", plan.border.results)
        placed = ProgramPlacement(Graph(copy), self.setting, plan).run()
        return PartitionedProgram(placed, self.setting, plan, lambda: self.limit)

    @cached_property
    def limit(self) -> float:
        """The bytes that a device may hold."""
        if self.setting.available:
            return self.setting.limit
        return max((1 + _TOLERATED) * self.baseline.peak.total, _NEGLIGIBLE)

    def saved(self, trial: PartitionedProgram) -> float:
        """What a trial saves of what the baseline costs beside what is hidden, and holds."""
        baseline = self.baseline
        byte = self.budget.byte(min(trial.cost, baseline.cost))
        return baseline.exposed - trial.exposed + byte * (baseline.peak.total - trial.peak.total)

    @cached_property
    def budget(self) -> MemoryBudget:
        """What the program may hold, and send."""
        memory, by_time = self.setting.target.memory, self.costs.unit == "seconds"
        usual = self.setting.unstated_limit
        return MemoryBudget(self.limit, memory, _MEMORY_WORTH, by_time, self._incumbent, usual)

    @property
    def can_be_planned(self) -> bool:
        """Whether the program is on few enough axes."""
        return self._start.can_be_planned

    @property
    def can_fit(self) -> bool:
        """Whether arguments and results, where they are stated, leave room for anything else."""
        return self.baseline.peak.border <= self.limit

    @property
    def _baseline_fits(self) -> bool:
        """Whether the baseline keeps within the limit. Where no memory is known that is by what it holds itself, which
        need not be counted: a tenth of the time of planning a flax step of 12 layers (2026-11)."""
        return not self.setting.available or self.budget.fits(self.baseline)

    @cached_property
    def least_gain(self) -> float:
        """What a plan has to save."""
        return _LEAST_GAIN * self.baseline.sending

    @property
    def _latency(self) -> float:
        """That of a gather along an axis, the slowest one."""
        axes = [AxisRef(axis.name) for axis in self.mesh.axes if axis.size > 1]
        return max([self.costs.rate("all_gather", (axis,), self.mesh).fixed for axis in axes], default=0.0)

    def found(self, multipliers: int = MULTIPLIERS) -> list[PartitionedProgram]:
        """All trials that were tried, the baseline first, which is alone where it sends nothing and fits.

        Args:
            multipliers: of memory, that are tried at most where the cheapest one does not fit.

        Raises:
            MemoryLimitError: arguments and results alone, where they are stated, hold more than what is stated.
        """
        layouts = self.baseline.placed.layouts
        if self.policy.memory is not None and not self.can_fit:
            held = self.baseline.peak.total
            raise border_too_large(self.graph, layouts, held, self.setting.inputs, self.mesh, self.limit)
        must_plan = self.baseline.sends or not self._baseline_fits
        return self.planned(multipliers) if must_plan else [self.baseline]

    def planned(self, multipliers: int = MULTIPLIERS) -> list[PartitionedProgram]:
        """The trials by plans that were tried, the baseline first. Where the model promises little it is alone."""
        if not self.can_be_planned or self._tried is None:
            return [self.baseline]
        if not self._least_worth:
            return self._tried.at_multipliers(multipliers)
        trials = self._tried.at_multipliers(min(multipliers, FEW))
        if self.allowed(trials) not in ([], [self.baseline]) or self._tried_for_less is None:
            return trials
        return self._tried_for_less.at_multipliers(multipliers)

    @property
    def _least_worth(self) -> float:
        """Nothing where memory is asked for: few collectives, early, hold more."""
        is_charged = self.costs.unit == "bytes" and not self._latency and self.policy.memory is None
        return _LEAST_WORTH if is_charged else 0.0

    @cached_property
    def _tried(self) -> ProgramsTried | None:
        """The trials by plans; None where the model promises little."""
        return self._tried_where(self._least_worth)

    @cached_property
    def _tried_for_less(self) -> ProgramsTried | None:
        """Those where collectives need save but a share of what others cost: few collectives may hold more."""
        return self._tried_where(0.0)

    def _tried_where(self, least_worth: float) -> ProgramsTried | None:
        """Those where a collective has to save so much, at least, where no latency is known."""
        program = planning_problem(self.graph, self.baseline.placed, self.setting, self._start.atoms, self._border)
        improver, tried = Improver(program, self.policy.effort or math.inf), _Tried(program, self)
        best = self._best_choice(improver, tried, least_worth)
        known = tried.programs.get(tuple(best))
        saved = program.saved(best) if known in (None, self.baseline) else self.saved(known)
        if self._baseline_fits and saved < self.least_gain:
            return None
        return ProgramsTried(improver, best, self.baseline, self.budget, self.trial, tried.programs)

    def _best_choice(self, improver: Improver, tried: _Tried, least_worth: float) -> Chosen:
        """The best choice where collectives share latency as in a large program; of few ops, or that in which each
        waits all of its own, if the program costs less by that."""
        program = improver.program
        choices = self._choices(improver, least_worth)
        if self.costs.combines and len(program.model.nodes) <= _FEW:
            with program.model.prices.all_alone():
                choices += self._choices(improver, least_worth)
        best = tried.best(choices)
        if not tried.repeats(best):
            program.leave_out_repeated_work()
        return best

    def _choices(self, improver: Improver, least_worth: float) -> list[Chosen]:
        """The best choice in which products repeat no work; and where they may, the best one of all, if that promises
        to save something."""
        program, model = improver.program, improver.program.model
        every = program.leave_out_repeated_work()
        best = best_choice(improver, self._latency, least_worth)
        worth = _PROMISED * (self.baseline.cost - program.saved(best))
        for node, candidates in every.items():
            model.nodes[node].candidates = candidates
        if not every or model.cost(best) - model.work(best) < worth:
            return [best]
        repeating = improver.improved(best)
        return [best, repeating] if model.cost(best) - model.cost(repeating) > worth else [best]

    def keeping(self, kept: LayoutPlan) -> PartitionedProgram | None:
        """The best trial of those in which some ops run as they are planned, as far as they may; None where it does not
        fit on a device whose memory is known, or the program is on too many axes."""
        if not self.can_be_planned:
            return None
        program = planning_problem(self.graph, self.baseline.placed, self.setting, self._start.atoms, self._border)
        with keeping(program, kept) as chosen_of:
            improver = Improver(program, self.policy.effort or math.inf)
            best = chosen_of(self._best_choice(improver, _Tried(program, self), self._least_worth))
        trial = self.trial(plan_of(program, best))
        return trial if self.budget.fits(trial) or not self.setting.available else None

    def fitting(self, trials: Sequence[PartitionedProgram]) -> list[PartitionedProgram]:
        """Those that may be chosen; if there are none, and the limit is what devices have, the one that holds least.

        Raises:
            MemoryLimitError: there are none, and the limit is stated.
        """
        found = self.choosable(trials)
        if found:
            return found
        least = min(trials, key=lambda trial: trial.peak.total)
        if self.policy.memory is not None:
            raise too_large(least.peak, self.limit)
        return [least]

    def choosable(self, trials: Sequence[PartitionedProgram]) -> list[PartitionedProgram]:
        """Those that may be chosen; perhaps none."""
        return self.allowed(trials) or self.budget.choosable(trials, self.baseline)

    def allowed(self, trials: Sequence[PartitionedProgram]) -> list[PartitionedProgram]:
        """Those that keep within the limit, and send no more than they may; perhaps none."""
        if list(trials) == [self.baseline]:
            return [self.baseline] if self._baseline_fits else []
        return [trial for trial in trials if self.budget.allows(trial, self.baseline)]

    def best(self, fitting: Sequence[PartitionedProgram]) -> PartitionedProgram:
        """The best of the trials that fit; the baseline, where no other one saves enough."""
        if len(fitting) == 1:
            return fitting[0]
        best = self.budget.best(fitting)
        return self.baseline if self.baseline in fitting and self.saved(best) < self.least_gain else best
