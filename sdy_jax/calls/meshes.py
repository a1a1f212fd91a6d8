"""The mesh of a function that is given none: that of its shardings, of `jax.set_mesh`, of its arguments, or inside."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from sdy_jax.annotate.arguments import Leaf
from sdy_jax.annotate.equations import all_equations
from sdy_jax.errors import ShardingError
from sdy_jax.jax_internals.contexts import context_mesh
from sdy_jax.representation.named import AnyMesh, mesh_from_jax
from sdy_jax.representation.types import explicit_axes
from sdy_jax.runtime.function_mesh import checked_mesh
from sdy_jax.runtime.layouts import as_named, as_stated, layout_of

_KNOWN = (NamedSharding, SingleDeviceSharding)


def stated_mesh(*specs: Any) -> AnyMesh | None:
    """The mesh of the first `NamedSharding` in trees of specifications, of those on devices if there are any; else one
    for the first sharding of another kind on several devices; else the device of the first `SingleDeviceSharding`."""
    stated = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, (NamedSharding, Format)))
    shardings = [spec.sharding if isinstance(spec, Format) else spec for spec in stated]
    single = (as_named(s, ()) for s in shardings if isinstance(s, SingleDeviceSharding))
    others = (as_stated(s) for s in shardings if isinstance(s, Sharding) and not isinstance(s, _KNOWN))
    found = _first_mesh(shardings) or _first_abstract_mesh(shardings)
    return found or _first_mesh(others) or _first_mesh(single)


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


def mesh_of_call(values: Iterable[Any], inside: Callable[[], AnyMesh | None] = lambda: None) -> AnyMesh:
    """The mesh of `jax.set_mesh`, else that of the first value whose type has Explicit axes, of `with mesh:`, of the
    first value that lies on a mesh, or whose type is on one; else that which is stated `inside` of the function.

    Raises:
        ShardingError: there is none.
    """
    values, set_mesh = list(values), jax.sharding.get_abstract_mesh()
    layouts = [own for own in map(layout_of, values) if own is not None]
    typed = _first_mesh(own for own in layouts if explicit_axes(own.mesh))
    if set_mesh.empty and typed is not None:  # `with mesh:` says nothing of types
        return checked_mesh(typed)
    around: AnyMesh | None = context_mesh()
    if around is None or around.empty:
        around = _first_mesh(layouts) or set_mesh
    if around.empty:
        around = _first_abstract_mesh(map(_sharding_of, values)) or inside() or around
    return checked_mesh(around)


def mesh_inside(jaxpr: Any) -> jax.sharding.Mesh | None:
    """The one mesh on devices that a traced function states: in constraints, moves of arrays, `shard_map`s and calls.

    None where there is none, or there are several, of which nothing says which the results are on.
    """
    parameters = [x for e in all_equations(jaxpr) for x in jax.tree.leaves([*e.params.values()], is_leaf=_says_mesh)]
    stated = [x.mesh if isinstance(x, NamedSharding) else x for x in parameters if _says_mesh(x)]
    meshes = {mesh for mesh in stated if isinstance(mesh, jax.sharding.Mesh) and not mesh.empty}
    return next(iter(meshes)) if len(meshes) == 1 else None


def _says_mesh(x: Any) -> bool:
    return isinstance(x, (NamedSharding, jax.sharding.Mesh))


def check_context(name: str, mesh: AnyMesh) -> None:
    """
    Raises:
        ShardingError: the mesh in context has another number of devices, which jax does not let a function change.
    """
    around = jax.sharding.get_abstract_mesh()
    if not around.empty and around.size != mesh.size:
        raise ShardingError(
            f"{name} is partitioned on the mesh {mesh_from_jax(mesh)}, and called where jax.set_mesh says "
            f"{mesh_from_jax(around)}, which has another number of devices; to fix: state one of them only"
        )


def type_beside_context(leaves: Iterable[Leaf]) -> ShardingError | None:
    """The error about an argument whose type is on another mesh than that in context, where one of these has Explicit
    axes: jit raises one where the argument is used, and lets it be moved or passed through."""
    around = jax.sharding.get_abstract_mesh()
    for leaf in leaves:
        sharding = None if around.empty else _sharding_of(leaf.value)
        own = sharding.mesh.abstract_mesh if isinstance(sharding, NamedSharding) else around
        if own != around and not own.empty and (explicit_axes(own) or explicit_axes(around)):
            return ShardingError(
                f"`{leaf.path}` is on the mesh {own}, and jax.set_mesh says {around}; to fix: place it there, by "
                "jax.device_put(x, PartitionSpec(...)), or set its mesh"
            )
    return None


def _first_mesh(shardings: Iterable[Any]) -> jax.sharding.Mesh | None:
    meshes = (s.mesh for s in shardings if isinstance(s, NamedSharding))
    return next((mesh for mesh in meshes if isinstance(mesh, jax.sharding.Mesh) and not mesh.empty), None)


def _first_abstract_mesh(shardings: Iterable[Any]) -> jax.sharding.AbstractMesh | None:
    meshes = (s.mesh for s in shardings if isinstance(s, NamedSharding))
    return next((mesh for mesh in meshes if isinstance(mesh, jax.sharding.AbstractMesh) and not mesh.empty), None)


def _sharding_of(x: Any) -> Any:
    """What the type of a value says of its sharding."""
    return getattr(getattr(x, "aval", x), "sharding", None)
