"""The search for a program that keeps within a device's memory, the budget, and the errors where none does.

See docs/explanation/memory.md#when-the-cheapest-program-does-not-fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import NamedTuple

import numpy as np
from jax.extend.mlir import ir

from sdy_jax.base.errors import MemoryLimitError
from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.jax_shardings import bytes_text, type_text
from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.stored_shardings import entries_of
from sdy_jax.lowering.planner.memory.live_ranges import Peak
from sdy_jax.lowering.planner.problem.layout_plan import LayoutPlan, PlacedLayouts, PlannedUse
from sdy_jax.lowering.planner.problem.planning_problem import PlanningProblem
from sdy_jax.lowering.planner.problem.program_model import Chosen
from sdy_jax.lowering.planner.search.held_copies import freed_gaps, held_copies, live_without, numbered_uses, place_uses
from sdy_jax.lowering.planner.search.partitioned_program import PartitionedProgram, PerOp, plan_of
from sdy_jax.lowering.planner.solve.improvement import Improver

# What a program may hold on a device, and which of several programs is the best within that.

_COMPARED = 2
"""How often its small price memory has where trials are compared. Measured (2026-11, `scripts/bench_models`): a step
that holds 48 of 60 GiB for 4 percent of the time, as hidden collectives count, stood beside one that holds 11, and won
with 1."""


class MemoryBudget(NamedTuple):
    """What a program may hold.

    `limit`: bytes per device. `memory`: of these a device has; 0 where that is not known. `worth`: the share of a
    program's cost that it is worth to hold nothing instead of all of it. `by_time`: costs are times, so it may send
    more than the baseline, where that fits, only to save some. `incumbent`: the cost of a program that fits. `usual`:
    the limit if none were stated; 0 where none is.
    """

    limit: float
    memory: float
    worth: float
    by_time: bool = False
    incumbent: float = math.inf
    usual: float = 0.0

    def byte(self, cost: float) -> float:
        """What it is worth not to hold a byte, in a program of this cost: a little, and always, where the memory of
        devices is known."""
        return self.worth * cost / self.memory if self.memory else 0.0

    def fits(self, trial: PartitionedProgram) -> bool:
        """Whether a trial keeps within the limit."""
        return trial.peak.total <= self.limit

    def is_dear(self, trial: PartitionedProgram) -> bool:
        """Whether a trial costs more than the incumbent."""
        return trial.cost > self.incumbent

    def allows(self, trial: PartitionedProgram, baseline: PartitionedProgram) -> bool:
        """Whether a trial may be chosen, beside the baseline: it fits, and sends no more than may be."""
        if not self.fits(trial):
            return False
        return not (self.by_time and self.fits(baseline) and trial.sends_too_much_beside(baseline))

    def choosable(self, trials: Sequence[PartitionedProgram], baseline: PartitionedProgram) -> list[PartitionedProgram]:
        """The trials that may be chosen; where there are none, and no limit is stated, those that keep within all of
        the memory, of which the limit is a share."""
        found = [trial for trial in trials if self.allows(trial, baseline)]
        if found or self.usual or not self.memory:
            return found
        whole = self._replace(limit=self.memory)
        return [trial for trial in trials if whole.allows(trial, baseline)]

    def best(self, trials: Sequence[PartitionedProgram]) -> PartitionedProgram:
        """The trial that costs least beside what is hidden, with a little for what it holds."""
        byte = _COMPARED * self.byte(min(trial.cost for trial in trials))
        return min(trials, key=lambda trial: (trial.exposed + byte * trial.peak.total, trial.cost))

    def candidates(self, trials: Sequence[PartitionedProgram]) -> list[PartitionedProgram]:
        """Those of which one is the best, whatever a byte is worth: of no other one is less exposed and held."""
        found = list[PartitionedProgram]()
        for trial in sorted(trials, key=lambda trial: (trial.exposed, trial.cost)):
            if not found or (self.memory and trial.peak.total < found[-1].peak.total):
                found.append(trial)
        return found


# What is said where a program cannot keep within a limit of memory: what is largest, and where it comes from.

_LISTED = 5
"""Values that an error lists. Chosen: for a reader."""


class GivenUp(Exception):
    """A program that does not fit as it is written costs more, where it does, than the incumbent."""


def too_large(peak: Peak, limit: float) -> MemoryLimitError:
    """The error for a program that holds more than the limit however it is planned; `peak`: of what holds least."""
    largest = "; ".join(
        f"{bytes_text(live.bytes)} of {_type(live.value)} at {live.source}" for live in peak.live[:_LISTED]
    )
    error = MemoryLimitError(
        f"memory={bytes_text(limit)} is not enough: the least that was found is {bytes_text(peak.total)} per device "
        f"({bytes_text(peak.arguments)} of arguments, {bytes_text(peak.results)} of results, {bytes_text(peak.bytes)} "
        f"in between). The largest values at the peak: {largest}; to fix: split these, or compute them again "
        "(jax.checkpoint)"
    )
    error.least = peak.total
    return error


def border_too_large(
    graph: Graph, layouts: PlacedLayouts, held: float, inputs: Sequence[str], mesh: Mesh, limit: float
) -> MemoryLimitError:
    """The error for a program whose arguments and results alone hold more than the limit.

    Args:
        graph, layouts: the program, and its layouts.
        held: the bytes that it holds per device in all.
        inputs: what the user calls the arguments.
        mesh: the mesh of the layouts.
        limit: bytes per device.
    """
    arguments = dict(_sizes(inputs or _numbered("argument", graph.arguments), graph.arguments, layouts.arguments, mesh))
    results = dict(_sizes(_named_results(graph.main), graph.outputs, layouts.results, mesh))
    both = sorted({**arguments, **results}.items(), key=lambda item: -item[1])[:_LISTED]
    error = MemoryLimitError(
        f"memory={bytes_text(limit)} is not enough: arguments take {bytes_text(sum(arguments.values()))} and results "
        f"{bytes_text(sum(results.values()))} per device. The largest: "
        f"{', '.join(f'`{name}` ({bytes_text(size)})' for name, size in both)}; to fix: split them further, by "
        "in_shardings and out_shardings, or leave them to the planner (AUTO)"
    )
    error.least = held
    return error


def _type(value: Value) -> str:
    return type_text(value.dtype, value.shape, value.sharding)


def _numbered(what: str, values: Sequence[Value]) -> list[str]:
    return [f"{what} {number}" for number in range(len(values))]


def _named_results(function: Op) -> list[str]:
    """The paths of a function's results, which jax writes; their numbers where it did not."""
    said = [entry.get("jax.result_info") for entry in entries_of(function.mlir, "res_attrs")]
    paths = ["" if each is None else str(ir.StringAttr(each).value) for each in said]
    return [path or f"result {number}" for number, path in enumerate(paths)]


def _sizes(
    names: Sequence[str], values: Sequence[Value], shardings: Sequence[TensorSharding], mesh: Mesh
) -> Iterator[tuple[str, float]]:
    """The bytes of each on a device."""
    for name, value, sharding in zip(names, values, shardings, strict=True):
        if value.shape is not None:
            yield name, math.prod(sharding.local_shape(value.shape, mesh)) * value.itemsize


# The search for a program that keeps within a device's memory.
#
# First what costs least is tried. Where that holds too much, copies of values in other layouts are freed between their
# uses and recomputed: those that cost least for what they free at the moments at which too much is live. In the end
# memory gets a Lagrange multiplier at these moments, the price of a byte, which rises until the choice for the whole
# program fits. See docs/explanation/memory.md#when-the-cheapest-program-does-not-fit.

MULTIPLIERS = 8
"""Multipliers of memory that are tried. Guessed, a guard of planning time: each is a solve and a trial; with fewer, the
search ends above a limit that some multiplier would meet."""

FEW = 2
"""Multipliers that are tried of a program that will hardly fit as it is: what it costs to hold less then says how it is
rewritten. Guessed: each is a solve and a trial of a program that will change anyway."""

_STEEPER = 16.0
"""By how much the multiplier of memory rises while it changes nothing. Measured (2026-11, `scripts/bench_models`): of
an 8B model on 256 chips all layers are gathered in the loops at 256 times the first one; of multipliers that rise by
four the last ones were never tried."""

_STEEP = 4.0
"""By how much it rises where it does. Measured (2026-11, `scripts/bench_models`): the same model's layers, unrolled,
held 14.8 GiB of 14.2 at 16 times the first multiplier and 9.3 at 64 times; at 256 times whole activations were gathered
at moments that nobody had priced."""

_CLOSER = 2
"""Multipliers that are tried between the lowest at which the program fits and the highest at which it does not.
Guessed: each is a solve and a trial; with none, a plan may hold much less than it may, and send more for it."""

_IDLE = 3
"""Multipliers that are tried in a row though nothing holds less than before. Guessed: with 1, the search gives up
before the steep ones; with more, it takes longer to say that nothing fits."""

LITTLE = 0.1
"""The share of what the best choice's collectives cost that a program that fits may cost more, before others are tried.
Guessed: with 0, each program that frees copies is searched at all multipliers; with much, dear plans stay."""

_FULL = 0.25
"""The share of a device's memory from which on it matters how much of it a program holds that fits. Guessed: with less,
small programs are searched as if memory were short, which takes some solves each."""

_SAVING = (1.0, 1.0, 8.0, 64.0, 256.0)
"""Choices that are made, where it does: at the price that memory always has, and at higher ones, as a compiler may
hide what is sent instead. Measured (2026-11, `scripts/bench_models`): an 8B model on 64 H100s that gathers weights in
each trip, not before the loop, takes 0.92 of the time by the model, which then counts what is hidden, and holds 8.3 GiB
instead of 28.5."""

_JUMP = 0.5
"""The share of what a choice holds that the next one holds at most, so that others between them are tried. Measured
(2026-11, `scripts/bench_models`): of an 8B step on 64 H100s over a network that holds 32 GiB, and 6.5 GiB at four times
the price, one between holds 7.5 and takes 0.96 of the time of the first. Without, a limit has to ask for it."""

_MANY = 1_500_000
"""Candidates of all nodes from which on no choices are made to hold less of what fits. Measured (2026-11,
`scripts/bench_models`): 32 layers of an 8B model that are no loop have 85,000 along one axis, where these choices take
8 s and save half, and 2,300,000 along two parts of it, where they take 25 s for each of three plans and save none."""

_WORK = 4.0
"""By how much the multiplier of work falls from try to try, where its savings are paid for with bytes; and the multiple
of it at which one more choice is made, as compilers hide what is sent, which the model counts whole. Measured (2026-11,
plans of `scripts/bench_models`): by that a step of 8B on 8 x 8 H100s takes 547 ms for 580, and one of an LSTM on eight
47.8 for 53; with 2, the former takes 580."""

_CHEAPENED = 3
"""Multipliers of work that are tried there. Guessed: each is a solve and a trial; with none, plans by time may send
more bytes than op by op."""

_FREED = 2
"""How often more copies are freed, where what was freed before was not enough. Guessed: freeing one copy moves the peak
to another moment; with more, solves at a multiplier of memory would do better."""

_NEARLY = 0.5
"""The share of what may be held beside arguments and results from which on memory has a multiplier. Guessed: with 1,
moments that are nearly full are filled by what is freed at the worst one; with 0, all is paid for that never was in the
candidate."""

_EVERYWHERE = 0.5
"""The share of the multiplier at the worst moment that memory has at all others. Measured (2026-11,
`scripts/bench_models`, 70B model): without it whole activations were gathered at moments that nobody had priced."""


FollowPlan = Callable[[LayoutPlan], PartitionedProgram]


class ProgramsTried:
    """The trials by the best choice and, where it does not fit, with copies recomputed, and at rising multipliers of
    memory until one fits, and then a little below. A trial that does not fit and costs more than one that does ends it:
    those that hold less cost more. Where it fits, but sends more bytes than the baseline to save work, trials at
    falling multipliers of work if it may not; by a model of time, one at a higher one; and where it holds much of a
    device's memory, trials by what is best if memory has its small price.

    They are made as far as they are asked for, each once; `known` are made already, by choice.
    """

    def __init__(
        self,
        improver: Improver,
        best: Chosen,
        baseline: PartitionedProgram,
        budget: MemoryBudget,
        partitioned: FollowPlan,
        known: Mapping[object, PartitionedProgram] | None = None,
    ):
        self._kept: list[PartitionedProgram] = []
        search = _MemorySearch(improver, baseline, budget, partitioned, self._kept)
        search.trials.update(known or {})
        self._further = search.run(best)
        self._per_multiplier: list[list[PartitionedProgram]] = []
        """Per multiplier, the trials until then."""

    def at_multipliers(self, most: int = MULTIPLIERS) -> list[PartitionedProgram]:
        """The trials at `FEW` or at `MULTIPLIERS` multipliers at most; those that will not be chosen are forgotten."""
        for trials in islice(self._further, max(most - len(self._per_multiplier), 0)):
            self._per_multiplier.append(trials)
            if len(self._per_multiplier) == FEW:
                self._kept += trials
        if len(self._per_multiplier) < most or most == MULTIPLIERS:
            self._further = iter(())  # which has the model, and that is large
        return self._per_multiplier[min(most, len(self._per_multiplier)) - 1]


class _MemorySearch:
    """The trials that were made, by choice and copies. `kept`: those that are not forgotten, whatever comes."""

    def __init__(
        self,
        improver: Improver,
        baseline: PartitionedProgram,
        budget: MemoryBudget,
        partitioned: FollowPlan,
        kept: Sequence[PartitionedProgram],
    ):
        self._improver, self._program = improver, improver.program
        self._baseline, self._budget, self._partitioned = baseline, budget, partitioned
        self._kept = kept
        self.trials: dict[object, PartitionedProgram] = {tuple(self._program.start): baseline}

    def run(self, best: Chosen) -> Iterator[list[PartitionedProgram]]:
        """The trials that were made until after each multiplier, from the best choice on if memory costs nothing."""
        if self._budget.is_dear(cheapest := self._with_copies(best, {})) and not self._budget.fits(cheapest):
            yield list(self.trials.values())  # what holds less costs more
            return
        trial = self.follow(best)
        fits = self._budget.fits(trial)
        if fits and not self._budget.allows(trial, self._baseline):
            best, trial = self._send_less(best, trial)
        quickest = self._with_copies(best, {})
        aside = [self._baseline, *self._work_less(best, quickest)]
        self._save(best, quickest)
        # These end nothing: of what holds less than the cheapest choice, other choices may hide more.
        made = [trial for trial in self.trials.values() if not any(trial is other for other in aside)]
        if fits or any(self._budget.fits(each) and each.exposed <= quickest.exposed for each in made):
            yield list(self.trials.values())
        else:
            yield from (list(self.trials.values()) for _ in self._raise_multipliers(best, trial))

    @cached_property
    def _timed(self) -> PlanningProblem:
        """The program, whose model knows when values are needed. Most programs fit, and nobody asks."""
        place_uses(self._program, self._baseline.setting.target.compiler.fusion)
        return self._program

    def follow(self, chosen: Chosen) -> PartitionedProgram:
        """The trial by a choice; with copies recomputed, if it does not fit and enough of them can be freed, or so many
        that it may hold less than any other trial."""
        trial = self._with_copies(chosen, {})
        if self._budget.fits(trial):
            return trial
        held = held_copies(self._timed, chosen)
        freed = set[tuple[int, int]]()
        for _ in range(_FREED if held else 0):
            more = freed_gaps(held, trial.live - self._budget.limit, freed)
            left = live_without(held, more - freed, trial.live).max(initial=0.0)
            if more == freed or left > max(self._budget.limit, self._lowest):
                break
            freed = more
            trial = self._with_copies(chosen, dict(numbered_uses(held, freed)))
            if self._budget.fits(trial):
                break
        return trial

    def _with_copies(self, chosen: Chosen, copies: dict[PlannedUse, int]) -> PartitionedProgram:
        key = (*chosen, *copies.items())
        if key not in self.trials:
            self._forget()
            self.trials[key] = self._partitioned(plan_of(self._program, chosen, copies))
        return self.trials[key]

    def _forget(self) -> None:
        """Forgets the trials that will not be chosen, whatever comes: each is a copy of the program."""
        trials, budget, baseline = list(self.trials.values()), self._budget, self._baseline
        kept = [baseline, min(trials, key=lambda trial: trial.peak.total), *self._kept]
        kept += budget.candidates(budget.choosable(trials, baseline))
        for trial in trials:
            if not any(trial is other for other in kept):
                trial.forget()

    def is_good(self, best: Chosen) -> bool:
        """Whether the cheapest program that fits costs little more than the best choice, which may not fit."""
        trial = self._with_copies(best, {})
        return self._least <= trial.cost + LITTLE * trial.sending

    @property
    def _least(self) -> float:
        """The least cost of those that fit."""
        return min([trial.cost for trial in self.trials.values() if self._budget.fits(trial)], default=math.inf)

    @property
    def _lowest(self) -> float:
        """The least that a trial holds."""
        return min(trial.peak.total for trial in self.trials.values())

    def _raise_multipliers(self, best: Chosen, trial: PartitionedProgram) -> Iterator[None]:
        """Tries choices at rising multipliers of memory, one after the other."""
        program, chosen = self._timed, best
        multipliers = self._first_multipliers(trial)
        low, high, closer, idle = np.zeros_like(multipliers), None, 0, 0
        for _ in range(MULTIPLIERS):
            program.set_memory_multipliers(multipliers.tolist())
            before, count = self._lowest, len(self.trials)
            chosen = self._improver.improved(chosen, nearby=not idle)  # near it, chains of nodes keep their layouts
            trial = self.follow(chosen)
            fits = self._budget.fits(trial)
            low, high = (low, multipliers) if fits else (multipliers, high)
            idle = 0 if fits or self._lowest < before else idle + 1
            yield
            if (
                not self._improver.left
                or self.is_good(best)
                or closer == _CLOSER
                or idle == _IDLE
                or (not fits and trial.cost > min(self._least, self._budget.incumbent))
            ):
                break
            closer += int(high is not None and bool(low.any()))
            steep = _STEEPER if len(self.trials) == count else _STEEP
            multipliers = self._raised(multipliers, trial, steep) if high is None else _between(low, high)

    def _send_less(self, best: Chosen, trial: PartitionedProgram) -> tuple[Chosen, PartitionedProgram]:
        """The choice at the highest multiplier of work with which no more bytes are sent than may be, and its trial;
        the last one that was tried, if there is none."""
        program, chosen = self._program, best
        for number in range(1, _CHEAPENED + 1):
            program.model.set_work_multiplier(_WORK**-number)
            chosen = self._improver.improved(chosen)
            trial = self.follow(chosen)
            if not trial.sends_too_much_beside(self._baseline):
                break
        return chosen, trial

    def _work_less(self, best: Chosen, trial: PartitionedProgram) -> list[PartitionedProgram]:
        """Where a choice sends something, by a model of time, the trial by one for which work is dearer."""
        model = self._program.model
        if not (self._budget.by_time and trial.sent) or self._has_many:
            return []
        before = model.work_multiplier
        model.set_work_multiplier(_WORK * before)
        found = self._with_copies(self._improver.improved(best), {})
        model.set_work_multiplier(before)
        return [found] if found is not trial else []

    def _save(self, best: Chosen, trial: PartitionedProgram) -> None:
        """Where a choice holds much of a device's memory, tries those at multipliers of memory at the moments at which
        most is held, and between two of which one holds much less than the other: the same ones whatever is stated, so
        that none of two limits that they meet has the quicker program."""
        if not self._budget.memory or trial.peak.total <= _FULL * self._budget.memory or self._has_many:
            return
        program, chosen, multipliers = self._timed, best, np.zeros(1)
        usual = self._budget.usual or self._budget.limit
        byte = self._budget.byte(min(each.cost for each in self.trials.values()))
        jumps = list[tuple[PerOp, PerOp, float]]()
        for times in _SAVING:
            tight, before, held = self._tight(trial, usual), multipliers, trial.peak.total
            multipliers = np.maximum(multipliers, times * byte * tight / tight.sum())
            if not np.array_equal(multipliers, before):
                program.set_memory_multipliers(multipliers.tolist())
                chosen = self._improver.improved(chosen)
                trial = self._with_copies(chosen, {})
                if before.any() and trial.peak.total < _JUMP * held:
                    jumps.append((before, multipliers, held))
                elif jumps:  # dearer ones hold little less
                    break
        for low, high, held in jumps[-1:]:
            for _ in range(_CLOSER + 1):
                between = _between(low, high)
                program.set_memory_multipliers(between.tolist())
                trial = self._with_copies(self._improver.improved(best), {})
                low, high = (low, between) if trial.peak.total < held else (between, high)

    @property
    def _has_many(self) -> bool:
        """Whether there are so many candidates that no choices are made to hold less of what fits."""
        return sum(len(node.candidates) for node in self._program.model.nodes) >= _MANY

    def _first_multipliers(self, trial: PartitionedProgram) -> PerOp:
        """The multipliers of memory at which what is live at all tight moments costs half as much as sending it
        does."""
        tight, costs = self._tight(trial, self._budget.limit), self._baseline.setting.costs
        slowest = min([costs.bandwidth_of(axis.name) for axis in self._baseline.placed.mesh.axes], default=1.0)
        return tight / (tight.sum() * slowest) / 2

    def _tight(self, trial: PartitionedProgram, limit: float) -> PerOp:
        """Per op, 1 where most is live, and less the less is, but a share of that everywhere."""
        live, beside = trial.live, trial.peak.border
        least = beside + _NEARLY * max(limit - beside, 0.0)
        over = np.maximum(live - least, 0.0)
        return np.maximum(over / over.max(), _EVERYWHERE) if over.any() else (live == live.max()).astype(float)

    def _raised(self, multipliers: PerOp, trial: PartitionedProgram, steep: float) -> PerOp:
        """Multipliers that are so many times as high at the moments at which more is held than may be."""
        tight = self._tight(trial, self._budget.limit)
        return np.where(tight > 0, np.maximum(multipliers, multipliers.max() * tight) * steep, multipliers)


def _between(low: PerOp, high: PerOp) -> PerOp:
    """Multipliers between those at which a program does not fit and those at which it does."""
    return np.where(low > 0, np.sqrt(low * high), high / _STEEP)
