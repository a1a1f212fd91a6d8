"""The meshes that annotations are about, as meshes of SDY: with all sizes known, and with names for their axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sdy_jax.errors import ShardingError
from sdy_jax.representation.mesh import Mesh
from sdy_jax.shard.op_meshes import DeviceMesh, mesh_of, resolved_sizes


class MeshError(ShardingError):
    """A mesh, of this symbol, that cannot be laid over the devices."""

    def __init__(self, symbol: str, message: str):
        self.symbol, self.message = symbol, message
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Devices:
    """What the meshes of a program are laid over.

    Attributes:
        mesh: the mesh that the program is to run on. Meshes of the program that have its shape are this one.
        axis_names: what the axes of meshes with as many axes are called; by default `axis0`, `axis1`, ...
        count: how many devices there are, where there is no mesh to say it.
    """

    mesh: Mesh | None = None
    axis_names: tuple[str, ...] = ()
    count: int | None = None


def annotated_meshes(meshes: Iterable[DeviceMesh], declared: Mapping[str, Mesh], devices: Devices) -> dict[str, Mesh]:
    """The meshes by symbol.

    Args:
        meshes: those of the mesh and shard dialects in a module.
        declared: its SDY meshes by symbol; one with the name of a dialect's mesh is the same mesh.
        devices: what they are laid over.

    Raises:
        MeshError: a size that does not fit or cannot be known, or meshes of different numbers of devices.
    """
    meshes = tuple(meshes)
    _check_some_fits([mesh for mesh in meshes if mesh.symbol not in declared], devices)
    found = {}
    for mesh in meshes:
        try:
            mesh.check_declared(declared.get(mesh.symbol))
            found[mesh.symbol] = _resolved(mesh, declared.get(mesh.symbol), devices)
        except ShardingError as error:
            raise MeshError(mesh.symbol, str(error)) from None
    if found:
        _check_counts({**found, **declared})
    return found


def _resolved(mesh: DeviceMesh, declared: Mesh | None, devices: Devices) -> Mesh:
    if declared is not None:
        return declared
    if devices.mesh is not None and mesh.has_the_sizes_of(devices.mesh):
        return devices.mesh
    return mesh_of(_sizes(mesh, devices), devices.axis_names)


def _sizes(mesh: DeviceMesh, devices: Devices) -> tuple[int, ...]:
    count = devices.count if devices.mesh is None else devices.mesh.size
    known = [size for size in mesh.shape if size is not None]
    if len(known) == mesh.rank:
        count = math.prod(known)
    elif count is None and len(known) == mesh.rank - 1:
        raise ShardingError(f"@{mesh.symbol} = {mesh} has an unknown size; say how many devices there are")
    return resolved_sizes(mesh, count or 0)


def _check_some_fits(meshes: Sequence[DeviceMesh], devices: Devices) -> None:
    """The mesh of the program is one of those that it is annotated with."""
    if devices.mesh is None or not meshes or any(mesh.has_the_sizes_of(devices.mesh) for mesh in meshes):
        return
    raise MeshError(meshes[0].symbol, meshes[0].unlike(devices.mesh.sizes.values()))


def _check_counts(meshes: Mapping[str, Mesh]) -> None:
    counts = {symbol: mesh.size for symbol, mesh in meshes.items() if mesh.axes}
    first = next(iter(counts))
    for symbol, count in counts.items():
        if count != counts[first]:
            raise MeshError(
                first,
                f"@{first} has {counts[first]} devices, @{symbol} {count}; one program runs on one set of devices",
            )
