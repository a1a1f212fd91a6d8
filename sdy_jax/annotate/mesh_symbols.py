"""The meshes that a module declares."""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.representation.attributes import mesh_from_attribute, mesh_to_attribute
from sdy_jax.representation.mesh import Mesh


def declare_mesh(module: ir.Operation, mesh: Mesh, symbols: ir.SymbolTable | None = None) -> str:
    """The symbol of a mesh in a module; an `sdy.mesh` at its beginning is added if there is none for it.

    Args:
        module: the module.
        mesh: the mesh.
        symbols: the module's symbol table, where someone keeps one, so that it learns of the new name.
    """
    body = module.regions[0].blocks[0]
    for op in body.operations:
        if op.operation.name == "sdy.mesh" and mesh_from_attribute(op.operation.attributes["mesh"]) == mesh:
            return str(ir.StringAttr(op.operation.attributes["sym_name"]).value)
    context = module.context
    symbols = symbols or ir.SymbolTable(module)  # before the new op is there, so that it gives way
    attributes = {"sym_name": ir.StringAttr.get("mesh", context), "mesh": mesh_to_attribute(mesh, context)}
    op = ir.Operation.create(
        "sdy.mesh",
        attributes=attributes,
        loc=ir.Location.unknown(context),
        ip=ir.InsertionPoint.at_block_begin(body),
    )
    name = symbols.insert(op)
    return str(ir.StringAttr(name).value)
