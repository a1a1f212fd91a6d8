"""Arrays sent from device to device: to one of a group, along an axis, or into the halos of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sdy_jax.representation.named import AnyMesh
from sdy_jax.shard.grids import (
    AxisNames,
    Device,
    axis_numbers,
    coordinates,
    integer,
    listed,
    mesh_terms,
    on_devices,
)
from sdy_jax.shard.semantics import exchange, halo, movement


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
    here, axes = on_devices("send_recv", grid, grid_axes)
    sender = None if source is None else coordinates(source, "shard.send_recv: source")
    return exchange.send_recv(
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
    here, axes = on_devices("shift", grid, shift_axis if grid_axes is None else grid_axes)
    (along,) = axis_numbers("shard.shift", here, shift_axis, "shift_axis")
    return movement.shift(here, jnp.asarray(x), axes, along, offset, rotate)


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
    here, _ = on_devices("update_halo", grid, [name for names in split_axes for name in listed(names)])
    lists = [axis_numbers("shard.update_halo", here, names, "split_axes") for names in split_axes]
    sizes = tuple(
        size if isinstance(size, jax.Array) else integer(size, "shard.update_halo: a halo size") for size in halo_sizes
    )
    return halo.update_halo(here, jnp.asarray(x), lists, sizes)
