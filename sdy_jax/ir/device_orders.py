"""Where the devices of a mesh lie along its axes and parts of them, and one mesh's axes expressed by another's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from sdy_jax.ir.meshes import Axes, AxisRef, Mesh, MeshAxis, axes_size, merge_neighbours, sort_and_merge
from sdy_jax.ir.shardings import TensorSharding

# Axes in parts, and the blocks that each position of a mesh has along them.


def cuts_at(axes: Iterable[AxisRef], mesh: Mesh) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Per axis of a mesh the coarsest parts of which all of `axes` are products: `(pre, size)` from major to minor."""
    bounds = {axis.name: {1, axis.size} for axis in mesh.axes}
    for ref in axes:
        bounds[ref.name] |= {ref.pre_size, ref.next_pre_size(mesh)}
    edges = (sorted(bounds[axis.name]) for axis in mesh.axes)
    return tuple(tuple((low, high // low) for low, high in pairwise(each)) or ((1, 1),) for each in edges)


def coordinates(axis: AxisRef, mesh: Mesh) -> np.ndarray:
    """The coordinate along `axis` of each position of `mesh` (row-major), shape `[mesh.size]`."""
    sizes = tuple(a.size for a in mesh.axes)
    full = np.unravel_index(np.arange(mesh.size), sizes)[mesh.positions[axis.name]]
    return (full // (mesh.sizes[axis.name] // axis.next_pre_size(mesh))) % axis.size(mesh)


def block_indices(axes: Sequence[AxisRef], mesh: Mesh) -> np.ndarray:
    """Which block of a dimension split by `axes` (major to minor) each position of `mesh` owns, shape `[mesh.size]`."""
    index = np.zeros(mesh.size, dtype=np.int64)
    for axis in axes:
        index = index * axis.size(mesh) + coordinates(axis, mesh)
    return index


def groups_of_axes(axes: Sequence[AxisRef], mesh: Mesh) -> np.ndarray:
    """The groups of positions of `mesh` that differ only along `axes`, which number the members (first axis major).

    Shape `[groups, members]`; groups are in the order of their first members.
    """
    return np.argsort(block_indices(axes, mesh), kind="stable").reshape(axes_size(axes, mesh), -1).T


# Meshes over the same devices: axes that are equal on both, and one mesh's axes expressed by another's.
#
# Two lists of axes are equal if every device has the same coordinate along both. On the meshes `a=2, b=2` and `p=4`,
# each of the devices 0, 1, 2, 3, the axis `p` equals the list `a, b`. If the second mesh has its devices in the order
# 0, 2, 1, 3, `p` equals `b, a`; in the order 3, 2, 1, 0 it equals no list of axes of the first.


def device_ids(mesh: Mesh) -> tuple[int, ...]:
    """The device at each position of a mesh."""
    return mesh.device_ids or tuple(range(mesh.size))


@lru_cache(maxsize=1 << 10)
def coordinates_by_device(axes: Axes, mesh: Mesh) -> bytes:
    """The number of each device, in ascending order of devices, along a list of axes: a key to compare."""
    return np.asarray(block_indices(axes, mesh)[np.argsort(device_ids(mesh))], np.int32).tobytes()


def coincide(axes: Axes, first: Mesh, second: Mesh) -> bool:
    """Whether every device has the same coordinate along a list of axes on two meshes that both have these axes."""
    return not axes or coordinates_by_device(axes, first) == coordinates_by_device(axes, second)


def hold_the_same(first: TensorSharding, first_mesh: Mesh, second: TensorSharding, second_mesh: Mesh) -> bool:
    """Whether each device has the same block of a whole value under two shardings with equal shard counts."""
    return all(
        coordinates_by_device(a, first_mesh) == coordinates_by_device(b, second_mesh)
        for a, b in zip(first.axes, second.axes, strict=True)
    )


def common_part(axes: Axes, first: Mesh, second: Mesh) -> Axes:
    """The longest prefix of a list of axes, the last one possibly cut, that coincides on two meshes."""
    kept: list[AxisRef] = []
    for axis in axes:
        found = next((a for a in _leading_parts(axis, first) if coincide((a,), first, second)), None)
        kept += [] if found is None else [found]
        if found != axis:
            break
    return tuple(kept)


def _leading_parts(axis: AxisRef, mesh: Mesh) -> list[AxisRef]:
    """An axis and what its major digits make, longest first."""
    size = axis.size(mesh)
    sizes = [n for n in range(size, 1, -1) if size % n == 0]
    return [AxisRef.canonical(axis.name, axis.pre_size, n, mesh) for n in sizes]


@lru_cache(maxsize=1 << 10)
def expressed(axis: AxisRef, own: Mesh, other: Mesh) -> Axes | None:
    """The list of axes of `other` that numbers the devices as an axis of `own` does; None if there is none."""
    size = axis.size(own)
    if size == 1:
        return ()
    for part in _leading_parts(axis, own):
        found = _table(other).get(coordinates_by_device((part,), own))
        if found is None:
            continue
        taken = part.size(own)
        rest = AxisRef.canonical(axis.name, axis.pre_size * taken, size // taken, own)
        tail = expressed(rest, own, other) if taken < size else ()
        if tail is not None:
            return merge_neighbours([found, *tail], other)
    return None


def expressed_part(axes: Sequence[AxisRef], own: Mesh, other: Mesh) -> Axes:
    """The longest leading part of a list of axes that can be expressed in axes of `other`."""
    kept: list[AxisRef] = []
    for axis in axes:
        parts = ((part, expressed(part, own, other)) for part in _leading_parts(axis, own))
        part, found = next(((p, f) for p, f in parts if f is not None), (None, ()))
        kept += found or ()
        if part != axis:
            break
    return merge_neighbours(kept, other)


@lru_cache(maxsize=64)
def _table(mesh: Mesh) -> dict[bytes, AxisRef]:
    """All axes and sub-axes of a mesh, by the coordinates that devices have along them."""
    found: dict[bytes, AxisRef] = {}
    for axis in mesh.axes:
        for pre in (n for n in range(1, axis.size) if axis.size % n == 0):
            for part in _leading_parts(AxisRef.canonical(axis.name, pre, axis.size // pre, mesh), mesh):
                found[coordinates_by_device((part,), mesh)] = part
    return found


def cut_at(axes: Sequence[AxisRef], mesh: Mesh) -> Mesh:
    """The mesh of the coarsest parts of a mesh's axes of which all of `axes` are products, each named as it is written:
    `x:(1)2`."""
    named = zip(mesh.axis_names, cuts_at(axes, mesh), strict=True)
    parts = [AxisRef.canonical(name, pre, size, mesh) for name, cuts in named for pre, size in cuts]
    return replace(mesh, axes=tuple(MeshAxis(_name(part), part.size(mesh)) for part in parts))


def _name(axis: AxisRef) -> str:
    return axis.name if axis.sub_axis is None else f"{axis.name}:{axis.sub_axis}"


def same_devices(first: Mesh, second: Mesh) -> bool:
    return sorted(device_ids(first)) == sorted(device_ids(second))


def can_express(own: Mesh, other: Mesh) -> bool:
    """Whether every axis of `own` is a list of axes of `other`."""
    return same_devices(own, other) and all(expressed(AxisRef(a.name), own, other) is not None for a in own.axes)


def in_order_of(base: Mesh, own: Mesh) -> Mesh:
    """What a mesh without devices in hand stands for beside one that has them: in another order, it is the other's."""
    return own if own.is_maximal or can_express(own, base) else replace(own, device_ids=base.device_ids)


def rewritten(sharding: TensorSharding, own: Mesh, other: Mesh, name: str) -> TensorSharding:
    """A sharding on `own` in axes of `other`, whose symbol is `name` and which can express all of them."""

    def axes(listed: Axes) -> Axes:
        return merge_neighbours([found for axis in listed for found in expressed(axis, own, other) or ()], other)

    return TensorSharding(
        name,
        tuple(replace(dim, axes=axes(dim.axes)) for dim in sharding.dimensions),
        sort_and_merge(axes(sharding.replicated_axes), other),
        sort_and_merge(axes(sharding.unreduced_axes), other),
        sharding.reduction,
    )
