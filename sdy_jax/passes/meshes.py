"""Meshes of a module: inline ones get a symbol, axes of size one disappear from shardings."""

from __future__ import annotations

from dataclasses import replace

from jax.extend.mlir import ir

from sdy_jax.passes.manual import module_meshes
from sdy_jax.passes.shardings import map_shardings, mesh_of
from sdy_jax.passes.walk import body_of
from sdy_jax.representation.attributes import mesh_from_attribute, mesh_to_attribute
from sdy_jax.representation.mesh import AxisRef, Mesh
from sdy_jax.representation.sharding import DimensionSharding, TensorSharding


def lift_meshes(module: ir.Operation) -> None:
    """One symbol per mesh: equal `sdy.mesh` ops are unified, and inline meshes refer to an op."""
    symbols, renamed = _unify(module)
    taken = _symbols(module)

    def lifted(sharding: TensorSharding) -> TensorSharding:
        mesh = sharding.mesh
        if isinstance(mesh, str):
            return replace(sharding, mesh=renamed[mesh]) if mesh in renamed else sharding
        if mesh not in symbols:
            symbols[mesh] = _create(module, mesh, taken)
        return replace(sharding, mesh=symbols[mesh])

    map_shardings(module, lifted)


def _unify(module: ir.Operation) -> tuple[dict[Mesh, str], dict[str, str]]:
    """Removes repeated mesh ops. Returns the symbol of each mesh, and the new name of each removed symbol."""
    symbols: dict[Mesh, str] = {}
    renamed: dict[str, str] = {}
    for op in [op.operation for op in body_of(module).operations]:
        if op.name != "sdy.mesh":
            continue
        name = str(ir.StringAttr(op.attributes["sym_name"]).value)
        kept = symbols.setdefault(mesh_from_attribute(op.attributes["mesh"]), name)
        if kept != name:
            renamed[name] = kept
            op.erase()
    return symbols, renamed


def _symbols(module: ir.Operation) -> set[str]:
    ops = (op.operation for op in body_of(module).operations)
    return {str(ir.StringAttr(op.attributes["sym_name"]).value) for op in ops if "sym_name" in op.attributes}


def _create(module: ir.Operation, mesh: Mesh, taken: set[str]) -> str:
    """A new mesh op after the last one, or at the start of the module."""
    name = base = _base_name(mesh)
    count = 0
    while name in taken:
        name, count = f"{base}_{count}", count + 1
    taken.add(name)
    block = body_of(module)
    existing = [op for op in block.operations if op.operation.name == "sdy.mesh"]
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
    return tuple(axis for axis in axes if axis.size(mesh) > 1)


def _shortened(dimension: DimensionSharding, mesh: Mesh) -> DimensionSharding:
    axes = _larger(dimension.axes, mesh)
    priority = None if dimension.is_closed and not axes else dimension.priority
    return DimensionSharding(axes, dimension.is_closed, priority)
