"""Sizes that a program in text leaves open (`tensor<?x16xf32>`), resolved by the arguments of a call."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func

from sdy_jax.errors import SdyError
from sdy_jax.ir.operations import body_of, copied, function_type, main_function, replace_op
from sdy_jax.jax_internals.symbolic_shapes import refined

_INNER = "main_of_any_size"


def has_open_sizes(module: ir.Operation) -> bool:
    """Whether main takes or returns a tensor with a size that the text does not say."""
    type_ = function_type(main_function(module))
    return any(_is_open(t) for t in (*type_.inputs, *type_.results))


def with_sizes(module: ir.Operation, shapes: Sequence[tuple[int, ...]]) -> ir.Operation:
    """The module for arguments of these shapes.

    Args:
        module: a `builtin.module`, which is not changed.
        shapes: one for each argument of main; they fit its type.

    Raises:
        SdyError: the sizes break a rule of an op, or do not determine all others.
    """
    module = copied(module)
    given = [_sized(t, shape) for t, shape in zip(function_type(main_function(module)).inputs, shapes, strict=True)]
    with module.context, ir.Location.unknown(module.context):
        _wrap(module, given)
        parsed = ir.Module.parse(module.get_asm(enable_debug_info=True), module.context)
    try:
        found = refined(parsed)
    except ValueError as error:
        raise SdyError(f"arguments of {_listed(given)} do not fit the program: {_reason(error)}") from None
    operation = copied(found)
    _erase_conversions(operation)
    return operation


def _wrap(module: ir.Operation, types: Sequence[ir.Type]) -> None:
    """Lets a new main take arguments of the given types, and call the old one."""
    inner = main_function(module)
    wanted = function_type(inner)
    ir.SymbolTable(module).set_symbol_name(inner, _INNER)
    inner.attributes["sym_visibility"] = ir.StringAttr.get("private")
    attributes = {name: inner.attributes[name] for name in ("arg_attrs", "res_attrs") if name in inner.attributes}
    with ir.InsertionPoint(inner):
        outer = func.FuncOp("main", (list(types), wanted.results), visibility="public")
    for name, attribute in attributes.items():
        outer.attributes[name] = attribute
    with ir.InsertionPoint(outer.add_entry_block()):
        pairs = zip(outer.arguments, wanted.inputs, strict=True)
        operands = [x if x.type == t else _converted(x, t) for x, t in pairs]
        func.ReturnOp(func.CallOp(wanted.results, ir.FlatSymbolRefAttr.get(_INNER), operands).results)


def _converted(x: ir.Value, type_: ir.Type) -> ir.Value:
    return ir.Operation.create("stablehlo.convert", results=[type_], operands=[x]).results[0]


def _erase_conversions(module: ir.Operation) -> None:
    """Removes what `_wrap` has put in."""
    for op in [op.operation for op in body_of(main_function(module)).operations]:
        if op.name == "stablehlo.convert" and op.operands[0].type == op.results[0].type:
            replace_op(op, op.operands)


def _is_open(type_: ir.Type) -> bool:
    return isinstance(type_, ir.RankedTensorType) and not type_.has_static_shape


def _sized(type_: ir.Type, shape: tuple[int, ...]) -> ir.Type:
    """An argument's type with the sizes of a call."""
    if not _is_open(type_):
        return type_
    tensor = ir.RankedTensorType(type_)
    with type_.context:
        return ir.RankedTensorType.get(list(shape), tensor.element_type, loc=ir.Location.unknown())


def _listed(types: Sequence[ir.Type]) -> str:
    return ", ".join(map(str, types)) or "no types"


_ERROR = re.compile(r"error: (?:loc\(.*?\): )?(?P<message>[^\n]*)")


def _reason(error: ValueError) -> str:
    """What jaxlib says, in its first line."""
    text = str(error.__cause__ or error)
    found = _ERROR.search(text)
    return found["message"].strip() if found else text.split("\n", 1)[0]
