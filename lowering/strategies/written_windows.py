"""Updates at places that are known before, as of a grid's interior, whose parts are on the devices of what they change.

    %1 = stablehlo.dynamic_update_slice(%u, %inner, 1, 1)     %0 = stablehlo.pad(%inner), one on each side
                                                         ->   %1 = stablehlo.select(%is_inside, %0, %u)

An update along whose dimension it is written is gathered, as where it lies is known at run time only. Here it is known:
padded, it is moved to the devices that have the elements around it, at most one block, and no number is computed anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce

import numpy as np
from jax.extend.mlir import ir

from sdy_jax.ir.graph import Op, Value
from sdy_jax.ir.new_ops import Place, any_number, created, filled, tensor_type
from sdy_jax.lowering.strategies.monoids import known_scalar, reduction_kind, returns_new
from sdy_jax.lowering.strategies.registry import folds
from sdy_jax.op_rules.op_attributes import scatter_dimension_numbers
from sdy_jax.representation.sharding import TensorSharding

_MOST = 2
"""How many times as large as its update an array may be. Guessed: an array of which little is written is not read and
written whole for it; with less, updates of a half are gathered."""


@folds("stablehlo.dynamic_update_slice")
def _fold_slice(op: Op) -> bool:
    operand, update, *starts = op.operands
    found = [_integer(start) for start in starts]
    shapes = zip(operand.shape or (), update.shape or (), strict=True)
    clamped = [None if at is None else min(max(at, 0), n - m) for at, (n, m) in zip(found, shapes, strict=True)]
    return _fold(op, operand, update, clamped)


@folds("stablehlo.scatter")
def _fold_scatter(op: Op) -> bool:
    """One that writes one window, or adds it. Where that does not fit nothing is written, and nothing is folded."""
    if len(op.results) != 1 or not (returns_new(op.blocks[0]) or reduction_kind(op.blocks[0]) == "sum"):
        return False
    (operand, indices, update), numbers = op.operands, scatter_dimension_numbers(op)
    if numbers.inserted_window_dims or numbers.input_batching_dims or update.rank != len(numbers.update_window_dims):
        return False
    found = list(_components(indices))
    if len(found) != len(numbers.scatter_dims_to_operand_dims):
        return False
    starts = dict(zip(numbers.scatter_dims_to_operand_dims, found, strict=True))
    return _fold(op, operand, update, [starts.get(dim, 0) for dim in range(operand.rank)])


def _components(indices: Value) -> Iterator[int | None]:
    """The elements of one index vector, as far as they are known."""
    op = indices.defining_op
    is_joined = op is not None and op.name == "stablehlo.concatenate" and indices.rank == 1
    for part in op.operands if op is not None and is_joined else [indices]:
        yield from [_integer(part)] * int(np.prod(part.shape or (), dtype=int))


def _integer(value: Value) -> int | None:
    known = known_scalar(value)
    return None if known is None else int(known)


def _fold(op: Op, operand: Value, update: Value, starts: Sequence[int | None]) -> bool:
    whole, part = operand.shape or (), update.shape or ()
    dims = [d for d, (n, m) in enumerate(zip(whole, part, strict=True)) if n != m]
    known = [at for at in starts if at is not None]
    is_inside = len(known) == len(whole) and all(0 <= at <= n - m for at, n, m in zip(known, whole, part, strict=True))
    is_much = np.prod(whole, dtype=float) <= _MOST * np.prod(part, dtype=float)
    if not (is_inside and is_much and _is_split(update, dims)):
        return False
    result = op.results[0].mlir
    window = _Window(Place.before(op.mlir), result.type, op.results[0].sharding)
    padded = window.padded(update.mlir, known, [n - m - at for at, n, m in zip(known, whole, part, strict=True)])
    inside = reduce(window.both, [each for d in dims for each in window.within(d, known[d], known[d] + part[d])])
    if op.blocks and not returns_new(op.blocks[0]):
        padded = window.made("stablehlo.add", [operand.mlir, padded])
    result.replace_all_uses_with(window.made("stablehlo.select", [inside, padded, operand.mlir]))
    return True


def _is_split(update: Value, dims: Sequence[int]) -> bool:
    return update.sharding is not None and any(update.sharding.axes[d] for d in dims)


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
