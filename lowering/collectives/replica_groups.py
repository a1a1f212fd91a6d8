"""The groups of devices that StableHLO's collectives name, and the mesh axes that make them.

A group is a tuple of mesh positions (row-major over the axes in mesh order) in the order in which the collective joins
them. On a mesh x=2, y=4 the groups of `y` are (0, 1, 2, 3) and (4, 5, 6, 7), those of `y, x` the one group
(0, 4, 1, 5, 2, 6, 3, 7).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from jax.extend.mlir import ir

from sdy_jax.errors import UnsupportedError
from sdy_jax.ir.custom_ops import RAGGED
from sdy_jax.ir.graph import Op
from sdy_jax.representation.mesh import AxisRef, Mesh
from sdy_jax.runtime.mesh import block_indices
from sdy_jax.runtime.mesh import groups_of_axes as mesh_groups

Groups = tuple[tuple[int, ...], ...]

_CHANNEL = re.compile(r"handle = (-?\d+)")
_AXIS = re.compile(r'name = "([^"]+)"(?:, sub_axis_info = \((\d+)\)(\d+))?')
_REPLICAS_TIMES_PARTITIONS = frozenset({"stablehlo.all_reduce", "stablehlo.all_gather", "stablehlo.reduce_scatter"})


def groups_of_axes(axes: Sequence[AxisRef], mesh: Mesh) -> Groups:
    """The groups of all devices that differ only along `axes`, which number the members (first axis major)."""
    return tuple(map(tuple, mesh_groups(axes, mesh).tolist()))


def axes_of_groups(groups: Groups, atoms: Sequence[AxisRef], mesh: Mesh) -> tuple[AxisRef, ...] | None:
    """The list made of `atoms` (all of a mesh's, in mesh order) whose groups are these; None if there is none."""
    strides: dict[int, AxisRef] = {}
    stride = 1
    for atom in reversed(atoms):
        if atom.size(mesh) > 1:
            strides[stride] = atom
            stride *= atom.size(mesh)
    found: list[AxisRef] = []
    rest = groups[0]
    while len(rest) > 1:
        minor = strides.get(rest[1] - rest[0])
        if minor is None:
            return None
        found.insert(0, minor)
        rest = rest[:: minor.size(mesh)]
    return tuple(found) if groups_of_axes(found, mesh) == tuple(sorted(groups)) else None


def spans(groups: Sequence[Sequence[int]], axes: Sequence[AxisRef], mesh: Mesh) -> bool:
    """Whether a group joins devices that differ along `axes`."""
    block = block_indices(axes, mesh)
    return any(block[member] != block[group[0]] for group in groups for member in group)


def device_groups(op: Op, mesh: Mesh) -> Groups:
    """The groups of a StableHLO collective, in a program of one replica whose partitions are the devices of `mesh`.

    Raises:
        UnsupportedError: not every device is in exactly one group, groups differ in size, or they are given by axes
            that the mesh does not have.
    """
    everybody = tuple(range(mesh.size))
    if op.key == RAGGED:
        return _ragged_groups(op, mesh)
    if not _has_channel(op):
        return tuple((position,) for position in everybody)  # the groups are of replicas, and there is only one
    if op.name in _REPLICAS_TIMES_PARTITIONS and "use_global_device_ids" not in op.attributes:
        return (everybody,)  # the groups are of replicas, each with all its partitions
    given = op.attributes.get("replica_groups")
    if "replica_group_mesh_axes" in str(given):
        return groups_of_axes(_named_axes(str(given), op, mesh), mesh)
    ids = op.ints("replica_groups")
    if not ids:
        return (everybody,)
    width = given.type.shape[1]  # type: ignore[union-attr]
    return _of_all_devices(op, tuple(_positions(ids[i : i + width], mesh) for i in range(0, len(ids), width)), mesh)


def _ragged_groups(op: Op, mesh: Mesh) -> Groups:
    """Those of jax's ragged exchange, which says them in its backend configuration, between partitions."""
    said = ir.DictAttr(op.attributes["backend_config"])
    if "channel_id" not in said:
        return tuple((position,) for position in range(mesh.size))
    ids = np.array(ir.DenseIntElementsAttr(said["replica_groups"]))
    return _of_all_devices(op, tuple(_positions(group.tolist(), mesh) for group in ids), mesh)


def _of_all_devices(op: Op, groups: Groups, mesh: Mesh) -> Groups:
    """Groups of one size that hold each device once.

    Raises:
        UnsupportedError: they are none.
    """
    everybody = range(mesh.size)
    if sorted(member for group in groups for member in group) != list(everybody):
        raise UnsupportedError(
            f"replica_groups {[list(group) for group in groups]} of {op.name}; expected groups of one size that hold "
            f"each of the {mesh.size} devices of the mesh {mesh} once"
        )
    return groups


def device_pairs(op: Op, mesh: Mesh) -> list[tuple[int, int]]:
    """The (sender, receiver) mesh positions of a StableHLO `collective_permute`."""
    ids = op.ints("source_target_pairs")
    if not _has_channel(op):
        return [(p, p) for p in range(mesh.size)] if ids else []  # pairs of replicas, of which there is one
    positions = _positions(ids, mesh)
    return list(zip(positions[::2], positions[1::2], strict=True))


def _positions(ids: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
    """Mesh positions of partition numbers; -1 for what is none."""
    numbers = mesh.device_ids or tuple(range(mesh.size))
    at = {number: position for position, number in enumerate(numbers)}
    return tuple(at.get(number, -1) for number in ids)


def _has_channel(op: Op) -> bool:
    """Without a channel a collective works across replicas, with one across partitions."""
    match = _CHANNEL.search(str(op.attributes.get("channel_handle")))
    return match is not None and int(match[1]) > 0


def _named_axes(text: str, op: Op, mesh: Mesh) -> tuple[AxisRef, ...]:
    """The axes of `#stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [...]>`."""
    found = [(name, int(pre or 1), size) for name, pre, size in _AXIS.findall(text)]
    unknown = [name for name, _, _ in found if name not in mesh.sizes]
    if unknown:
        raise UnsupportedError(f"replica_groups of {op.name} name the axis {unknown[0]}; the mesh is {mesh}")
    return tuple(AxisRef.canonical(n, pre, int(size or mesh.sizes[n]), mesh) for n, pre, size in found)
