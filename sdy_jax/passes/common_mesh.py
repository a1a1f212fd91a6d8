"""Shardings on several meshes over the same devices, on one of them: so that propagation goes from one to the other.

A manual computation is along whole axes. Where one is on a mesh that cuts those of the function's mesh, as `a=2, b=2,
c=2` cuts `x=4, y=2`, the program is on a mesh of the parts, whose axes have the names of these: `x:(1)2=2, x:(2)2=2,
y=2`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from jax.extend.mlir import ir

from sdy_jax.annotate.mesh_symbols import declare_mesh
from sdy_jax.annotate.program import Program
from sdy_jax.errors import UnsupportedError
from sdy_jax.ir.locations import source_line
from sdy_jax.ir.operations import copied, manual_axes, module_meshes, named, pre_order
from sdy_jax.ir.stored_shardings import map_shardings
from sdy_jax.passes.meshes import lift_meshes
from sdy_jax.representation.attributes import manual_axes_to_attribute, shardings_from_attribute
from sdy_jax.representation.mesh import AxisRef, Mesh
from sdy_jax.representation.sdy_collectives import COLLECTIVE_OPS
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.runtime.device_orders import can_express, cut_at, expressed, rewritten


def put_on_mesh(module: ir.Operation, name: str) -> None:
    """Writes shardings in axes of one mesh wherever all axes of their own mesh are lists of axes of that one.

    On `x=2, y=4`, the axis `p` of a mesh `p=4, q=2` of the same devices is `x, y:(1)2`. So are the axes that a manual
    computation is manual on, where each is a list of whole axes, as `r` of `r=8` is `x, y`: devices have numbers in its
    collectives. Meshes of other manual computations stay as they are.
    """
    meshes = module_meshes(module)
    if len(meshes) == 1:
        return
    base = meshes[name]
    others = {n: mesh for n, mesh in meshes.items() if mesh != base and mesh.axes and can_express(mesh, base)}
    computations = [(op, n) for op in pre_order(module) for n in _manual_meshes(op)]
    kept = {n for op, n in computations if n in others and not _is_on_whole_axes(op, others[n], base)}
    others = {n: mesh for n, mesh in others.items() if n not in kept}

    def changed(sharding: TensorSharding) -> TensorSharding:
        own = others.get(str(sharding.mesh))
        return sharding if own is None else rewritten(sharding, own, base, name)

    for op, n in computations:
        if n in others:
            axes = [axis.name for axis in _in_axes_of(manual_axes(op), others[n], base)]
            op.attributes["manual_axes"] = manual_axes_to_attribute(tuple(axes), op.context)
            _rewrite_groups(op, n, others[n], name, base)
    if others:
        map_shardings(module, changed)


def on_whole_axes(program: Program) -> Program:
    """The program on a mesh along whose whole axes all its manual computations are; itself where its own is one.

    Raises:
        UnsupportedError: it has collectives of SDY as well, which are written in the function's axes.
    """
    base, axes = program.mesh, list[AxisRef]()
    meshes = module_meshes(program.module)
    for op in pre_order(program.module):
        for own in (meshes[name] for name in _manual_meshes(op) if name in meshes):
            if own != base and own.axes and can_express(own, base):
                axes += _in_axes_of(manual_axes(op), own, base)
    finer = cut_at(axes, base)
    if finer == base:
        return program
    if written := named(program.module, *COLLECTIVE_OPS):
        raise UnsupportedError(
            f"{source_line(written[0].location)}: {written[0].name} is on the mesh {base}, and a jax.shard_map on one "
            "that cuts its axes; to fix: use one mesh for both, or sdy_jax.reshard in its place"
        )
    module = copied(program.module)
    lift_meshes(module)  # groups of devices may name a mesh by a symbol of its own
    name = declare_mesh(module, finer)
    put_on_mesh(module, name)
    return replace(program, module=module, mesh=finer, mesh_name=name, uncut=base)


_GROUP_AXIS = re.compile(r'#stablehlo\.axis_ref<name = "([^"]+)">')


def _rewrite_groups(computation: ir.Operation, name: str, own: Mesh, base_name: str, base: Mesh) -> None:
    """Groups of devices that are given by whole axes (`#stablehlo.replica_group_mesh_axes`) in axes of the base."""

    def listed(match: re.Match[str]) -> str:
        axes = _in_axes_of([match[1]], own, base)
        return ", ".join(f'#stablehlo.axis_ref<name = "{axis.name}">' for axis in axes)

    for op in pre_order(computation):
        text = str(op.attributes["replica_groups"]) if "replica_groups" in op.attributes else ""
        if f"mesh = @{name}," in text:
            text = _GROUP_AXIS.sub(listed, text.replace(f"mesh = @{name},", f"mesh = @{base_name},"))
            op.attributes["replica_groups"] = ir.Attribute.parse(text, op.context)


def _manual_meshes(op: ir.Operation) -> set[str]:
    """The symbols of the meshes of a manual computation; none for other ops."""
    if not manual_axes(op):
        return set()
    sides = (op.attributes[side] for side in ("in_shardings", "out_shardings"))
    return {str(sharding.mesh) for side in sides for sharding in shardings_from_attribute(side)}


def _in_axes_of(names: Iterable[str], own: Mesh, base: Mesh) -> list[AxisRef]:
    return [axis for name in names for axis in expressed(AxisRef(name), own, base) or ()]


def _is_on_whole_axes(op: ir.Operation, own: Mesh, base: Mesh) -> bool:
    return all(axis.sub_axis is None for axis in _in_axes_of(manual_axes(op), own, base))
