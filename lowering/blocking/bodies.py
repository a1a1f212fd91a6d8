"""The body of a loop over parts: ops as they were, on parts of what they took."""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Op, Value
from sdy_jax.ir.new_ops import Place, created, sharding_as_carried, tensor_type
from sdy_jax.lowering.analysis.fusion import is_constant
from sdy_jax.lowering.blocking.groups import MadeOfNothing
from sdy_jax.lowering.blocking.parts import Views
from sdy_jax.lowering.blocking.spans import Cut, RuleOf, Span, Split, split_along
from sdy_jax.lowering.strategies.registry import PART_BY_PART


class Body:
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
        self._cut, self._place, self._trip, self._before = cut, place, trip, before
        self._views, self._rule_of, self._nothing = Views(cut, before), rule_of, nothing
        self._made: dict[tuple[Value, Span | None], ir.Value] = {}
        self._counted: dict[tuple[str, int], ir.Value] = {}

    def run(self, op: Op, split: Split) -> None:
        """Lets an op of the group run on its parts."""
        operands = [self.value(*each) for each in zip(op.operands, split.operands, strict=True)]
        results = self._clone(op, operands, split.results, next(iter(split.operands), None))
        for value, span, made in zip(op.results, split.results, results, strict=True):
            self._made[value, span] = made

    def value(self, value: Value, span: Span | None) -> ir.Value:
        """A part of a value, or all of it."""
        key = value, span
        if key not in self._made:
            found = self._again(value, span) if value in self._nothing else None
            self._made[key] = found or (value.mlir if span is None else self._part(value.mlir, span, value))
        return self._made[key]

    def _part(self, made: ir.Value, span: Span, value: Value) -> ir.Value:
        return self._views.read(made, span, sharding_as_carried(value), self._trip, self._place)

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
        return self._clone(op, operands, [span], spans[0])[0]

    def _from_nothing(self, op: Op, span: Span | None) -> ir.Value | None:
        """A part of a constant of one number, or of an iota."""
        if op.name != "stablehlo.iota":
            return self._number(op, span)
        if span is None or span.dim != op.int("iota_dimension"):
            return self._clone(op, [], [span], None)[0]
        value, place = op.results[0], self._place
        at = Span(0, span.outer, span.size, span.inner)
        counted = self._views.read(self._numbers(value, span.dim), at, None, self._trip, place)
        dims = {"broadcast_dimensions": ir.DenseI64ArrayAttr.get([span.dim], place.context)}
        type_ = tensor_type(self._cut.part(value.shape or (), span), value.mlir)
        return created("stablehlo.broadcast_in_dim", type_, [counted], place, value.sharding, dims)

    def _numbers(self, value: Value, dim: int) -> ir.Value:
        """0, 1, 2, ... along a dimension of a value, before the loop."""
        key = value.dtype, (value.shape or ())[dim]
        if key not in self._counted:
            type_ = tensor_type(key[1:], value.mlir)
            along = ir.IntegerAttr.get(ir.IntegerType.get_signless(64, self._before.context), 0)
            self._counted[key] = created("stablehlo.iota", type_, [], self._before, None, {"iota_dimension": along})
        return self._counted[key]

    def _number(self, op: Op, span: Span | None) -> ir.Value | None:
        attribute = op.attributes.get("value")
        if not isinstance(attribute, ir.DenseElementsAttr) or not attribute.is_splat:
            return None
        type_ = tensor_type(self._cut.part(op.results[0].shape or (), span), op.results[0].mlir)
        try:
            number = ir.DenseElementsAttr.get_splat(type_, attribute.get_splat_value())
        except (TypeError, ValueError):  # of an element type that MLIR's bindings cannot read
            return None
        return created("stablehlo.constant", type_, [], self._place, op.results[0].sharding, {"value": number})

    def _clone(
        self, op: Op, operands: Sequence[ir.Value], results: Sequence[Span | None], first: Span | None
    ) -> list[ir.Value]:
        """An op on other operands. `results`: the spans of which parts it makes; `first`: that of its first operand."""
        clone = op.mlir.clone(self._place.point).operation
        for index, operand in enumerate(operands):
            clone.operands[index] = operand
        for result, value, span in zip(clone.results, op.results, results, strict=True):
            result.set_type(tensor_type(self._cut.part(value.shape or (), span), result))
        sizes = PART_BY_PART.get(op.name, "")
        if sizes and first is not None:
            clone.attributes[sizes] = self._local_sizes(op, sizes, first)
        return list(clone.results)

    def _local_sizes(self, op: Op, name: str, span: Span) -> ir.Attribute:
        """Sizes along the dimensions of the first operand: that of a whole dimension becomes that of its part."""
        found, whole = list(op.ints(name)), (op.operands[0].shape or ())[span.dim]
        if found[span.dim] == whole:
            found[span.dim] = whole // self._cut.parts
        return ir.DenseI64ArrayAttr.get(found, op.mlir.context)
