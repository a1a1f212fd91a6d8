"""Meshes of a module: inline ones get a symbol, axes of size one disappear from shardings."""

from __future__ import annotations

import re
from dataclasses import replace

from jax.extend.mlir import ir

from sdy_jax.errors import ShardingError
from sdy_jax.ir.locations import source_line
from sdy_jax.ir.operations import body_of, module_meshes, pre_order, top_level
from sdy_jax.ir.stored_shardings import (
    LISTS,
    SINGLE,
    function_shardings,
    map_shardings,
    mesh_of,
    set_function_shardings,
)
from sdy_jax.passes.call_graph import UniqueNames
from sdy_jax.representation.attributes import mesh_from_attribute, mesh_to_attribute
from sdy_jax.representation.axes import merge_neighbours
from sdy_jax.representation.mesh import AxisRef, Mesh
from sdy_jax.representation.sharding import DimensionSharding, TensorSharding


def lift_meshes(module: ir.Operation) -> None:
    """One symbol per mesh: equal `sdy.mesh` ops are unified, and inline meshes refer to an op."""
    symbols, renamed = _unify(module)
    _rename_in_groups(module, renamed)
    names = UniqueNames(module)

    def lifted(sharding: TensorSharding) -> TensorSharding:
        mesh = sharding.mesh
        if isinstance(mesh, str):
            return replace(sharding, mesh=renamed[mesh]) if mesh in renamed else sharding
        if mesh not in symbols:
            symbols[mesh] = _create(module, mesh, names)
        return replace(sharding, mesh=symbols[mesh])

    map_shardings(module, lifted)


def _unify(module: ir.Operation) -> tuple[dict[Mesh, str], dict[str, str]]:
    """Removes repeated mesh ops. Returns the symbol of each mesh, and the new name of each removed symbol."""
    symbols: dict[Mesh, str] = {}
    renamed: dict[str, str] = {}
    for op in top_level(module, "sdy.mesh"):
        name = str(ir.StringAttr(op.attributes["sym_name"]).value)
        kept = symbols.setdefault(mesh_from_attribute(op.attributes["mesh"]), name)
        if kept != name:
            renamed[name] = kept
            op.erase()
    return symbols, renamed


_GROUPS_MESH = re.compile(r"(?<=mesh = @)[^,]+")


def _rename_in_groups(module: ir.Operation, renamed: dict[str, str]) -> None:
    """The groups of StableHLO's collectives name a mesh, too (`#stablehlo.replica_group_mesh_axes`)."""
    if not renamed:
        return
    for op in pre_order(module):
        text = str(op.attributes["replica_groups"]) if "replica_groups" in op.attributes else ""
        changed = _GROUPS_MESH.sub(lambda match: renamed.get(match[0], match[0]), text)
        if changed != text:
            op.attributes["replica_groups"] = ir.Attribute.parse(changed, module.context)


def _create(module: ir.Operation, mesh: Mesh, names: UniqueNames) -> str:
    """A new mesh op after the last one, or at the start of the module."""
    name = names.new(_base_name(mesh))
    block = body_of(module)
    existing = top_level(module, "sdy.mesh")
    ip = ir.InsertionPoint.after(existing[-1]) if existing else ir.InsertionPoint.at_block_begin(block)
    attributes = {
        "sym_name": ir.StringAttr.get(name, module.context),
        "mesh": mesh_to_attribute(mesh, module.context),
    }
    ir.Operation.create("sdy.mesh", attributes=attributes, loc=module.location, ip=ip)
    return name


def _base_name(mesh: Mesh) -> str:
    if mesh.is_maximal:
        return f"maximal_mesh_{mesh.device_ids[0]}"
    return "empty_mesh" if mesh.is_empty else "mesh"


def inline_meshes(module: ir.Operation) -> None:
    """Writes each mesh into the shardings that refer to it, and removes the mesh ops."""
    meshes = module_meshes(module)
    map_shardings(module, lambda sharding: replace(sharding, mesh=mesh_of(meshes, sharding)))
    for op in top_level(module, "sdy.mesh"):
        op.erase()


def drop_shardings_and_meshes(module: ir.Operation) -> None:
    """Removes all `sdy.sharding` attributes and the meshes.

    Raises:
      ShardingError: an op of the sdy dialect, whose sharding is a part of it, is left.
    """
    for op in pre_order(module):
        own = next((name for name in (*SINGLE, *LISTS[1:]) if op.name.startswith("sdy.") and name in op.attributes), "")
        if own:
            raise ShardingError(
                f"{op.name} at {source_line(op.location)} has {own}, which cannot be dropped; "
                "to fix: remove such ops before shardings and meshes are dropped"
            )
    for op in pre_order(module):
        if op.name == "func.func":
            _drop_from_function(op)
        elif "sdy.sharding" in op.attributes:
            del op.attributes["sdy.sharding"]
    for op in top_level(module, "sdy.mesh"):
        op.erase()


def _drop_from_function(function: ir.Operation) -> None:
    for name in ("arg_attrs", "res_attrs"):
        set_function_shardings(function, name, dict.fromkeys(range(len(function_shardings(function, name)))))


def remove_size_one_axes(module: ir.Operation) -> None:
    """Drops axes of size one from all shardings; the meshes keep them."""
    meshes = module_meshes(module)
    if not any(axis.size == 1 for mesh in meshes.values() for axis in mesh.axes):
        return

    def without(sharding: TensorSharding) -> TensorSharding:
        mesh = mesh_of(meshes, sharding)
        dimensions = tuple(_shortened(d, mesh) for d in sharding.dimensions)
        return replace(
            sharding,
            dimensions=dimensions,
            replicated_axes=_larger(sharding.replicated_axes, mesh),
            unreduced_axes=_larger(sharding.unreduced_axes, mesh),
        )

    map_shardings(module, without)


def _larger(axes: tuple[AxisRef, ...], mesh: Mesh) -> tuple[AxisRef, ...]:
    """The other axes; parts of one axis that stand side by side now are one part."""
    return merge_neighbours((axis for axis in axes if axis.size(mesh) > 1), mesh)


def _shortened(dimension: DimensionSharding, mesh: Mesh) -> DimensionSharding:
    axes = _larger(dimension.axes, mesh)
    priority = None if dimension.is_closed and not axes else dimension.priority
    return DimensionSharding(axes, dimension.is_closed, priority)
