"""Updates of a layer as updates of the stack that it lies in: of fewer elements, none of which is moved before.

%layer = dynamic_slice %stack, %i                       %new = dynamic_update_slice %stack, %few, %i, %position
%next = dynamic_update_slice %layer, %few, %position    %next = dynamic_slice %new, %i
%new = dynamic_update_slice %stack, %next, %i
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jax.extend.mlir import ir

from sdy_jax.ir.graph import Op
from sdy_jax.ir.new_ops import Place, converted, created, filled, reshaped, shape_of, tensor_type
from sdy_jax.ir.stored_shardings import store_results
from sdy_jax.lowering.strategies.registry import LayerOfStack, updates_layers
from sdy_jax.op_rules.op_attributes import ScatterDimensionNumbers, scatter_dimension_numbers
from sdy_jax.representation.attributes import attribute_from_text
from sdy_jax.representation.sharding import CLOSED, TensorSharding


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
    first, last = (filled(np.asarray(number), layer.at.type, place) for number in numbers)
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
