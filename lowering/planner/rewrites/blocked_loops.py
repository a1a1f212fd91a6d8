"""A group of ops as a loop over parts: views of values by parts, the body, and what parts reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jax.extend.mlir import ir

from sdy_jax.ir.custom_ops import ROUNDED
from sdy_jax.ir.graph import Op, Value
from sdy_jax.ir.new_ops import (
    Place,
    created,
    entry_of,
    filled_array,
    integer,
    new_loop,
    reshaped,
    shape_of,
    sharding_as_carried,
    tensor_type,
    unwritten,
    with_entry,
)
from sdy_jax.ir.shardings import CLOSED, TensorSharding
from sdy_jax.lowering.ops.collectives import reductions
from sdy_jax.lowering.ops.re_emission import numpy_dtype
from sdy_jax.lowering.planner.facts.fusion import is_constant
from sdy_jax.lowering.planner.rewrites.blocking_groups import (
    Cut,
    Group,
    MadeOfNothing,
    RuleOf,
    Span,
    later_ops,
    split_along,
)
from sdy_jax.lowering.planner.rewrites.op_parts import OpParts

# Parts of values: read from a view with a dimension for the parts, and written into one.


class Views:
    """What stands before a loop for values of which each trip takes a part: the same elements, with a dimension for the
    parts. That is split over no devices, and what is before it may be: each device then takes a part of its own block.

    Args:
        cut: into which parts the factor is cut.
        place: before the loop.
    """

    def __init__(self, cut: Cut, place: Place):
        self._cut, self._place = cut, place
        self._made: dict[tuple[ir.Value, Span], ir.Value] = {}

    def read(
        self, value: ir.Value, span: Span, sharding: TensorSharding | None, trip: ir.Value, place: Place
    ) -> ir.Value:
        """The part of a trip of a value with a sharding."""
        view = self._view(value, span, sharding)
        entry = entry_of(view, trip, span.dim + 1, place, with_parts(sharding, span))
        return reshaped(entry, self._cut.part(shape_of(value), span), place, sharding)

    def _view(self, value: ir.Value, span: Span, sharding: TensorSharding | None) -> ir.Value:
        if (value, span) not in self._made:
            shape = view_shape(self._cut, span, shape_of(value))
            self._made[value, span] = reshaped(value, shape, self._place, with_parts(sharding, span))
        return self._made[value, span]


def view_shape(cut: Cut, span: Span, shape: Sequence[int]) -> list[int]:
    """A shape with a dimension for the parts."""
    return [*shape[: span.dim], *cut.view(span), *shape[span.dim + 1 :]]


def written(
    stack: ir.Value, part: ir.Value, span: Span, sharding: TensorSharding | None, trip: ir.Value, place: Place
) -> ir.Value:
    """A view of a value with a sharding, into which the part of a trip is written."""
    return with_entry(stack, part, trip, span.dim + 1, place, with_parts(sharding, span))


def with_parts(sharding: TensorSharding | None, span: Span) -> TensorSharding | None:
    """The sharding of a view."""
    if sharding is None:
        return None
    dims = sharding.dimensions
    dims = (*dims[: span.dim + 1], CLOSED, CLOSED, *dims[span.dim + 1 :])
    return replace(sharding, dimensions=dims, unreduced_axes=(), reduction="sum")


# The body of a loop over parts: ops as they were, on parts of what they took.


class Body(OpParts):
    """The values of one trip.

    Args:
        cut: into which parts the factor is cut.
        place: where ops are made.
        trip: the number of the trip.
        before: where ops before the loop are made.
        rule_of: the rules of ops.
        nothing: the values that are made of nothing.
    """

    def __init__(self, cut: Cut, place: Place, trip: ir.Value, before: Place, rule_of: RuleOf, nothing: MadeOfNothing):
        super().__init__(cut, place)
        self._trip, self._before = trip, before
        self._views, self._rule_of, self._nothing = Views(cut, before), rule_of, nothing
        self._counted: dict[tuple[str, int], ir.Value] = {}

    def outside(self, value: Value, span: Span | None) -> ir.Value:
        found = self._again(value, span) if value in self._nothing else None
        return found or (value.mlir if span is None else self._part(value.mlir, span, value))

    def _part(self, made: ir.Value, span: Span, value: Value) -> ir.Value:
        return self._views.read(made, span, sharding_as_carried(value), self._trip, self.place)

    def _again(self, value: Value, span: Span | None) -> ir.Value | None:
        """What is made of nothing, made here; None where a part of it cannot be."""
        op = value.defining_op
        assert op is not None
        if is_constant(op):
            return self._from_nothing(op, span)
        spans: Sequence[Span | None] = [None] * len(op.operands)
        if span is not None:
            split = split_along(op, self._rule_of(op), len(op.operands), span)
            if split is None or split.kind:
                return None
            spans = split.operands
        operands = [self.value(*each) for each in zip(op.operands, spans, strict=True)]
        return self.clone(op, operands, [span], spans[0])[0]

    def _from_nothing(self, op: Op, span: Span | None) -> ir.Value | None:
        """A part of a constant of one number, or of an iota."""
        if op.name != "stablehlo.iota":
            return self.number(op, span)
        if span is None or span.dim != op.int("iota_dimension"):
            return self.clone(op, [], [span], None)[0]
        value, place = op.results[0], self.place
        at = Span(0, span.outer, span.size, span.inner)
        counted = self._views.read(self._numbers(value, span.dim), at, None, self._trip, place)
        dims = {"broadcast_dimensions": ir.DenseI64ArrayAttr.get([span.dim], place.context)}
        type_ = tensor_type(self.cut.part(value.shape or (), span), value.mlir)
        return created("stablehlo.broadcast_in_dim", type_, [counted], place, value.sharding, dims)

    def _numbers(self, value: Value, dim: int) -> ir.Value:
        """0, 1, 2, ... along a dimension of a value, before the loop."""
        key = value.dtype, (value.shape or ())[dim]
        if key not in self._counted:
            type_ = tensor_type(key[1:], value.mlir)
            along = ir.IntegerAttr.get(ir.IntegerType.get_signless(64, self._before.context), 0)
            self._counted[key] = created("stablehlo.iota", type_, [], self._before, None, {"iota_dimension": along})
        return self._counted[key]


# A group of ops as a loop over parts.
#
# What each trip makes a part of is carried as a view with a dimension for the parts, into which trips write; what
# parts reduce is carried as what the parts so far add up to.

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
        return filled_array(number, self._type(), place, self.sharding)

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
    body.run_all(group.splits)
    new = [
        each.next(state, body.value(each.value, group.span_of(each.value)), trip, place)
        for each, state in zip(carried, states, strict=True)
    ]
    number = created("stablehlo.add", trip.type, [trip, integer(1, place)], place)
    ir.Operation.create("stablehlo.return", [], [number, *new], loc=before.location, ip=place.point)
