"""send and recv, which are one op on a device: what it sends, to whom, and from whom it receives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sdy_jax.errors import ShardingError
from sdy_jax.lowering.collectives import chunks
from sdy_jax.shard.semantics.checks import AxisIndices, check_axes, check_device
from sdy_jax.shard.semantics.grid import (
    Coordinate,
    Grid,
    group_device,
    op,
    peers,
    permute,
)
from sdy_jax.shard.semantics.movement import entry


@op
def send_recv(
    grid: Grid,
    x: jax.Array,
    axes: AxisIndices,
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


def _received(grid: Grid, x: jax.Array, axes: AxisIndices, receiver: int | np.ndarray | jax.Array) -> jax.Array:
    """What each device gets of what is sent to it.

    Raises:
        ShardingError: it is not known before the run who sends to a device, or several do.
    """
    if grid.group_size(axes) == 1:
        return x
    if isinstance(receiver, jax.Array):
        raise ShardingError("recv needs a source: destinations that are computed in the run do not say who sends")
    devices = peers(grid, axes)
    pairs = [(device, int(devices[device, to])) for device, to in _known(grid, receiver) if to >= 0]
    receivers = [number for _, number in pairs]
    doubly = next((number for number in receivers if receivers.count(number) > 1), None)
    if doubly is not None:
        senders = [sender for sender, number in pairs if number == doubly]
        raise ShardingError(f"recv needs a source: devices {', '.join(map(str, senders))} all send to device {doubly}")
    return permute(grid, x, range(grid.rank), pairs)


def _known(grid: Grid, index: int | np.ndarray) -> Iterable[tuple[int, int]]:
    """A group index that is known before the run, for each device."""
    return enumerate(np.broadcast_to(index, grid.group_size(range(grid.rank))).tolist())


def known_pairs(
    grid: Grid, axes: AxisIndices, senders: int | np.ndarray, receivers: int | np.ndarray
) -> list[tuple[int, int]]:
    """Who sends to whom, by linear index, of group indices that are known for each device."""
    devices, meant = peers(grid, axes), dict(_known(grid, receivers))
    named = [(int(devices[device, by]), device) for device, by in _known(grid, senders) if by >= 0]
    return [(by, device) for by, device in named if meant[by] >= 0 and devices[by, meant[by]] == device]


def _here(grid: Grid, index: int | np.ndarray | jax.Array) -> int | jax.Array:
    """The entry of the device that runs this."""
    return jnp.asarray(index)[grid.group_index(range(grid.rank))] if isinstance(index, np.ndarray) else index


def _exchanged(
    grid: Grid, x: jax.Array, axes: AxisIndices, sender: int | jax.Array, receiver: int | jax.Array
) -> jax.Array:
    sent = (x, jnp.asarray(receiver, jnp.int32))
    inputs, receivers = (chunks.stacked(each, grid.refs(axes), grid.mesh) for each in sent)
    chosen = receivers[jnp.maximum(sender, 0)]
    meant = (sender >= 0) & (chosen == grid.group_index(axes))
    found = entry(inputs, sender)
    return jnp.where(meant, found, jnp.zeros_like(found))
