"""Functions that are partitioned on a mesh without devices: calls take these from their arguments; what is lowered gets
arguments that say how they lie, since no device does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from sdy_jax.annotate.arguments import Leaf
from sdy_jax.calls.derivatives import specs
from sdy_jax.errors import ShardingError
from sdy_jax.plan.plan import Plan
from sdy_jax.representation.named import AnyMesh, mesh_from_jax
from sdy_jax.runtime.layouts import layout_of, named


def with_devices(mesh: AnyMesh, values: Iterable[Any], around: Any) -> AnyMesh:
    """The mesh on the devices of the first array, or of the mesh `around` the call, that has its axes; else itself."""
    if isinstance(mesh, jax.sharding.Mesh):
        return mesh
    layouts = (own for own in map(layout_of, values) if own is not None)
    found = next((own.mesh for own in layouts if _has_axes_of(own.mesh, mesh)), None)
    if found is not None:
        return jax.sharding.Mesh(found.devices, mesh.axis_names, axis_types=mesh.axis_types)
    return around if _has_axes_of(around, mesh) else mesh


def on_devices_of(mesh: AnyMesh, other: AnyMesh) -> AnyMesh | None:
    """A mesh where it has the devices of another one in their order; on these, if it has none. Else None."""
    if isinstance(mesh, jax.sharding.Mesh) and isinstance(other, jax.sharding.Mesh):
        return mesh if mesh.devices.flat[:].tolist() == other.devices.flat[:].tolist() else None
    if mesh.size != other.size or not isinstance(other, jax.sharding.Mesh):
        return None
    return jax.sharding.Mesh(other.devices.reshape(mesh.axis_sizes), mesh.axis_names, axis_types=mesh.axis_types)


def _has_axes_of(found: Any, mesh: AnyMesh) -> bool:
    return isinstance(found, jax.sharding.Mesh) and mesh_from_jax(found) == mesh_from_jax(mesh)


def check_has_devices(name: str, mesh: AnyMesh, leaves: Iterable[Leaf]) -> None:
    """
    Raises:
        ShardingError: a call with arrays has no devices to run on.
    """
    if isinstance(mesh, jax.sharding.Mesh) or any(_is_type(leaf.value) for leaf in leaves):
        return
    raise ShardingError(
        f"{name} is partitioned on the mesh {mesh_from_jax(mesh)}, which has no devices, and none of its arguments is "
        "on a mesh with these axes; to fix: place one by jax.device_put(x, NamedSharding(mesh, ...)), call it under "
        "jax.set_mesh(mesh), or partition it on a mesh of devices"
    )


def _is_type(value: Any) -> bool:
    return isinstance(value, (jax.core.Tracer, jax.ShapeDtypeStruct))


def described(leaves: Sequence[Leaf], plan: Plan, mesh: AnyMesh) -> list[jax.ShapeDtypeStruct]:
    """The types of a call's leaves, with the shardings in which a plan takes them."""
    return [
        jax.ShapeDtypeStruct(
            leaf.value.shape,
            leaf.value.dtype,
            weak_type=leaf.value.weak_type,
            sharding=named(sharding, mesh),
        )
        for leaf, sharding in zip(
            leaves, specs(plan.program, plan.arguments, [leaf.value for leaf in leaves]), strict=True
        )
    ]
