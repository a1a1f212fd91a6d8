"""The program's own ops before a moment, and what those after it take of what they make: an unrolled forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from itertools import accumulate

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.lowering.analysis.fusion import is_constant, moves
from sdy_jax.lowering.recomputation.clones import Clones
from sdy_jax.lowering.recomputation.parts import parts_of
from sdy_jax.lowering.recomputation.segments import Segment
from sdy_jax.lowering.schedule.after_ops import create_after
from sdy_jax.lowering.strategies.after import AGAIN
from sdy_jax.representation.sharding import TensorSharding


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
