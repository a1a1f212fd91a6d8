"""Reading what passes share of MLIR modules: scopes, defining ops, shardable values."""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.errors import UnsupportedError
from sdy_jax.ir.graph import pre_order
from sdy_jax.ir.locations import source_line

TERMINATORS = ("func.return", "stablehlo.return", "sdy.return")


def named(module: ir.Operation, *names: str) -> list[ir.Operation]:
    """All ops with one of these names, in pre-order."""
    return [op for op in pre_order(module) if op.name in names]


def functions(module: ir.Operation) -> dict[str, ir.Operation]:
    ops = (op.operation for op in module.regions[0].blocks[0].operations)
    return {symbol(op): op for op in ops if op.name == "func.func"}


def check_bodies(module: ir.Operation) -> None:
    """Raises an error for functions without a body: what they do with their arguments is not known."""
    for name, function in functions(module).items():
        if not len(function.regions[0].blocks):
            raise UnsupportedError(
                f"function @{name} is declared without a body, at {source_line(function.location)}; "
                "to fix: define it, or call what it does by stablehlo.custom_call"
            )


def symbol(op: ir.Operation) -> str:
    return str(ir.StringAttr(op.attributes["sym_name"]).value)


def body_of(op: ir.Operation) -> ir.Block:
    return op.regions[0].blocks[0]


def terminator_of(block: ir.Block) -> ir.Operation:
    return block.operations[-1].operation


def users(value: ir.Value) -> list[ir.Operation]:
    """One entry per use, in use-list order."""
    return [use.owner.operation for use in value.uses]


def has_static_shape(value: ir.Value) -> bool:
    return isinstance(value.type, ir.RankedTensorType) and value.type.has_static_shape


def rank(value: ir.Value) -> int:
    return value.type.rank if isinstance(value.type, ir.RankedTensorType) else 0


def just_after(value: ir.Value) -> ir.InsertionPoint:
    """Where an op has to be inserted to come right after the definition of `value`."""
    if isinstance(value, ir.BlockArgument):
        return ir.InsertionPoint.at_block_begin(value.owner)
    return ir.InsertionPoint.after(value.owner)
