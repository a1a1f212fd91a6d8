"""The devices of a command: real ones, or virtual ones on the CPU where there are too few; none where it only plans."""

from __future__ import annotations

import os
import sys

import jax

from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.named import AnyMesh
from sdy_jax.runtime.devices import mesh_on_devices, too_few_devices
from sdy_jax.runtime.mesh import abstract_mesh

_FLAG = "xla_force_host_platform_device_count"


_FEW = 64
"""So many virtual devices are made for a function that may make arrays or meshes when its module is imported, although
it is only planned. Measured (2026-11): they take 0.1 s; 65,536 would take minutes."""


def request_for_plan(count: int) -> None:
    """As `request`, where a plan does without."""
    request(count if count <= _FEW else 1)


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
        remedy = "use a smaller mesh, and leave JAX_PLATFORMS and XLA_FLAGS to this command"
        raise too_few_devices("the command", count, max(len(real), len(virtual)), remedy)
    print(f"note: {len(real)} {real[0].platform} at hand, so {count} virtual CPU devices are used", file=sys.stderr)
    return virtual[:count]


def mesh_for_plan(mesh: Mesh, count: int) -> AnyMesh:
    """As `mesh_on`, of `count` devices that need not be there: they are then like those at hand."""
    is_there = len(jax.devices()) >= count
    if is_there or mesh.size > count or mesh.device_ids or not mesh.axes:
        return mesh_on(mesh, count)
    return abstract_mesh([axis.size for axis in mesh.axes], mesh.axis_names)


def mesh_on(mesh: Mesh, count: int) -> jax.sharding.Mesh:
    """A mesh on the first of `count` devices, in its order.

    Raises:
      ShardingError: it has more than `count`.
    """
    return mesh_on_devices(mesh, devices(count), f"say --devices {mesh.size}, or leave it out")
