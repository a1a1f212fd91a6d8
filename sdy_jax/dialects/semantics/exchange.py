"""send and recv, which are one op on a device: what it sends, to whom, and from whom it receives."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sdy_jax.dialects.semantics.grid import (
    Axes,
    Coordinate,
    Grid,
    check_axes,
    check_device,
    coordinates_in_group,
    group_device,
    op,
    permute,
    position,
)
from sdy_jax.dialects.semantics.movement import entry
from sdy_jax.errors import ShardingError


@op
def send_recv(
    grid: Grid,
    x: jax.Array,
    axes: Axes,
    source: Sequence[Coordinate] | None,
    destination: Sequence[Coordinate],
) -> jax.Array:
    """The input of the device `source`, if that one's `destination` is this device; else zeros.

    Coordinates may differ from device to device. Unless they are known for each before the run, all inputs of the group
    are gathered.
    """
    check_axes(grid, axes)
    check_device(grid, axes, destination, "destination")
    if source is None:
        if grid.group_size(axes) > 1:
            raise ShardingError("recv needs a source: a permutation is built before the run")
        return x
    check_device(grid, axes, source, "source")
    if not axes:
        return x
    sender, receiver = group_device(grid, axes, source), group_device(grid, axes, destination)
    if isinstance(sender, int) and isinstance(receiver, int):
        return permute(grid, x, axes, [(sender, receiver)])
    if not isinstance(sender, jax.Array) and not isinstance(receiver, jax.Array):
        return permute(grid, x, range(grid.rank), known_pairs(grid, axes, sender, receiver))
    return _exchanged(grid, x, axes, _here(grid, sender), _here(grid, receiver))


def known_pairs(
    grid: Grid, axes: Axes, senders: int | np.ndarray, receivers: int | np.ndarray
) -> list[tuple[int, int]]:
    """Who sends to whom, by linear index, of group indices that are known for each device."""
    places = list(itertools.product(*map(range, grid.sizes)))
    senders, receivers = (np.broadcast_to(known, len(places)) for known in (senders, receivers))
    pairs = []
    for number, place in enumerate(places):
        if senders[number] < 0:
            continue
        coordinates = coordinates_in_group(grid, axes, int(senders[number]))
        other = dict(enumerate(place)) | dict(zip(axes, coordinates, strict=True))
        sender = int(position(grid, range(grid.rank), other))
        if receivers[sender] == position(grid, axes, place):
            pairs.append((sender, number))
    return pairs


def _here(grid: Grid, index: int | np.ndarray | jax.Array) -> int | jax.Array:
    """The entry of the device that runs this."""
    return jnp.asarray(index)[grid.group_index(range(grid.rank))] if isinstance(index, np.ndarray) else index


def _exchanged(grid: Grid, x: jax.Array, axes: Axes, sender: int | jax.Array, receiver: int | jax.Array) -> jax.Array:
    inputs, receivers = _stacked(grid, x, axes), _stacked(grid, jnp.asarray(receiver, jnp.int32), axes)
    chosen = receivers[jnp.maximum(sender, 0)]
    meant = (sender >= 0) & (chosen == grid.group_index(axes))
    found = entry(inputs, sender)
    return jnp.where(meant, found, jnp.zeros_like(found))


def _stacked(grid: Grid, x: jax.Array, axes: Axes) -> jax.Array:
    """What the devices of the group have, along a new dimension 0."""
    refs = grid.refs(axes)
    return lax.all_gather(x, **grid.mesh.group(refs), axis=0, tiled=False) if refs else x[None]
