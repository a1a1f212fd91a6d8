"""Loops that leave stacks behind, with an entry per trip, from which later ops read single ones: a scan's forward pass.

%s = while (%i from 0, %stack) {
  %v = ...
  %u = reshape %v                                  an entry: 1 x ...
  %n = dynamic_update_slice %stack, %u, %i, 0, ...
}
while (...) { %e = dynamic_slice %s, %j, 0, ... }  the backward pass
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.lowering.analysis.trip_counts import numbers_in_trips, trip_count
from sdy_jax.lowering.prepare.loop_invariants import is_outside
from sdy_jax.lowering.recomputation.segments import Segment
from sdy_jax.lowering.strategies.registry import PARTIAL_ACCESS

LOOP = "stablehlo.while"


@dataclass(frozen=True, eq=False)
class Stack:
    """What a loop leaves behind as its result `index`: the op that writes the entry of a trip, and those that read
    single entries."""

    index: int
    update: Op
    reads: tuple[Op, ...]

    @property
    def entry(self) -> Value:
        """What is written in a trip: one row of the stack."""
        return self.update.operands[1]

    @property
    def place(self) -> Value:
        """Where a trip writes its entry."""
        return self.update.operands[2]


@dataclass(frozen=True, eq=False)
class ForwardLoop:
    """A loop with stacks. `place`: where its body writes the entries of a trip."""

    loop: Op
    trips: int
    place: Value
    stacks: tuple[Stack, ...]

    @property
    def reads(self) -> list[Op]:
        """The ops that read single entries of its stacks."""
        return [read for stack in self.stacks for read in stack.reads]

    @property
    def entries(self) -> Mapping[Value, Stack]:
        """The stacks by what is written in a trip; one of those that hold the same."""
        return {stack.entry: stack for stack in self.stacks}

    def segment(self, entry_bytes: Mapping[Value, float]) -> Segment:
        """The body, of which entries of stacks are needed, with the bytes that these take."""
        updates = {stack.update for stack in self.stacks}
        ops = tuple(op for op in self.loop.blocks[1].ops[:-1] if op not in updates)
        return Segment(ops, entry_bytes, self.is_at_hand)

    def is_at_hand(self, value: Value) -> bool:
        """Whether a value is there later in the layout of a trip: it is made before the loop, or is the place of the
        trip's entries."""
        return value is self.place or is_outside(value, self.loop)

    def depends_on_place(self, op: Op) -> bool:
        """Whether an op takes the place of a trip's entries otherwise than as that of an entry of a stack that has one
        per trip: a later op may ask for a place that there is not, and read the nearest one."""
        return any(
            value is self.place and not (inner is op and self._is_place(op, index))
            for inner in op.walk()
            for index, value in enumerate(inner.operands)
        )

    def _is_place(self, op: Op, index: int) -> bool:
        return index == 1 and is_read_of_entry(op, self.trips)


def forward_loops(graph: Graph) -> list[ForwardLoop]:
    """The loops of a program with stacks that are read entry by entry later, and of which each trip writes one; not
    those that read such stacks themselves, which change where these are recomputed."""
    found = list(_forward_loops(graph))
    reading = {around for forward in found for read in forward.reads for around in _loops_around(read)}
    return [forward for forward in found if forward.loop not in reading]


def _loops_around(op: Op) -> Iterator[Op]:
    around = op.parent
    while around is not None:
        if around.name == LOOP:
            yield around
        around = around.parent


def _forward_loops(graph: Graph) -> Iterator[ForwardLoop]:
    for loop in graph.ops:
        trips = trip_count(loop) if loop.name == LOOP else None
        if trips is None or trips < 2:
            continue
        stacks = list(_stacks(loop, trips))
        for place in dict.fromkeys(stack.place for stack in stacks[:1]):
            yield ForwardLoop(loop, trips, place, tuple(stack for stack in stacks if stack.place is place))


def is_read_of_entry(op: Op, entries: int) -> bool:
    """Whether an op takes one of so many entries of a stack, whole."""
    return PARTIAL_ACCESS.get(op.name) == "read" and _is_entry(op.results[0], op.operands[0], entries)


def _is_entry(entry: Value, stack: Value, entries: int) -> bool:
    if not stack.shape or entry.shape is None:
        return False
    return stack.shape[0] == entries and entry.shape == (1, *stack.shape[1:])


def _stacks(loop: Op, trips: int) -> Iterator[Stack]:
    condition, body = loop.blocks
    for index, (argument, returned) in enumerate(zip(body.arguments, body.terminator.operands, strict=True)):
        update, uses = returned.defining_op, loop.results[index].uses
        if update is None or PARTIAL_ACCESS.get(update.name) != "write" or condition.arguments[index].uses:
            continue
        into, entry, place, *_ = update.operands
        is_written = into is argument and _is_entry(entry, argument, trips) and _is_each_once(loop, place, trips)
        is_alone = argument.only_user is update and returned.only_user is body.terminator
        is_read = all(is_read_of_entry(op, trips) and operand == 0 for op, operand in uses)
        if is_written and is_alone and is_read and uses:
            yield Stack(index, update, tuple(op for op, _ in uses))


def _is_each_once(loop: Op, place: Value, trips: int) -> bool:
    """Whether a number of a loop's body is that of each entry of a stack once."""
    found = numbers_in_trips(loop, place)
    return found is not None and sorted((found[0], found[-1])) == [0, trips - 1]
