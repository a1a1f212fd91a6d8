"""Parts of values: read from a view with a dimension for the parts, and written into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jax.extend.mlir import ir

from sdy_jax.ir.new_ops import Place, entry_of, reshaped, shape_of, with_entry
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
