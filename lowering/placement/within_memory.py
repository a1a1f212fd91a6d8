"""The search for a program that keeps within a device's memory.

First what costs least is walked. Where that holds too much, copies of values in other layouts are freed between their
uses and made again: those that cost least for what they free at the moments at which too much is live. In the end
holding a byte gets a price at these moments, which rises until the choice for the whole program fits.
See docs/explanation/memory.md#when-the-cheapest-program-does-not-fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdy_jax.ir.graph import Graph
from sdy_jax.lowering.placement.beside_work import hidden_by_work
from sdy_jax.lowering.placement.copies import HeldCopy, PlannedUse
from sdy_jax.lowering.placement.held_copies import held_copies
from sdy_jax.lowering.placement.layout_plans import plan_of
from sdy_jax.lowering.placement.live_bytes import Peak, peak_of
from sdy_jax.lowering.placement.modelled import ModelledProgram
from sdy_jax.lowering.placement.partitioner import Partitioner
from sdy_jax.lowering.placement.report import PartitionReport
from sdy_jax.lowering.placement.uses_in_time import place_uses
from sdy_jax.lowering.placement.walked import LayoutPlan
from sdy_jax.lowering.planning.program_model import Chosen
from sdy_jax.lowering.targets.target import Target

_WORTH = 1 / 16
"""The share of what the proposal's reshards cost on average that another one has to save: each is time to compile, and
latency that a model of bytes does not know. Measured (2026-11, `scripts/bench_bytes`): without it a transformer's step
with replicated weights on 2 x 4 has 94 collectives, with it 77 for 0.6 percent more cost. Half as much would have the
data-parallel step of twelve flax layers compile for 1.4 as long, with 226 instead of 200 collectives for 1 percent
less."""

_LATENCIES = 0.25
"""The latencies that it has to save at most, where the model knows them. Measured (2026-11, `scripts/bench_models`):
the proposal for an 8B model on 256 chips moves whole activations, 0.1 s each on average; a sixteenth of that for each
gather of a layer had stacks gathered before the loops, which held twice of what a chip has."""

PRICES = 8
"""Prices of holding that are tried. Guessed, a guard of planning time: each is a solve and a walk; with fewer, the
search ends above a limit that some price would meet."""

_TRIES = 8
"""Prices of work that are tried. Guessed, a guard: the price is 4^8 times the first by then, and all work counts."""

_DEARER = 4.0
"""By how much the price of work rises from try to try. Guessed: with less, more tries; with more, bytes are paid for
work that a lower price would have saved as well."""

_STEEPER = 16.0
"""By how much the price of holding rises while it changes nothing. Measured (2026-11, `scripts/bench_models`): of an 8B
model on 256 chips all layers are gathered in the loops at 256 times the first price; of prices that rise by four the
last ones were never tried."""

_STEEP = 4.0
"""By how much it rises where it does. Measured (2026-11, `scripts/bench_models`): the same model's layers, unrolled,
held 14.8 GiB of 14.2 at 16 times the first price and 9.3 at 64 times; at 256 times whole activations were gathered at
moments that nobody had priced."""

_CLOSER = 2
"""Prices that are tried between the lowest at which the program fits and the highest at which it does not. Guessed:
each is a solve and a walk; with none, a plan may hold much less than it may, and send more for it."""

_IDLE = 3
"""Prices that are tried in a row though nothing holds less than before. Guessed: with 1, the search gives up before the
steep prices; with more, it takes longer to say that nothing fits."""

_LITTLE = 0.1
"""The share of what the best choice's collectives cost that a program that fits may cost more, before others are tried.
Guessed: with 0, each program that frees copies is searched at all prices; with much, dear plans stay."""

_FULL = 0.25
"""The share of a device's memory from which on it matters how much of it a program holds that fits. Guessed: with less,
small programs are searched as if memory were short, which takes some solves each."""

_SAVING = (1.0, 1.0, 8.0, 64.0)
"""Choices that are made, where it does: at the price that holding always has, and at higher ones, as a compiler may
hide what is sent instead. Measured (2026-11, `scripts/bench_models`): an 8B model on 64 H100s that gathers weights in
each trip, not before the loop, takes 0.92 of the time by the model, which then counts what is hidden, and holds 8.3 GiB
instead of 28.5."""

_HIDDEN = 0.6
"""What the time of collectives counts that run beside other work: they take a part of the memory's rate and of the
units, others may be on the links, and a compiler may not hide what the model says it does. Where nothing is held for
it, twice the bytes have to save a good deal. Measured (2026-11, `scripts/bench_models`): BERT on 8 H100s sends 1.1 GiB
in 42 ms by the model, or 2.25 in 38; with less, it sends the latter."""

_COMPARED = 2
"""How often its small price holding has where walks are compared. Measured (2026-11, `scripts/bench_models`): a step
that holds 48 of 60 GiB for 4 percent of the time, as hidden collectives count, stood beside one that holds 11, and won
with 1."""

_CHEAPER = 4.0
"""By how much the price of work falls from try to try, where its savings are paid for with bytes. Guessed, as
`_DEARER`."""

_CHEAPENED = 3
"""Prices of work that are tried there. Guessed: each is a solve and a walk; with none, plans by time may send more
bytes than op by op."""

_SAME = 1 + 1e-9
"""Given: times and bytes are sums of floats, whose rounding is no difference."""

_FREED = 2
"""How often more copies are freed, where what was freed before was not enough. Guessed: freeing one copy moves the peak
to another moment; with more, solves at a price of holding would do better."""

_NEARLY = 0.5
"""The share of what may be held beside arguments and results from which on holding has a price. Guessed: with 1,
moments that are nearly full are filled by what is freed at the worst one; with 0, all is paid for that never was in the
way."""

_EVERYWHERE = 0.5
"""The share of the price at the worst moment that holding has at all others. Measured (2026-11, `scripts/bench_models`,
70B model): without it whole activations were gathered at moments that nobody had priced."""

PerOp = NDArray[np.float64]
"""A number per op of the program before it is walked."""


@dataclass(eq=False)
class Walk:
    """A walk over a copy of the program, and what it inserted; the devices for which it is. One that will not be
    chosen may be forgotten: its figures stay, its copy of the program goes."""

    walker: Partitioner
    report: PartitionReport
    target: Target

    @cached_property
    def cost(self) -> float:
        """What collectives and each device's own work cost."""
        return self.walker.cost()

    @cached_property
    def exposed(self) -> float:
        """What it costs but for most of the time of the collectives that the compiler hides by itself."""
        walker = self.walker
        if walker.costs.unit != "seconds":
            return self.cost
        inserted = walker.placement.inserted
        hidden = hidden_by_work(walker.graph.module, inserted, walker.mesh, walker.costs, self.target.compiler)
        return self.cost - (1 - _HIDDEN) * hidden

    @cached_property
    def peak(self) -> Peak:
        """What a device holds at most."""
        return peak_of(Graph(self.walker.graph.module), self.target)

    @property
    def sends(self) -> bool:
        """Whether anything is sent that the program does not send itself."""
        return any(record.wire_bytes and record.origin == "partitioner" for record in self.report.collectives)

    @cached_property
    def sending(self) -> float:
        """What collectives cost."""
        return self.walker.sending_time()

    @cached_property
    def sent(self) -> float:
        """The bytes that a device sends."""
        return sum([record.wire_bytes * record.estimated_times for record in self.report.collectives])

    def sends_more_than(self, other: Walk) -> bool:
        """Whether a device sends more bytes than by another walk."""
        return self.sent > other.sent * _SAME

    def forget(self) -> None:
        """Keeps what it costs and holds, and lets the copy of the program go."""
        if hasattr(self, "walker"):
            _ = self.cost, self.exposed, self.sending, self.sent, self.live
            self.peak = replace(self.peak, live=(), at=())
            del self.walker, self.report

    @cached_property
    def live(self) -> PerOp:
        """The bytes that are live while an op runs, or what was inserted before it, arguments and results included."""
        found, most = np.zeros(len(self.walker.number)), 0.0
        numbers = self.walker.remaining
        for op, live in self.peak.at:
            most = max(most, live)
            if op in numbers:
                found[numbers[op]], most = max(found[numbers[op]], most), 0.0
        return found + self.peak.border


Walked = Callable[[LayoutPlan], Walk]


def best_choice(program: ModelledProgram, latency: float = 0.0) -> Chosen:
    """The best choice that was found, if holding costs nothing; of those that do not do too much work, at a price of
    work that rises where the best one does. `latency`: that of a collective; 0 where that is not known."""
    model, start = program.model, program.start
    worth = _WORTH * model.mean_reshard(start)
    model.charge_each_reshard(min(worth, _LATENCIES * latency or math.inf))
    for number in range(1, _TRIES + 1):
        found = program.improved(start)
        if model.operations(found) <= program.most_operations:
            return found
        model.price_work(_DEARER**number)
    return start


class Room(NamedTuple):
    """What a program may hold.

    `limit`: bytes per device. `memory`: of these a device has; 0 where that is not known. `holding`: the share of a
    program's cost that it is worth to hold nothing instead of all of it. `saves_bytes`: it may send no more than the
    proposal, where that fits: a model of time says what it saves by that, but not what it costs others on the links.
    `known`: what a program costs that is known to fit.
    """

    limit: float
    memory: float
    holding: float
    saves_bytes: bool = False
    known: float = math.inf

    def byte(self, cost: float) -> float:
        """What it is worth not to hold a byte, in a program of this cost: a little, and always, where the memory of
        devices is known."""
        return self.holding * cost / self.memory if self.memory else 0.0

    def fits(self, walk: Walk) -> bool:
        """Whether a walk keeps within the limit."""
        return walk.peak.total <= self.limit

    def allows(self, walk: Walk, proposed: Walk) -> bool:
        """Whether a walk may be chosen, beside the proposal: it fits, and sends no more than may be."""
        if not self.fits(walk):
            return False
        return not (self.saves_bytes and self.fits(proposed) and walk.sends_more_than(proposed))

    def best(self, walks: Sequence[Walk]) -> Walk:
        """The walk that costs least beside what is hidden, with a little for what it holds."""
        byte = _COMPARED * self.byte(min(walk.cost for walk in walks))
        return min(walks, key=lambda walk: (walk.exposed + byte * walk.peak.total, walk.cost))

    def candidates(self, walks: Sequence[Walk]) -> list[Walk]:
        """Those of which one is the best, whatever a byte is worth: of no other one is less exposed and held."""
        found = list[Walk]()
        for walk in sorted(walks, key=lambda walk: (walk.exposed, walk.cost)):
            if not found or (self.memory and walk.peak.total < found[-1].peak.total):
                found.append(walk)
        return found


def tried(
    program: ModelledProgram, best: Chosen, proposed: Walk, room: Room, walked: Walked, tries: int = PRICES
) -> list[Walk]:
    """The walks by the best choice and, where it does not fit, with copies made again, and at rising prices of holding
    until one fits, and then a little below. A walk that does not fit and costs more than one that does ends it: those
    that hold less cost more. Where it fits, but sends more bytes than the proposal to save work, walks at falling
    prices of work if it may not; and where it holds much of a device's memory, walks by what is best if holding has its
    small price.
    """
    search = _Search(program, proposed, room, walked)
    walk = search.follow(best)
    if not room.fits(walk):
        search.raise_prices(best, walk, tries)
        return list(search.known.values())
    if not room.allows(walk, proposed):
        best, walk = search.send_less(best, walk)
    if room.memory and walk.peak.total > _FULL * room.memory:
        search.save(best, walk)
    return list(search.known.values())


class _Search:
    """The walks that were made, by choice and copies."""

    def __init__(self, program: ModelledProgram, proposed: Walk, room: Room, walked: Walked):
        self._program, self._proposed, self._room, self._walked = program, proposed, room, walked
        self.known: dict[object, Walk] = {tuple(program.start): proposed}

    @cached_property
    def _timed(self) -> ModelledProgram:
        """The program, whose model knows when values are needed. Most programs fit, and nobody asks."""
        place_uses(self._program, self._proposed.target.compiler.fusion)
        return self._program

    def follow(self, chosen: Chosen) -> Walk:
        """The walk by a choice; with copies made again, if it does not fit and enough of them can be freed."""
        walk = self._with_copies(chosen, {})
        if self._room.fits(walk):
            return walk
        held = held_copies(self._timed, chosen)
        freed = set[tuple[int, int]]()
        for _ in range(_FREED if held else 0):
            more = _freed(held, walk.live - self._room.limit, freed)
            if more == freed:
                break
            freed = more
            walk = self._with_copies(chosen, dict(_numbered(held, freed)))
            if self._room.fits(walk):
                break
        return walk

    def _with_copies(self, chosen: Chosen, copies: dict[PlannedUse, int]) -> Walk:
        key = (*chosen, *copies.items())
        if key not in self.known:
            self._forget()
            self.known[key] = self._walked(plan_of(self._program, chosen, copies))
        return self.known[key]

    def _forget(self) -> None:
        """Forgets the walks that will not be chosen, whatever comes: each is a copy of the program."""
        walks, room, proposed = list(self.known.values()), self._room, self._proposed
        kept = [proposed, min(walks, key=lambda walk: walk.peak.total)]
        kept += room.candidates([walk for walk in walks if room.allows(walk, proposed)])
        for walk in walks:
            if not any(walk is other for other in kept):
                walk.forget()

    def is_good(self, best: Chosen) -> bool:
        """Whether the cheapest program that fits costs little more than the best choice, which may not fit."""
        walk = self._with_copies(best, {})
        return self._least <= walk.cost + _LITTLE * walk.sending

    @property
    def _least(self) -> float:
        """The least cost of those that fit."""
        return min([walk.cost for walk in self.known.values() if self._room.fits(walk)], default=math.inf)

    @property
    def _lowest(self) -> float:
        """The least that a walk holds."""
        return min(walk.peak.total for walk in self.known.values())

    def raise_prices(self, best: Chosen, walk: Walk, tries: int) -> None:
        """Tries choices at so many rising prices of holding, at most."""
        program, chosen = self._timed, best
        prices = self._first_prices(walk)
        low, high, closer, idle = np.zeros_like(prices), None, 0, 0
        for _ in range(tries):
            program.charge_holding(prices.tolist())
            before, known = self._lowest, len(self.known)
            chosen = program.improved(chosen)
            walk = self.follow(chosen)
            fits = self._room.fits(walk)
            low, high = (low, prices) if fits else (prices, high)
            idle = 0 if fits or self._lowest < before else idle + 1
            if (
                not program.left
                or self.is_good(best)
                or closer == _CLOSER
                or idle == _IDLE
                or (not fits and walk.cost > min(self._least, self._room.known))
            ):
                break
            closer += int(high is not None and bool(low.any()))
            steep = _STEEPER if len(self.known) == known else _STEEP
            prices = self._raised(prices, walk, steep) if high is None else _between(low, high)

    def send_less(self, best: Chosen, walk: Walk) -> tuple[Chosen, Walk]:
        """The choice at the highest price of work with which no more bytes are sent than by the proposal, and its walk;
        the last one that was tried, if there is none."""
        program, chosen = self._program, best
        for number in range(1, _CHEAPENED + 1):
            program.model.price_work(_CHEAPER**-number)
            chosen = program.improved(chosen)
            walk = self.follow(chosen)
            if not walk.sends_more_than(self._proposed):
                break
        return chosen, walk

    def save(self, best: Chosen, walk: Walk) -> None:
        """Tries choices at prices of holding a byte at the moments at which most is held."""
        program, chosen, prices = self._timed, best, np.zeros(1)
        byte = self._room.byte(min(known.cost for known in self.known.values()))
        for times in _SAVING:
            tight, before = self._tight(walk), prices
            prices = np.maximum(prices, times * byte * tight / tight.sum())
            if not np.array_equal(prices, before):
                program.charge_holding(prices.tolist())
                chosen = program.improved(chosen)
                walk = self.follow(chosen)

    def _first_prices(self, walk: Walk) -> PerOp:
        """The prices of holding at which what is live at all tight moments costs half as much as sending it does."""
        tight, walker = self._tight(walk), self._proposed.walker
        slowest = min([walker.costs.bandwidth_of(axis.name) for axis in walker.mesh.axes], default=1.0)
        return tight / (tight.sum() * slowest) / 2

    def _tight(self, walk: Walk) -> PerOp:
        """Per op, 1 where most is live, and less the less is, but a share of that everywhere."""
        live, beside = walk.live, walk.peak.border
        least = beside + _NEARLY * max(self._room.limit - beside, 0.0)
        over = np.maximum(live - least, 0.0)
        return np.maximum(over / over.max(), _EVERYWHERE) if over.any() else (live == live.max()).astype(float)

    def _raised(self, prices: PerOp, walk: Walk, steep: float) -> PerOp:
        """Prices that are so many times as high at the moments at which more is held than may be."""
        tight = self._tight(walk)
        return np.where(tight > 0, np.maximum(prices, prices.max() * tight) * steep, prices)


def _between(low: PerOp, high: PerOp) -> PerOp:
    """Prices between those at which a program does not fit and those at which it does."""
    return np.where(low > 0, np.sqrt(low * high), high / _STEEP)


# Copies.


def _freed(held: Sequence[HeldCopy], over: PerOp, freed: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """The gaps of copies, by copy and use, in which they are freed, and more of them, so that nowhere more is live than
    may be, if possible: at the worst moment first, what costs least per byte, and is not needed for longest."""
    found, over = set(freed), over.copy()
    gaps = {
        (n, i): (begin, end)
        for n, copy in enumerate(held)
        for i, (begin, end) in enumerate(copy.gaps())
        if begin < end and copy.bytes and copy.cost < math.inf and (n, i) not in freed
    }
    order = sorted(gaps, key=lambda gap: (held[gap[0]].cost / held[gap[0]].bytes, gaps[gap][0] - gaps[gap][1], gap))
    while over.max(initial=0.0) > 0:
        worst = over.argmax().item()
        gap = next((gap for gap in order if gap not in found and gaps[gap][0] <= worst < gaps[gap][1]), None)
        if gap is None:
            over[worst] = 0.0
            continue
        found.add(gap)
        over[slice(*gaps[gap])] -= held[gap[0]].bytes
    return found


def _numbered(held: Sequence[HeldCopy], freed: set[tuple[int, int]]) -> Iterator[tuple[PlannedUse, int]]:
    """Which copy serves each use, counted from 1, of the values of which some are made again."""
    for n, copy in enumerate(held):
        if any((n, i) in freed for i in range(len(copy.uses))):
            number = 1
            for i, use in enumerate(copy.uses):
                yield use.planned, number
                number += (n, i) in freed
