"""Types of arrays on Explicit axes: the part of a sharding that JAX knows while it traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from sdy_jax.representation.mesh import AxisRef, axes_size
from sdy_jax.representation.named import AnyMesh, from_named_sharding, mesh_from_jax, unreduced_arguments
from sdy_jax.representation.sharding import TensorSharding

_EMPTY_MESH = jax.sharding.AbstractMesh((), ())


def explicit_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """The axes of a mesh by which types say how arrays are split."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in types if kind == AxisType.Explicit)


def type_on(value: Any, mesh: AnyMesh) -> NamedSharding | None:
    """What the type of a value says of its layout; None if it is on no mesh with the axes of this one. The mesh in it
    has no devices; an Auto axis of it is in no type."""
    sharding = getattr(value, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not _same_axes(sharding.mesh, mesh):
        return None
    spec, rank = sharding.spec, len(value.shape)
    partitions = (*spec.partitions, *(None for _ in range(rank - len(spec.partitions))))
    return NamedSharding(sharding.mesh.abstract_mesh, spec.update(partitions=partitions))


def auto_mesh_of(value: Any) -> jax.sharding.AbstractMesh | None:
    """The mesh that the type of a value shows, if it has no Explicit axes: of how it lies on that it says nothing."""
    sharding = getattr(value, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty or explicit_axes(sharding.mesh):
        return None
    mesh: jax.sharding.AbstractMesh = sharding.mesh.abstract_mesh
    return mesh


def type_elsewhere(value: Any, mesh: AnyMesh) -> NamedSharding | None:
    """What the type of a value on another mesh with Explicit axes says."""
    sharding = getattr(value, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not explicit_axes(sharding.mesh) or type_on(value, mesh) is not None:
        return None
    return NamedSharding(sharding.mesh.abstract_mesh, sharding.spec)


def own_type(value: Any, mesh: AnyMesh) -> NamedSharding | None:
    """What the type of a value on this mesh says; None where it says nothing."""
    own = type_on(value, mesh)
    return own if own is not None and own.mesh == mesh.abstract_mesh and explicit_axes(mesh) else None


def typed(value: jax.ShapeDtypeStruct, type_: NamedSharding | None) -> jax.ShapeDtypeStruct:
    """The same shape and dtype with a sharding in the type."""
    return jax.ShapeDtypeStruct(value.shape, value.dtype, weak_type=value.weak_type, sharding=type_)


def sharding_in(type_: Any) -> NamedSharding | None:
    """The sharding in the type of an array (`ShapedArray`); None where that is on no mesh."""
    return None if type_.sharding.mesh.empty else type_.sharding


def _same_axes(one: AnyMesh, other: AnyMesh) -> bool:
    return (one.axis_names, one.axis_sizes) == (other.axis_names, other.axis_sizes)


def without_foreign_type(x: Any, mesh: AnyMesh) -> Any:
    """A value whose type is on another mesh with Explicit axes, as one that lies somewhere on that mesh."""
    own = jax.typeof(x).sharding
    if not explicit_axes(own.mesh) or _same_axes(own.mesh, mesh):
        return x
    auto = own.mesh.update_axis_types(dict.fromkeys(own.mesh.axis_names, AxisType.Auto))
    return jax.sharding.reshard(x, NamedSharding(auto, PartitionSpec(*(None,) * jax.typeof(x).ndim)))


def with_type_elsewhere(x: Any, type_: NamedSharding | None) -> Any:
    """A value in a type on another mesh of the devices; as it is where there is none."""
    return x if type_ is None else jax.sharding.reshard(x, type_)


def on_devices_of(type_: NamedSharding, mesh: AnyMesh) -> NamedSharding:
    """A type as a sharding over the devices of a mesh of that size."""
    if not isinstance(mesh, jax.sharding.Mesh):
        return type_
    own = type_.mesh
    devices = mesh.devices.reshape(own.axis_sizes)
    return NamedSharding(jax.sharding.Mesh(devices, own.axis_names, axis_types=own.axis_types), type_.spec)


def in_type(x: Any, type_: NamedSharding | None, mesh: AnyMesh) -> Any:
    """A value in another type on a mesh; None is the type of a value on no mesh, which any one may have."""
    own = jax.typeof(x).sharding
    if type_ is None or own == type_ or own.mesh not in (mesh.abstract_mesh, _EMPTY_MESH):
        return x
    return jax.sharding.reshard(x, type_)


def sharding_of_type(type_: NamedSharding, rank: int, mesh_name: str) -> TensorSharding:
    """What a type says: everything where all axes are Explicit; else that dimensions have these axes, and that the
    other Explicit ones split none."""
    said, explicit = from_named_sharding(type_, rank, mesh_name), explicit_axes(type_.mesh)
    if len(explicit) == len(type_.mesh.axis_names):
        return said
    used = {axis.name for axes in (*said.axes, said.unreduced_axes) for axis in axes}
    unused = tuple(AxisRef(name) for name in explicit if name not in used)
    return replace(said, dimensions=tuple(replace(d, is_closed=False) for d in said.dimensions), replicated_axes=unused)


def typed_part(sharding: TensorSharding, shape: Sequence[int], mesh: AnyMesh) -> NamedSharding:
    """The part of a sharding that a type can have: per dimension, the whole Explicit axes before any other that divide
    it, and those along which it is unreduced."""
    explicit = explicit_axes(mesh)
    entries = []
    for axes, size in zip(sharding.axes, shape, strict=False):
        sayable = [*takewhile(lambda axis: not axis.sub_axis and axis.name in explicit, axes)]
        while sayable and (not size or size % axes_size(sayable, mesh_from_jax(mesh))):
            sayable.pop()
        entries.append(tuple(axis.name for axis in sayable) or None)
    is_sayable = all(axis.name in explicit and not axis.sub_axis for axis in sharding.unreduced_axes)
    is_named = sharding.reduction == "sum" or hasattr(jax.sharding, "UnreducedKind")
    unreduced = unreduced_arguments(sharding) if is_sayable and is_named else {}
    return NamedSharding(mesh.abstract_mesh, PartitionSpec(*entries, **unreduced))
