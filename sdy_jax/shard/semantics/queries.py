"""Ops that query a device's coordinates, its neighbours, and the shape of its shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sdy_jax.shard.semantics.checks import AxisIndices, check_axes, check_neighbors, check_whole_device
from sdy_jax.shard.semantics.grid import (
    Coordinate,
    Grid,
    Index,
    coordinates_in_group,
    op,
    position,
)
from sdy_jax.shard.semantics.layout import Dimension, Layout, check_layout, dimensions


@op
def grid_shape(grid: Grid, axes: AxisIndices = ()) -> tuple[int, ...]:
    """The sizes of the listed axes in their order; of all if none is listed."""
    check_axes(grid, axes, "axes")
    return grid.shape(axes or range(grid.rank))


@op
def process_multi_index(grid: Grid, axes: AxisIndices = ()) -> tuple[jax.Array, ...]:
    """The device's coordinates along the listed axes in their order; along all if none is listed."""
    check_axes(grid, axes, "axes")
    return tuple(jnp.asarray(grid.group_index((axis,))) for axis in axes or range(grid.rank))


@op
def process_linear_index(grid: Grid) -> jax.Array:
    """The row-major number of the device's coordinates."""
    return jnp.asarray(grid.group_index(range(grid.rank)))


@op
def neighbors_linear_indices(grid: Grid, device: Sequence[Coordinate], split_axes: AxisIndices) -> tuple[Index, Index]:
    """The linear indices of the devices before and after one in the group over `split_axes`; -1 where there is none.

    Integers for integers; scalars if a coordinate is one.
    """
    check_neighbors(grid, split_axes, device)
    own = position(grid, split_axes, device)
    return _neighbour(grid, device, split_axes, own - 1), _neighbour(grid, device, split_axes, own + 1)


def _neighbour(grid: Grid, device: Sequence[Coordinate], split_axes: AxisIndices, index: Index) -> Index:
    """The linear index of the device with another group index over `split_axes`."""
    inside: Any = (index >= 0) & (index < grid.group_size(split_axes))
    moved = list(device)
    for axis, coordinate in zip(split_axes, coordinates_in_group(grid, split_axes, index), strict=True):
        moved[axis] = coordinate
    found = position(grid, range(grid.rank), moved)
    if isinstance(found, int):
        return found if inside else -1
    return jnp.where(inside, found, -1)


@op
def shard_shape(grid: Grid, shape: Sequence[int], layout: Layout, device: Sequence[Coordinate]) -> tuple[Index, ...]:
    """The shape of what a device holds of a tensor of global `shape`, halos included.

    `device` are its coordinates, or its linear index alone. Integers for integers; else scalars.
    """
    check_layout(layout, grid)
    check_whole_device(grid, device, linear=True)
    if len(device) == 1:
        device = coordinates_in_group(grid, range(grid.rank), device[0])
    return tuple(_length(grid, found, device) for found in dimensions(layout, grid, shape))


def _length(grid: Grid, dimension: Dimension, device: Sequence[Coordinate]) -> Index:
    lengths = [dimension.halo[0] + length + dimension.halo[1] for length in dimension.lengths]
    block = position(grid, dimension.axes, device)
    return lengths[block] if isinstance(block, int) else jnp.asarray(lengths)[block]
