"""Meshes and shardings of SDY as frontend attributes, in which programs carry them through HLO."""

from __future__ import annotations

from collections.abc import Mapping

from jax.extend.mlir import ir

from sdy_jax.ir.operations import body_of, functions, module_meshes, named, pre_order, replace_op, returned_by
from sdy_jax.ir.stored_shardings import SIDES, entries_of, set_entries

_FRONTEND, _SHARDING = "mhlo.frontend_attributes", "xla.sdy.sharding"
_OF_RESULT = "xla.sdy.FuncResultSharding"
"""The target of calls that state how a function's result is sharded, and compute nothing."""

# Torch/XLA and JAX's round trip write them so, with quotes that are escaped once, or not.


def settle_frontend_shardings(module: ir.Operation) -> None:
    """Gives a module the meshes and shardings that its frontend attributes state, in SDY's own attributes; nothing
    where it has meshes, or states none.

    Args:
        module: a `builtin.module`, which is changed.
    """
    meshes = _stated(module.attributes, "xla.sdy.meshes")
    if meshes is None or module_meshes(module):
        return
    with module.context, ir.Location.unknown(module.context):
        with ir.InsertionPoint.at_block_begin(body_of(module)):
            for mesh in ir.DictAttr(meshes):
                ir.Operation.create(
                    "sdy.mesh", attributes={"sym_name": ir.StringAttr.get(mesh.name), "mesh": mesh.attr}
                )
        for function in functions(module).values():
            for side in SIDES:
                _settle_side(function, side)
        for op in pre_order(module):
            sharding = _stated(op.attributes, _SHARDING)
            if sharding is not None and op.name != "func.func":
                op.attributes["sdy.sharding"] = sharding
        for call in named(module, "stablehlo.custom_call"):
            if ir.StringAttr(call.attributes["call_target_name"]).value == _OF_RESULT:
                _settle_result(call)


def _stated(attributes: Mapping[str, ir.Attribute], name: str) -> ir.Attribute | None:
    """What the frontend attribute of a name holds as text."""
    if _FRONTEND not in attributes:
        return None
    said = ir.DictAttr(attributes[_FRONTEND])
    if name not in said:
        return None
    text = str(ir.StringAttr(said[name]).value).replace('\\"', '"')
    return ir.Attribute.parse(text, said.context)


def _settle_side(function: ir.Operation, side: str) -> None:
    entries, changed = entries_of(function, side), False
    for entry in entries:
        sharding = _stated(entry, _SHARDING)
        if sharding is not None:
            entry["sdy.sharding"], changed = sharding, True
    if changed:
        set_entries(function, side, entries)


def _settle_result(call: ir.Operation) -> None:
    function = call.parent
    (result,) = call.results
    if "sdy.sharding" in call.attributes and function is not None and function.operation.name == "func.func":
        sharding = str(call.attributes["sdy.sharding"]).removeprefix("#sdy.sharding_per_value<[").removesuffix("]>")
        entries = entries_of(function.operation, "res_attrs")
        for entry, value in zip(entries, returned_by(function.operation), strict=True):
            if value == result:
                entry["sdy.sharding"] = ir.Attribute.parse(f"#sdy.sharding{sharding}")
        set_entries(function.operation, "res_attrs", entries)
    replace_op(call, call.operands)
