"""The meshes of `jax.shard_map`s in a traced function: of the devices of the function's mesh, in its order, as under
jit, whose program has one order."""

from __future__ import annotations

from typing import Any

import jax

from sdy_jax.annotate.equations import all_equations, line_of
from sdy_jax.errors import ShardingError
from sdy_jax.ir.locations import short_source
from sdy_jax.representation.named import AnyMesh, mesh_from_jax


def check_mapped_meshes(jaxpr: Any, mesh: AnyMesh) -> None:
    """
    Raises:
        ShardingError: a `jax.shard_map` in a closed jaxpr is on other devices than the mesh, or on these in another
            order.
    """
    if not isinstance(mesh, jax.sharding.Mesh):
        return
    devices = [*mesh.devices.flat]
    for equation in all_equations(jaxpr):
        own = equation.params.get("mesh") if equation.primitive.name == "shard_map" else None
        if not isinstance(own, jax.sharding.Mesh) or [*own.devices.flat] == devices:
            continue
        how = "these devices in another order" if {*own.devices.flat} == {*devices} else "other devices"
        raise ShardingError(
            f"Received incompatible devices: the function is partitioned on the mesh {mesh_from_jax(mesh)}, and a "
            f"jax.shard_map{_at(line_of(equation))} is on {mesh_from_jax(own)}, which has {how}; to fix: give both "
            "meshes the same devices in one order, or partition the function on the other mesh"
        )


def _at(line: str) -> str:
    return f" at {short_source(line)}" if line else ""
