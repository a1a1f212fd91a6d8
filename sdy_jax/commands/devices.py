"""The devices of a command: real ones, or virtual ones on the CPU where there are too few."""

from __future__ import annotations

import os
import sys

import jax
import numpy as np

from sdy_jax.errors import ShardingError
from sdy_jax.representation.mesh import Mesh

_FLAG = "xla_force_host_platform_device_count"


def request(count: int) -> None:
    """Sees to it that there will be so many devices on the CPU, if jax has not looked for its devices yet."""
    if count > 1 and _FLAG not in os.environ.get("XLA_FLAGS", ""):
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:  # it has; what there is, `devices` says
            return


def devices(count: int) -> list[jax.Device]:
    """The first devices, or virtual ones.

    Raises:
      ShardingError: there are too few of both.
    """
    real = jax.devices()
    if len(real) >= count:
        return real[:count]
    try:
        virtual = jax.devices("cpu")
    except RuntimeError:  # jax is told not to use the CPU
        virtual = []
    if len(virtual) < count:
        kind = real[0].platform
        raise ShardingError(
            f"{count} devices are needed; there are {len(real)} of platform {kind}, and {len(virtual)} on the CPU; to "
            "fix: use a smaller mesh, and leave JAX_PLATFORMS and XLA_FLAGS to this command"
        )
    print(f"note: {len(real)} {real[0].platform} at hand, so {count} virtual CPU devices are used", file=sys.stderr)
    return virtual[:count]


def mesh_on(mesh: Mesh, count: int) -> jax.sharding.Mesh:
    """A mesh on the first of `count` devices, in its order.

    Raises:
      ShardingError: it has more than `count`.
    """
    if mesh.size > count:
        raise ShardingError(f"--devices {count} are too few for the mesh {mesh}, which needs {mesh.size}")
    found = np.array(devices(count)[: mesh.size])[list(mesh.device_ids) or slice(None)]
    return jax.sharding.Mesh(found.reshape([axis.size for axis in mesh.axes]), mesh.axis_names)
