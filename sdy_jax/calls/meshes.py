"""The mesh of a function that is given none: that of its shardings, of `jax.set_mesh`, or of its arguments."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import NamedSharding

from sdy_jax.errors import ShardingError
from sdy_jax.jax_internals import context_mesh
from sdy_jax.representation.named import AnyMesh, mesh_from_jax
from sdy_jax.runtime.boundary import checked_mesh
from sdy_jax.runtime.layouts import layout_of


def stated_mesh(*specs: Any) -> jax.sharding.Mesh | None:
    """The mesh of the first `NamedSharding` on devices in trees of specifications."""
    stated = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, (NamedSharding, Format)))
    return _first_mesh(spec.sharding if isinstance(spec, Format) else spec for spec in stated)


def mesh_with_device(mesh: Any, device: jax.Device | None, backend: str | None) -> Any:
    """The mesh of a function for which jit's options `device` or `backend` are given, which are deprecated.

    Raises:
        ShardingError: the mesh has other devices.
    """
    if device is None and backend is None:
        return mesh
    warnings.warn(
        "device= and backend= are deprecated, as they are in jax.jit: the mesh says where a partitioned function runs",
        DeprecationWarning,
        stacklevel=3,
    )
    devices = jax.devices(backend) if device is None else [device]
    if mesh is None:
        return jax.sharding.Mesh(np.array(devices[:1]), ("device",))
    if isinstance(mesh, jax.sharding.Mesh) and {*mesh.devices.flat} <= {*devices}:
        return mesh
    given = f"device={device}" if backend is None else f"backend={backend!r}"
    raise ShardingError(f"{given}, and the mesh {mesh_from_jax(checked_mesh(mesh))} has others; to fix: leave it out")


def mesh_of_call(values: Iterable[Any]) -> AnyMesh:
    """The mesh of `jax.set_mesh`, else that of the first of the values that lies on one.

    Raises:
        ShardingError: there is none.
    """
    around = context_mesh()
    if around is None or around.empty:
        around = _first_mesh(map(layout_of, values)) or around
    return checked_mesh(around)


def _first_mesh(shardings: Iterable[Any]) -> jax.sharding.Mesh | None:
    meshes = (s.mesh for s in shardings if isinstance(s, NamedSharding))
    return next((mesh for mesh in meshes if isinstance(mesh, jax.sharding.Mesh) and not mesh.empty), None)
