"""Meshes on the devices of the machine."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from sdy_jax.errors import ShardingError
from sdy_jax.representation.mesh import Mesh

_USABLE = 0.9
"""The share of a device's memory that programs are planned for."""


def mesh_on_devices(
    mesh: Mesh, devices: Sequence[jax.Device] | None = None, remedy: str | None = None
) -> jax.sharding.Mesh:
    """A mesh on the first devices, in its order.

    Args:
      mesh: with axes.
      devices: which there are; by default those of the machine.
      remedy: what to do where they are too few.

    Raises:
      ShardingError: they are too few.
    """
    devices = jax.devices() if devices is None else devices
    if mesh.size > len(devices):
        raise too_few_devices(f"the mesh {mesh}", mesh.size, len(devices), remedy)
    first = np.array(devices[: mesh.size])[list(mesh.device_ids) or slice(None)]
    return jax.sharding.Mesh(first.reshape([axis.size for axis in mesh.axes]), mesh.axis_names)


def too_few_devices(what: str, needed: int, count: int, remedy: str | None = None) -> ShardingError:
    """The error that something needs more devices than there are; by default it tells of virtual ones."""
    remedy = remedy or f"try it on virtual ones, by {virtual_devices(needed)} before anything else"
    return ShardingError(f"{what} needs {needed} devices, {count} are at hand; to fix: {remedy}")


def virtual_devices(count: int) -> str:
    """The call that makes virtual devices on the CPU."""
    return f'jax.config.update("jax_num_cpu_devices", {count})'


def usable_memory(mesh: jax.sharding.Mesh) -> float:
    """The bytes of a device that a program may hold: 0.9 of what its allocator has; 0 where that is not known.

    With several processes it is not asked for: each would see its own devices only, and plans must be equal everywhere.
    """
    if not isinstance(mesh, jax.sharding.Mesh) or jax.process_count() > 1:
        return 0.0
    try:
        stats = mesh.devices.flat[0].memory_stats()
    except (jax.errors.JaxRuntimeError, NotImplementedError):  # a topology without devices, such as TPUs compiled for
        stats = None
    return _USABLE * (stats or {}).get("bytes_limit", 0)


def network_axes(mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    """The axes along which neighbours reach each other over the data-centre network only: TPUs of several slices, other
    devices of several processes. Virtual CPU devices have none."""
    if mesh.devices.flat[0].platform == "cpu":
        return ()
    place = np.vectorize(_place, otypes=[int])(mesh.devices)
    return tuple(name for dim, name in enumerate(mesh.axis_names) if np.diff(place, axis=dim).any())


def _place(device: jax.Device) -> int:
    """The number of what a device's own links reach: its slice or process."""
    if device.platform == "tpu":
        return getattr(device, "slice_index", None) or 0
    return device.process_index
