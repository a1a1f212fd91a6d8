"""Lookups of one window at a place that is known before are slices: the gradient of an update of a grid's interior.

    %1 = stablehlo.gather(%u, [1, 1]) {slice_sizes = [94, 94]}   ->   %1 = stablehlo.slice(%u) [1:95, 1:95]

As a lookup it is a partial sum of the size of the window; as a slice, devices send each other strips of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Op
from sdy_jax.ir.new_ops import Place, created
from sdy_jax.lowering.strategies.known_places import (
    clamped_starts,
    is_split_along,
    known_integers,
    known_starts,
    partial_dims,
)
from sdy_jax.lowering.strategies.registry import folds
from sdy_jax.op_rules.op_attributes import gather_dimension_numbers


@folds("stablehlo.gather")
def _fold_gather(op: Op) -> bool:
    numbers, sizes = gather_dimension_numbers(op), op.ints("slice_sizes")
    if len(numbers.offset_dims) != op.results[0].rank or op.results[0].shape != sizes:
        return False
    starts = known_starts(op.operands[1], numbers.start_index_map, len(sizes))
    return starts is not None and _fold(op, starts)


@folds("stablehlo.dynamic_slice")
def _fold_slice(op: Op) -> bool:
    starts = known_integers(op.operands[1:])
    return starts is not None and _fold(op, starts)


def _fold(op: Op, starts: Sequence[int]) -> bool:
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
