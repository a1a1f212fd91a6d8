"""What the collectives of the mesh and shard dialects do to the shape of a tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from sdy_jax.shard.view import DialectOp

DynamicShape = tuple[int | None, ...]
"""Sizes, None where they are not known."""

CHANGED_DIMENSIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "all_gather": ("", "gather_axis"),
        "gather": ("", "gather_axis"),
        "all_slice": ("slice_axis", ""),
        "scatter": ("scatter_axis", ""),
        "reduce_scatter": ("scatter_axis", ""),
        "all_to_all": ("split_axis", "concat_axis"),
    }
)
"""The attributes that say which dimension is divided among the devices of a group, and which is as many times longer.

All other ops keep the shape."""


def result_shape(op: DialectOp, shape: Sequence[int | None], group: int | None) -> DynamicShape:
    """The shape of an op's result, given that of its operand and the number of devices in a group.

    What does not divide is rounded down, and found when the ops are checked.
    """
    sizes = list(shape)
    shorter, longer = (op[name] if name else None for name in CHANGED_DIMENSIONS.get(op.name, ("", "")))
    if shorter == longer:
        return tuple(sizes)
    if shorter is not None:
        sizes[shorter] = None if sizes[shorter] is None or group is None else sizes[shorter] // group
    if longer is not None:
        sizes[longer] = None if sizes[longer] is None or group is None else sizes[longer] * group
    return tuple(sizes)
