"""A group of ops as a loop over parts.

What each trip makes a part of is carried as a view with a dimension for the parts, into which trips write; what parts
reduce is carried as what the parts so far add up to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax.extend.mlir import ir

from sdy_jax.ir.custom_ops import ROUNDED
from sdy_jax.ir.graph import Value
from sdy_jax.ir.new_ops import (
    Place,
    created,
    filled,
    integer,
    new_loop,
    reshaped,
    shape_of,
    tensor_type,
    unwritten,
)
from sdy_jax.lowering.blocking.bodies import Body
from sdy_jax.lowering.blocking.groups import Group, MadeOfNothing, later_ops
from sdy_jax.lowering.blocking.parts import view_shape, with_parts, written
from sdy_jax.lowering.blocking.spans import Cut, RuleOf
from sdy_jax.lowering.collectives import reductions
from sdy_jax.lowering.emission.re_emission import numpy_dtype
from sdy_jax.representation.sharding import TensorSharding

_SUMS = {"bf16": "f32", "f16": "f32"}
"""The types in which sums in narrow ones are carried: a product of all is rounded but once, so to speak; compilers make
products of parts in the wide type where their results are widened."""

_COMBINED = {
    "sum": "stablehlo.add",
    "product": "stablehlo.multiply",
    "max": "stablehlo.maximum",
    "min": "stablehlo.minimum",
    "and": "stablehlo.and",
    "or": "stablehlo.or",
    "xor": "stablehlo.xor",
}
"""The ops that combine partial results of a kind."""


def run_in_parts(group: Group, cut: Cut, rule_of: RuleOf) -> None:
    """Replaces a group by a loop over so many parts."""
    location = group.ops[-1].mlir.location
    end = group.block.ops[group.block.ops.index(group.ops[-1]) + 1].mlir  # there is a terminator
    later, before = later_ops(group), Place(ir.InsertionPoint(end), location)
    carried = [_carried(group, cut, value) for value in group.left]
    starts = [integer(0, before), *(each.start(before) for each in carried)]
    loop = _loop(starts, [None, *(each.sharding for each in carried)], before)
    _count(loop, cut.parts, location)
    _fill(loop, group, cut, carried, before, rule_of)
    for each, result in zip(carried, list(loop.results)[1:], strict=True):
        made = each.after(result, before)
        each.value.mlir.replace_all_uses_with(made)
        each.value.mlir = made  # other groups may take it
    for op in later:
        op.mlir.move_before(end)
    for op in reversed([op for op in group.ops if not group.stays(op)]):
        op.mlir.erase()


@dataclass(frozen=True)
class _Carried:
    """What a loop carries of a value that others need."""

    group: Group
    cut: Cut
    value: Value

    @property
    def kind(self) -> str:
        """How parts combine; empty where each is a part of the value."""
        return self.group.splits[self.value.owner].kind  # type: ignore[index]

    @property
    def sharding(self) -> TensorSharding | None:
        span = self.group.span_of(self.value)
        return self.value.sharding if span is None else with_parts(self.value.sharding, span)

    def start(self, place: Place) -> ir.Value:
        """What the first trip takes."""
        raise NotImplementedError

    def next(self, carried: ir.Value, part: ir.Value, trip: ir.Value, place: Place) -> ir.Value:
        """What a trip makes of it with its part."""
        raise NotImplementedError

    def after(self, result: ir.Value, place: Place) -> ir.Value:
        """The value, after the loop."""
        raise NotImplementedError


class _Stack(_Carried):
    """A value of which trips write their parts."""

    def start(self, place: Place) -> ir.Value:
        span = self.group.span_of(self.value)
        assert span is not None
        shape = view_shape(self.cut, span, self.value.shape or ())
        return unwritten(tensor_type(shape, self.value.mlir), place, self.sharding)

    def next(self, carried: ir.Value, part: ir.Value, trip: ir.Value, place: Place) -> ir.Value:
        span = self.group.span_of(self.value)
        assert span is not None
        return written(carried, part, span, self.value.sharding, trip, place)

    def after(self, result: ir.Value, place: Place) -> ir.Value:
        return reshaped(result, self.value.shape or (), place, self.value.sharding)


class _Reduced(_Carried):
    """A value to which trips add their parts."""

    @property
    def dtype(self) -> str:
        return _SUMS.get(self.value.dtype, self.value.dtype) if self.kind == "sum" else self.value.dtype

    def start(self, place: Place) -> ir.Value:
        number = reductions.identity(self.kind, numpy_dtype(self.dtype))
        return filled(number, self._type(), place, self.sharding)

    def _type(self) -> ir.Type:
        value = self.value.mlir
        return tensor_type(shape_of(value), value, ir.Type.parse(self.dtype, value.context))

    def next(self, carried: ir.Value, part: ir.Value, trip: ir.Value, place: Place) -> ir.Value:
        wide = part if part.type == carried.type else _rounded(part, carried.type, place, self.sharding)
        return created(_COMBINED[self.kind], carried.type, [carried, wide], place, self.sharding)

    def after(self, result: ir.Value, place: Place) -> ir.Value:
        return (
            result
            if result.type == self.value.mlir.type
            else _rounded(result, self.value.mlir.type, place, self.sharding)
        )


def _rounded(value: ir.Value, type_: ir.Type, place: Place, sharding: TensorSharding | None) -> ir.Value:
    """A sum in another type."""
    target = {"call_target_name": ir.StringAttr.get(ROUNDED, place.context)}
    return created("stablehlo.custom_call", type_, [value], place, sharding, target)


def _carried(group: Group, cut: Cut, value: Value) -> _Carried:
    return (_Stack if group.span_of(value) else _Reduced)(group, cut, value)


def _loop(starts: Sequence[ir.Value], shardings: Sequence[TensorSharding | None], place: Place) -> ir.Operation:
    """A loop that carries some values, with empty blocks."""
    loop, types = new_loop(starts, shardings, place), [start.type for start in starts]
    for region in loop.regions:
        region.blocks.append(*types, arg_locs=[place.location] * len(types))
    return loop


def _count(loop: ir.Operation, trips: int, location: ir.Location) -> None:
    """Lets a loop run so often."""
    block = loop.regions[0].blocks[0]
    place = Place(ir.InsertionPoint(block), location)
    scalar = ir.RankedTensorType.get([], ir.IntegerType.get_signless(1, location.context), loc=location)
    below = {
        "comparison_direction": ir.Attribute.parse("#stablehlo<comparison_direction LT>", location.context),
        "compare_type": ir.Attribute.parse("#stablehlo<comparison_type SIGNED>", location.context),
    }
    test = created("stablehlo.compare", scalar, [block.arguments[0], integer(trips, place)], place, None, below)
    ir.Operation.create("stablehlo.return", [], [test], loc=location, ip=place.point)


def _fill(
    loop: ir.Operation, group: Group, cut: Cut, carried: Sequence[_Carried], before: Place, rule_of: RuleOf
) -> None:
    """Lets each trip run the ops of a group on its parts."""
    block = loop.regions[1].blocks[0]
    place = Place(ir.InsertionPoint(block), before.location)
    trip, *states = block.arguments
    body = Body(cut, place, trip, Place(ir.InsertionPoint(loop), before.location), rule_of, MadeOfNothing())
    for op, split in group.splits.items():
        body.run(op, split)
    new = [
        each.next(state, body.value(each.value, group.span_of(each.value)), trip, place)
        for each, state in zip(carried, states, strict=True)
    ]
    number = created("stablehlo.add", trip.type, [trip, integer(1, place)], place)
    ir.Operation.create("stablehlo.return", [], [number, *new], loc=before.location, ip=place.point)
