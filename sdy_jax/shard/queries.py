"""What a device asks of the grid, as functions: its sizes, the coordinates of the device, its neighbours."""

from __future__ import annotations

import jax

from sdy_jax.representation.named import AnyMesh
from sdy_jax.shard.grids import (
    AxisNames,
    Device,
    axis_numbers,
    coordinates,
    grid_of,
    listed,
    mesh_terms,
    on_devices,
    on_every_axis,
)
from sdy_jax.shard.semantics import queries
from sdy_jax.shard.semantics.grid import Index


@mesh_terms
def grid_shape(axes: AxisNames = (), *, grid: AnyMesh | None = None) -> tuple[int, ...]:
    """The sizes of grid axes in the listed order, of all if none is listed. It can be called anywhere.

    Raises:
        SdyError: an axis that there is not, or that is listed twice.

    Example:
        >>> grid_shape(("model", "data"), grid=jax.sharding.AbstractMesh((2, 4), ("data", "model")))
        (4, 2)

    Source: the mesh dialect reference, `mesh.mesh_shape`.
    """
    here = grid_of(grid)
    return queries.grid_shape(here, axis_numbers("shard.grid_shape", here, axes, "axes"))


@mesh_terms
def process_multi_index(axes: AxisNames = (), *, grid: AnyMesh | None = None) -> tuple[jax.Array, ...]:
    """The device's coordinates along grid axes in the listed order, along all if none is listed: integer scalars.

    Raises:
        SdyError: while tracing: an axis that there is not or is listed twice, or a call outside of `jax.shard_map`.

    Example:
        >>> body = lambda: process_multi_index()[1][None]
        >>> jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(), out_specs=P(("data", "model"))))().tolist()
        [0, 1, 2, 3, 0, 1, 2, 3]

    Source: the mesh dialect reference, `mesh.process_multi_index`.
    """
    given = listed(axes)
    here, numbers = (
        on_devices("process_multi_index", grid, given) if given else on_every_axis("process_multi_index", grid)
    )
    return queries.process_multi_index(here, numbers)


@mesh_terms
def process_linear_index(*, grid: AnyMesh | None = None) -> jax.Array:
    """The row-major number of the device's coordinates, the last axis fastest: an integer scalar.

    It is a position in the grid, not the id of a `jax.Device`.

    Raises:
        SdyError: while tracing: a call outside of `jax.shard_map`, or in one that is not manual on all axes.

    Example:
        >>> body = lambda: process_linear_index()[None]
        >>> jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(), out_specs=P(("data", "model"))))().tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]

    Source: the mesh dialect reference, `mesh.process_linear_index`.
    """
    here, _ = on_every_axis("process_linear_index", grid)
    return queries.process_linear_index(here)


@mesh_terms
def neighbors_linear_indices(
    device: Device = None, *, split_axes: AxisNames, grid: AnyMesh | None = None
) -> tuple[Index, Index]:
    """The linear indices of the devices before and after one, as the blocks of a dimension follow each other.

    Args:
        device: coordinates along all grid axes; those of the device that runs this by default.
        split_axes: the axes that split the dimension, major to minor.
        grid: the mesh.

    Returns:
        The device before and the one after; -1 where there is none. Integers for integers, else integer scalars.

    Raises:
        SdyError: an axis that there is not or is listed twice, no axes, or coordinates of another number than axes.

    Example:
        >>> grid = jax.sharding.AbstractMesh((10, 20, 30), ("x", "y", "z"))
        >>> neighbors_linear_indices((1, 2, 3), split_axes="y", grid=grid)
        (633, 693)

    Source: the mesh dialect reference, `mesh.neighbors_linear_indices`.
    """
    if device is None:
        here, every = on_every_axis("neighbors_linear_indices", grid)
        device = queries.process_multi_index(here, every)
    here = grid_of(grid)
    axes = axis_numbers("shard.neighbors_linear_indices", here, split_axes, "split_axes")
    return queries.neighbors_linear_indices(here, coordinates(device, "shard.neighbors_linear_indices: device"), axes)
