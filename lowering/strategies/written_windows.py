"""Updates at places that are known before, as of a grid's interior, whose parts are on the devices of what they change.

    %1 = stablehlo.dynamic_update_slice(%u, %inner, 1, 1)     %0 = stablehlo.pad(%inner), one on each side
                                                         ->   %1 = stablehlo.select(%is_inside, %0, %u)

An update along whose dimension it is written is gathered, as where it lies is known at run time only. Here it is known:
padded, it is moved to the devices that have the elements around it, at most one block, and no number is computed anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import reduce

import numpy as np
from jax.extend.mlir import ir

from sdy_jax.ir.graph import Op, Value
from sdy_jax.ir.new_ops import Place, any_number, created, filled, tensor_type
from sdy_jax.lowering.strategies.known_places import (
    clamped_starts,
    is_split_along,
    known_integers,
    known_starts,
    partial_dims,
)
from sdy_jax.lowering.strategies.monoids import reduction_kind, returns_new
from sdy_jax.lowering.strategies.registry import folds
from sdy_jax.op_rules.op_attributes import scatter_dimension_numbers
from sdy_jax.representation.sharding import TensorSharding

_MOST = 2
"""How many times as large as its update an array may be. Guessed: an array of which little is written is not read and
written whole for it; with less, updates of a half are gathered."""


@folds("stablehlo.dynamic_update_slice")
def _fold_slice(op: Op) -> bool:
    """The op clamps its starts."""
    operand, update, *starts = op.operands
    found = known_integers(starts)
    return found is not None and _fold(op, update, clamped_starts(found, operand.shape or (), update.shape or ()))


@folds("stablehlo.scatter")
def _fold_scatter(op: Op) -> bool:
    """One that writes one window, or adds it. Where that does not fit nothing is written, and nothing is folded."""
    if len(op.results) != 1 or not (returns_new(op.blocks[0]) or reduction_kind(op.blocks[0]) == "sum"):
        return False
    (operand, indices, update), numbers = op.operands, scatter_dimension_numbers(op)
    if numbers.inserted_window_dims or numbers.input_batching_dims or update.rank != len(numbers.update_window_dims):
        return False
    starts = known_starts(indices, numbers.scatter_dims_to_operand_dims, operand.rank)
    return starts is not None and _fold(op, update, starts)


def _fold(op: Op, update: Value, starts: Sequence[int]) -> bool:
    whole, part = op.operands[0].shape or (), update.shape or ()
    ends = [at + m for at, m in zip(starts, part, strict=True)]
    dims = partial_dims(whole, part)
    is_inside = all(at >= 0 and end <= n for at, end, n in zip(starts, ends, whole, strict=True))
    if not (is_inside and math.prod(whole) <= _MOST * math.prod(part) and is_split_along(update, dims)):
        return False
    window = _Window(Place.before(op.mlir), op.results[0].mlir.type, op.results[0].sharding)
    old, new = op.mlir.operands[0], op.mlir.operands[op.operands.index(update)]  # those of before may be folded
    new = window.padded(new, starts, [n - end for n, end in zip(whole, ends, strict=True)])
    if op.blocks and not returns_new(op.blocks[0]):
        new = window.made("stablehlo.add", [old, new])
    inside = reduce(window.both, [each for d in dims for each in window.within(d, starts[d], ends[d])])
    op.results[0].mlir.replace_all_uses_with(window.made("stablehlo.select", [inside, new, old]))
    return True


class _Window:
    """Ops of the shape and the sharding of an array that is written."""

    def __init__(self, place: Place, type_: ir.Type, sharding: TensorSharding | None):
        self._place, self._type, self._sharding = place, ir.RankedTensorType(type_), sharding

    def made(self, name: str, operands: Sequence[ir.Value], **attributes: ir.Attribute) -> ir.Value:
        return created(name, self._type, operands, self._place, self._sharding, attributes)

    def padded(self, update: ir.Value, low: Sequence[int], high: Sequence[int]) -> ir.Value:
        """An update with something around it."""
        context = self._place.context
        number = any_number(tensor_type([], update), self._place.point, self._place.location)
        padding = {"edge_padding_low": low, "edge_padding_high": high, "interior_padding": [0] * len(low)}
        attributes = {name: ir.DenseI64ArrayAttr.get(list(sizes), context) for name, sizes in padding.items()}
        return self.made("stablehlo.pad", [update, number], **attributes)

    def within(self, dim: int, first: int, end: int) -> Iterator[ir.Value]:
        """Whether elements are between some of a dimension; nothing of a side on which all are."""
        shape, context = self._type.shape, self._place.context
        index = ir.RankedTensorType.get(shape, ir.IntegerType.get_signless(32, context), loc=self._place.location)
        dims = {"iota_dimension": ir.IntegerAttr.get(ir.IntegerType.get_signless(64, context), dim)}
        at = created("stablehlo.iota", index, [], self._place, self._sharding, dims)
        for bound, direction, is_needed in ((first, "GE", first > 0), (end, "LT", end < shape[dim])):
            if is_needed:
                other = filled(np.asarray(bound, np.int32), index, self._place, self._sharding)
                compares = {"comparison_direction": _direction(direction, context)}
                yield created("stablehlo.compare", self._flags, [at, other], self._place, self._sharding, compares)

    def both(self, one: ir.Value, other: ir.Value) -> ir.Value:
        return created("stablehlo.and", self._flags, [one, other], self._place, self._sharding)

    @property
    def _flags(self) -> ir.Type:
        flag = ir.IntegerType.get_signless(1, self._place.context)
        return ir.RankedTensorType.get(self._type.shape, flag, loc=self._place.location)


def _direction(name: str, context: ir.Context) -> ir.Attribute:
    return ir.Attribute.parse(f"#stablehlo<comparison_direction {name}>", context)
