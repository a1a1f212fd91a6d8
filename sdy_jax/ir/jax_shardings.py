"""Meshes and shardings from and to `jax.sharding`, and the types of arrays on Explicit axes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from sdy_jax.errors import ShardingError, UnsupportedError
from sdy_jax.ir.meshes import AxisRef, Mesh, MeshAxis, axes_size, sort_axes
from sdy_jax.ir.shardings import CLOSED, OPEN, DimensionSharding, TensorSharding

# Between the vocabulary and `jax.sharding`: meshes, partition specs and named shardings.
#
# What jax leaves unsaid is read as jax reads it: a missing or None entry of a `PartitionSpec` is a dimension that is
# not split, closed to propagation; `P.UNCONSTRAINED` leaves it open. A spec's `reduced` axes say how a gradient is
# produced, nothing about the layout, and are dropped, as `jax.jit` does.

AnyMesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
"""A mesh of devices, or the axes of one that is not there."""


def mesh_from_jax(mesh: AnyMesh) -> Mesh:
    """The axes of a jax mesh. Its devices, in their order, are those that the program runs on, so no ids are needed."""
    return Mesh(tuple(MeshAxis(str(name), size) for name, size in zip(mesh.axis_names, mesh.axis_sizes, strict=True)))


def from_named_sharding(
    sharding: jax.sharding.NamedSharding, rank: int, mesh_name: str, where: str = "sharding"
) -> TensorSharding:
    """A `NamedSharding` of a value of rank `rank` as a sharding on `mesh_name`, the symbol of its mesh."""
    return from_partition_spec(sharding.spec, rank, mesh_from_jax(sharding.mesh), mesh_name, where)


def from_partition_spec(
    spec: PartitionSpec, rank: int, mesh: Mesh, mesh_name: str, where: str = "sharding"
) -> TensorSharding:
    """A `PartitionSpec` as a tensor sharding.

    Args:
      spec: at most `rank` entries; the missing ones count as None.
      rank: the rank of the value.
      mesh: the mesh whose axes the spec names.
      mesh_name: the symbol under which the sharding refers to it.
      where: names the value in messages.

    Raises:
      ShardingError: too many entries, an axis that the mesh lacks, or one that is used twice.
    """
    entries = spec.partitions
    if len(entries) > rank:
        raise ShardingError(
            f"{where}: {spec} has {len(entries)} entries for a value of rank {rank}; give at most one per dimension"
        )
    unreduced = frozenset(spec.unreduced)
    named = [str(name) for entry in entries for name in entry_names(entry)] + sorted(map(str, unreduced))
    _check_names(named, mesh, f"{where}: {spec}")
    dimensions = (*map(_dimension, entries), *(CLOSED for _ in range(rank - len(entries))))
    axes = sort_axes((AxisRef(str(name)) for name in unreduced), mesh)
    return TensorSharding(mesh_name, dimensions, (), axes, unreduced_by(spec))


def to_partition_spec(sharding: TensorSharding, where: str = "sharding") -> PartitionSpec:
    """A tensor sharding as a `PartitionSpec`; open dimensions become closed, priorities are dropped.

    Raises:
      UnsupportedError: a sub-axis is used (`has_sub_axes` asks beforehand; such a spec exists on a refined mesh,
        `RefinedMesh.spec`), or a reduction that this version of jax cannot name.
    """
    if has_sub_axes(sharding):
        raise UnsupportedError(
            f"{where}: <{sharding}> splits by a part of a mesh axis, which a PartitionSpec cannot say; use a mesh "
            "whose axes are the parts, or RefinedMesh.spec"
        )
    entries = (_entry([axis.name for axis in axes]) for axes in sharding.axes)
    return PartitionSpec(*entries, **unreduced_arguments(sharding, where))  # type: ignore[no-untyped-call]


def has_sub_axes(sharding: TensorSharding) -> bool:
    """A dimension or the unreduced list of the sharding uses a part of an axis."""
    lists = (*sharding.axes, sharding.unreduced_axes)
    return any(axis.sub_axis is not None for axes in lists for axis in axes)


def on_whole_axes(sharding: TensorSharding) -> TensorSharding:
    """The sharding with each dimension's axes up to the first part of one: what a `PartitionSpec` can say of it."""
    whole = (tuple(takewhile(lambda axis: axis.sub_axis is None, axes)) for axes in sharding.axes)
    dimensions = tuple(replace(d, axes=axes) for d, axes in zip(sharding.dimensions, whole, strict=True))
    return replace(sharding, dimensions=dimensions)


def entry_names(entry: Any) -> tuple[Any, ...]:
    """The axes that an entry of a spec names."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, tuple | list) else (entry,)


def _entry(names: list[str]) -> str | tuple[str, ...] | None:
    if not names:
        return None
    return names[0] if len(names) == 1 else tuple(names)


def _dimension(entry: Any) -> DimensionSharding:
    if entry is PartitionSpec.UNCONSTRAINED:
        return OPEN
    return DimensionSharding(tuple(AxisRef(str(name)) for name in entry_names(entry)))


def _check_names(names: Iterable[str], mesh: Mesh, where: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name not in mesh.sizes:
            known = ", ".join(mesh.axis_names) or "none"
            raise ShardingError(f"{where} names the axis {name!r}, which the mesh lacks; its axes are: {known}")
        if name in seen:
            raise ShardingError(f"{where} uses the axis {name!r} twice; an axis splits a value once")
        seen.add(name)


# `unreduced_kind` is newer than `unreduced`; without it the kind is a sum.


def unreduced_by(spec: PartitionSpec) -> str:
    """The reduction kind of an unreduced value."""
    kind = getattr(spec, "unreduced_kind", None)
    return "sum" if kind is None else str(kind.name)


def unreduced_arguments(sharding: TensorSharding, where: str = "sharding") -> dict[str, Any]:
    """The keyword arguments of a `PartitionSpec` for the axes along which a value is unreduced.

    Raises:
      UnsupportedError: a reduction that this version of jax cannot name.
    """
    if not sharding.unreduced_axes:
        return {}
    arguments: dict[str, Any] = {"unreduced": frozenset(axis.name for axis in sharding.unreduced_axes)}
    if sharding.reduction == "sum":
        return arguments
    kind = getattr(getattr(jax.sharding, "UnreducedKind", None), sharding.reduction, None)
    if kind is None:
        raise UnsupportedError(f"{where}: a PartitionSpec of this jax cannot say unreduced={sharding.reduction}")
    return {**arguments, "unreduced_kind": kind}


# Types of arrays on Explicit axes: the part of a sharding that JAX knows while it traces.

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
