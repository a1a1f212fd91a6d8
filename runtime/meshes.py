"""Meshes of partitioned functions: as users give them, and refined, with the sub-axes that a program uses as axes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding

from sdy_jax.base.errors import MissingMeshError, ShardingError, UnsupportedError, with_article
from sdy_jax.ir.device_orders import block_indices, cuts_at, device_ids, groups_of_axes, same_devices
from sdy_jax.ir.jax_shardings import AnyMesh, mesh_from_jax
from sdy_jax.ir.meshes import AxisRef, Mesh, MeshAxis
from sdy_jax.ir.shardings import TensorSharding

# In which forms a compiler takes collectives, and some other ops, best.


@dataclass(frozen=True, slots=True, kw_only=True)
class Forms:
    """The forms in which programs are emitted for a kind of devices; without any all is emitted as it is.

    Attributes:
        at_once: a gather or scatter along several dimensions as one, along a new first dimension.
        apart: what an all_to_all takes is computed for itself, not once for each of its parts.
        in_lanes: what is scattered, and the product that makes it, in shapes that fill the lanes of tiles.
        in_halves: elements of 64 bits lie in two registers; reductions that are not compiled so are made of moves.
        in_rows: what is transformed lies with its last dimensions in memory.
        looked_up_apart: rows that are looked up by an array of indices are an array of their own.
        in_order: the largest array of a product as it lies, the others transposed: a compiler that keeps dimensions in
            the order in which they are written copies each array that is transposed.
        barriers_last: the compiler's own barrier makes an array one that is not taken for what it was before.
    """

    at_once: bool = False
    apart: bool = False
    in_lanes: bool = False
    in_halves: bool = False
    in_rows: bool = False
    looked_up_apart: bool = False
    in_order: bool = False
    barriers_last: bool = False


# Names of mesh axes that compilers take.

_TAKES_ASCII_ONLY = version("jaxlib").startswith("0.10.")


def check_axis_names(names: Iterable[str]) -> None:
    """Refuses names of which XLA would end the process: it reads the escapes of its own printer wrongly.

    jaxlib 0.10 dies of what is not ASCII, 0.12 of backslashes; `jax.jit` likewise.

    Raises:
        UnsupportedError: such a name.
    """
    for name in names:
        if "\\" in name or (_TAKES_ASCII_ONLY and not name.isascii()):
            raise UnsupportedError(
                f"mesh axis {name!r} cannot be compiled: XLA ends the process at such a name, in jax.jit too; to fix: "
                "name the axis in ASCII letters"
            )


# Meshes on devices: the refined mesh, whose axes are the sub-axes that a program uses.
#
# A program that speaks of `"model":(1)2` and `"model":(2)2` runs on a mesh in which `model` is cut into two axes,
# `model.1.2` and `model.2.2` (axis, pre-size, size). The pieces are called atoms: two atoms are equal or disjoint, so
# list operations on them are exact. Axes that are never cut keep their names; axes of size one are kept too.
#
# A `shard_map` has one order of the devices. A value on a mesh with the same axes and the devices in another order
# uses a view of the refined mesh (`RefinedMesh.on`), which names groups of devices by their positions instead of by
# axes.


class ReplicaGroups(TypedDict):
    """The devices that a collective joins, as the keyword arguments of lax's collectives: all along some axes, or lists
    of positions over all axes."""

    axis_name: tuple[str, ...]
    axis_index_groups: list[list[int]] | None


@dataclass(frozen=True)
class RefinedMesh:
    """A mesh and, per axis, the atoms it is cut into: `(pre, size)` from major to minor.

    `others` are the meshes, by symbol, that have the same axes and the devices in another order. A view of one of them
    has in `device_permutation` the position on the mesh of the `shard_map` of the device at each of its own; all other
    positions in this class and outside of it are those of the `shard_map`. Its axes are `around`, where those of a view
    are others. `forms`: in which the compiler of its devices takes collectives best.
    """

    mesh: Mesh
    cuts: tuple[tuple[tuple[int, int], ...], ...]
    others: tuple[tuple[str, Mesh], ...] = ()
    device_permutation: tuple[int, ...] = ()
    around: tuple[str, ...] = ()
    forms: Forms = field(default_factory=Forms)

    @classmethod
    def of(cls, mesh: Mesh, axes: Iterable[AxisRef] = (), forms: Forms = Forms()) -> RefinedMesh:
        """The coarsest refinement in which each of `axes` is a product of atoms."""
        return cls(mesh, cuts_at(axes, mesh), forms=forms)

    def with_meshes(self, meshes: Mapping[str, Mesh]) -> RefinedMesh:
        """Knows those of a module's meshes whose devices are this mesh's in another order."""
        found = ((name, mesh) for name, mesh in meshes.items() if mesh != self.mesh and mesh.axes == self.mesh.axes)
        return replace(self, others=tuple((name, mesh) for name, mesh in found if same_devices(mesh, self.mesh)))

    def on(self, mesh: str | Mesh) -> RefinedMesh:
        """The view of the mesh with this symbol; of the mesh of the `shard_map` for every name that is not known."""
        other = next((m for name, m in self.others if name == mesh), None)
        if other is None:
            return replace(self, device_permutation=()) if self.device_permutation else self
        seat = {device: position for position, device in enumerate(device_ids(self.mesh))}
        return replace(self, device_permutation=tuple(seat[device] for device in device_ids(other)))

    def in_groups(self, groups: Sequence[Sequence[int]]) -> RefinedMesh:
        """The view of groups of one size that hold each position once: their members differ along the axis `member`."""
        grouped = Mesh((MeshAxis("group", len(groups)), MeshAxis("member", len(groups[0]))))
        members = tuple(member for group in groups for member in group)
        return replace(RefinedMesh.of(grouped, forms=self.forms), device_permutation=members, around=self.axis_names)

    def group(self, axes: Sequence[AxisRef]) -> ReplicaGroups:
        """The groups of devices that differ along `axes` only, which number the members, first axis major."""
        if not self.device_permutation:
            return {"axis_name": self.names(axes), "axis_index_groups": None}
        groups = np.asarray(self.device_permutation)[groups_of_axes(axes, self.mesh)].tolist()
        return {"axis_name": self.axis_names, "axis_index_groups": groups}

    def index(self, axes: Sequence[AxisRef]) -> jax.Array:
        """The running device's position along `axes` (first one major), an int32 scalar."""
        if not self.device_permutation:
            return self._index(self.atoms(axes))
        return jnp.asarray(self.block_indices(axes), jnp.int32)[jax.lax.axis_index(self.axis_names)]

    def _index(self, atoms: Sequence[AxisRef]) -> Any:
        # lax.axis_index of several names computes by jnp, which takes ten times as long to trace.
        index: Any = np.int32(0)
        for position, atom in enumerate(atoms):
            own = jax.lax.axis_index(_atom_name(atom))
            index = jax.lax.add(jax.lax.mul(index, np.int32(atom.size(self.mesh))), own) if position else own
        return index

    def block_indices(self, axes: Sequence[AxisRef]) -> np.ndarray:
        """`block_indices` of each position of the `shard_map`, also on a view."""
        own = block_indices(axes, self.mesh)
        return own[np.argsort(self.device_permutation)] if self.device_permutation else own

    def atoms(self, axes: Sequence[AxisRef]) -> tuple[AxisRef, ...]:
        """The atoms that make up a list of axes, major to minor; full axes stay plain."""
        found: list[AxisRef] = []
        for axis in axes:
            lo, hi = axis.pre_size, axis.next_pre_size(self.mesh)
            for pre, size in self.cuts[self.mesh.positions[axis.name]]:
                if lo <= pre and pre * size <= hi:
                    found.append(AxisRef.canonical(axis.name, pre, size, self.mesh))
        return tuple(found)

    def names(self, axes: Sequence[AxisRef]) -> tuple[str, ...]:
        """The jax axis names of a list of axes, major to minor."""
        return tuple(_atom_name(atom) for atom in self.atoms(axes))

    @property
    def all_atoms(self) -> tuple[AxisRef, ...]:
        """Every atom in mesh order."""
        return self.atoms([AxisRef(name) for name in self.mesh.axis_names])

    @property
    def axis_names(self) -> tuple[str, ...]:
        return self.around or self.names([AxisRef(name) for name in self.mesh.axis_names])

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for pieces in self.cuts for _, size in pieces)

    def spec(self, sharding: TensorSharding | None) -> jax.sharding.PartitionSpec:
        """The PartitionSpec of a sharding on the refined mesh."""
        if sharding is None:
            return jax.sharding.PartitionSpec()
        return jax.sharding.PartitionSpec(*(self.names(axes) or None for axes in sharding.axes))

    def to_jax(self, devices: np.ndarray) -> jax.sharding.Mesh:
        """The jax mesh over `devices` (shaped like the unrefined mesh), with Auto axes."""
        return jax.sharding.Mesh(devices.reshape(self.shape), self.axis_names)

    def refining(self, mesh: AnyMesh) -> AnyMesh:
        """The jax mesh that refines another one, with Auto axes; one without devices where that has another number of
        them, as when a program is planned for another mesh than it was traced for."""
        if isinstance(mesh, jax.sharding.Mesh) and mesh.size == math.prod(self.shape):
            return self.to_jax(mesh.devices)
        return abstract_mesh(self.shape, self.axis_names, mesh.abstract_mesh.abstract_device)


def abstract_mesh(sizes: Sequence[int], names: Sequence[str], device: Any = None) -> jax.sharding.AbstractMesh:
    """A mesh without devices, with Auto axes."""
    types = (AxisType.Auto,) * len(names)
    return jax.sharding.AbstractMesh(tuple(sizes), tuple(names), axis_types=types, abstract_device=device)


def in_place_of_context(mesh: AnyMesh) -> AbstractContextManager[Any]:
    """The mesh in place of another one that is in context. Where none is, none is set: `checkify` looks into the bodies
    of `shard_map`s."""
    around = jax.sharding.get_abstract_mesh()
    is_other = not around.empty and around != mesh.abstract_mesh
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh) if is_other else nullcontext()


def _atom_name(atom: AxisRef) -> str:
    if atom.sub_axis is None:
        return atom.name
    return f"{atom.name}.{atom.sub_axis.pre_size}.{atom.sub_axis.size}"


# The mesh of a partitioned function as a user gives it, and whether arrays lie on its devices.


def auto_mesh(mesh: AnyMesh) -> AnyMesh:
    """The same mesh with Auto axes: shardings are stated, not part of types."""
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return abstract_mesh(mesh.axis_sizes, mesh.axis_names, mesh.abstract_device)
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names)


def checked_mesh(mesh: object) -> AnyMesh:
    """The mesh itself, or that of the surroundings. One that has no devices may be planned on.

    Raises:
        MissingMeshError: there is no mesh.
    """
    if mesh is None or getattr(mesh, "empty", False):
        mesh = jax.sharding.get_abstract_mesh()
    if getattr(mesh, "empty", False):
        raise MissingMeshError(
            "partition needs a mesh: pass mesh=jax.make_mesh(shape, names), or call the function under jax.set_mesh"
        )
    if isinstance(mesh, Mesh) and mesh.axes:
        return abstract_mesh([axis.size for axis in mesh.axes], mesh.axis_names)
    if not isinstance(mesh, AnyMesh):
        raise _no_mesh(mesh)
    return mesh


def check_devices(path: str, x: Any, mesh: AnyMesh) -> None:
    """Whether jit takes an array together with a mesh.

    Raises:
        ShardingError: it is on other devices than the mesh's, or on the same in another order; `path` names it.
    """
    if (problem := _elsewhere(x, mesh)) is not None:
        by_calls = "or state P() for it in in_shardings, so that each call copies it there, "
        copied = by_calls if x.sharding.is_fully_replicated else ""
        raise ShardingError(
            f"`{path}` {problem}; to fix: move it first, by jax.device_put(x, NamedSharding(mesh, ...)) with the mesh "
            f"{mesh_from_jax(mesh)} of the function, {copied}or partition on the array's mesh"
        )


def is_whole_elsewhere(x: Any, mesh: AnyMesh) -> bool:
    """Whether an array is committed to devices that are not those of the mesh, or in another order, and each of them
    has all of it."""
    return _elsewhere(x, mesh) is not None and bool(x.sharding.is_fully_replicated)


def _elsewhere(x: Any, mesh: AnyMesh) -> str | None:
    """Where an array lies, if that is not on the devices of the mesh."""
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer) or not x.committed:
        return None
    if not isinstance(mesh, jax.sharding.Mesh):
        return None
    own = x.sharding.mesh if isinstance(x.sharding, NamedSharding) else None
    if own == mesh:
        return None
    if x.sharding.device_set != {*mesh.devices.flat}:
        count = len(x.sharding.device_set)
        devices = "a single device" if count == 1 else f"{count} devices"
        return f"lies on {devices}, not on the {mesh.size} of the function's mesh"
    if isinstance(own, jax.sharding.Mesh) and own.devices.flat[:].tolist() != mesh.devices.flat[:].tolist():
        return "lies on the devices of the function's mesh in another order, and a jitted function has one order"
    return None


def _no_mesh(mesh: Any) -> ShardingError:
    """Something in place of a mesh."""
    devices = np.ravel(mesh).tolist() if isinstance(mesh, (list, tuple, np.ndarray)) else []
    if devices and all(isinstance(each, jax.Device) for each in devices):
        return ShardingError(
            f"partition got {with_article(type(mesh))} of {len(devices)} devices as mesh=, which names no axes; to "
            "fix: mesh=jax.sharding.Mesh(numpy.array(devices), names), with a name for each dimension"
        )
    return ShardingError(
        f"partition got the {type(mesh).__name__} {mesh!s:.80}, which has no devices; pass mesh={_make_mesh(mesh)}"
    )


def _make_mesh(given: Any) -> str:
    """A `jax.make_mesh` call to suggest in an error."""
    if isinstance(given, str):
        given = dict(re.findall(r"(\w+)=(\d+)", given))
    if isinstance(given, dict) and given:
        sizes, names = tuple(map(int, given.values())), tuple(map(str, given))
    elif isinstance(given, (tuple, list)) and given and all(isinstance(n, int) for n in given):
        sizes, names = tuple(given), ("data", "model")[: len(given)]
        names += tuple(f"axis{i}" for i in range(2, len(given)))
    else:
        return "jax.make_mesh(shape, names)"
    return f"jax.make_mesh({sizes}, {names})"
