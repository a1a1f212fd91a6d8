"""The collectives of the shard dialect on local arrays, for the bodies of `jax.shard_map`.

All functions take `grid`, the mesh whose axes they list: by default that of `with_grid`, or of the surrounding
`shard_map`. `grid_axes` are its axes by name or position, singly or in a sequence, whose order is that of the devices
of a group; there is no default. In the shapes of the docstrings `g` is the number of devices of a group, the product
of the sizes of the listed axes. `mesh` and `mesh_axes` can be said for `grid` and `grid_axes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sdy_jax.ir.jax_shardings import AnyMesh
from sdy_jax.mesh_dialects.python.grids import (
    AxisNames,
    Device,
    axis_numbers,
    call_grid,
    coordinates,
    dimension,
    integer,
    listed,
    mesh_terms,
)
from sdy_jax.mesh_dialects.semantics import collectives

# Arrays sent from device to device: to one of a group, along an axis, or into the halos of blocks.


@mesh_terms
def send_recv(
    x: Any, *, grid_axes: AxisNames, source: Device, destination: Device, grid: AnyMesh | None = None
) -> jax.Array:
    """Sends an array to one device of the group, and receives one from another: `send` and `recv` of the dialect.

    Args:
        x: the array that the device sends.
        grid_axes: the axes whose devices form a group.
        source: the coordinates of the device to receive from, as `root` in `broadcast`; traced ones may differ from
            device to device. None, in groups of one device, is the device itself.
        destination: the coordinates of the device to send to, likewise.
        grid: the mesh.

    Returns:
        The array of `source` if that device sends to this one, else zeros. Traced coordinates make all devices of the
        group gather all arrays, since the exchange is not known before the run.

    Raises:
        SdyError: while tracing: a device that there is not, coordinates of another number than the axes, `source` None
            in a group of several devices, or a call outside of `jax.shard_map`.

    Example:
        >>> def body(x):  # to the next device along "model"
        ...     size, me = sdy.shard.grid_shape("model")[0], sdy.shard.process_multi_index("model")[0]
        ...     return send_recv(x, grid_axes="model", source=[(me - 1) % size], destination=[(me + 1) % size])
        >>> split = P(("data", "model"))
        >>> jax.jit(jax.shard_map(body, mesh=mesh, in_specs=split, out_specs=split))(jnp.arange(8)).tolist()
        [3, 0, 1, 2, 7, 4, 5, 6]

    Source: the mesh dialect reference, `mesh.send` and `mesh.recv`.
    """
    here, axes = call_grid("send_recv", grid, grid_axes)
    sender = None if source is None else coordinates(source, "shard.send_recv: source")
    return collectives.send_recv(
        here, jnp.asarray(x), axes, sender, coordinates(destination, "shard.send_recv: destination")
    )


@mesh_terms
def shift(
    x: Any,
    *,
    shift_axis: int | str,
    offset: int,
    rotate: bool = False,
    grid_axes: AxisNames | None = None,
    grid: AnyMesh | None = None,
) -> jax.Array:
    """Moves arrays along a grid axis, towards higher coordinates.

    Args:
        x: an array.
        shift_axis: the grid axis, by name or position.
        offset: by how many coordinates; negative ones go the other way.
        rotate: whether what leaves the axis enters at its other end.
        grid_axes: the axes whose devices form a group, among them `shift_axis`, which alone has an influence; only
            `shift_axis` by default.
        grid: the mesh.

    Returns:
        The array of the device `offset` coordinates lower; zeros where there is none.

    Raises:
        SdyError: while tracing: `shift_axis` is not among `grid_axes`, an axis that there is not, or a call outside of
            `jax.shard_map`.

    Example:
        >>> body = lambda x: shift(x, shift_axis="model", offset=1, rotate=True)
        >>> each = P(("data", "model"))
        >>> jax.jit(jax.shard_map(body, mesh=mesh, in_specs=each, out_specs=each))(jnp.arange(8)).tolist()
        [3, 0, 1, 2, 7, 4, 5, 6]

    Source: the mesh dialect reference, `mesh.shift`.
    """
    here, axes = call_grid("shift", grid, shift_axis if grid_axes is None else grid_axes)
    (along,) = axis_numbers("shard.shift", here, shift_axis, "shift_axis")
    return collectives.shift(here, jnp.asarray(x), axes, along, offset, rotate)


@mesh_terms
def update_halo(
    x: Any, *, split_axes: Sequence[AxisNames], halo_sizes: Sequence[int | jax.Array], grid: AnyMesh | None = None
) -> jax.Array:
    """Fills the halos of blocks with what the neighbouring devices own, also over corners.

    Args:
        x: the device's block with its halos. Along a split dimension it is `lo + core + hi` long, and the device owns
            the cells `[lo, lo + core)`; blocks are equal on all devices.
        split_axes: per dimension the grid axes that split it, major to minor; missing lists are empty.
        halo_sizes: `lo` and `hi` of each dimension that is split, one after the other. They may be traced scalars,
            equal on all devices: whole blocks are sent then. Such sizes are not checked.
        grid: the mesh.

    Returns:
        The block; halo cells beyond the first and the last device keep what they hold.

    Raises:
        SdyError: while tracing: more lists than dimensions, not two sizes per split dimension, negative ones or such
            that are larger than the core, an axis that there is not or is listed twice, or a call outside of
            `jax.shard_map`.

    Example:
        >>> body = lambda x: update_halo(x, split_axes=[["model"]], halo_sizes=[0, 1])  # the last of two elements
        >>> x = jnp.array([1, 0, 2, 0, 3, 0, 4, 0])
        >>> jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("model"), out_specs=P("model")))(x).tolist()
        [1, 2, 2, 3, 3, 4, 4, 0]

    Source: the mesh dialect reference, `mesh.update_halo`.
    """
    here, _ = call_grid("update_halo", grid, [name for names in split_axes for name in listed(names)])
    lists = [axis_numbers("shard.update_halo", here, names, "split_axes") for names in split_axes]
    sizes = tuple(
        size if isinstance(size, jax.Array) else integer(size, "shard.update_halo: a halo size") for size in halo_sizes
    )
    return collectives.update_halo(here, jnp.asarray(x), lists, sizes)


# The devices among which a collective runs.


def in_groups(
    op: Callable[..., jax.Array], x: Any, grid: AnyMesh | None, grid_axes: AxisNames, *parameters: Any
) -> jax.Array:
    """An op of the semantics among the devices that a call means."""
    here, axes = call_grid(op.__name__, grid, grid_axes)
    return op(here, jnp.asarray(x), axes, *parameters)


# Collectives that combine the arrays of a group.


@mesh_terms
def all_reduce(
    x: Any, *, grid_axes: AxisNames, reduction: str = "sum", dtype: Any = None, grid: AnyMesh | None = None
) -> jax.Array:
    """Combines the arrays of a group element by element, on every device of it.

    Args:
        x: an array.
        grid_axes: the axes whose devices form a group.
        reduction: "sum", "max", "min", "product", "average", "bitwise_and", "bitwise_or" or "bitwise_xor". Integers
            wrap, their average is truncated. Of booleans, sum and max are "or", product and min "and". max and min of
            floats are NaN if an input is; inputs that are equal share the derivative.
        dtype: the element type of the result, to which inputs are converted first; that of `x` by default.
        grid: the mesh.

    Returns:
        An array of the shape of `x`.

    Raises:
        SdyError: while tracing: an unknown kind, a bitwise one of floats, an order of complex numbers, a `dtype` of 64
            bits without `jax_enable_x64`, an axis that there is not, or a call outside of `jax.shard_map`.

    Example:
        >>> body = lambda x: all_reduce(x, grid_axes=("data", "model"), dtype=jnp.float32)
        >>> each = P(("data", "model"))
        >>> jax.jit(jax.shard_map(body, mesh=mesh, in_specs=each, out_specs=each))(jnp.arange(8)).tolist()
        [28.0, 28.0, 28.0, 28.0, 28.0, 28.0, 28.0, 28.0]

    Source: the mesh dialect reference, `mesh.all_reduce`.
    """
    return in_groups(collectives.all_reduce, x, grid, grid_axes, reduction, dtype)


@mesh_terms
def reduce(
    x: Any,
    *,
    grid_axes: AxisNames,
    root: Device,
    reduction: str = "sum",
    dtype: Any = None,
    grid: AnyMesh | None = None,
) -> jax.Array:
    """Combines the arrays of a group on one device of it; the others get zeros.

    Args:
        x: an array.
        grid_axes: the axes whose devices form a group.
        root: the coordinates of the root, as in `broadcast`.
        reduction: as in `all_reduce`.
        dtype: as in `all_reduce`.
        grid: the mesh.

    Returns:
        An array of the shape of `x`.

    Raises:
        SdyError: as for `all_reduce` and `broadcast`.

    Example:
        >>> body = lambda x: reduce(x, grid_axes="data", root=0, reduction="max")
        >>> each = P(("data", "model"))  # the parts of the roots are shown
        >>> jax.jit(jax.shard_map(body, mesh=mesh, in_specs=each, out_specs=each))(jnp.arange(8))[:4].tolist()
        [4, 5, 6, 7]

    Source: the mesh dialect reference, `mesh.reduce`.
    """
    return in_groups(collectives.reduce, x, grid, grid_axes, coordinates(root, "shard.reduce: root"), reduction, dtype)


@mesh_terms
def reduce_scatter(
    x: Any,
    *,
    grid_axes: AxisNames,
    scatter_axis: int,
    reduction: str = "sum",
    dtype: Any = None,
    grid: AnyMesh | None = None,
) -> jax.Array:
    """Combines the arrays of a group; each device keeps its piece of the result.

    Args:
        x: an array of rank 1 or more.
        grid_axes: the axes whose devices form a group.
        scatter_axis: the dimension, of length `n`, that the devices share.
        reduction: as in `all_reduce`.
        dtype: as in `all_reduce`.
        grid: the mesh.

    Returns:
        An array with dimension `scatter_axis` of length `n / g`.

    Raises:
        SdyError: as for `all_reduce` and `all_slice`.

    Example:
        >>> body = lambda x: reduce_scatter(x, grid_axes="model", scatter_axis=0, reduction="max")
        >>> each = P(("data", "model"))
        >>> jax.jit(jax.shard_map(body, mesh=mesh, in_specs=each, out_specs=each))(jnp.arange(32)).tolist()
        [12, 13, 14, 15, 28, 29, 30, 31]

    Source: the mesh dialect reference, `mesh.reduce_scatter`.
    """
    return in_groups(collectives.reduce_scatter, x, grid, grid_axes, dimension(x, scatter_axis), reduction, dtype)


# Collectives that move pieces of arrays among the devices of a group.


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
    return in_groups(collectives.all_gather, x, grid, grid_axes, dimension(x, gather_axis))


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
    return in_groups(collectives.all_slice, x, grid, grid_axes, dimension(x, slice_axis))


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
    return in_groups(collectives.all_to_all, x, grid, grid_axes, dimension(x, split_axis), dimension(x, concat_axis))


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
    return in_groups(collectives.broadcast, x, grid, grid_axes, coordinates(root, "shard.broadcast: root"))


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
        collectives.gather, x, grid, grid_axes, dimension(x, gather_axis), coordinates(root, "shard.gather: root")
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
        collectives.scatter, x, grid, grid_axes, dimension(x, scatter_axis), coordinates(root, "shard.scatter: root")
    )
