"""Collectives that move pieces of arrays among the devices of a group."""

from __future__ import annotations

from typing import Any

import jax

from sdy_jax.representation.named import AnyMesh
from sdy_jax.shard.collectives.groups import in_groups
from sdy_jax.shard.grids import AxisNames, Device, coordinates, dimension, mesh_terms
from sdy_jax.shard.semantics import movement


@mesh_terms
def all_gather(x: Any, *, grid_axes: AxisNames, gather_axis: int, grid: AnyMesh | None = None) -> jax.Array:
    """Joins the arrays of a group along a dimension, on every device of it.

    Args:
        x: an array of rank 1 or more.
        grid_axes: the axes whose devices form a group.
        gather_axis: the dimension, of length `n`.
        grid: the mesh.

    Returns:
        The array with dimension `gather_axis` of length `n * g`.

    Raises:
        SdyError: while tracing: an axis or a dimension that there is not, or a call outside of `jax.shard_map`.

    Example:
        >>> def body(x):  # (2, 3) on each device, 4 of them along "model"
        ...     return all_gather(x, grid_axes="model", gather_axis=1)  # (2, 12)
        >>> split = P("data", "model")
        >>> jax.jit(jax.shard_map(body, mesh=mesh, in_specs=split, out_specs=split))(jnp.ones((4, 12))).shape
        (4, 48)

    Source: the mesh dialect reference, `mesh.all_gather`.
    """
    return in_groups(movement.all_gather, x, grid, grid_axes, dimension(x, gather_axis))


@mesh_terms
def all_slice(x: Any, *, grid_axes: AxisNames, slice_axis: int, grid: AnyMesh | None = None) -> jax.Array:
    """Keeps each device's piece of its own array; nothing is sent.

    Args:
        x: an array of rank 1 or more.
        grid_axes: the axes whose devices share the dimension.
        slice_axis: the dimension, of length `n`.
        grid: the mesh.

    Returns:
        The array with dimension `slice_axis` of length `n / g`: the piece numbered by the device's place in its group.

    Raises:
        SdyError: while tracing: `n` is no multiple of `g`, an axis or a dimension that there is not, or a call outside
            of `jax.shard_map`.

    Example:
        >>> body = lambda x: all_slice(x, grid_axes="model", slice_axis=0)
        >>> each = P(("data", "model"))
        >>> jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=each))(jnp.arange(8)).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]

    Source: the mesh dialect reference, `mesh.all_slice`.
    """
    return in_groups(movement.all_slice, x, grid, grid_axes, dimension(x, slice_axis))


@mesh_terms
def all_to_all(
    x: Any, *, grid_axes: AxisNames, split_axis: int, concat_axis: int, grid: AnyMesh | None = None
) -> jax.Array:
    """Exchanges pieces: piece j of device i becomes piece i of device j.

    Args:
        x: an array of rank 1 or more.
        grid_axes: the axes whose devices form a group.
        split_axis: the dimension that is cut into `g` pieces.
        concat_axis: the dimension along which the received pieces are joined.
        grid: the mesh.

    Returns:
        The array with `split_axis` of length `n / g` and `concat_axis` of length `m * g`; of the same shape if they are
        one dimension.

    Raises:
        SdyError: while tracing: the length of `split_axis` is no multiple of `g`, an axis or a dimension that there is
            not, or a call outside of `jax.shard_map`.

    Example:
        >>> body = lambda x: all_to_all(x, grid_axes="model", split_axis=0, concat_axis=1)  # (8, 3) -> (2, 12)
        >>> split = P(("data", "model"))
        >>> jax.jit(jax.shard_map(body, mesh=mesh, in_specs=split, out_specs=split))(jnp.ones((64, 3))).shape
        (16, 12)

    Source: the mesh dialect reference, `mesh.all_to_all`.
    """
    return in_groups(movement.all_to_all, x, grid, grid_axes, dimension(x, split_axis), dimension(x, concat_axis))


@mesh_terms
def broadcast(x: Any, *, grid_axes: AxisNames, root: Device, grid: AnyMesh | None = None) -> jax.Array:
    """Gives every device of a group the array of one of them.

    Args:
        x: an array; only the root's matters.
        grid_axes: the axes whose devices form a group.
        root: the coordinates of the root along `grid_axes`: an integer if it is one axis, else one per axis. They may
            be traced scalars, equal in the group; a scalar outside of its axis means no device, and zeros everywhere.
        grid: the mesh.

    Returns:
        An array of the shape of `x`. -0.0 arrives as 0.0.

    Raises:
        SdyError: while tracing: a root that there is not, or that has not one coordinate per axis, an axis that there
            is not, or a call outside of `jax.shard_map`.

    Example:
        >>> body = lambda x: broadcast(x, grid_axes=("model", "data"), root=(2, 0))
        >>> each = P(("data", "model"))
        >>> jax.jit(jax.shard_map(body, mesh=mesh, in_specs=each, out_specs=each))(jnp.arange(8)).tolist()
        [2, 2, 2, 2, 2, 2, 2, 2]

    Source: the mesh dialect reference, `mesh.broadcast`.
    """
    return in_groups(movement.broadcast, x, grid, grid_axes, coordinates(root, "shard.broadcast: root"))


@mesh_terms
def gather(x: Any, *, grid_axes: AxisNames, gather_axis: int, root: Device, grid: AnyMesh | None = None) -> jax.Array:
    """Joins the arrays of a group along a dimension on one device of it; the others get zeros.

    Args:
        x: an array of rank 1 or more.
        grid_axes: the axes whose devices form a group.
        gather_axis: the dimension, of length `n`.
        root: the coordinates of the root, as in `broadcast`.
        grid: the mesh.

    Returns:
        An array with dimension `gather_axis` of length `n * g`.

    Raises:
        SdyError: as for `all_gather` and `broadcast`.

    Example:
        >>> body = lambda x: gather(x, grid_axes="model", gather_axis=0, root=3)
        >>> each = P(("data", "model"))  # the part of a root is shown
        >>> jax.jit(jax.shard_map(body, mesh=mesh, in_specs=each, out_specs=each))(jnp.arange(8))[12:16].tolist()
        [0, 1, 2, 3]

    Source: the mesh dialect reference, `mesh.gather`, which leaves the result off the root undefined.
    """
    return in_groups(
        movement.gather, x, grid, grid_axes, dimension(x, gather_axis), coordinates(root, "shard.gather: root")
    )


@mesh_terms
def scatter(x: Any, *, grid_axes: AxisNames, scatter_axis: int, root: Device, grid: AnyMesh | None = None) -> jax.Array:
    """Gives each device of a group its piece of the array of one of them.

    Args:
        x: an array of rank 1 or more; only the root's matters.
        grid_axes: the axes whose devices form a group.
        scatter_axis: the dimension, of length `n`, that the devices share.
        root: the coordinates of the root, as in `broadcast`.
        grid: the mesh.

    Returns:
        An array with dimension `scatter_axis` of length `n / g`.

    Raises:
        SdyError: as for `all_slice` and `broadcast`.

    Example:
        >>> body = lambda x: scatter(x, grid_axes="data", scatter_axis=0, root=1)
        >>> each = P(("data", "model"))
        >>> jax.jit(jax.shard_map(body, mesh=mesh, in_specs=each, out_specs=each))(jnp.arange(16)).tolist()
        [8, 10, 12, 14, 9, 11, 13, 15]

    Source: the mesh dialect reference, `mesh.scatter`.
    """
    return in_groups(
        movement.scatter, x, grid, grid_axes, dimension(x, scatter_axis), coordinates(root, "shard.scatter: root")
    )
