"""Layouts of arrays: the shardings of arguments, by a function's mesh, and of results; the memory of the host."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from sdy_jax.base.jax_meshes import tiles_of
from sdy_jax.base.jax_primitives import primal_of
from sdy_jax.ir.jax_shardings import AnyMesh, has_sub_axes, mesh_from_jax, to_partition_spec
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.runtime.devices import can_express, on_devices_of
from sdy_jax.runtime.meshes import RefinedMesh

# Layouts of arrays: the shardings of arguments, in terms of a function's mesh, and those of results.


def layout_of(x: Any) -> NamedSharding | None:
    """The sharding of an array on a mesh, or of a `ShapeDtypeStruct`; None where it is unknown.

    An array that is differentiated eagerly has the layout of its value. Under a trace only types are known; an array
    on a single device goes wherever a function wants it.
    """
    x = primal_of(x)
    sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    if sharding is None or isinstance(sharding, NamedSharding):
        return sharding
    return as_named(sharding, x.shape) if sharding.num_devices > 1 else None


def as_named(sharding: jax.sharding.Sharding, shape: Sequence[int]) -> NamedSharding | None:
    """A sharding of any class as one on a mesh of its devices: an axis per dimension, and one for copies of blocks.

    None: jax cannot say which blocks devices have, or some block has more copies than others.
    """
    if isinstance(sharding, NamedSharding):
        return sharding
    if sharding.num_devices == 1:
        alone = jax.sharding.Mesh(np.array([*sharding.device_set]), ("device",))
        return NamedSharding(alone, PartitionSpec(), memory_kind=sharding.memory_kind)
    starts = _starts(sharding, tuple(shape))
    counts = [len(set(places)) for places in zip(*starts.values(), strict=True)]
    blocks = Counter(starts.values())
    if len(set(blocks.values())) != 1 or len(blocks) != math.prod(counts):
        return None
    ordered = sorted(starts, key=lambda device: starts[device])  # stable: copies keep their order
    names = (*(f"dim{i}" for i in range(len(counts))), "copies")
    sizes = (*counts, len(ordered) // math.prod(counts))
    whole = [[(name, size)] for name, size in zip(names, sizes, strict=True)]
    parts = [_prime_parts(name, size) for name, size in zip(names, sizes, strict=True)]
    sorted_ones = ((axes, _in_order(ordered, axes, [*starts])) for axes in (whole, parts))
    found = ((axes, mesh) for axes, mesh in sorted_ones if mesh is not None)
    axes, mesh = next(found, (whole, _mesh(ordered, whole)))
    entries = (tuple(name for name, size in own if size > 1) or None for own in axes[:-1])
    return NamedSharding(mesh, PartitionSpec(*entries), memory_kind=sharding.memory_kind)


def as_stated(sharding: jax.sharding.Sharding) -> NamedSharding | None:
    """`as_named` of a sharding that arrays of some shape have: that of one element per block."""
    return as_named(sharding, tiles_of(sharding))


_Axes = list[tuple[str, int]]
"""Names and sizes."""


def _prime_parts(name: str, size: int) -> _Axes:
    """An axis of prime size, or such parts of one."""
    found: list[int] = []
    while size > 1:
        found.append(next(n for n in range(2, size + 1) if size % n == 0))
        size //= found[-1]
    return [(f"{name}.{i}", n) for i, n in enumerate(found)] if len(found) > 1 else [(name, math.prod(found))]


def _mesh(devices: Sequence[jax.Device], axes: Sequence[_Axes]) -> jax.sharding.Mesh:
    names, sizes = zip(*(axis for dimension in axes for axis in dimension), strict=True)
    return jax.sharding.Mesh(np.array(devices, object).reshape(sizes), names)


def _in_order(
    devices: Sequence[jax.Device], axes: Sequence[_Axes], order: Sequence[jax.Device]
) -> jax.sharding.Mesh | None:
    """The mesh of these axes, sorted such that its devices come in an order, which has to be one for all of a jitted
    function; None if there is no such way."""
    mesh, position = _mesh(devices, axes), {device: number for number, device in enumerate(order)}
    positions = np.vectorize(position.__getitem__, otypes=[int])(mesh.devices)
    strides = [int(np.diff(positions, axis=i).flat[0]) if n > 1 else 0 for i, n in enumerate(positions.shape)]
    way = sorted(range(len(strides)), key=lambda i: -strides[i])
    if [*positions.transpose(way).flat] != [*range(len(order))]:
        return None
    return jax.sharding.Mesh(mesh.devices.transpose(way), tuple(mesh.axis_names[i] for i in way))


def _starts(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> dict[jax.Device, tuple[int, ...]]:
    """Where each device's block begins; nothing where jax cannot say."""
    try:
        blocks = sharding.devices_indices_map(shape)
    except (ValueError, NotImplementedError):
        return {}
    return {d: tuple(s.indices(n)[0] for s, n in zip(block, shape, strict=True)) for d, block in blocks.items()}


def is_on(sharding: NamedSharding, mesh: AnyMesh) -> bool:
    """Whether a sharding is on this mesh, or on one with its axes and devices, where both have some; axis types do not
    matter."""
    own = sharding.mesh
    if own is mesh:
        return True
    if (own.axis_names, own.axis_sizes) != (mesh.axis_names, mesh.axis_sizes):
        return False
    are_known = isinstance(own, jax.sharding.Mesh) and isinstance(mesh, jax.sharding.Mesh)
    return not are_known or own.devices.tolist() == mesh.devices.tolist()


def as_specification(sharding: NamedSharding, mesh: AnyMesh) -> PartitionSpec | NamedSharding | None:
    """A sharding as a specification for a function on `mesh`; equal ones for shardings on its axes that are equal.

    None: the mesh has no axes for it, or other devices.
    """
    if is_on(sharding, mesh):
        return _shortened(sharding.spec)
    own = on_devices_of(sharding.mesh, mesh)
    return sharding if own is not None and can_express(own, mesh_from_jax(mesh)) else None


def _shortened(spec: PartitionSpec) -> PartitionSpec:
    """The specification without trailing entries of None."""
    entries = list(spec.partitions)
    while entries and not entries[-1]:
        entries.pop()
    return spec.update(partitions=tuple(entries)) if len(entries) < len(spec.partitions) else spec


def named(sharding: TensorSharding, mesh: AnyMesh) -> NamedSharding:
    """The jax sharding of a value at the border: on the mesh itself where its axes can say it, else on a mesh whose
    axes are the parts of them that are used."""
    if not has_sub_axes(sharding):
        return NamedSharding(mesh, _shortened(to_partition_spec(sharding)))
    refined = RefinedMesh.of(mesh_from_jax(mesh), [axis for axes in sharding.axes for axis in axes])
    return NamedSharding(refined.refining(mesh), refined.spec(sharding))


# Arrays in the memory of the host, next to that of their devices: programs take and make them on devices.

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def is_on_host(type_: Any) -> bool:
    """Whether the type of an array says that it is in the memory of the host."""
    return getattr(type_, "memory_space", _DEVICE) == _HOST


def states_host(spec: Any) -> bool:
    """Whether a specification of a result states the memory of the host that jax's types know. Of other kinds jit is
    told."""
    return isinstance(spec, jax.sharding.NamedSharding) and spec.memory_kind == "pinned_host"


def states_other_kind(spec: Any) -> bool:
    """Whether a specification states a kind of memory that jax's types do not know."""
    return isinstance(spec, jax.sharding.NamedSharding) and spec.memory_kind not in (None, "device", "pinned_host")


def on_devices(x: Any) -> Any:
    """An argument in the memory of its devices."""
    return jax.device_put(x, _DEVICE) if is_on_host(jax.typeof(x)) else x


def with_some_on_host(values: Sequence[Any], numbers: Collection[int]) -> list[Any]:
    """Values of which some are in the memory of the host."""
    # `src`: cotangents come back to devices, which jax 0.10 and 0.12 leave on the host.
    return [jax.device_put(y, _HOST, src=_DEVICE) if i in numbers else y for i, y in enumerate(values)]
