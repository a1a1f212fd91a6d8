"""Calls, what values belong to, and the module around an op, in modules that are changed in place."""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Op, pre_order

CALL = "func.call"


def calls_in(op: ir.Operation) -> list[ir.Operation]:
    """All calls in a function or module, in program order."""
    return [inner for inner in pre_order(op) if inner.name == CALL]


def callee_of(call: ir.Operation | Op) -> str:
    """The name of the function that is called."""
    return str(ir.FlatSymbolRefAttr(call.attributes["callee"]).value)


def defining_op(value: ir.Value) -> ir.Operation | None:
    """The op whose result `value` is; None for block arguments."""
    return None if isinstance(value, ir.BlockArgument) else value.owner.operation


def owning_op(value: ir.Value) -> ir.Operation:
    """The op whose result, or whose region's argument, `value` is."""
    return (value.owner.owner if isinstance(value, ir.BlockArgument) else value.owner).operation


def module_of(op: ir.Operation) -> ir.Operation:
    """The module around an op, or the op itself if it is one."""
    while op.name != "builtin.module":
        op = op.parent.operation
    return op


def update_function_type(function: ir.Operation) -> None:
    """Gives a function the types that its arguments and what it returns have now."""
    block = function.regions[0].blocks[0]
    returned = block.operations[len(block.operations) - 1].operands
    with function.context:
        type_ = ir.FunctionType.get([value.type for value in block.arguments], [value.type for value in returned])
        function.attributes["function_type"] = ir.TypeAttr.get(type_)
