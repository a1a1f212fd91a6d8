"""Jaxprs that are lowered to modules of their own, as bytes, and what such bytes say where an equation is lowered.

* `ModuleContext`: the module that is lowered to, and what jax keeps alive for it, callbacks among that.
* `SymbolTable`: functions and meshes of another module get names that are free in the one around it.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from jax.extend.mlir import ir
from jax.interpreters import mlir

from sdy_jax.jax_internals.lowering import lowered_in_place

_MAIN = "main"


def lowered_apart(ctx: mlir.LoweringRuleContext, jaxpr: Any, types: Sequence[ir.Type]) -> bytes | None:
    """A closed jaxpr of values of some types as a module of its own, its constants included, in a module context like
    that of `ctx`; None where it calls what only this process has."""
    outer = ctx.module_context
    module = ir.Module.create(ir.Location.unknown(outer.context))
    context = outer.replace(
        module=module,
        ip=ir.InsertionPoint(module.body),
        symbol_table=ir.SymbolTable(module.operation),
        keepalives=[],
        host_callbacks=[],
        lowering_cache={},
        cached_primitive_lowerings={},
        sharding_attr_cache={},
    )
    attributes = {"sym_name": ir.StringAttr.get(_MAIN), "function_type": _type_of(types, [])}
    with ir.Location.unknown(outer.context):
        main = ir.Operation.create("func.func", [], [], attributes, regions=1, ip=context.ip)
        block = main.regions[0].blocks.append(*types)
        with ir.InsertionPoint(block):
            inside = ctx.replace(module_context=context, const_lowering={})
            lowered = lowered_with_constants(inside, context, jaxpr, list(block.arguments))
            found, _ = mlir.ir_tree_registry.flatten(lowered)
            ir.Operation.create("func.return", [], found)
        main.attributes["function_type"] = _type_of(types, [value.type for value in found])
    if context.keepalives or context.host_callbacks:
        return None
    data = io.BytesIO()
    module.operation.write_bytecode(data)
    return data.getvalue()


def lowered_with_constants(ctx: mlir.LoweringRuleContext, context: Any, jaxpr: Any, xs: Sequence[Any]) -> Sequence[Any]:
    """As `lowered_in_place`, of a closed jaxpr with constants, which become part of the module."""
    pairs = zip(jaxpr.consts, jaxpr.jaxpr.constvars, strict=True)
    constants = [mlir.ir_constants(x, const_lowering=ctx.const_lowering, aval=v.aval) for x, v in pairs]
    values, _ = mlir.ir_tree_registry.flatten(constants)
    return lowered_in_place(ctx, context, jaxpr.jaxpr, xs, values)


def _type_of(operands: Sequence[ir.Type], results: Sequence[ir.Type]) -> ir.Attribute:
    return ir.TypeAttr.get(ir.FunctionType.get(list(operands), list(results)))


def lowered_from(ctx: mlir.LoweringRuleContext, data: bytes, xs: Sequence[Any]) -> Sequence[ir.Value]:
    """What the bytes of `lowered_apart` compute of these values, at the current insertion point."""
    context = ctx.module_context
    module = ir.Module.parse(data, context.context)
    _make_names_free(module, context.symbol_table)
    for op in list(module.body.operations):
        if ir.StringAttr(op.operation.attributes["sym_name"]).value != _MAIN:
            op.operation.detach_from_parent()
            context.ip.insert(op)
            context.symbol_table.insert(op)
            continue
        block = op.operation.regions[0].blocks[0]
        for argument, x in zip(block.arguments, xs, strict=True):
            argument.replace_all_uses_with(x)
        point, ops = ir.InsertionPoint.current, list(block.operations)
        for inner in ops[:-1]:
            point.insert(inner.operation.detach_from_parent())
        results = list(ops[-1].operation.operands)
    return results


def _make_names_free(module: ir.Module, taken: ir.SymbolTable) -> None:
    """Renames what has the name of something in another module."""
    own = ir.SymbolTable(module.operation)
    for op in list(module.body.operations):
        name = ir.StringAttr(op.operation.attributes["sym_name"]).value
        if name == _MAIN or name not in taken:
            continue
        number = 0
        while (new := f"{name}_{number}") in taken or new in own:
            number += 1
        own.set_symbol_name(op, new)
        for user in module.body.operations:
            own.replace_all_symbol_uses(name, new, user.operation)
