"""The best form of a program that may compute again what it would else hold."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from sdy_jax.ir.graph import Graph
from sdy_jax.ir.locations import is_computed_again
from sdy_jax.ir.operations import copied
from sdy_jax.lowering.interface.outcomes import InParts, Recomputed
from sdy_jax.lowering.recomputation.choice import price_that_saves, recomputed
from sdy_jax.lowering.recomputation.forward_loops import forward_loops
from sdy_jax.lowering.recomputation.program_prices import ProgramPrices
from sdy_jax.lowering.recomputation.segment_prices import Mark, priced_loops, priced_segments
from sdy_jax.lowering.whole_program.layout_search import LayoutSearch
from sdy_jax.lowering.whole_program.memory_search import PRICES
from sdy_jax.lowering.whole_program.partitioned_program import PartitionedProgram

_TRIES = 3
"""Programs that hold less and less that are planned, at most. Guessed: each is a plan; the last one saves all that can
be saved."""

_MORE = 1.2
"""How much more is saved than the last program held too much: layouts change with what is held. Guessed: with 1, the
next try misses the limit by little again; with more, more runs again than need be."""

FEW = 2
"""Prices of holding that are tried while something can be computed again or in parts, or is not known to fit nearly.
Guessed: each is a solve and a walk of a program that will change anyway."""

_NEAR = 0.6
"""The share of what it may hold that a program may hold too much, so that it is worth to try all prices. Guessed: a
search that is spared where layouts alone will hardly do."""


@dataclass(eq=False)
class Program:
    """A program with the trials that were tried at so many prices of holding, what it computes again, and what in
    parts."""

    search: LayoutSearch
    what: Recomputed | None = None
    prices: int = PRICES
    blocked: tuple[InParts, ...] = ()

    @property
    def at_all_prices(self) -> Program:
        """The same with trials at as many prices as there are."""
        return replace(self, prices=PRICES)

    @cached_property
    def found(self) -> list[PartitionedProgram]:
        """The trials."""
        return self.search.found(self.prices)

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
        """The best trial of those that fit; if there is none, that which holds least."""
        allowed = self.search.allowed(self.found)
        return self.search.best(allowed) if allowed else self.least

    def rank(self) -> tuple[float, float]:
        """What is less is better: what it costs, if it fits; of those that do not, what they hold."""
        return (self.best.cost if self.fits else math.inf), self.best.peak.total


def best_program(written: Program, named: Collection[Mark]) -> Program:
    """The best form of a program: as it is, or with something that is computed again, if that costs less than
    to fit otherwise, or if nothing else fits; and in loops where that takes less time than to hold it. Nothing is where
    `jax.checkpoint` says what is held.

    Args:
        written: the program as it is, with trials at few prices.
        named: the lines and types of values that are held where anything fits by that.

    Raises:
        MemoryLimitError: arguments and results alone, where they are stated, hold more than what is stated.
    """
    if any(is_computed_again(op.mlir.location) for op in written.search.graph.ops):
        return written.at_all_prices
    others = _quicker if written.search.budget.fits(written.cheapest) else _holding_less
    best = min([written, *others(written, named)], key=Program.rank)
    if not best.fits:
        best = min(best, written.at_all_prices, key=Program.rank)
    if best.what is not None:
        best.what = best.what._replace(bytes=written.cheapest.peak.total - best.best.peak.total)
    return best


def _quicker(written: Program, named: Collection[Mark]) -> Iterator[Program]:
    """One that computes again in a loop what takes longer to write in another loop, and to read."""
    price = 2 * written.search.costs.memory
    if not price:
        return
    copy = Graph(copied(written.search.graph.module))
    found = recomputed(copy, list(priced_loops(forward_loops(copy), _prices(written, copy), named)), price)
    if found is not None:
        yield Program(written.search.of(found[0]), found[1])


def _holding_less(written: Program, named: Collection[Mark]) -> Iterator[Program]:
    """Programs that hold less of what is needed later; the last one fits, if there is such."""
    for kept in dict.fromkeys((frozenset(named), frozenset[Mark]())):
        for less in chain(_holding_less_and_less(written, kept), _of_little(written, kept)):
            yield less
            if less.fits:
                return


def _holding_less_and_less(written: Program, kept: Collection[Mark]) -> Iterator[Program]:
    """Programs that hold as much less as the one before did hold too much, and in the end as little as they can."""
    saving, before = written.too_much, Recomputed()
    for number in range(_TRIES):
        found = _again(written, kept, saving if number < _TRIES - 1 else math.inf)
        if found is None or found[1] == before:
            return
        (graph, before), search = found, written.search
        less = _searched(search.of(graph), before)
        yield less
        saving = before.bytes + _MORE * less.too_much


def _of_little(written: Program, kept: Collection[Mark]) -> Iterator[Program]:
    """One that makes parts of others that it makes again, instead of holding what passes between them."""
    found = _again(written, kept, written.too_much, in_parts=False)
    if found is not None:
        yield _searched(written.search.of(found[0]), found[1])


def _again(
    written: Program, kept: Collection[Mark], saving: float, in_parts: bool = True
) -> tuple[Graph, Recomputed] | None:
    """The program with something that is computed again to save so many bytes; None where nothing can be saved."""
    copy = Graph(copied(written.search.graph.module))
    segments = list(priced_segments(copy, _prices(written, copy), written.search.setting.mesh_name, kept, in_parts))
    return recomputed(copy, segments, price_that_saves(segments, saving))


def _prices(written: Program, copy: Graph) -> ProgramPrices:
    return ProgramPrices(copy, written.least, written.search.setting.target.arrays)


def _searched(search: LayoutSearch, what: Recomputed) -> Program:
    """A program, with trials at all prices where few of them nearly have it fit."""
    quick = Program(search, what, FEW)
    is_near = quick.too_much <= _NEAR * search.limit
    return quick.at_all_prices if is_near and not quick.fits else quick
