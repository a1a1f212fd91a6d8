"""Segments of a program with prices: what runs again at a price of a byte, and what that saves."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.locations import place_of
from sdy_jax.lowering.analysis.fusion import moves
from sdy_jax.lowering.interface.outcomes import NotHeld, RanAgain
from sdy_jax.lowering.recomputation.forward_loops import ForwardLoop, forward_loops
from sdy_jax.lowering.recomputation.min_cut import ops_to_run_again
from sdy_jax.lowering.recomputation.program_prices import ProgramPrices
from sdy_jax.lowering.recomputation.segments import Segment, can_run_again
from sdy_jax.lowering.recomputation.stretches import Stretch
from sdy_jax.lowering.recomputation.trip_reruns import run_trips_again
from sdy_jax.representation.type_text import type_text

Mark = tuple[str, str]
"""The line and the type, without axes, of a value."""

_ANEW = 1.001
"""What is not held yet counts a little more: of a value and its entry in a stack that is there, that stays. Guessed:
anything above 1 breaks the tie."""


class Rerun(NamedTuple):
    """How ops of a segment run again.

    `may_run`: whether an op may. `gone`: what is not held where a needed value is not. `run`: lets ops run again in the
    program.
    """

    may_run: Callable[[Op], bool]
    gone: Callable[[Value, float], NotHeld]
    run: Callable[[Collection[Op]], None]


class PricedSegment:
    """A segment, with times and bytes for all executions together.

    Args:
        segment: the ops, and what is needed of them.
        prices: of ops and values.
        now: the bytes that are held now: the others are computed of that where they are needed, by one kernel.
        entries: how many of a value are held.
        rerun: how ops run again here.
    """

    def __init__(
        self,
        segment: Segment,
        prices: ProgramPrices,
        now: float,
        entries: int,
        rerun: Rerun,
    ):
        self._segment, self._prices, self.bytes = segment, prices, now
        self._entries, self._gone, self.run = entries, rerun.gone, rerun.run
        able = {op: rerun.may_run(op) and can_run_again(op) for op in segment.ops}
        self._times = {op: prices.seconds(op) if is_able else math.inf for op, is_able in able.items()}
        self._known: dict[float, frozenset[Op]] = {}

    @cached_property
    def seconds(self) -> float:
        """The time of all ops that may run again."""
        return sum([time for time in self._times.values() if time < math.inf])

    def again(self, price: float) -> frozenset[Op]:
        """The ops that run again at a price of a byte."""
        if price not in self._known:
            self._known[price] = ops_to_run_again(self._segment, self._times.__getitem__, self._held_bytes, price)
        return self._known[price]

    def saved(self, again: frozenset[Op]) -> float:
        """The bytes that are held less."""
        needed, held = self._segment.needed, self._segment.held(again)
        return self.bytes - sum([needed[value] if value in needed else self._held_bytes(value) for value in held])

    def _held_bytes(self, value: Value) -> float:
        return _ANEW * self._entries * self._prices.bytes_of(value)

    def not_held(self, again: frozenset[Op]) -> list[NotHeld]:
        """What is gone."""
        held = set(map(_before_moves, self._segment.held(again)))
        needed = self._segment.needed.items()
        return [self._gone(value, size) for value, size in needed if _before_moves(value) not in held]

    def ran(self, again: frozenset[Op]) -> list[RanAgain]:
        """The ops that run again and take time, in order."""
        ran = [op for op in self._segment.ops if op in again and self._times[op] > 0]
        return [RanAgain(op.title, op.mlir.location, self._prices.operations(op), self._times[op]) for op in ran]


def priced_segments(
    graph: Graph, prices: ProgramPrices, mesh_name: str, kept: Collection[Mark], in_parts: bool
) -> Iterator[PricedSegment]:
    """The segments of a program of which ops could run again, in the order in which they can be rewritten.

    Args:
        graph: the program.
        prices: of its ops and values.
        mesh_name: the program's mesh.
        kept: the marks of values that are not recomputed.
        in_parts: what is recomputed is so part by part, of what passes between them.
    """
    loops = forward_loops(graph)
    if prices.peak is not graph.main:
        stretch = Stretch(graph, prices.peak.ancestor_in(graph.main.blocks[0]), mesh_name)
        yield _of_stretch(stretch, prices, loops, kept, in_parts)
    yield from priced_loops(loops, prices, kept)


def priced_loops(
    loops: Iterable[ForwardLoop], prices: ProgramPrices, kept: Collection[Mark]
) -> Iterator[PricedSegment]:
    """Those of them that are bodies of loops."""
    for forward in loops:
        yield _of_loop(forward, prices, kept)


def _is_kept(op: Op, kept: Collection[Mark]) -> bool:
    """Whether an op makes a value that is not recomputed."""
    if not kept:
        return False
    line = place_of(op.mlir.location).line
    return any((line, type_text(value.dtype, value.shape, None)) in kept for value in op.results)


def _of_stretch(
    stretch: Stretch, prices: ProgramPrices, loops: Collection[ForwardLoop], kept: Collection[Mark], in_parts: bool
) -> PricedSegment:
    apart = {op for forward in loops for op in (forward.loop, *map(stretch.op_around, forward.reads))}
    segment = stretch.segment(lambda value: 0.0 if value.owner in apart else prices.bytes_of(value), in_parts)

    def gone(value: Value, size: float) -> NotHeld:
        assert isinstance(value.owner, Op)
        return NotHeld(value.dtype, value.shape or (), size, value.owner.mlir.location)

    def run(again: Collection[Op]) -> None:
        stretch.run_again(segment, again)

    def may_run(op: Op) -> bool:
        return op not in apart and not _is_kept(op, kept)

    now = prices.bytes_at_peak([op for op in segment.ops if op not in apart])
    return PricedSegment(segment, prices, now, 1, Rerun(may_run, gone, run))


def _of_loop(forward: ForwardLoop, prices: ProgramPrices, kept: Collection[Mark]) -> PricedSegment:
    sizes = dict[Value, float]()
    for stack in forward.stacks:
        size = forward.trips * prices.taken_bytes(stack.update, 1)
        sizes[stack.entry] = sizes.get(stack.entry, 0.0) + size
    segment, stacks = forward.segment(sizes), forward.entries

    def gone(entry: Value, size: float) -> NotHeld:
        update = stacks[entry].update
        made = _before_moves(entry).defining_op or update
        return NotHeld(entry.dtype, update.results[0].shape or (), size, made.mlir.location)

    def run(again: Collection[Op]) -> None:
        run_trips_again(forward, segment, again)

    def may_run(op: Op) -> bool:
        return not forward.depends_on_place(op) and not _is_kept(op, kept)

    return PricedSegment(segment, prices, sum(sizes.values()), forward.trips, Rerun(may_run, gone, run))


def _before_moves(value: Value) -> Value:
    """The value of which one has all elements, in another shape."""
    op = value.defining_op
    while op is not None and moves(op) and len(op.operands) == 1 and _count(op.operands[0]) == _count(value):
        value = op.operands[0]
        op = value.defining_op
    return value


def _count(value: Value) -> int:
    return math.prod(value.shape or ())
