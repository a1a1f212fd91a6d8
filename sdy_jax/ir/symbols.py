"""References by name from ops to functions: callees, decompositions of composites, computations of custom calls."""

from __future__ import annotations

from collections.abc import Iterator

from jax.extend.mlir import ir

from sdy_jax.errors import ShardingError
from sdy_jax.ir.locations import source_line
from sdy_jax.ir.operations import body_of, pre_order, symbol

_DATA = "value"
"""The elements of a constant: large, and no place for a symbol."""


def references(op: ir.Operation) -> Iterator[str]:
    """The symbols that the attributes of an op, and of the ops inside it, refer to, whatever these attributes are
    called. Meshes, which only the sdy dialect's own attributes name, are left out."""
    for inner in pre_order(op):
        attributes = inner.attributes
        for name in attributes:
            if not name.startswith("sdy.") and name != _DATA:
                yield from _symbols(attributes[name])


def _symbols(attribute: ir.Attribute) -> Iterator[str]:
    if isinstance(attribute, ir.FlatSymbolRefAttr):
        yield str(attribute.value)
    elif isinstance(attribute, ir.SymbolRefAttr):
        yield str(attribute.value[0])
    elif isinstance(attribute, ir.ArrayAttr):
        for element in attribute:
            yield from _symbols(element)
    elif isinstance(attribute, ir.DictAttr):
        for item in attribute:
            yield from _symbols(item.attr)


def referenced_functions(op: ir.Operation, module: ir.Operation) -> list[ir.Operation]:
    """The functions of `module` that an op refers to, and those that these refer to, in the order they are found.

    Raises:
      ShardingError: one of them is not defined.
    """
    ops = (op.operation for op in body_of(module).operations)
    known = {symbol(op): op for op in ops if "sym_name" in op.attributes}
    found: dict[str, ir.Operation] = {}
    waiting = [(name, op) for name in references(op)]
    while waiting:
        name, user = waiting.pop(0)
        if name not in known:
            raise ShardingError(
                f"{source_line(user.location)}: {user.name} refers to @{name}, which the module does not define"
            )
        if name not in found and known[name].name == "func.func":
            found[name] = known[name]
            waiting += [(inner, known[name]) for inner in references(known[name])]
    return list(found.values())
