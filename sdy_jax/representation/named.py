"""Between the vocabulary and `jax.sharding`: meshes, partition specs and named shardings.

What jax leaves unsaid is read as jax reads it: a missing or None entry of a `PartitionSpec` is a dimension that is not
split, closed to propagation; `P.UNCONSTRAINED` leaves it open. A spec's `reduced` axes say how a gradient is produced,
nothing about the layout, and are dropped, as `jax.jit` does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import takewhile
from typing import Any

import jax
from jax.sharding import PartitionSpec

from sdy_jax.errors import ShardingError, UnsupportedError
from sdy_jax.representation.axes import sort_axes
from sdy_jax.representation.mesh import AxisRef, Mesh, MeshAxis
from sdy_jax.representation.sharding import CLOSED, OPEN, DimensionSharding, TensorSharding

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
