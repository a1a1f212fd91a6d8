"""Recomputation: what is held between a forward and a backward pass, and what is computed again instead.

jax keeps what a derivative needs of the forward pass: of a scan, stacks with an entry per trip. Where a program does
not fit, some of these values are computed again of others, by the ops that made them. Which ones is a minimum cut: the
ops that run again cost their time, and each value that stays costs a Lagrange multiplier times its bytes, which rises
until enough is saved. Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016); the cut as in the
partitioner of PyTorch's AOTAutograd; `jax.checkpoint`, whose policies state by hand what is found here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from sdy_jax.ir.graph import Graph
from sdy_jax.ir.locations import RUN_AGAIN, is_computed_again, may_mention
from sdy_jax.ir.operations import copied
from sdy_jax.lowering.planner.problem.layout_plan import LayoutPlan, Rewrite
from sdy_jax.lowering.planner.report import InParts, Recomputed
from sdy_jax.lowering.planner.rewrites.forward_loops import forward_loops, without_unread
from sdy_jax.lowering.planner.rewrites.preparation import erase_dead_code
from sdy_jax.lowering.planner.rewrites.recomputation_prices import (
    Mark,
    PricedSegment,
    ProgramPrices,
    priced_loops,
    priced_segments,
)
from sdy_jax.lowering.planner.search.layout_search import LayoutSearch
from sdy_jax.lowering.planner.search.memory_search import FEW, LITTLE, MULTIPLIERS, GivenUp
from sdy_jax.lowering.planner.search.partitioned_program import PartitionedProgram

# What of a program is computed again, so that it holds so many bytes less.

_RANGE = 1e6
"""The multipliers of memory that are tried: up to so many times what all ops take by all bytes, and down to that part.
Guessed, a guard: wide enough that one end saves nothing and the other all that can be."""

_STEPS = 24
"""How often the range of multipliers is halved, in the logarithm. Guessed: 24 leave a factor of 1 + 2e-6 of a range of
1e12; each is a minimum cut."""


def recomputed(graph: Graph, segments: Sequence[PricedSegment], multiplier: float) -> tuple[Graph, Recomputed] | None:
    """A program that computes again what costs less than it does to hold it.

    Args:
        graph: the program, which is rewritten.
        segments: what of it may run again.
        multiplier: of memory, in seconds per byte that is held.

    Returns:
        The program, and what is computed again; None where that is nothing.
    """
    found = [(segment, segment.again(multiplier)) for segment in segments]
    saved = sum([segment.saved(again) for segment, again in found])
    if saved <= 0:
        return None
    what = Recomputed(
        tuple(value for segment, again in found for value in segment.not_held(again)),
        tuple(op for segment, again in found for op in segment.ran(again)),
        saved,
    )
    for segment, again in found:
        segment.run(again)
    return without_unread(erase_dead_code(Graph(graph.module))), what


def multiplier_that_saves(segments: Sequence[PricedSegment], saving: float) -> float:
    """The least multiplier of memory at which so many bytes are held less; the highest one tried, if that is never."""

    def saved(multiplier: float) -> float:
        return sum([segment.saved(segment.again(multiplier)) for segment in segments])

    seconds, size = (sum([getattr(segment, name) for segment in segments]) for name in ("seconds", "bytes"))
    if not (seconds and size):
        return 0.0
    low, high = math.log(seconds / size / _RANGE), math.log(seconds / size * _RANGE)
    for _ in range(_STEPS if saved(math.exp(high)) >= saving else 0):
        half = (low + high) / 2
        low, high = (low, half) if saved(math.exp(half)) >= saving else (half, high)
    return math.exp(high)


# The best form of a program that may compute again what it would else hold.

_FURTHER = 1.25
"""How many times as much is saved, too, where what fits is dear. Measured (2026-11, scanned layers on eight chips of
v5e): at 0.75 of what a step holds it takes 725 us as the form with which it first fits, whose choices are dear, and 592
as the next one. Guessed: with less, that is the same form; with more, it computes more again than need be."""

_TRIES = 3
"""Programs that hold less and less that are planned, at most. Guessed: each is a plan; the last one saves all that can
be saved."""

_MORE = 1.2
"""How much more is saved than the last program held too much: layouts change with what is held. Guessed: with 1, the
next try misses the limit by little again; with more, more runs again than need be."""

_NEAR = 0.6
"""The share of what it may hold that a program may hold too much, so that it is worth to try all multipliers. Guessed:
a search that is spared where layouts alone will hardly do."""


@dataclass(eq=False)
class ProgramForm:
    """A program with the trials that were tried at so many multipliers of memory, what it computes again, what in
    parts, and how it was rewritten for that; `incumbent`: the cost of another program that fits."""

    search: LayoutSearch
    what: Recomputed | None = None
    multipliers: int = MULTIPLIERS
    blocked: tuple[InParts, ...] = ()
    rewrites: tuple[tuple[Rewrite, LayoutPlan | None], ...] = ()
    incumbent: float = math.inf

    @property
    def at_all_multipliers(self) -> ProgramForm:
        """The same with trials at as many multipliers as there are."""
        return replace(self, multipliers=MULTIPLIERS)

    @cached_property
    def found(self) -> list[PartitionedProgram]:
        """The trials."""
        return self.search.found(self.multipliers)

    @property
    def least(self) -> PartitionedProgram:
        """The trial that holds least."""
        return min(self.found, key=lambda trial: trial.peak.total)

    @property
    def cheapest(self) -> PartitionedProgram:
        """The trial that costs least, whether it fits or not."""
        return min(self.found, key=lambda trial: trial.cost)

    @property
    def too_much(self) -> float:
        """The bytes that it holds too much: by its cheapest trial, if another one fits."""
        return (self.cheapest if self.fits else self.least).peak.total - self.search.limit

    @property
    def fits(self) -> bool:
        return bool(self.search.allowed(self.found))

    @property
    def best(self) -> PartitionedProgram:
        """The best trial of those that may be chosen; if there is none, that which holds least."""
        choosable = self.search.choosable(self.found)
        return self.search.best(choosable) if choosable else self.least

    def of(self, graph: Graph) -> LayoutSearch:
        """The trials over another form of it; none is worth searching that costs more than the incumbent."""
        return self.search.of(graph, self.best.cost if self.fits else self.incumbent)

    def give_up_if_dear(self) -> None:
        """Ends the search for a form that fits, where this one does for more than the incumbent's cost, or does not,
        though it costs more.

        Raises:
            GivenUp: as described.
        """
        tried = [self.best] if self.fits else [trial for trial in self.found if trial is not self.search.baseline]
        if any(trial.cost > self.incumbent for trial in tried):
            raise GivenUp

    @property
    def is_dear(self) -> bool:
        """Whether even the trial that costs least costs more than the incumbent."""
        return self.search.budget.is_dear(self.cheapest)

    def is_dear_beside(self, written: ProgramForm) -> bool:
        """Whether this form, which fits, costs more than the program that it is a form of where memory costs nothing,
        by much beside what that sends. A smaller limit may then have a cheaper form."""
        free = written.cheapest
        return self.best.exposed > free.exposed + LITTLE * free.sending

    def after(self, rewrite: Rewrite) -> tuple[tuple[Rewrite, LayoutPlan | None], ...]:
        """How another form of it is rewritten, made of this one by what its trial says that holds least."""
        return (*self.rewrites, (rewrite, self.least.plan))

    def rank(self) -> tuple[float, float]:
        """What is less is better: what it costs beside what is hidden, if it fits; of those that do not, what they
        hold."""
        return (self.best.exposed if self.fits else math.inf), self.best.peak.total


def best_program(written: ProgramForm, named: Collection[Mark]) -> ProgramForm:
    """The best form of a program: as it is, or with something that is computed again, if that costs less than
    to fit otherwise, or if nothing else fits; and in loops where that takes less time than to hold it. Nothing is where
    `jax.checkpoint` says what is held.

    Args:
        written: the program as it is, with trials at few multipliers.
        named: the lines and types of values that are held where anything fits by that.

    Raises:
        MemoryLimitError: arguments and results alone, where they are stated, hold more than what is stated.
        GivenUp: nothing fits as it is written, and what is rewritten costs more than the incumbent.
    """
    graph = written.search.graph
    if may_mention(graph.module, RUN_AGAIN) and any(is_computed_again(op.mlir.location) for op in graph.ops):
        return written.at_all_multipliers
    others = _quicker if written.search.budget.fits(written.cheapest) else _holding_less
    best = min([written, *others(written, named)], key=ProgramForm.rank)
    if not best.fits:
        best = min(best, written.at_all_multipliers, key=ProgramForm.rank)
    if best.what is not None:
        best.what = best.what._replace(bytes=written.cheapest.peak.total - best.best.peak.total)
    return best


def _quicker(written: ProgramForm, named: Collection[Mark]) -> Iterator[ProgramForm]:
    """One that computes again in a loop what takes longer to write in another loop, and to read."""
    multiplier = 2 * written.search.costs.memory
    if not multiplier or not forward_loops(written.search.graph):
        return
    rewrite = Rewrite("loops", multiplier, keeps_named=True)
    found = rewritten(written, rewrite, named)
    if found is not None:
        yield ProgramForm(written.of(found[0]), found[1], rewrites=written.after(rewrite))


def _holding_less(written: ProgramForm, named: Collection[Mark]) -> Iterator[ProgramForm]:
    """Programs that hold less of what is needed later; the last one fits, if there is such, or the one before, if that
    is dear."""
    kept = frozenset(named)
    for keeps_named in (True, False) if kept else (True,):
        held = kept if keeps_named else frozenset[Mark]()
        again = Rewrite("again", keeps_named=keeps_named)
        of_little = replace(again, in_parts=False)  # makes parts of others that run again, instead of holding them
        for less in chain(*(_holding_less_and_less(written, each, held) for each in (again, of_little))):
            if not written.fits:
                less.give_up_if_dear()
            yield less
            if less.fits:
                if less.is_dear_beside(written) and less.what is not None:
                    yield from _holding(written, of_little, held, _FURTHER * less.what.bytes)
                return


def _holding_less_and_less(written: ProgramForm, again: Rewrite, kept: Collection[Mark]) -> Iterator[ProgramForm]:
    """Programs that hold as much less as the one before did hold too much, and in the end as little as they can."""
    saving, before = written.too_much, Recomputed()
    for number in range(_TRIES):
        found = _saving(written, again, kept, saving if number < _TRIES - 1 else math.inf)
        if found is None or found[2] == before:
            return
        rewrite, graph, before = found
        less = _searched(written, graph, before, rewrite)
        yield less
        if less.is_dear:  # so is what computes more again
            return
        saving = before.bytes + _MORE * less.too_much


def _holding(written: ProgramForm, again: Rewrite, kept: Collection[Mark], saving: float) -> Iterator[ProgramForm]:
    """One that holds so many bytes less."""
    found = _saving(written, again, kept, saving)
    if found is not None:
        rewrite, graph, what = found
        yield _searched(written, graph, what, rewrite)


def _saving(
    written: ProgramForm, again: Rewrite, kept: Collection[Mark], saving: float
) -> tuple[Rewrite, Graph, Recomputed] | None:
    """The program with something that is computed again to save so many bytes, and how it is rewritten for that; None
    where nothing can be saved."""
    copy = Graph(copied(written.search.graph.module))
    segments = _segments(written, copy, again, kept)
    rewrite = replace(again, memory_multiplier=multiplier_that_saves(segments, saving))
    found = recomputed(copy, segments, rewrite.memory_multiplier)
    return None if found is None else (rewrite, *found)


def rewritten(written: ProgramForm, rewrite: Rewrite, named: Collection[Mark]) -> tuple[Graph, Recomputed] | None:
    """A program with something that is computed again; None where that is nothing."""
    copy = Graph(copied(written.search.graph.module))
    segments = _segments(written, copy, rewrite, named if rewrite.keeps_named else ())
    return recomputed(copy, segments, rewrite.memory_multiplier)


def _segments(written: ProgramForm, copy: Graph, rewrite: Rewrite, kept: Collection[Mark]) -> list[PricedSegment]:
    """What of a copy of a program could run again."""
    prices = ProgramPrices(copy, written.least, written.search.setting.target.arrays)
    if rewrite.kind == "loops":
        return list(priced_loops(forward_loops(copy), prices, kept))
    return list(priced_segments(copy, prices, written.search.setting.mesh_name, kept, rewrite.in_parts))


def _searched(written: ProgramForm, graph: Graph, what: Recomputed, rewrite: Rewrite) -> ProgramForm:
    """A form of a program, with trials at all multipliers where few of them nearly have it fit."""
    quick = ProgramForm(written.of(graph), what, FEW, rewrites=written.after(rewrite), incumbent=written.incumbent)
    is_near = quick.too_much <= _NEAR * quick.search.limit
    return quick.at_all_multipliers if is_near and not quick.fits else quick
