"""The user's specification of one array's sharding: checked where it is traced, resolved where it is lowered.

In a primitive's parameters a specification is a `PartitionSpec`, a `NamedSharding`, whose devices only a partition can
place, or a `TensorSharding` whose mesh is another `Mesh` or a name, which stands for the mesh of whatever partition the
primitive is lowered in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr

from sdy_jax.annotate.argument_errors import no_entries, no_sharding_text, no_specification
from sdy_jax.annotate.arguments import AUTO, SPEC_TYPES, Leaf, positional_name
from sdy_jax.annotate.site import Site
from sdy_jax.base.errors import ParseError, ShardingError, with_article
from sdy_jax.ir.device_orders import can_express, in_order_of, rewritten, same_devices
from sdy_jax.ir.jax_shardings import (
    AnyMesh,
    check_used_once,
    entry_names,
    explicit_axes,
    from_partition_spec,
    mesh_from_jax,
)
from sdy_jax.ir.meshes import AxisRef, Mesh, MeshAxis
from sdy_jax.ir.parsers import parse_sharding
from sdy_jax.ir.shardings import CLOSED, OPEN, REDUCTION_KINDS, DimensionSharding, TensorSharding
from sdy_jax.ir.validity import verify_sharding
from sdy_jax.runtime.devices import on_devices_of

Stated = PartitionSpec | NamedSharding | TensorSharding

PARTITION = "mesh"
"""The mesh name in a `TensorSharding` that is not lowered yet."""


def stated(spec: Any, rank: int, place: str, site: Site | None, manual: frozenset[str]) -> Stated:
    """The user's specification in the form of a parameter, checked as far as that is possible.

    Args:
        spec: a `PartitionSpec`, `NamedSharding`, `TensorSharding` or text.
        rank: the rank of the array.
        place: names the function and the array for messages.
        site: the partition that is being traced, if one is.
        manual: the axes of its mesh that cannot be used here, because the code around is manual on them.

    Raises:
        ShardingError: a wrong rank, or an axis that the mesh lacks, that is used twice, or that is manual here.
        ParseError: text that is no sharding.
    """
    found = specification(spec, place)
    if site is not None:
        check_free(resolved(found, rank, site.mesh, PARTITION, place, site.jax_mesh), manual, place)
        return found
    assumed = _assumed_mesh(found)
    if assumed is not None:
        resolved(found, rank, assumed, PARTITION, place)
    elif isinstance(found, TensorSharding) and found.rank != rank:
        raise ShardingError(f"{place}: {found.rank} dimension shardings for a value of rank {rank}; give one each")
    return found


def specification(spec: Any, place: str) -> Stated:
    """What the user said, text parsed.

    Raises:
        ShardingError: it says nothing of mesh axes.
        ParseError: text that is no sharding.
    """
    if isinstance(spec, str):
        try:
            return parse_sharding(spec, PARTITION)
        except ParseError as error:
            raise no_sharding_text(spec, place, error) from None
    if spec is AUTO:
        raise ShardingError(f"{place} is AUTO, which only in_shardings and out_shardings of partition can be; state it")
    if isinstance(spec, PartitionSpec) and any(AUTO in entry_names(entry) for entry in spec.partitions):
        raise ShardingError(
            f"{place}: {spec} has AUTO for a dimension; to fix: write P.UNCONSTRAINED for a dimension that propagation "
            "decides, or, in in_shardings and out_shardings, sdy.AUTO in place of the whole PartitionSpec"
        )
    if not isinstance(spec, Stated):
        raise ShardingError(f"{place} is {with_article(type(spec))}, which names no mesh axes; give a PartitionSpec")
    return spec


def check_stated(specs: Any, names: Sequence[str], where: str) -> list[tuple[str, PartitionSpec]]:
    """Whether trees of specifications are such, whatever the mesh and the arrays, as jit asks before any call.

    Args:
        specs: as given for arguments or results.
        names: the parameters' names, where they are for arguments.
        where: `in_shardings` or `out_shardings`.

    Returns:
        Those that state partial sums, with the place for messages.

    Raises:
        ArgumentError: something is no specification.
        ShardingError: a `PartitionSpec` uses an axis twice.
    """
    terms = []
    for path, spec in jax.tree.leaves_with_path(specs, is_leaf=lambda x: isinstance(x, SPEC_TYPES)):
        root = _rooted(path, names) if "in_" in where else "result" + keystr(path)
        if not isinstance(spec, SPEC_TYPES):
            raise no_specification(spec, root, where) if path else no_entries(spec, names, where)
        if isinstance(spec, PartitionSpec) and not any(AUTO in entry_names(entry) for entry in spec.partitions):
            place = f"{where} for `{root}`"
            check_used_once(spec, place)
            terms += [(place, spec)] if spec.unreduced else []
    return terms


def _rooted(path: tuple[Any, ...], names: Sequence[str]) -> str:
    """`params['w']`: the argument of an entry of `in_shardings`."""
    if not path:
        return names[0] if len(names) == 1 else "all arguments"
    first = getattr(path[0], "idx", getattr(path[0], "key", keystr(path[:1])))
    return f"{positional_name(first, names) if isinstance(first, int) else first}{keystr(path[1:])}"


def check_terms(stated: Sequence[tuple[str, PartitionSpec]], mesh: AnyMesh) -> None:
    """
    Raises:
        ShardingError: partial sums are stated along an axis that is not Explicit.
    """
    explicit = explicit_axes(mesh)
    for place, spec in stated:
        axis = next((axis for axis in sorted(spec.unreduced) if axis in mesh.axis_names and axis not in explicit), None)
        if axis is not None:
            raise ShardingError(
                f"{place}: {spec} says that the array is unreduced along {axis!r}, an Auto axis of the mesh; types say "
                "so along Explicit axes only; to fix: leave it out, or make the axis Explicit (axis_types=)"
            )


def resolved(
    spec: Stated, rank: int, mesh: Mesh, mesh_name: str, place: str, jax_mesh: AnyMesh | None = None
) -> TensorSharding:
    """A specification on the mesh it is about: `mesh`, whose symbol is `mesh_name`, or its own inline mesh.

    Args:
        spec: from `specification`.
        rank: the rank of the array.
        mesh, mesh_name, jax_mesh: the partition's mesh, its symbol, and its devices, if they are known.
        place: names the function and the array for messages.

    Raises:
        ShardingError: it does not fit the mesh, its devices or the rank.
    """
    if isinstance(spec, PartitionSpec):
        return from_partition_spec(spec, rank, mesh, mesh_name, place)
    if isinstance(spec, NamedSharding):
        own = _mesh_of(spec, jax_mesh, place)
        spec = replace(from_partition_spec(spec.spec, rank, own, mesh_name, place), mesh=own)
    if isinstance(spec.mesh, str) or spec.mesh == mesh:
        spec = replace(spec, mesh=mesh_name)
    verify_sharding(spec, {mesh_name: mesh}, rank, place)
    return spec


def _mesh_of(spec: NamedSharding, jax_mesh: AnyMesh | None, place: str) -> Mesh:
    """The mesh of a sharding, its devices as positions on the function's mesh."""
    if jax_mesh is None or not isinstance(spec.mesh, jax.sharding.Mesh):
        return mesh_from_jax(spec.mesh)  # an AbstractMesh stands for any devices
    own = on_devices_of(spec.mesh, jax_mesh)
    if own is None:
        raise ShardingError(
            f"{place} is on the mesh {mesh_from_jax(spec.mesh)}, whose devices are not those of the function's mesh "
            f"{mesh_from_jax(jax_mesh)}; use that mesh, or a PartitionSpec"
        )
    return own


def resolve(leaf: Leaf, rank: int, mesh: Mesh, mesh_name: str, where: str, jax_mesh: AnyMesh) -> TensorSharding | None:
    """The user's specification of one leaf, as a sharding of a value of `rank` dimensions on the program's mesh.

    A sharding on another mesh with the same devices becomes the one on the program's mesh that says the same.

    Raises:
        ShardingError: unknown axis, axis used twice, wrong rank, or a sharding that only another mesh can say.
    """
    place = f"{where} for `{leaf.path}`"
    if leaf.spec is None or leaf.spec is AUTO:
        return None
    sharding = resolved(specification(leaf.spec, place), rank, mesh, mesh_name, place, jax_mesh)
    if isinstance(sharding.mesh, str):
        return sharding
    own = sharding.mesh if isinstance(leaf.spec, NamedSharding) else in_order_of(mesh, sharding.mesh)
    return _on_mesh(sharding, own, mesh, mesh_name, place)


def _on_mesh(sharding: TensorSharding, own: Mesh, mesh: Mesh, mesh_name: str, place: str) -> TensorSharding:
    """A sharding on another mesh in axes of the program's."""
    if own.is_empty:
        return replace(sharding, mesh=mesh_name)
    if can_express(own, mesh):
        return rewritten(sharding, own, mesh, mesh_name)
    reordered = same_devices(own, mesh) and can_express(replace(own, device_ids=mesh.device_ids), mesh)
    given = "a single device" if own.is_maximal else f"the mesh {replace(own, device_ids=())}"
    problem = "; its devices are in another order, and a jitted function has one order" if reordered else ""
    raise ShardingError(
        f"{place} is on {given}, the function is partitioned on {mesh}{problem}; use that mesh, or a PartitionSpec"
    )


def padded(sharding: TensorSharding, rank: int) -> TensorSharding:
    """The sharding with unsplit trailing dimensions up to `rank`: what a key array's raw words add."""
    return replace(sharding, dimensions=(*sharding.dimensions, *(CLOSED,) * (rank - sharding.rank)))


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
    if isinstance(spec, NamedSharding):
        return _on_its_mesh(spec, position, axes)
    return _with_entry(spec, position, axes)


def _on_its_mesh(spec: NamedSharding, position: int, axes: Sequence[str] | None) -> NamedSharding:
    unknown = [axis for axis in axes or () if axis not in spec.mesh.axis_names]
    if unknown:
        raise ShardingError(
            f"vmap splits its dimension along {unknown[0]!r}, and {spec.spec} is on the mesh "
            f"{mesh_from_jax(spec.mesh)}, which has no such axis; use a PartitionSpec, or that mesh's axes"
        )
    return NamedSharding(spec.mesh, _with_entry(spec.spec, position, axes))


def _with_entry(spec: PartitionSpec, position: int, axes: Sequence[str] | None) -> PartitionSpec:
    entries = [*spec.partitions, *(None,) * (position - len(spec.partitions))]
    entries.insert(position, PartitionSpec.UNCONSTRAINED if axes is None else tuple(axes))
    longer: PartitionSpec = spec.update(partitions=entries)
    return longer


def _assumed_mesh(spec: Stated) -> Mesh | None:
    """Outside of a partition: the specification's own mesh, or one that has just the axes it names."""
    if isinstance(spec, NamedSharding):
        return mesh_from_jax(spec.mesh)
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
