"""Ops that run again at other places of a program."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Op, Value
from sdy_jax.ir.operations import pre_order
from sdy_jax.lowering.recomputation.segments import Segment, outside_values

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
