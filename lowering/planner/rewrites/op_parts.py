"""Ops on parts of their operands: clones of them, with the types of parts, elsewhere in a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Op, Value
from sdy_jax.ir.new_ops import Place, created, tensor_type
from sdy_jax.lowering.ops.registry import PART_BY_PART
from sdy_jax.lowering.planner.facts.row_numbers import is_splat
from sdy_jax.lowering.planner.rewrites.blocking_groups import Cut, Span, Split


class OpParts:
    """The values that ops make of parts, in one place.

    Args:
        cut: into which parts a factor is cut.
        place: where ops are made.
    """

    def __init__(self, cut: Cut, place: Place):
        self.cut, self.place = cut, place
        self._made: dict[tuple[Value, Span | None], ir.Value] = {}

    def run_all(self, splits: Mapping[Op, Split]) -> None:
        """Lets ops run on their parts, in order."""
        for op, split in splits.items():
            self.run(op, split)

    def run(self, op: Op, split: Split) -> None:
        """Lets an op run on its parts."""
        operands = [self.operand(op, index, span) for index, span in enumerate(split.operands)]
        results = self.clone(op, operands, split.results, next(iter(split.operands), None))
        for value, span, made in zip(op.results, split.results, results, strict=True):
            self._made[value, span] = made

    def operand(self, op: Op, index: int, span: Span | None) -> ir.Value:
        """A part of an operand, or all of it."""
        return self.value(op.operands[index], span)

    def value(self, value: Value, span: Span | None) -> ir.Value:
        """A part of a value, or all of it."""
        key = value, span
        if key not in self._made:
            self._made[key] = self.outside(value, span)
        return self._made[key]

    def outside(self, value: Value, span: Span | None) -> ir.Value:
        """A part, or all, of a value that none of the ops makes."""
        raise NotImplementedError

    def clone(
        self, op: Op, operands: Sequence[ir.Value], results: Sequence[Span | None], first: Span | None
    ) -> list[ir.Value]:
        """An op on other operands. `results`: the spans of which parts it makes; `first`: that of its first operand."""
        clone = op.mlir.clone(self.place.point).operation
        for index, operand in enumerate(operands):
            clone.operands[index] = operand
        for result, value, span in zip(clone.results, op.results, results, strict=True):
            result.set_type(tensor_type(self.cut.part(value.shape or (), span), result))
        sizes = PART_BY_PART.get(op.name, "")
        if sizes and first is not None:
            clone.attributes[sizes] = self._local_sizes(op, sizes, first)
        return list(clone.results)

    def _local_sizes(self, op: Op, name: str, span: Span) -> ir.Attribute:
        """Sizes along the dimensions of the first operand: that of a whole dimension becomes that of its part."""
        found, whole = list(op.ints(name)), (op.operands[0].shape or ())[span.dim]
        if found[span.dim] == whole:
            found[span.dim] = whole // self.cut.parts
        return ir.DenseI64ArrayAttr.get(found, op.mlir.context)

    def number(self, op: Op, span: Span | None) -> ir.Value | None:
        """A part of a constant of one number; None of other constants."""
        if not is_splat(op):
            return None
        attribute = op.attributes["value"]
        type_ = tensor_type(self.cut.part(op.results[0].shape or (), span), op.results[0].mlir)
        try:
            number = ir.DenseElementsAttr.get_splat(type_, attribute.get_splat_value())
        except (TypeError, ValueError):  # of an element type that MLIR's bindings cannot read
            return None
        return created("stablehlo.constant", type_, [], self.place, op.results[0].sharding, {"value": number})
