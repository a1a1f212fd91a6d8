"""Lookups and updates as other ops that move less: at positions known before, and of a layer of a stack."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce

import numpy as np
from jax.extend.mlir import ir

from sdy_jax.ir.attributes import attribute_from_text
from sdy_jax.ir.graph import Op, Value
from sdy_jax.ir.new_ops import Place, any_number, converted, created, filled_array, reshaped, shape_of, tensor_type
from sdy_jax.ir.shardings import CLOSED, TensorSharding
from sdy_jax.ir.stored_shardings import store_results
from sdy_jax.lowering.ops.elementwise import known_scalar, reduction_kind, returns_new
from sdy_jax.lowering.ops.registry import LayerOfStack, folds, updates_layers
from sdy_jax.shardy.rules.op_attributes import (
    ScatterDimensionNumbers,
    gather_dimension_numbers,
    scatter_dimension_numbers,
)

# Windows at places that are known before the program runs.


def known_integer(value: Value) -> int | None:
    """The number that an integer array consists of, where that is known."""
    known = known_scalar(value)
    return None if known is None else int(known)


def known_integers(values: Sequence[Value]) -> list[int] | None:
    """The numbers that integer arrays consist of; None where one is not known."""
    found = [number for number in map(known_integer, values) if number is not None]
    return found if len(found) == len(values) else None


def clamped_starts(starts: Sequence[int], whole: Sequence[int], part: Sequence[int]) -> list[int]:
    """Where a window begins of which the ops say that it fits."""
    return [min(max(at, 0), n - size) for at, n, size in zip(starts, whole, part, strict=True)]


def partial_dims(whole: Sequence[int], part: Sequence[int]) -> list[int]:
    """The dimensions of which a window has only a part."""
    return [d for d, (n, size) in enumerate(zip(whole, part, strict=True)) if n != size]


def known_starts(indices: Value, dims: Sequence[int], rank: int) -> list[int] | None:
    """Where the one window of a gather or a scatter begins in each dimension, of which one index vector addresses some;
    None where that is not known."""
    found = [number for number in _components(indices) if number is not None]
    if len(found) != math.prod(indices.shape or ()) or len(found) != len(dims):
        return None
    starts = dict(zip(dims, found, strict=True))
    return [starts.get(dim, 0) for dim in range(rank)]


def _components(indices: Value) -> Iterator[int | None]:
    op = indices.defining_op
    is_joined = op is not None and op.name == "stablehlo.concatenate" and indices.rank == 1
    for part in op.operands if op is not None and is_joined else [indices]:
        yield from [known_integer(part)] * math.prod(part.shape or ())


def is_split_along(value: Value, dims: Sequence[int]) -> bool:
    """Whether a value is split along one of some dimensions."""
    return value.sharding is not None and any(value.sharding.axes[d] for d in dims)


# Lookups of one window at a place that is known before are slices: the gradient of an update of a grid's interior.
#
#     %1 = stablehlo.gather(%u, [1, 1]) {slice_sizes = [94, 94]}   ->   %1 = stablehlo.slice(%u) [1:95, 1:95]
#
# As a lookup it is a partial sum of the size of the window; as a slice, devices send each other strips of it.


@folds("stablehlo.gather")
def _fold_gather(op: Op) -> bool:
    numbers, sizes = gather_dimension_numbers(op), op.ints("slice_sizes")
    if len(numbers.offset_dims) != op.results[0].rank or op.results[0].shape != sizes:
        return False
    starts = known_starts(op.operands[1], numbers.start_index_map, len(sizes))
    return starts is not None and _lookup_as_slice(op, starts)


@folds("stablehlo.dynamic_slice")
def _fold_dynamic_slice(op: Op) -> bool:
    starts = known_integers(op.operands[1:])
    return starts is not None and _lookup_as_slice(op, starts)


def _lookup_as_slice(op: Op, starts: Sequence[int]) -> bool:
    """Starts are clamped, as by these ops."""
    whole, sizes = op.operands[0].shape or (), op.results[0].shape or ()
    if not is_split_along(op.operands[0], partial_dims(whole, sizes)):
        return False
    starts = clamped_starts(starts, whole, sizes)
    ends = [at + size for at, size in zip(starts, sizes, strict=True)]
    bounds = {"start_indices": starts, "limit_indices": ends, "strides": [1] * len(starts)}
    place, result = Place.before(op.mlir), op.results[0]
    attributes = {name: ir.DenseI64ArrayAttr.get(list(each), place.context) for name, each in bounds.items()}
    operand = op.mlir.operands[0]  # that of before may be folded
    sliced = created("stablehlo.slice", result.mlir.type, [operand], place, result.sharding, attributes)
    result.mlir.replace_all_uses_with(sliced)
    return True


# Updates at places that are known before, as of a grid's interior, whose parts are on the devices of what they
# change.
#
#     %1 = stablehlo.dynamic_update_slice(%u, %inner, 1, 1)     %0 = stablehlo.pad(%inner), one on each side
#                                                          ->   %1 = stablehlo.select(%is_inside, %0, %u)
#
# An update along whose dimension it is written is gathered, as where it lies is known at run time only. Here it is
# known: padded, it is moved to the devices that have the elements around it, at most one block, and no number is
# computed anew.

_MOST = 2
"""How many times as large as its update an array may be. Guessed: an array of which little is written is not read and
written whole for it; with less, updates of a half are gathered."""


@folds("stablehlo.dynamic_update_slice")
def _fold_dynamic_update(op: Op) -> bool:
    """The op clamps its starts."""
    operand, update, *starts = op.operands
    found = known_integers(starts)
    return found is not None and _update_as_pad(
        op, update, clamped_starts(found, operand.shape or (), update.shape or ())
    )


@folds("stablehlo.scatter")
def _fold_scatter(op: Op) -> bool:
    """One that writes one window, or adds it. Where that does not fit nothing is written, and nothing is folded."""
    if len(op.results) != 1 or not (returns_new(op.blocks[0]) or reduction_kind(op.blocks[0]) == "sum"):
        return False
    (operand, indices, update), numbers = op.operands, scatter_dimension_numbers(op)
    if numbers.inserted_window_dims or numbers.input_batching_dims or update.rank != len(numbers.update_window_dims):
        return False
    starts = known_starts(indices, numbers.scatter_dims_to_operand_dims, operand.rank)
    return starts is not None and _update_as_pad(op, update, starts)


def _update_as_pad(op: Op, update: Value, starts: Sequence[int]) -> bool:
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
                other = filled_array(np.asarray(bound, np.int32), index, self._place, self._sharding)
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


# Updates of a layer as updates of the stack that it lies in: of fewer elements, none of which is moved before.
#
# %layer = dynamic_slice %stack, %i                       %new = dynamic_update_slice %stack, %few, %i, %position
# %next = dynamic_update_slice %layer, %few, %position    %next = dynamic_slice %new, %i %new = dynamic_update_slice
# %stack, %next, %i


@updates_layers("stablehlo.dynamic_update_slice")
def _dynamic_update_slice(op: Op, layer: LayerOfStack) -> ir.Value:
    few, starts, place = op.operands[1], [value.mlir for value in op.operands[2:]], Place.before(op.mlir)
    first = converted(layer.at, starts[0].type, place) if starts else layer.at
    of_stack = reshaped(few.mlir, [1, *shape_of(few.mlir)], place, _with_dim(few.sharding, 0))
    operands = [layer.stack, of_stack, first, *starts]
    return created(op.name, layer.stack.type, operands, place, layer.sharding)


@updates_layers("stablehlo.scatter")
def _scatter(op: Op, layer: LayerOfStack) -> ir.Value | None:
    if len(op.results) != 1 or "sdy.sharding_rule" in op.attributes:
        return None
    numbers = scatter_dimension_numbers(op)
    indices = _with_layer(op, _within(layer, Place.before(op.mlir)), numbers.index_vector_dim)
    made = op.mlir.clone(ir.InsertionPoint(op.mlir)).operation
    made.operands[0], made.operands[1] = layer.stack, indices
    made.results[0].set_type(layer.stack.type)
    made.attributes["scatter_dimension_numbers"] = attribute_from_text(_of_stack(numbers).text, op.mlir.context)
    store_results(made, [layer.sharding])
    return made.results[0]


def _within(layer: LayerOfStack, place: Place) -> ir.Value:
    """The number of a layer that is there: slices take the nearest one, scatters leave out what is out of bounds."""
    numbers = 0, shape_of(layer.stack)[0] - 1
    first, last = (filled_array(np.asarray(number), layer.at.type, place) for number in numbers)
    return created("stablehlo.clamp", layer.at.type, [first, layer.at, last], place)


def _with_layer(op: Op, at: ir.Value, vector_dim: int) -> ir.Value:
    """The indices of a scatter, in which each vector begins with the number of the layer."""
    indices, place, sharding = op.operands[1].mlir, Place.before(op.mlir), op.operands[1].sharding
    shape = shape_of(indices)
    if vector_dim == len(shape):
        shape.append(1)
        sharding = _with_dim(sharding, vector_dim)
        indices = reshaped(indices, shape, place, sharding)
    sharding = _whole_along(sharding, vector_dim)
    one = [1 if dim == vector_dim else size for dim, size in enumerate(shape)]
    number = converted(at, tensor_type([], indices), place)
    dims = {"broadcast_dimensions": ir.DenseI64ArrayAttr.get([], place.context)}
    numbers = created("stablehlo.broadcast_in_dim", tensor_type(one, indices), [number], place, sharding, dims)
    shape[vector_dim] += 1
    along = {"dimension": ir.IntegerAttr.get(ir.IntegerType.get_signless(64, place.context), vector_dim)}
    joined = tensor_type(shape, indices)
    return created("stablehlo.concatenate", joined, [numbers, indices], place, sharding, along)


def _of_stack(numbers: ScatterDimensionNumbers) -> ScatterDimensionNumbers:
    """Those with one more dimension of the input in front, for which the first element of index vectors is."""
    return replace(
        numbers,
        inserted_window_dims=(0, *_behind(numbers.inserted_window_dims)),
        input_batching_dims=_behind(numbers.input_batching_dims),
        scatter_dims_to_operand_dims=(0, *_behind(numbers.scatter_dims_to_operand_dims)),
    )


def _behind(dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(dim + 1 for dim in dims)


def _whole_along(sharding: TensorSharding | None, dim: int) -> TensorSharding | None:
    if sharding is None:
        return None
    dimensions = sharding.dimensions
    return replace(sharding, dimensions=(*dimensions[:dim], CLOSED, *dimensions[dim + 1 :]))


def _with_dim(sharding: TensorSharding | None, dim: int) -> TensorSharding | None:
    """One of a value that has one more dimension, of size one."""
    if sharding is None:
        return None
    dimensions = sharding.dimensions
    return replace(sharding, dimensions=(*dimensions[:dim], CLOSED, *dimensions[dim:]))
