"""Segments of a program that may be computed again: ops, what is needed of them later, and clones elsewhere."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from jax.extend.mlir import ir

from sdy_jax.ir.custom_ops import CALLBACK, CALLBACK_ON_BLOCKS, INSPECTED
from sdy_jax.ir.graph import OWN_TARGETS, Graph, Op, Value
from sdy_jax.ir.operations import pre_order
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.ops.elementwise import AGAIN
from sdy_jax.lowering.planner.facts.fusion import is_constant, moves
from sdy_jax.lowering.planner.rewrites.preparation import has_effect
from sdy_jax.lowering.planner.schedule.op_order import create_after

# What may be computed again: the ops of a stretch of a program, and what later ops need of it.

_NEVER_AGAIN = frozenset({"stablehlo.rng", "stablehlo.optimization_barrier", CALLBACK, CALLBACK_ON_BLOCKS, INSPECTED})
"""Ops that may not run again: what makes other numbers each time, what the host does, and what keeps ops apart."""


@dataclass(frozen=True, eq=False)
class Segment:
    """A stretch of a program.

    `ops`: those that could run again, in order. `needed`: the values that are read later, each with the bytes that it
    is held in. `is_at_hand`: whether a value that they take can be read later for nothing. `part`: of some ops, the
    number of the part that they are in, else 0: what an op takes of another part is held, if the op runs again. Else
    all that is needed could be recomputed at once.
    """

    ops: tuple[Op, ...]
    needed: Mapping[Value, float]
    is_at_hand: Callable[[Value], bool]
    part: Mapping[Op, int] = field(default_factory=dict)

    def taken(self, op: Op) -> list[Value]:
        """What an op takes, and what is in its regions, that is not at hand."""
        return [value for value in outside_values(op) if not self.is_at_hand(value)]

    def is_near(self, value: Value, op: Op) -> bool:
        """Whether a value that an op takes is of the op's part."""
        return not isinstance(value.owner, Op) or self.part.get(value.owner, 0) == self.part.get(op, 0)

    def is_made_again(self, value: Value, op: Op, again: Collection[Op]) -> bool:
        """Whether an op that runs again takes a value that is recomputed, if some ops run again."""
        return value.owner in again and self.is_near(value, op)

    def held(self, again: Collection[Op]) -> list[Value]:
        """The values that stay where some ops run again."""
        kept = dict.fromkeys(value for value in self.needed if value.owner not in again)
        for op in self.ops:
            taken = self.taken(op) if op in again else ()
            kept.update(dict.fromkeys(value for value in taken if not self.is_made_again(value, op, again)))
        return list(kept)


def can_run_again(op: Op) -> bool:
    """Whether an op does the same once more, and nothing else."""
    return all(_is_pure(inner) and inner.key not in _NEVER_AGAIN for inner in op.walk())


def _is_pure(op: Op) -> bool:
    if op.name == "stablehlo.custom_call" and not op.key.startswith(OWN_TARGETS):
        return False
    return not has_effect(op) and all(value.shape is not None for value in op.results)


def outside_values(op: Op) -> Iterator[Value]:
    """The values from outside of an op that it takes, or that something in its regions takes."""
    if not op.blocks:
        yield from op.operands
        return
    inside = dict.fromkeys(op.walk())
    for inner in inside:
        for value in inner.operands:
            owner = value.owning_op
            if owner not in inside or (owner is op and isinstance(value.owner, Op)):
                yield value


# Where to cut a sequence of ops into parts, as into layers: where little passes from one to the next.

_MIDDLE = (0.25, 0.75)
"""Where a part is cut, by what is needed of it. Guessed: nearer to its ends, parts are of unlike sizes; nearer to its
middle, no place may be narrow."""

_NARROW = 0.25
"""The share of what is needed of a part that may pass where it is cut: that has to be held beside what is recomputed of
one part. Guessed: with less, unrolled layers with wide residual streams are not cut; with more, parts save little."""


def parts_of(needed: Sequence[float], crossing: Sequence[float]) -> list[int]:
    """The numbers of the parts of ops.

    Args:
        needed: per op, the bytes of what is needed later of what it makes.
        crossing: per op, the bytes that it, or an op after it, takes of what is made before it.

    >>> parts_of([1, 9, 9, 1, 9, 9], [0, 1, 10, 1, 2, 10])
    [0, 0, 0, 1, 1, 1]
    """
    sums = [0.0, *accumulate(needed)]
    cuts, waiting = set[int](), [(0, len(needed))]
    while waiting:
        begin, end = waiting.pop()
        cut = _narrowest(sums, crossing, begin, end)
        if cut is not None:
            cuts.add(cut)
            waiting += [(begin, cut), (cut, end)]
    return list(accumulate(int(number in cuts) for number in range(len(needed))))


def _narrowest(sums: Sequence[float], crossing: Sequence[float], begin: int, end: int) -> int | None:
    """Where least passes in the middle of a part, by what is needed; None where that is not little."""
    whole = sums[end] - sums[begin]
    low, high = (bisect_left(sums, sums[begin] + share * whole, begin, end) for share in _MIDDLE)
    middle = range(max(low, begin + 1), min(high + 1, end))
    cut = min(middle, key=crossing.__getitem__, default=None)
    return cut if cut is not None and crossing[cut] < _NARROW * whole else None


# Ops that run again at other places of a program.

Supply = Callable[[Value, ir.Location, ir.InsertionPoint], ir.Value]
"""What stands at a place for a value that is held."""


class Clones:
    """Clones of a segment's ops at places that follow each other.

    Args:
        segment: the ops.
        again: those that run again.
        known: what stands there for values that are at hand under other names.
        supply: gives what stands there for values that are held.
        is_apart: an op that takes nothing that is made for it, or held, takes one of its operands by `supply`, too;
            else compilers see that it computes the same as before.
    """

    def __init__(
        self,
        segment: Segment,
        again: Collection[Op],
        known: Mapping[ir.Value, ir.Value],
        supply: Supply,
        is_apart: bool = False,
    ):
        self._segment, self._again, self._known, self._supply, self._is_apart = segment, again, known, supply, is_apart
        self._order = {op: number for number, op in enumerate(segment.ops)}
        self._made: dict[Value, ir.Value] = {}
        self._held: dict[Value, ir.Value] = {}

    def make(self, value: Value, point: ir.InsertionPoint) -> ir.Value:
        """Makes a value, and before it what it is made of, unless that is there."""
        for op in self._missing(value):
            operands = self._operands(op, point)
            clone = op.mlir.clone(point).operation
            _take(clone, {**self._known, **operands})
            self._made.update(zip(op.results, clone.results, strict=True))
        return self._made[value]

    def _missing(self, value: Value) -> list[Op]:
        """The ops that have to run for a value, in order."""
        assert isinstance(value.owner, Op)
        found, waiting = set[Op](), [value.owner]
        while waiting:
            op = waiting.pop()
            if op in found or all(result in self._made for result in op.results):
                continue
            found.add(op)
            taken = (each for each in self._segment.taken(op) if self._segment.is_made_again(each, op, self._again))
            waiting += [each.owner for each in taken if isinstance(each.owner, Op)]
        return sorted(found, key=self._order.__getitem__)

    def _operands(self, op: Op, point: ir.InsertionPoint) -> dict[ir.Value, ir.Value]:
        """What stands there for what an op takes."""
        taken = self._segment.taken(op)
        if not taken and self._is_apart:
            taken = [value for value in outside_values(op) if value.rank][:1]
        found = {}
        for value in taken:
            if self._segment.is_made_again(value, op, self._again):
                found[value.mlir] = self._made[value]
                continue
            if value not in self._held:
                self._held[value] = self._supply(value, op.mlir.location, point)
            found[value.mlir] = self._held[value]
        return found


def _take(clone: ir.Operation, values: Mapping[ir.Value, ir.Value]) -> None:
    """Lets a clone, and what is in it, take other values."""
    for op in pre_order(clone):
        for index, operand in enumerate(op.operands):
            if operand in values:
                op.operands[index] = values[operand]


# The program's own ops before a moment, and what those after it take of what they make: an unrolled forward pass.


class Stretch:
    """The ops of the main function's own block before one of them, which takes what it takes.

    Args:
        graph: the program.
        until: that op.
        mesh_name: the program's mesh.
    """

    def __init__(self, graph: Graph, until: Op, mesh_name: str):
        self._block, self._mesh_name = graph.main.blocks[0], mesh_name
        self._positions = {op: number for number, op in enumerate(self._block.ops)}
        self._end = self._positions[until]
        self.ops = tuple(self._not_at_hand())
        self._made = frozenset(self.ops)

    def _not_at_hand(self) -> Iterator[Op]:
        """The ops but for constants and those that take a part of an argument."""
        made = set[Op]()
        for op in self._block.ops[: self._end]:
            if not is_constant(op) and (not _takes_part(op) or op.operands[0].owner in made):
                made.add(op)
                yield op

    def segment(self, sizes: Callable[[Value], float], in_parts: bool) -> Segment:
        """The ops, in parts or not, and what is needed of them, by the bytes of values."""
        needed = {value: sizes(value) for op in self.ops for value in op.results if self._later_uses(value)}
        made = [sum([needed.get(value, 0.0) for value in op.results]) for op in self.ops]
        parts = parts_of(made, self._crossing(sizes)) if in_parts else [0] * len(self.ops)
        return Segment(
            self.ops, needed, lambda value: value.owner not in self._made, dict(zip(self.ops, parts, strict=True))
        )

    def _crossing(self, sizes: Callable[[Value], float]) -> list[float]:
        """Per op, the bytes of what is made before it that it or ops after it take."""
        number = {op: n for n, op in enumerate(self.ops)}
        changes = [0.0] * (len(self.ops) + 1)
        for op in self.ops:
            for value in op.results:
                users = (user.ancestor_in(self._block) for user, _ in value.uses)
                last = max([number[user] for user in users if user in number], default=number[op])
                changes[number[op] + 1] += sizes(value)
                changes[last + 1] -= sizes(value)
        return list(accumulate(changes[:-1]))

    def _later_uses(self, value: Value) -> list[tuple[Op, int]]:
        return [(op, index) for op, index in value.uses if self._position(op) > self._end]

    def op_around(self, op: Op) -> Op:
        """The op of the main function's own block that is, or contains, another one."""
        return op.ancestor_in(self._block)

    def _position(self, op: Op) -> int:
        return self._positions[self.op_around(op)]

    def run_again(self, segment: Segment, again: Collection[Op]) -> None:
        """Lets ops run again before the first later op that takes what they make."""
        held = set(segment.held(again))
        uses = {value: self._later_uses(value) for value in segment.needed if value not in held}
        first = {value: min(self._position(op) for op, _ in found) for value, found in uses.items()}
        clones = Clones(segment, again, {}, self._later, is_apart=True)
        for value in sorted(uses, key=first.__getitem__):
            made = clones.make(value, ir.InsertionPoint(self._block.ops[first[value]].mlir))
            for op, index in uses[value]:
                op.mlir.operands[index] = made

    def _later(self, value: Value, location: ir.Location, point: ir.InsertionPoint) -> ir.Value:
        """A value, of which a compiler does not know that ops computed with it before."""
        if value.shape is None:
            return value.mlir
        sharding = value.sharding or TensorSharding.replicated(self._mesh_name, value.rank)
        return create_after([value.mlir], sharding, location, point, AGAIN)


def _takes_part(op: Op) -> bool:
    """Whether an op takes a part of its only operand."""
    if not moves(op) or len(op.operands) != 1:
        return False
    return math.prod(op.results[0].shape or ()) < math.prod(op.operands[0].shape or ())
