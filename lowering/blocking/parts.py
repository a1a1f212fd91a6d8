"""Parts of values: read from a view with a dimension for the parts, and written into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jax.extend.mlir import ir

from sdy_jax.lowering.blocking.made import Place, created, integer, reshaped, shape_of, tensor_type
from sdy_jax.lowering.blocking.spans import Cut, Span
from sdy_jax.representation.sharding import CLOSED, TensorSharding


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
        shape, at = shape_of(view), span.dim + 1
        shape[at] = 1
        sizes = {"slice_sizes": ir.DenseI64ArrayAttr.get(shape, place.context)}
        operands = [view, *_starts(trip, at, len(shape), place)]
        entry = created(
            "stablehlo.dynamic_slice", tensor_type(shape, view), operands, place, with_parts(sharding, span), sizes
        )
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
    shape, at = shape_of(stack), span.dim + 1
    shape[at] = 1
    within = with_parts(sharding, span)
    operands = [stack, reshaped(part, shape, place, within), *_starts(trip, at, len(shape), place)]
    return created("stablehlo.dynamic_update_slice", stack.type, operands, place, within)


def with_parts(sharding: TensorSharding | None, span: Span) -> TensorSharding | None:
    """The sharding of a view."""
    if sharding is None:
        return None
    dims = sharding.dimensions
    dims = (*dims[: span.dim + 1], CLOSED, CLOSED, *dims[span.dim + 1 :])
    return replace(sharding, dimensions=dims, unreduced_axes=(), reduction="sum")


def _starts(trip: ir.Value, dim: int, rank: int, place: Place) -> list[ir.Value]:
    """Where the part of a trip begins: its number is that along a dimension."""
    zero = integer(0, place)
    return [trip if other == dim else zero for other in range(rank)]
