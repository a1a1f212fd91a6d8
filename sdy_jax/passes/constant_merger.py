"""The copies of a constant that got the same sharding become one again."""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.ir.operations import functions, post_order, read_attributes

_CONSTANTS = ("sdy.constant", "stablehlo.constant")
_BROADCAST = "stablehlo.broadcast_in_dim"


def merge_constants(module: ir.Operation) -> None:
    """Merges, per region, constants of equal attributes, and broadcasts of one scalar of equal type and attributes."""
    for function in functions(module).values():
        first: dict[object, ir.Operation] = {}
        for op in post_order(function):
            key = _key(op)
            if key is None:
                continue
            original = first.setdefault(key, op)
            if original is not op:
                op.results[0].replace_all_uses_with(original.results[0])
                op.erase()


def _key(op: ir.Operation) -> object | None:
    if op.name in _CONSTANTS:
        operands: tuple[ir.Value, ...] = ()
    elif op.name == _BROADCAST and op.operands[0].type.rank == 0:
        operands = (op.operands[0],)
    else:
        return None
    attributes = tuple(sorted(read_attributes(op).items(), key=lambda item: item[0]))
    return (op.block, op.name, operands, op.results[0].type, attributes)
