"""send and recv, which are one op on a device: what it sends, to whom, and from whom it receives."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sdy_jax.errors import ShardingError
from sdy_jax.shard.semantics.checks import Axes, check_axes, check_device
from sdy_jax.shard.semantics.grid import (
    Coordinate,
    Grid,
    coordinates_in_group,
    group_device,
    op,
    permute,
    position,
)
from sdy_jax.shard.semantics.movement import entry


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
    are gathered. Without a source, a device receives from the one whose destination it is; that must be known.
    """
    check_axes(grid, axes)
    check_device(grid, axes, destination, "destination")
    if source is None:
        return _received(grid, x, axes, group_device(grid, axes, destination) if axes else 0)
    check_device(grid, axes, source, "source")
    if not axes:
        return x
    sender, receiver = group_device(grid, axes, source), group_device(grid, axes, destination)
    if isinstance(sender, int) and isinstance(receiver, int):
        return permute(grid, x, axes, [(sender, receiver)])
    if not isinstance(sender, jax.Array) and not isinstance(receiver, jax.Array):
        return permute(grid, x, range(grid.rank), known_pairs(grid, axes, sender, receiver))
    return _exchanged(grid, x, axes, _here(grid, sender), _here(grid, receiver))


def _received(grid: Grid, x: jax.Array, axes: Axes, receiver: int | np.ndarray | jax.Array) -> jax.Array:
    """What each device gets of what is sent to it.

    Raises:
        ShardingError: it is not known before the run who sends to a device, or several do.
    """
    if grid.group_size(axes) == 1:
        return x
    if isinstance(receiver, jax.Array):
        raise ShardingError("recv needs a source: destinations that are computed in the run do not say who sends")
    pairs = [
        (int(position(grid, range(grid.rank), place)), int(position(grid, range(grid.rank), other)))
        for place, other in _addressed(grid, axes, receiver)
    ]
    receivers = [number for _, number in pairs]
    doubly = next((number for number in receivers if receivers.count(number) > 1), None)
    if doubly is not None:
        senders = [sender for sender, number in pairs if number == doubly]
        raise ShardingError(f"recv needs a source: devices {', '.join(map(str, senders))} all send to device {doubly}")
    return permute(grid, x, range(grid.rank), pairs)


def _addressed(grid: Grid, axes: Axes, receiver: int | np.ndarray) -> Iterator[tuple[Sequence[int], dict[int, int]]]:
    """Each device that sends to one of its group, and that one, by their coordinates."""
    places = list(itertools.product(*map(range, grid.sizes)))
    for place, index in zip(places, np.broadcast_to(receiver, len(places)), strict=True):
        if index >= 0:
            coordinates = coordinates_in_group(grid, axes, int(index))
            yield place, dict(enumerate(place)) | dict(zip(axes, coordinates, strict=True))


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
