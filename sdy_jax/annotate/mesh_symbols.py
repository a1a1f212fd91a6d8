"""The meshes that a module declares."""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.ir.operations import body_of, module_meshes
from sdy_jax.representation.attributes import mesh_to_attribute
from sdy_jax.representation.mesh import Mesh


def declare_mesh(module: ir.Operation, mesh: Mesh, symbols: ir.SymbolTable | None = None) -> str:
    """The symbol of a mesh in a module; an `sdy.mesh` at its beginning is added if there is none for it.

    Args:
        module: the module.
        mesh: the mesh.
        symbols: the module's symbol table, where someone keeps one, so that it learns of the new name.
    """
    known = next((name for name, own in module_meshes(module).items() if own == mesh), None)
    if known is not None:
        return known
    context = module.context
    symbols = symbols or ir.SymbolTable(module)  # before the new op is there, so that it gives way
    attributes = {"sym_name": ir.StringAttr.get("mesh", context), "mesh": mesh_to_attribute(mesh, context)}
    op = ir.Operation.create(
        "sdy.mesh",
        attributes=attributes,
        loc=ir.Location.unknown(context),
        ip=ir.InsertionPoint.at_block_begin(body_of(module)),
    )
    name = symbols.insert(op)
    return str(ir.StringAttr(name).value)
