"""Ops that move data between the devices of a group: gathers, slices, exchanges, broadcasts, shifts."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from sdy_jax.lowering.collectives import chunks, data_movement, reductions
from sdy_jax.shard.semantics.checks import AxisIndices, check_axes, check_device, check_shift_axis
from sdy_jax.shard.semantics.grid import (
    Coordinate,
    Grid,
    check_dimension,
    group_device,
    only_on,
    op,
    permute,
    piece_size,
    shifted,
)


@op
def all_gather(grid: Grid, x: jax.Array, axes: AxisIndices, gather_axis: int) -> jax.Array:
    """The inputs of the group joined along `gather_axis`: `n -> n*g`."""
    check_axes(grid, axes)
    check_dimension(x, gather_axis, "gather_axis")
    return data_movement.all_gather(x, chunks.along(x, gather_axis, grid.refs(axes)), grid.mesh)


@op
def all_slice(grid: Grid, x: jax.Array, axes: AxisIndices, slice_axis: int) -> jax.Array:
    """The device's piece of its own input along `slice_axis`: `n -> n/g`. Nothing is sent."""
    check_axes(grid, axes)
    check_dimension(x, slice_axis, "slice_axis")
    piece_size(grid, x, slice_axis, axes)
    return data_movement.all_slice(x, chunks.along(x, slice_axis, grid.refs(axes)), grid.mesh)


@op
def all_to_all(grid: Grid, x: jax.Array, axes: AxisIndices, split_axis: int, concat_axis: int) -> jax.Array:
    """Piece j along `split_axis` of device i becomes piece i along `concat_axis` of device j."""
    check_axes(grid, axes)
    check_dimension(x, split_axis, "split_axis")
    check_dimension(x, concat_axis, "concat_axis")
    piece_size(grid, x, split_axis, axes)
    if not axes:
        return x
    return data_movement.all_to_all(x, [(grid.refs(axes), concat_axis, split_axis)], grid.mesh)


@op
def broadcast(grid: Grid, x: jax.Array, axes: AxisIndices, root: Sequence[Coordinate]) -> jax.Array:
    """The root's input, on every device of the group.

    A sum in which the inputs of all others are zero: it can be differentiated, and only turns -0.0 into 0.0.
    """
    check_axes(grid, axes)
    check_device(grid, axes, root, "root")
    return reductions.all_reduce(only_on(grid, axes, root, x), grid.refs(axes), "sum", grid.mesh)


@op
def gather(grid: Grid, x: jax.Array, axes: AxisIndices, gather_axis: int, root: Sequence[Coordinate]) -> jax.Array:
    """On the root, the inputs of the group joined along `gather_axis`; zeros elsewhere."""
    check_axes(grid, axes)
    check_dimension(x, gather_axis, "gather_axis")
    check_device(grid, axes, root, "root")
    joined = data_movement.all_gather(x, chunks.along(x, gather_axis, grid.refs(axes)), grid.mesh)
    return only_on(grid, axes, root, joined)


@op
def scatter(grid: Grid, x: jax.Array, axes: AxisIndices, scatter_axis: int, root: Sequence[Coordinate]) -> jax.Array:
    """Each device's piece along `scatter_axis` of the root's input: `n -> n/g`.

    All devices send pieces and keep the root's, which moves 1/g of what a broadcast would.
    """
    check_axes(grid, axes)
    check_dimension(x, scatter_axis, "scatter_axis")
    check_device(grid, axes, root, "root")
    piece = piece_size(grid, x, scatter_axis, axes)
    if not axes:
        return x
    group = grid.group_size(axes)
    pieces = x.reshape(*x.shape[:scatter_axis], group, piece, *x.shape[scatter_axis + 1 :])
    pieces = jnp.moveaxis(pieces, scatter_axis, 0)
    received = data_movement.all_to_all(pieces, [(grid.refs(axes), 0, 0)], grid.mesh)
    return entry(received, group_device(grid, axes, root))


@op
def shift(grid: Grid, x: jax.Array, axes: AxisIndices, shift_axis: int, offset: int, rotate: bool = False) -> jax.Array:
    """The input of the device `offset` coordinates lower along `shift_axis`; zeros where there is none.

    With `rotate` the coordinates are those of a ring. Other axes of the list have no influence.
    """
    check_axes(grid, axes)
    check_shift_axis(grid, axes, shift_axis)
    if not rotate:
        return shifted(grid, x, (shift_axis,), offset)
    size = grid.sizes[shift_axis]
    return permute(grid, x, (shift_axis,), [(i, (i + offset) % size) for i in range(size)])


def entry(stack: jax.Array, index: int | jax.Array) -> jax.Array:
    """Entry `index` of dimension 0; zeros if it is -1."""
    found = lax.dynamic_index_in_dim(stack, jnp.maximum(index, 0), 0, keepdims=False)
    return jnp.where(index >= 0, found, jnp.zeros_like(found))
