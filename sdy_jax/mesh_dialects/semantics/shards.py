"""What a device has of a tensor: its coordinates and neighbours, the shape of its shard, and its buffer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sdy_jax.errors import ShardingError
from sdy_jax.lowering.ops.collectives import reductions
from sdy_jax.mesh_dialects.semantics.checks import (
    AxisIndices,
    DeviceAxes,
    check_axes,
    check_neighbors,
    check_whole_device,
)
from sdy_jax.mesh_dialects.semantics.grid import (
    NUMBERS,
    Arithmetic,
    Coordinate,
    Grid,
    Index,
    coordinates_in_group,
    op,
    position,
)
from sdy_jax.mesh_dialects.semantics.layout import Dimension, Layout, check_fits, check_layout, dimensions

# Ops that query a device's coordinates, its neighbours, and the shape of its shard.


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


# Buffers: what a device holds of a tensor under a layout, made from the whole tensor and joined to it again.

# The kinds of which copies are no terms, so that all devices but one hold the identity.
COUNTING = {"sum": "sum", "product": "product", "bitwise_xor": "xor"}


def cut(grid: Grid, x: jax.Array, dim: int, dimension: Dimension) -> jax.Array:
    """The device's part of a dimension of a tensor, with its halo."""
    if not dimension.axes:
        return x
    lo, hi = dimension.halo
    widths = [(lo, hi + dimension.core) if d == dim else (0, 0) for d in range(x.ndim)]
    block = grid.group_index(dimension.axes)
    start = jnp.asarray(dimension.starts[:-1], jnp.int32)[block]
    part = lax.dynamic_slice_in_dim(jnp.pad(x, widths), start, dimension.length, axis=dim)
    if dimension.is_even:
        return part
    own = jnp.asarray(dimension.lengths, jnp.int32)[block]
    row = lax.broadcasted_iota(jnp.int32, part.shape, dim)
    return jnp.where(row < own, part, jnp.zeros_like(part))


# On the host: all buffers at once.


def all_buffers(x: np.ndarray, layout: Layout, grid: Grid) -> np.ndarray:
    """The buffers of all devices along a new dimension 0, in the order of their linear index."""
    found = dimensions(layout, grid, x.shape)
    buffers = []
    for device in itertools.product(*map(range, grid.sizes)):
        if layout.partial in COUNTING and any(device[axis] for axis in layout.partial_axes):
            identity = reductions.identity(COUNTING[layout.partial], x.dtype)
            buffers.append(np.full([d.length for d in found], identity, x.dtype))
            continue
        part = x
        for dim, dimension in enumerate(found):
            part = _host_cut(grid, part, dim, dimension, device)
        buffers.append(part)
    return np.stack(buffers)


def _host_cut(grid: Grid, x: np.ndarray, dim: int, dimension: Dimension, device: Sequence[int]) -> np.ndarray:
    lo, hi = dimension.halo
    block = int(position(grid, dimension.axes, device))
    start, end = dimension.starts[block] - lo, dimension.starts[block + 1] + hi
    part = np.take(x, range(max(start, 0), min(end, dimension.size)), axis=dim)
    before = max(-start, 0)
    after = dimension.length - before - part.shape[dim]
    return np.pad(part, [(before, after) if d == dim else (0, 0) for d in range(x.ndim)])


_COMBINE: dict[str, Any] = {
    "sum": np.add,
    "average": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "product": np.multiply,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
}


def joined(buffers: np.ndarray, layout: Layout, grid: Grid, shape: Sequence[int]) -> np.ndarray:
    """The tensor of global `shape` of which all devices' buffers are given; partial sums are combined.

    Devices that hold copies of a block must agree; the first one's is taken.
    """
    found = dimensions(layout, grid, shape)
    expected = (int(np.prod(grid.sizes)), *(dimension.length for dimension in found))
    if buffers.shape != expected:
        raise ShardingError(f"got buffers of shape {buffers.shape}, expected {expected}")
    whole = buffers.reshape(*grid.sizes, *buffers.shape[1:])
    terms = [
        _term(whole, found, grid, dict(zip(layout.partial_axes, place, strict=True)))
        for place in itertools.product(*map(range, grid.shape(layout.partial_axes)))
    ]
    total = terms[0]
    for term in terms[1:]:
        total = _COMBINE[layout.partial or "sum"](total, term).astype(total.dtype)
    if layout.partial == "average":
        mean = np.trunc(total / len(terms)) if np.issubdtype(total.dtype, np.integer) else total / len(terms)
        return np.asarray(mean).astype(total.dtype)
    return total


def _term(whole: np.ndarray, found: Sequence[Dimension], grid: Grid, fixed: Mapping[int, int]) -> np.ndarray:
    """What the devices hold whose coordinates along some axes are fixed; those along axes that split nothing are 0."""
    result = np.zeros([dimension.size for dimension in found], whole.dtype)
    for blocks in itertools.product(*(range(len(dimension.lengths)) for dimension in found)):
        device = dict.fromkeys(range(grid.rank), 0) | dict(fixed)
        for dimension, block in zip(found, blocks, strict=True):
            device |= zip(dimension.axes, coordinates_in_group(grid, dimension.axes, block), strict=True)
        pairs = list(zip(found, blocks, strict=True))
        own = [slice(d.halo[0], d.halo[0] + d.lengths[block]) for d, block in pairs]
        here = [slice(d.starts[block], d.starts[block + 1]) for d, block in pairs]
        result[tuple(here)] = whole[tuple(device.values())][tuple(own)]
    return result
