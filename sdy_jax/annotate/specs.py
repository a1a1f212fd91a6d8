"""What a user says of one array's sharding: checked where it is traced, resolved where it is lowered.

In a primitive's parameters a specification is a `PartitionSpec`, or a `TensorSharding` whose mesh is another `Mesh` or
a name, which stands for the mesh of whatever partition the primitive is lowered in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from sdy_jax.annotate.arguments import parsed
from sdy_jax.errors import ShardingError
from sdy_jax.representation.mesh import AxisRef, Mesh, MeshAxis
from sdy_jax.representation.named import from_partition_spec, mesh_from_jax
from sdy_jax.representation.sharding import OPEN, REDUCTION_KINDS, DimensionSharding, TensorSharding
from sdy_jax.representation.verify import verify_sharding

Stated = PartitionSpec | TensorSharding

PARTITION = "mesh"
"""The mesh name in a `TensorSharding` that is not lowered yet."""


def stated(spec: Any, rank: int, place: str, mesh: Mesh | None, manual: frozenset[str]) -> Stated:
    """The user's specification in the form of a parameter, checked as far as that is possible.

    Args:
        spec: a `PartitionSpec`, `NamedSharding`, `TensorSharding` or text.
        rank: the rank of the array.
        place: names the function and the array for messages.
        mesh: the partition's mesh, if one is being traced.
        manual: the axes of that mesh that cannot be used here, because the code around is manual on them.

    Raises:
        ShardingError: a wrong rank, or an axis that the mesh lacks, that is used twice, or that is manual here.
        ParseError: text that is no sharding.
    """
    if isinstance(spec, NamedSharding):
        own = mesh_from_jax(spec.mesh)
        spec = replace(from_partition_spec(spec.spec, rank, own, PARTITION, place), mesh=own)
    if isinstance(spec, str):
        spec = parsed(spec, PARTITION, place)
    if not isinstance(spec, PartitionSpec | TensorSharding):
        raise ShardingError(f"{place} is a {type(spec).__name__}, which names no mesh axes; give a PartitionSpec")
    if mesh is not None:
        check_free(resolved(spec, rank, mesh, PARTITION, place), manual, place)
        return spec
    assumed = _assumed_mesh(spec)
    if assumed is not None:
        resolved(spec, rank, assumed, PARTITION, place)
    elif isinstance(spec, TensorSharding) and spec.rank != rank:
        raise ShardingError(f"{place}: {spec.rank} dimension shardings for a value of rank {rank}; give one each")
    return spec


def resolved(spec: Stated, rank: int, mesh: Mesh, mesh_name: str, place: str) -> TensorSharding:
    """A specification on the mesh it is about: `mesh`, whose symbol is `mesh_name`, or its own inline mesh.

    Raises:
        ShardingError: it does not fit the mesh or the rank.
    """
    if isinstance(spec, PartitionSpec):
        return from_partition_spec(spec, rank, mesh, mesh_name, place)
    if isinstance(spec.mesh, str) or spec.mesh == mesh:
        spec = replace(spec, mesh=mesh_name)
    verify_sharding(spec, {mesh_name: mesh}, rank, place)
    return spec


def check_reduction(kind: str, dtype: Any, place: str) -> None:
    """Raises `ShardingError` if there is no such reduction, or none of these numbers."""
    if kind not in REDUCTION_KINDS:
        raise ShardingError(f"{place}: unknown reduction {kind!r}; it is one of {', '.join(REDUCTION_KINDS)}")
    if kind in ("and", "or", "xor") and not (dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.integer)):
        raise ShardingError(f"{place}: reduction {kind!r} of {dtype}; it works on the bits of integers and booleans")
    if kind in ("max", "min") and jnp.issubdtype(dtype, jnp.complexfloating):
        raise ShardingError(f"{place}: reduction {kind!r} of {dtype}; complex numbers have sum and product alone")


def with_dimension(spec: Stated, position: int, axes: Sequence[str] | None) -> Stated:
    """The specification of an array with one more dimension: split along `axes`, or open where they are None."""
    if isinstance(spec, TensorSharding):
        if isinstance(spec.mesh, Mesh) and spec.mesh.is_maximal:
            return spec
        new = OPEN if axes is None else DimensionSharding(tuple(map(AxisRef, axes)))
        return replace(spec, dimensions=(*spec.dimensions[:position], new, *spec.dimensions[position:]))
    entries = [*spec.partitions, *(None,) * (position - len(spec.partitions))]
    entries.insert(position, PartitionSpec.UNCONSTRAINED if axes is None else tuple(axes))
    longer: PartitionSpec = spec.update(partitions=entries)
    return longer


def _assumed_mesh(spec: Stated) -> Mesh | None:
    """Outside of a partition: the specification's own mesh, or one that has just the axes it names."""
    if isinstance(spec, TensorSharding):
        return spec.mesh if isinstance(spec.mesh, Mesh) else None
    entries = (e for e in spec.partitions if e is not None and e is not PartitionSpec.UNCONSTRAINED)
    names = [str(name) for e in entries for name in (e if isinstance(e, tuple) else (e,))]
    names += sorted(map(str, spec.unreduced))
    return Mesh(tuple(MeshAxis(name, 1) for name in dict.fromkeys(names)))


def check_free(sharding: TensorSharding, manual: frozenset[str], place: str) -> None:
    """Raises `ShardingError` if a sharding uses an axis on which the code around it is manual."""
    used = [a for axes in (*sharding.axes, sharding.replicated_axes, sharding.unreduced_axes) for a in axes]
    taken = next((axis for axis in used if axis.name in manual), None)
    if taken is not None:
        raise ShardingError(
            f"{place}: <{sharding}> uses {taken} inside of a computation that is manual on it, where arrays are one "
            "device's block along that axis; name the other axes only"
        )
