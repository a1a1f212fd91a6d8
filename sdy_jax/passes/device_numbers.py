"""The devices of a module by other numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jax.extend.mlir import ir

from sdy_jax.ir.operations import top_level
from sdy_jax.ir.stored_shardings import map_shardings
from sdy_jax.representation.attributes import mesh_from_attribute, mesh_to_attribute
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.sharding import TensorSharding


def renumber_devices(module: ir.Operation, ids: Sequence[int]) -> None:
    """Gives the device `ids[n]` the number `n`, in all meshes of a module.

    A mesh with the devices `ids` has them in order afterwards: with `ids = (1, 0)`, `<["a"=2], device_ids=[1, 0]>`
    becomes `<["a"=2]>`, and the other way round. Meshes with devices that are not among `ids` stay as they are.
    """
    numbers = {device: number for number, device in enumerate(ids)}

    def renumbered(mesh: Mesh) -> Mesh:
        devices = mesh.device_ids or tuple(range(mesh.size))
        if mesh.is_empty or not numbers.keys() >= {*devices}:
            return mesh
        new = tuple(numbers[device] for device in devices)
        return replace(mesh, device_ids=() if mesh.axes and new == tuple(range(len(new))) else new)

    def moved(sharding: TensorSharding) -> TensorSharding:
        return replace(sharding, mesh=renumbered(sharding.mesh)) if isinstance(sharding.mesh, Mesh) else sharding

    for op in top_level(module, "sdy.mesh"):
        mesh = mesh_from_attribute(op.attributes["mesh"])
        op.attributes["mesh"] = mesh_to_attribute(renumbered(mesh), module.context)
    map_shardings(module, moved)
