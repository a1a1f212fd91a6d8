"""The two views of a sharding at the border of a manual computation.

Outside, manual axes lead each dimension; inside there are only free axes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from sdy_jax.representation.mesh import AxisRef
from sdy_jax.representation.sharding import DimensionSharding, TensorSharding


def manual_prefix(axes: Sequence[AxisRef], manual: Sequence[str]) -> tuple[AxisRef, ...]:
    """The manual axes that lead a dimension.

    Found by bisection as in Shardy: where a free axis stands before a manual one, which is wrong and can only come from
    an edge written by hand, both count, and no manual axis gets into the body.
    """
    return tuple(axes[: bisect_left(axes, True, key=lambda axis: axis.name not in manual)])


def erase_manual_axes(sharding: TensorSharding, manual: Sequence[str]) -> TensorSharding:
    """The inner view of an outer sharding: its free axes."""
    if not manual:
        return sharding

    def free(axes: Sequence[AxisRef]) -> tuple[AxisRef, ...]:
        return tuple(axis for axis in axes if axis.name not in manual)

    dimensions = tuple(
        DimensionSharding(d.axes[len(manual_prefix(d.axes, manual)) :], d.is_closed, d.priority)
        for d in sharding.dimensions
    )
    return replace(
        sharding,
        dimensions=dimensions,
        replicated_axes=free(sharding.replicated_axes),
        unreduced_axes=free(sharding.unreduced_axes),
    )


def add_free_axes(outer: TensorSharding, inner: TensorSharding, manual: Sequence[str]) -> TensorSharding:
    """The outer view of an inner sharding: `outer` says where the manual axes are, and what is not split."""
    dimensions = tuple(
        DimensionSharding(manual_prefix(o.axes, manual) + i.axes, i.is_closed, i.priority)
        for o, i in zip(outer.dimensions, inner.dimensions, strict=False)  # on one device there are none
    )
    return replace(outer, mesh=inner.mesh, dimensions=dimensions)
