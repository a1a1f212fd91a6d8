"""Meshes and shardings from and to `jax.sharding`, and types of arrays as jax has and prints them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import takewhile
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from sdy_jax.base.errors import ShardingError, UnsupportedError
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


def from_named_sharding(sharding: jax.sharding.NamedSharding, rank: int, mesh_name: str) -> TensorSharding:
    """A `NamedSharding` of a value of rank `rank` as a sharding on `mesh_name`, the symbol of its mesh."""
    return from_partition_spec(sharding.spec, rank, mesh_from_jax(sharding.mesh), mesh_name)


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
    _check_names(_names(spec), mesh, f"{where}: {spec}")
    dimensions = (*map(_dimension, entries), *(CLOSED for _ in range(rank - len(entries))))
    axes = sort_axes((AxisRef(str(name)) for name in spec.unreduced), mesh)
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


def check_used_once(spec: PartitionSpec, where: str) -> None:
    """
    Raises:
        ShardingError: a spec uses an axis twice, whatever the mesh.
    """
    _check_names(_names(spec), None, f"{where}: {spec}")


def _names(spec: PartitionSpec) -> list[str]:
    """All axes that a spec names."""
    unreduced = sorted(map(str, spec.unreduced))
    return [str(name) for entry in spec.partitions for name in entry_names(entry)] + unreduced


def _check_names(names: Iterable[str], mesh: Mesh | None, where: str) -> None:
    seen: set[str] = set()
    for name in names:
        if mesh is not None and name not in mesh.sizes:
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


def sharding_on_devices(type_: NamedSharding, mesh: AnyMesh) -> NamedSharding:
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


# Types as jax prints them, with the axes that split each dimension: `f32[8@data,4]{U:model}`.

_KIBI, _KILO = 1024, 1000
"""Given: the steps of units."""

_ONE = 0.9995
"""Given: what rounds to one of the unit in three digits."""

_JAX_NAMES = {"i1": "bool", "complex<f32>": "c64", "complex<f64>": "c128"}


@lru_cache(maxsize=1 << 8)
def dtype_name(dtype: str) -> str:
    """jax's short name of an MLIR element type (`ui8`: `u8`, `i1`: `bool`, `f8E4M3FN`: `f8_e4m3fn`)."""
    name = _JAX_NAMES.get(dtype) or re.sub(r"^ui", "u", dtype)
    return re.sub(r"^(f\d)(E\w+)$", lambda found: f"{found[1]}_{found[2].lower()}", name)


_SHORT_DTYPE = re.compile(r"(bf|f|i|s|u|c)(\d+)")
_LONG_KINDS = {"bf": "bfloat", "f": "float", "i": "int", "s": "int", "u": "uint", "c": "complex"}
_LONG_NAMES = {"pred": "bool", "i1": "bool"}


def long_dtype_name(name: str) -> str:
    """numpy's name of an element type that is written short.

    >>> [long_dtype_name(name) for name in ("f32", "bf16", "s8", "pred", "float8_e5m2")]
    ['float32', 'bfloat16', 'int8', 'bool', 'float8_e5m2']
    """
    short = _SHORT_DTYPE.fullmatch(name)
    return f"{_LONG_KINDS[short[1]]}{short[2]}" if short else _LONG_NAMES.get(name, name)


def array_text(info: Any) -> str:
    """`f32[8,4]`: the type of what has a shape, whose sizes may be symbolic, and a dtype."""
    if info.dtype.type is np.void:  # bytes of no type, which jax has no name for
        return type_text(str(info.dtype), info.shape, None)
    scalar = str(jax.core.ShapedArray((), info.dtype).str_short(short_dtypes=True))
    return type_text(scalar.removesuffix("[]"), info.shape, None)


def sizes_text(sizes: Iterable[int | None]) -> str:
    """`2x4`, `2x?` with a size that is not known, `[]` without any."""
    return "x".join("?" if size is None else str(size) for size in sizes) or "[]"


def axis_name(axis: AxisRef) -> str:
    return axis.name if axis.sub_axis is None else f"{axis.name}:{axis.sub_axis}"


def listed_axes(axes: Iterable[AxisRef]) -> str:
    """`'data', 'model'`."""
    return ", ".join(f"'{axis_name(axis)}'" for axis in axes)


def type_text(
    dtype: str, shape: Sequence[int] | None, sharding: TensorSharding | None, mesh_name: str | None = None
) -> str:
    """`f32[8@data,4@(x,y)]{U:model}`: global shape, axes per dimension, unreduced axes.

    With the name of the program's mesh, a sharding on another one says so: `f32[8@data] on @other`.
    """
    if shape is None:
        return dtype
    axes = sharding.axes if sharding else ((),) * len(shape)
    dims = ",".join(f"{n}{_at(a)}" for n, a in zip(shape, axes, strict=True))
    unreduced = sharding.unreduced_axes if sharding else ()
    text = f"{dtype_name(dtype)}[{dims}]" + (f"{{U:{','.join(map(axis_name, unreduced))}}}" if unreduced else "")
    if mesh_name is None or sharding is None or sharding.mesh == mesh_name or sharding.has_no_axes:
        return text
    return f"{text} on @{sharding.mesh}"


def _at(axes: Sequence[AxisRef]) -> str:
    if not axes:
        return ""
    names = ",".join(map(axis_name, axes))
    return f"@{names}" if len(axes) == 1 else f"@({names})"


def bytes_of_text(text: str) -> float | None:
    """The number of bytes that a text such as `16GiB`, `1.5 MB` or `4096` says; None where it says none."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if match is None or (match[3] and not match[2]):
        return None
    base = _KIBI if match[3] else _KILO
    power = " KMGT".index(match[2].upper() or " ")
    return float(match[1]) * math.pow(base, power)


def count_text(count: int) -> str:
    """What follows one of several that are alike, or what runs so often: ` x 3`; nothing where that is once.

    >>> [count_text(count) for count in (0, 1, 3)]  # a loop may never run
    [' x 0', '', ' x 3']
    """
    return f" x {count}" if count != 1 else ""


def bytes_text(count: float) -> str:
    """`512 B`, `24.0 KiB`, `1.5 MiB`."""
    return _in_units(count, _KIBI, ("B", "KiB", "MiB", "GiB", "TiB"))


def flops_text(count: float) -> str:
    """`512 flop`, `2.1 Mflop`, `13.0 Gflop`."""
    return _in_units(count, _KILO, ("flop", "kflop", "Mflop", "Gflop", "Tflop"))


def _in_units(count: float, step: int, units: Sequence[str]) -> str:
    """A count in the first unit, as an integer, or in the first one, or else the last, in which it is below a step."""
    number = 0
    while count >= step and number < len(units) - 1:
        count, number = count / step, number + 1
    return f"{count:.1f} {units[number]}" if number else f"{count:.0f} {units[0]}"


def seconds_text(amount: float) -> str:
    """A time with its unit.

    >>> [seconds_text(amount) for amount in (2000.0, 2.0, 0.0125, 0.0009999, 3e-6)]
    ['2000 s', '2 s', '12.5 ms', '1 ms', '3 us']
    """
    for unit in ("s", "ms"):
        if amount >= _ONE:
            return f"{amount:.0f} {unit}" if amount >= _KILO else f"{amount:.3g} {unit}"
        amount *= _KILO
    return f"{amount:.3g} us"


def amount_text(unit: str, amount: float) -> str:
    """What communication costs in the unit of a cost model, "seconds" or "bytes"."""
    return seconds_text(amount) if unit == "seconds" else bytes_text(amount)
