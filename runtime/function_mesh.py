"""The mesh of a partitioned function as a user gives it, and whether arrays lie on its devices."""

from __future__ import annotations

import re
from typing import Any

import jax
from jax.sharding import NamedSharding

from sdy_jax.errors import ShardingError
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.named import AnyMesh, mesh_from_jax
from sdy_jax.runtime.mesh import abstract_mesh


def auto_mesh(mesh: AnyMesh) -> AnyMesh:
    """The same mesh with Auto axes: shardings are stated, not part of types."""
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return abstract_mesh(mesh.axis_sizes, mesh.axis_names, mesh.abstract_device)
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names)


def checked_mesh(mesh: object) -> AnyMesh:
    """The mesh itself, or that of the surroundings. One that has no devices may be planned on.

    Raises:
        ShardingError: there is no mesh.
    """
    if mesh is None or getattr(mesh, "empty", False):
        mesh = jax.sharding.get_abstract_mesh()
    if getattr(mesh, "empty", False):
        raise ShardingError(
            "partition needs a mesh: pass mesh=jax.make_mesh(shape, names), or call the function under jax.set_mesh"
        )
    if isinstance(mesh, Mesh) and mesh.axes:
        return abstract_mesh([axis.size for axis in mesh.axes], mesh.axis_names)
    if not isinstance(mesh, AnyMesh):
        raise _no_mesh(mesh)
    return mesh


def check_devices(path: str, x: Any, mesh: AnyMesh) -> None:
    """Whether jit takes an array together with a mesh.

    Raises:
        ShardingError: it is on other devices than the mesh's, or on the same in another order; `path` names it.
    """
    if (problem := _elsewhere(x, mesh)) is not None:
        raise ShardingError(
            f"`{path}` {problem}; to fix: move it first, by jax.device_put(x, NamedSharding(mesh, ...)) with the mesh "
            f"{mesh_from_jax(mesh)} of the function, or partition on the array's mesh"
        )


def is_whole_elsewhere(x: Any, mesh: AnyMesh) -> bool:
    """Whether an array is committed to devices that are not those of the mesh, or in another order, and each of them
    has all of it."""
    return _elsewhere(x, mesh) is not None and bool(x.sharding.is_fully_replicated)


def _elsewhere(x: Any, mesh: AnyMesh) -> str | None:
    """Where an array lies, if that is not on the devices of the mesh."""
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer) or not x.committed:
        return None
    if not isinstance(mesh, jax.sharding.Mesh):
        return None
    own = x.sharding.mesh if isinstance(x.sharding, NamedSharding) else None
    if own == mesh:
        return None
    if x.sharding.device_set != {*mesh.devices.flat}:
        count = len(x.sharding.device_set)
        devices = "a single device" if count == 1 else f"{count} devices"
        return f"lies on {devices}, not on the {mesh.size} of the function's mesh"
    if isinstance(own, jax.sharding.Mesh) and own.devices.flat[:].tolist() != mesh.devices.flat[:].tolist():
        return "lies on the devices of the function's mesh in another order, and a jitted function has one order"
    return None


def _no_mesh(mesh: Any) -> ShardingError:
    """Something in place of a mesh."""
    return ShardingError(
        f"partition got the {type(mesh).__name__} {mesh}, which has no devices; pass mesh={_make_mesh(mesh)}"
    )


def _make_mesh(given: Any) -> str:
    """A `jax.make_mesh` call to suggest in an error."""
    if isinstance(given, str):
        given = dict(re.findall(r"(\w+)=(\d+)", given))
    if isinstance(given, dict) and given:
        sizes, names = tuple(map(int, given.values())), tuple(map(str, given))
    elif isinstance(given, (tuple, list)) and given and all(isinstance(n, int) for n in given):
        sizes, names = tuple(given), ("data", "model")[: len(given)]
        names += tuple(f"axis{i}" for i in range(2, len(given)))
    else:
        return "jax.make_mesh(shape, names)"
    return f"jax.make_mesh({sizes}, {names})"
