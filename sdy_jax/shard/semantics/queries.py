"""Ops that query a device's coordinates, its neighbours, and the shape of its shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from sdy_jax.shard.semantics.checks import AxisIndices, DeviceAxes, check_axes, check_neighbors, check_whole_device
from sdy_jax.shard.semantics.grid import (
    Coordinate,
    Grid,
    Index,
    coordinates_in_group,
    op,
    position,
)
from sdy_jax.shard.semantics.integers import NUMBERS, Arithmetic
from sdy_jax.shard.semantics.layout import Layout, check_fits, check_layout


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
    check_fits(layout, grid, shape)
    return tuple(shard_lengths(layout, grid, shape, device, NUMBERS))


def shard_lengths(
    layout: Layout, on: DeviceAxes, sizes: Sequence[Any], device: Sequence[Any], arithmetic: Arithmetic
) -> Iterator[Any]:
    """The length of each dimension of what a device holds, halos included, as far as it is known.

    Args:
        layout: the layout of the tensor, which fits it.
        on: the grid.
        sizes: those of the tensor; None may stand for one that offsets say.
        device: its coordinates, or its linear index alone.
        arithmetic: that on sizes, coordinates, halos and offsets which are no integers.
    """
    offsets, halos, coordinates = layout.offsets_of(on), layout.halo_of, device
    if len(device) == 1:
        coordinates = coordinates_in_group(on, range(on.rank), device[0], arithmetic)
    for dim, size in enumerate(sizes):
        axes, length = layout.split[dim] if dim < len(layout.split) else (), size
        if axes:
            block = _block(on, axes, coordinates, arithmetic)
            lengths = [arithmetic("arith.subi", end, start) for start, end in pairwise(offsets.get(dim, ()))]
            length = arithmetic.pick(lengths, block) if lengths else _even(size, on.group_size(axes), block, arithmetic)
        for halo in halos.get(dim, (0, 0)):
            length = arithmetic("arith.addi", length, halo)
        yield length


def _block(on: DeviceAxes, axes: AxisIndices, coordinates: Sequence[Any], arithmetic: Arithmetic) -> Any:
    """The number of the block that a device holds of a dimension that is split along `axes`."""
    block: Any = 0
    for axis in axes:
        start = arithmetic("arith.muli", block, on.group_size((axis,)) or 0)
        block = arithmetic("arith.addi", start, coordinates[axis])
    return block


def _even(size: Any, count: int | None, block: Any, arithmetic: Arithmetic) -> Any:
    """The length of one of the blocks of length `ceil(size / count)`, of which the last ones are shorter, or empty."""
    length = arithmetic("arith.ceildivsi", size, count or 1)
    rest = arithmetic("arith.subi", size, arithmetic("arith.muli", block, length))
    return arithmetic("arith.minsi", arithmetic("arith.maxsi", rest, 0), length)
