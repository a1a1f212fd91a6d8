"""The buffers that devices hold of a tensor under a sharding: their shapes, and the way to and from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sdy_jax.errors import ShardingError
from sdy_jax.representation.named import AnyMesh
from sdy_jax.shard.grids import AxisNames, Device, coordinates, grid_of, listed, mesh_terms, on_devices
from sdy_jax.shard.semantics import buffers, queries, resharding
from sdy_jax.shard.semantics.layout import even_shape
from sdy_jax.shard.sharding import Sharding, grid_for


@mesh_terms
def shard_shape(
    dims: Sequence[int], sharding: Sharding, device: Device, *, grid: AnyMesh | None = None
) -> tuple[int, ...]:
    """The shape of what a device holds of a tensor, halos included: `shard_shape` of the dialect.

    Args:
        dims: the shape of the tensor.
        sharding: its sharding.
        device: the device's linear index, or its coordinates along all grid axes. Traced ones make traced lengths.
        grid: the mesh, where the sharding has none.

    Returns:
        One length per dimension.

    Raises:
        SdyError: a sharding that does not fit the shape, or a device that there is not.

    Example:
        >>> grid = jax.sharding.AbstractMesh((4,), ("x",))
        >>> [shard_shape((10, 3), Sharding([["x"]]), device, grid=grid) for device in range(4)]
        [(3, 3), (3, 3), (3, 3), (1, 3)]

    Source: the mesh dialect reference, `mesh.shard_shape`.
    """
    here = grid_for(sharding, grid)
    return queries.shard_shape(
        here, tuple(dims), sharding.layout(here), coordinates(device, "shard.shard_shape: device")
    )  # type: ignore[return-value]


def reshard(x: Any, source: Sharding, target: Sharding, *, shape: Sequence[int] | None = None) -> jax.Array:
    """Moves a tensor from one sharding to another, inside `jax.shard_map`.

    Args:
        x: the device's buffer under `source`: its block, with halos; where blocks are uneven, at the start of a buffer
            as long as the longest, of which the rest does not matter.
        source, target: shardings on one grid.
        shape: the shape of the whole tensor. It is only needed where blocks are uneven and no offsets say so.

    Returns:
        The device's buffer under `target`; padding and halos beyond the tensor's edges are zeros.

    Raises:
        SdyError: while tracing: two grids, shardings that do not fit the tensor, or a call outside of `jax.shard_map`.

    Example:
        >>> body = lambda rows: reshard(rows, Sharding([["model"]]), Sharding([[], ["model"]]))  # an all-to-all
        >>> jax.shard_map(body, mesh=mesh, in_specs=P("model"), out_specs=P(None, "model"))(jnp.ones((4, 8))).shape
        (4, 8)

    Source: the mesh dialect reference, `mesh.shard`: an annotation for users is a reshard.
    """
    if source.grid is not None and target.grid is not None and grid_of(source.grid) != grid_of(target.grid):
        raise ShardingError("shard.reshard: source and target are on two grids; one reshard stays on one")
    here, _ = on_devices("reshard", source.grid or target.grid, _used(source) + _used(target))
    return resharding.reshard(here, jnp.asarray(x), source.layout(here), target.layout(here), shape)


def _used(sharding: Sharding) -> list[int | str]:
    partial: AxisNames = sharding.partial[1] if sharding.partial else ()
    return [axis for axes in (*sharding.split_axes, partial) for axis in listed(axes)]


def to_local(x: Any, sharding: Sharding) -> np.ndarray:
    """The buffers of all devices, on the host.

    Args:
        x: the whole tensor.
        sharding: its sharding, with a grid.

    Returns:
        An array of shape `(devices, *buffer)`, in the order of linear indices. Padding, and halos beyond the tensor's
        edges, are zeros. Of a tensor that is partial by sum, product or bitwise_xor, the first device along the axes
        has the data and the others the identity; else all have the data.

    Raises:
        SdyError: a sharding that does not fit the tensor, or without a grid.

    Example:
        >>> grid = jax.sharding.AbstractMesh((4,), ("x",))
        >>> to_local(np.arange(5), Sharding([["x"]], grid=grid)).tolist()
        [[0, 1], [2, 3], [4, 0], [0, 0]]
    """
    grid = grid_for(sharding, None)
    return buffers.all_buffers(np.asarray(x), sharding.layout(grid), grid)


def to_global(y: Any, sharding: Sharding, *, shape: Sequence[int] | None = None) -> np.ndarray:
    """The tensor of which the buffers of all devices are given, on the host; the inverse of `to_local`.

    Args:
        y: an array of shape `(devices, *buffer)`.
        sharding: its sharding, with a grid.
        shape: the shape of the tensor, where blocks are uneven and no offsets say so.

    Returns:
        The tensor. Of devices with the same block the first one's counts; partial sums are combined.

    Raises:
        SdyError: buffers of another shape than the sharding's, or a sharding without a grid.
    """
    grid, stack = grid_for(sharding, None), np.asarray(y)
    layout = sharding.layout(grid)
    whole = even_shape(layout, grid, stack.shape[1:]) if shape is None else tuple(shape)
    return buffers.joined(stack, layout, grid, whole)
