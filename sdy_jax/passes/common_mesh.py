"""Shardings on several meshes over the same devices, on one of them: so that propagation goes from one to the other."""

from __future__ import annotations

from collections.abc import Iterable

from jax.extend.mlir import ir

from sdy_jax.ir.operations import manual_axes, module_meshes, pre_order
from sdy_jax.ir.stored_shardings import map_shardings
from sdy_jax.representation.attributes import shardings_from_attribute
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.runtime.device_orders import can_express, rewritten


def put_on_mesh(module: ir.Operation, name: str) -> None:
    """Writes shardings in axes of one mesh wherever all axes of their own mesh are lists of axes of that one.

    On `x=2, y=4`, the axis `p` of a mesh `p=4, q=2` of the same devices is `x, y:(1)2`. Meshes that manual computations
    are written for stay as they are.
    """
    meshes = module_meshes(module)
    if len(meshes) == 1:
        return
    base, kept = meshes[name], {s.mesh for op in pre_order(module) for s in _manual_shardings(op)}
    others = {
        other: mesh
        for other, mesh in meshes.items()
        if other not in kept and mesh != base and mesh.axes and can_express(mesh, base)
    }

    def changed(sharding: TensorSharding) -> TensorSharding:
        own = others.get(str(sharding.mesh))
        return sharding if own is None else rewritten(sharding, own, base, name)

    if others:
        map_shardings(module, changed)


def _manual_shardings(op: ir.Operation) -> Iterable[TensorSharding]:
    if not manual_axes(op):
        return ()
    return (s for side in ("in_shardings", "out_shardings") for s in shardings_from_attribute(op.attributes[side]))
