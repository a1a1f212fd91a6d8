"""Layouts as plain data and back."""

from __future__ import annotations

from functools import lru_cache

from sdy_jax.errors import SdyError
from sdy_jax.plan.record.choices import RecordedLayout
from sdy_jax.representation.axes import braces
from sdy_jax.representation.axis_text import parse_axes, parse_axis_lists
from sdy_jax.representation.sharding import REDUCTION_KINDS, TensorSharding


@lru_cache(maxsize=1 << 12)
def recorded_layout(sharding: TensorSharding, mesh_name: str) -> RecordedLayout:
    """A layout as data; `mesh_name`: the program's mesh."""
    axes = f"[{', '.join(map(braces, sharding.axes))}]"
    unreduced = braces(sharding.unreduced_axes) if sharding.unreduced_axes else ""
    assert isinstance(sharding.mesh, str)
    return RecordedLayout(axes, unreduced, sharding.reduction, "" if sharding.mesh == mesh_name else sharding.mesh)


@lru_cache(maxsize=1 << 12)
def layout_from(recorded: RecordedLayout, mesh_name: str) -> TensorSharding:
    """A layout that data says; `mesh_name`: the program's mesh.

    Raises:
        SdyError: it is none.
    """
    if recorded.reduction not in REDUCTION_KINDS:
        raise SdyError(f"{recorded.reduction!r} is no reduction")
    unreduced = parse_axes(recorded.unreduced) if recorded.unreduced else ()
    lists = parse_axis_lists(recorded.axes)
    return TensorSharding.closed(recorded.mesh or mesh_name, lists, unreduced, recorded.reduction)
