"""The search for the layouts of a program: copies of it are partitioned, the first as it is proposed, others by plans.

See docs/explanation/planner.md#from-choice-to-program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

from sdy_jax.ir.graph import Graph
from sdy_jax.ir.operations import copied, main_function
from sdy_jax.ir.stored_shardings import set_function_shardings
from sdy_jax.lowering.insert.partitioner import Partitioner
from sdy_jax.lowering.interface.setting import Setting
from sdy_jax.lowering.model.model_builder import planning_problem
from sdy_jax.lowering.proposal.free_border import FreeBorder
from sdy_jax.lowering.proposal.layout_plan import LayoutPlan
from sdy_jax.lowering.solve.choices import Choices
from sdy_jax.lowering.whole_program.kept_choices import keeping
from sdy_jax.lowering.whole_program.memory_budget import MemoryBudget
from sdy_jax.lowering.whole_program.memory_errors import border_too_large, too_large
from sdy_jax.lowering.whole_program.memory_search import PRICES, ProgramsTried
from sdy_jax.lowering.whole_program.partitioned_program import PartitionedProgram
from sdy_jax.lowering.whole_program.plan_reader import plan_of
from sdy_jax.lowering.whole_program.starting_proposal import starting_proposal
from sdy_jax.lowering.whole_program.work_prices import best_choice
from sdy_jax.representation.mesh import AxisRef

_LEAST_GAIN = 0.005
"""The share of what the proposal sends that a plan has to save in all. Guessed: a reader looks for few differences,
each with its reason; with less, plans differ from what propagation said for nothing that a clock shows."""

_TOLERATED = 0.01
"""The share of what the proposal holds that a plan may hold more, on devices whose memory is not known. Guessed: the
estimate is no better than that; with none, plans that save much are refused for some kilobytes."""

_HOLDING = 0.04
"""The share of a program's cost that it is worth to hold nothing instead of all that a device has. Measured (2026-11,
`scripts/bench_models`, 8B model, 256 chips of v5e): weights that are gathered once before a loop of 32 layers, instead
of in each trip, save a hundredth of the time, and hold twice of what such a chip has. With less, they are gathered
before it."""


class LayoutSearch:
    """The trials over copies of a prepared program; the first one proposes.

    Args:
        graph: the program.
        setting: what it is planned with.
        border: the arguments and results that may have any layout.
        known: what a program costs that is known to fit; dearer ones need not be found.
    """

    def __init__(
        self,
        graph: Graph,
        setting: Setting,
        border: FreeBorder = FreeBorder(),  # noqa: B008 - immutable
        known: float = math.inf,
    ):
        self.graph, self._border, self._known = graph, border, known
        self._start = start = starting_proposal(graph, setting)
        self.setting, self.costs, self.policy = start.setting, setting.costs, setting.policy
        self.proposed = PartitionedProgram(start.proposal, self.setting, limit=lambda: self.limit)
        self.mesh = start.proposal.mesh

    def of(self, graph: Graph, known: float = math.inf) -> LayoutSearch:
        """The trials over another form of the program; `known`: what a program costs that is known to fit."""
        return LayoutSearch(graph, self.setting, self._border, min(self._known, known))

    def trial(self, plan: LayoutPlan) -> PartitionedProgram:
        """A copy of the program, partitioned by a plan."""
        copy = copied(self.graph.module)
        main = main_function(copy)
        set_function_shardings(main, "arg_attrs", plan.border.arguments)
        set_function_shardings(main, "res_attrs", plan.border.results)
        proposal = Partitioner(Graph(copy), self.setting, plan).run()
        return PartitionedProgram(proposal, self.setting, plan, lambda: self.limit)

    @cached_property
    def limit(self) -> float:
        """The bytes that a device may hold."""
        if self.setting.available:
            return self.setting.limit
        return (1 + _TOLERATED) * self.proposed.peak.total

    def saved(self, trial: PartitionedProgram) -> float:
        """What a trial saves of what the proposal costs beside what is hidden, and holds."""
        proposed = self.proposed
        byte = self.budget.byte(min(trial.cost, proposed.cost))
        return proposed.exposed - trial.exposed + byte * (proposed.peak.total - trial.peak.total)

    @cached_property
    def budget(self) -> MemoryBudget:
        """What the program may hold, and send."""
        return MemoryBudget(self.limit, self.setting.target.memory, _HOLDING, self.costs.unit == "seconds", self._known)

    @property
    def can_be_planned(self) -> bool:
        """Whether the program is on few enough axes."""
        return self._start.can_be_planned

    @property
    def _proposed_fits(self) -> bool:
        """Whether the proposal keeps within the limit. Where no memory is known that is by what it holds itself, which
        need not be counted: a tenth of the time of planning a flax step of 12 layers (2026-11)."""
        return not self.setting.available or self.budget.fits(self.proposed)

    @cached_property
    def least_gain(self) -> float:
        """What a plan has to save."""
        return _LEAST_GAIN * self.proposed.sending

    @property
    def _latency(self) -> float:
        """That of a gather along an axis, the slowest one."""
        axes = [AxisRef(axis.name) for axis in self.mesh.axes if axis.size > 1]
        return max([self.costs.rate("all_gather", (axis,), self.mesh).fixed for axis in axes], default=0.0)

    def found(self, prices: int = PRICES) -> list[PartitionedProgram]:
        """All trials that were tried, the proposal first, which is alone where it sends nothing and fits.

        Args:
            prices: of holding, that are tried at most where the cheapest one does not fit.

        Raises:
            MemoryLimitError: arguments and results alone, where they are stated, hold more than what is stated.
        """
        layouts = self.proposed.proposal.layouts
        if self.policy.memory is not None and (peak := self.proposed.peak).border > self.limit:
            raise border_too_large(self.graph, layouts, peak.total, self.setting.inputs, self.mesh, self.limit)
        must_plan = self.proposed.sends or not self._proposed_fits
        return self.planned(prices) if must_plan else [self.proposed]

    def planned(self, prices: int = PRICES) -> list[PartitionedProgram]:
        """The trials by plans that were tried, the proposal first. Where the model promises little it is alone."""
        if not self.can_be_planned or self._tried is None:
            return [self.proposed]
        return self._tried.at_prices(prices)

    @cached_property
    def _tried(self) -> ProgramsTried | None:
        """The trials by plans; None where the model promises little."""
        program = planning_problem(self.graph, self.proposed.proposal, self.setting, self._start.atoms, self._border)
        choices = Choices(program, self.policy.effort or math.inf)
        best = best_choice(choices, self._latency)
        if self._proposed_fits and program.saved(best) < self.least_gain:
            return None
        return ProgramsTried(choices, best, self.proposed, self.budget, self.trial)

    def keeping(self, kept: LayoutPlan) -> PartitionedProgram | None:
        """The best trial of those in which some ops run as they are planned, as far as they may; None where it does not
        fit on a device whose memory is known, or the program is on too many axes."""
        if not self.can_be_planned:
            return None
        program = planning_problem(self.graph, self.proposed.proposal, self.setting, self._start.atoms, self._border)
        with keeping(program, kept) as chosen_of:
            best = chosen_of(best_choice(Choices(program, self.policy.effort or math.inf), self._latency))
        trial = self.trial(plan_of(program, best))
        return trial if self.budget.fits(trial) or not self.setting.available else None

    def fitting(self, trials: Sequence[PartitionedProgram]) -> list[PartitionedProgram]:
        """Those that keep within the limit, and where the proposal does, by a model of time, send little more, and only
        to save time; if there are none, and the limit is what devices have, the one that holds least.

        Raises:
            MemoryLimitError: there are none, and the limit is stated.
        """
        found = self.allowed(trials)
        if found:
            return found
        least = min(trials, key=lambda trial: trial.peak.total)
        if self.policy.memory is not None:
            raise too_large(least.peak, self.limit)
        return [least]

    def allowed(self, trials: Sequence[PartitionedProgram]) -> list[PartitionedProgram]:
        """Those that keep within the limit, and send no more than they may; perhaps none."""
        if list(trials) == [self.proposed]:
            return [self.proposed] if self._proposed_fits else []
        return [trial for trial in trials if self.budget.allows(trial, self.proposed)]

    def best(self, fitting: Sequence[PartitionedProgram]) -> PartitionedProgram:
        """The best of the trials that fit; the proposal, where no other one saves enough."""
        if len(fitting) == 1:
            return fitting[0]
        best = self.budget.best(fitting)
        return self.proposed if self.proposed in fitting and self.saved(best) < self.least_gain else best
