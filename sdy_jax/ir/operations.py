"""MLIR's own operations, in modules that are changed in place: walks, functions, calls, references by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from jax.extend.mlir import ir

from sdy_jax.base.errors import ShardingError, UnsupportedError
from sdy_jax.ir.attributes import manual_axes_from_attribute, mesh_from_attribute
from sdy_jax.ir.locations import source_line
from sdy_jax.ir.meshes import Mesh

# MLIR's own operations, in modules that are changed in place: walks, functions, calls, and what values belong to.

T = TypeVar("T")


class AnyOp(Protocol):
    """An op of a module, or of a graph."""

    @property
    def name(self) -> str:
        """That of the op, with its dialect."""

    @property
    def attributes(self) -> Any:
        """By their names."""


CALL = "func.call"
COMPUTATIONS = ("sdy.manual_computation", "sdy.named_computation")
CONSTRAINTS = frozenset({"sdy.sharding_constraint", "sdy.reshard"})
"""The ops by which users state how a value is split."""
RESHAPING = frozenset({"stablehlo.reshape", "stablehlo.broadcast_in_dim"})
"""The ops by which jax gives a layer the dimension that it has in a stack."""
DATA_FLOW_OPS = ("stablehlo.while", "stablehlo.case", "stablehlo.if", "stablehlo.optimization_barrier", *COMPUTATIONS)
TERMINATORS = ("func.return", "stablehlo.return", "sdy.return")


# Walks.


def is_used(value: ir.Value) -> bool:
    """Whether an op takes a value."""
    return next(iter(value.uses), None) is not None


def has_users(op: ir.Operation) -> bool:
    """Whether an op takes one of an op's results."""
    return any(map(is_used, op.results))


def pre_order(op: ir.Operation) -> list[ir.Operation]:
    """`op`, then everything in its regions, as they are now: changes to come do not show."""
    return _walked(op, ir.WalkOrder.PRE_ORDER)


def post_order(op: ir.Operation) -> list[ir.Operation]:
    """Everything in the regions of `op` as it is now, then `op`."""
    return _walked(op, ir.WalkOrder.POST_ORDER)


def _walked(op: ir.Operation, order: ir.WalkOrder) -> list[ir.Operation]:
    """MLIR walks, which takes half the time of a walk in Python."""
    found: list[ir.Operation] = []
    add, advance = found.append, ir.WalkResult.ADVANCE

    def visit(inner: ir.Operation) -> ir.WalkResult:
        add(inner)
        return advance

    try:
        op.walk(visit, order)
    except RuntimeError as error:  # the bindings make one of what ends `visit`, and that can be an interrupt only
        if KeyboardInterrupt.__name__ in str(error):
            raise KeyboardInterrupt from None
        raise
    return found


def named(module: ir.Operation, *names: str) -> list[ir.Operation]:
    """All ops with one of these names, in pre-order."""
    return [op for op in pre_order(module) if op.name in names]


def op_names(module: ir.Operation) -> frozenset[str]:
    """The names of all ops in a module."""
    return frozenset([op.name for op in pre_order(module)])


def locate_bodies(module: ir.Operation) -> None:
    """Adds the locations of manual computations to those of their ops, which jax locates inside of the body."""
    for manual in reversed(named(module, "sdy.manual_computation")):  # inner ones first
        for op in pre_order(manual)[1:]:
            op.location = ir.Location.callsite(op.location, [manual.location], manual.context)


# Modules and functions.


def body_of(op: ir.Operation) -> ir.Block:
    return op.regions[0].blocks[0]


def terminator_of(block: ir.Block) -> ir.Operation:
    return block.operations[-1].operation


def copied(op: ir.Operation | ir.OpView | ir.Module) -> ir.Operation:
    """A copy in no module. MLIR's `clone` puts it where ops are being made, which may be where jax lowers a caller."""
    return op.operation.clone(ip=False).operation


def returned_by(function: ir.Operation) -> list[ir.Value]:
    """What a function returns, or the body of another op with one region."""
    return list(terminator_of(body_of(function)).operands)


def top_level(module: ir.Operation, name: str) -> list[ir.Operation]:
    """The ops of this name that are in no region but the module's."""
    return [op.operation for op in body_of(module).operations if op.operation.name == name]


def symbol(op: ir.Operation) -> str:
    return str(ir.StringAttr(op.attributes["sym_name"]).value)


def functions(module: ir.Operation) -> dict[str, ir.Operation]:
    """The functions of a module by name."""
    return {symbol(op): op for op in top_level(module, "func.func")}


def main_function(module: ir.Operation) -> ir.Operation:
    """The only function, or the one named `main`."""
    return main_of(functions(module), module)


def main_of(functions: Mapping[str, T], module: ir.Operation) -> T:
    """The only one of a module's functions, or the one named `main`.

    Raises:
        UnsupportedError: there is none.
    """
    if len(functions) == 1:
        return next(iter(functions.values()))
    if "main" in functions:
        return functions["main"]
    inner = [source_line(op.location) for op in top_level(module, "builtin.module")]
    if inner and not functions:
        raise UnsupportedError(
            f"the text has {len(inner)} modules in it, at {', '.join(inner)}, and a program is one; to fix: give one "
            "of them, or name a function that one of them defines: function= (--function)"
        )
    known = f"functions {', '.join(f'@{name}' for name in functions)}" if functions else "no function"
    raise UnsupportedError(
        f"the module has {known}, so it is not known where it starts; to fix: name a function @main, or "
        "say which one it is: function= (--function)"
    )


def check_bodies(functions: Iterable[ir.Operation]) -> None:
    """
    Raises:
        UnsupportedError: one of these functions is declared only; what it does with its arguments is not known.
    """
    for function in functions:
        if not len(function.regions[0].blocks):
            raise UnsupportedError(
                f"function @{symbol(function)} is declared without a body, at {source_line(function.location)}; "
                "to fix: define it, or call what it does by stablehlo.custom_call"
            )


def function_type(function: ir.Operation) -> ir.FunctionType:
    return ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)


def update_function_type(function: ir.Operation) -> None:
    """Gives a function the types that its arguments and what it returns have now."""
    arguments, returned = body_of(function).arguments, returned_by(function)
    with function.context:
        type_ = ir.FunctionType.get([value.type for value in arguments], [value.type for value in returned])
        function.attributes["function_type"] = ir.TypeAttr.get(type_)


def module_meshes(module: ir.Operation) -> dict[str, Mesh]:
    """The meshes of a module by symbol."""
    return {symbol(op): mesh_from_attribute(op.attributes["mesh"]) for op in top_level(module, "sdy.mesh")}


def module_of(op: ir.Operation) -> ir.Operation:
    """The module around an op, or the op itself if it is one."""
    while op.name != "builtin.module":
        op = op.parent.operation
    return op


def calls_in(op: ir.Operation) -> list[ir.Operation]:
    """All calls in a function or module, in program order."""
    return named(op, CALL)


def callee_of(call: AnyOp) -> str:
    """The name of the function that is called."""
    return str(ir.FlatSymbolRefAttr(call.attributes["callee"]).value)


def manual_axes(op: AnyOp) -> tuple[str, ...]:
    """The manual axes of a manual computation; none for other ops."""
    if op.name != "sdy.manual_computation" or "manual_axes" not in op.attributes:
        return ()
    return manual_axes_from_attribute(op.attributes["manual_axes"])


# Values.


def defining_op(value: ir.Value) -> ir.Operation | None:
    """The op whose result `value` is; None for block arguments."""
    return None if isinstance(value, ir.BlockArgument) else value.owner.operation


def owning_op(value: ir.Value) -> ir.Operation:
    """The op whose result, or whose region's argument, `value` is."""
    return (value.owner.owner if isinstance(value, ir.BlockArgument) else value.owner).operation


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


def replace_op(op: ir.Operation, values: Sequence[ir.Value]) -> None:
    """Lets all that use an op's results use these values, and erases the op."""
    for result, value in zip(op.results, values, strict=True):
        result.replace_all_uses_with(value)
    op.erase()


def replace_by_body(op: ir.Operation, body: ir.Block, operands: Sequence[ir.Value] = ()) -> None:
    """Puts the ops of one of an op's blocks in its place: `operands` are what the block takes, and what it returns are
    the op's results."""
    for argument, operand in zip(body.arguments, operands, strict=True):
        argument.replace_all_uses_with(operand)
    *inner, end = [each.operation for each in body.operations]
    for each in inner:
        each.move_before(op)
    returned = list(end.operands)
    end.erase()
    replace_op(op, returned)


def renamed(op: ir.Operation, name: str) -> ir.Operation:
    """A new op before one without regions, which it is like but for its name."""
    return ir.Operation.create(
        name,
        results=[result.type for result in op.results],
        operands=list(op.operands),
        attributes={key: op.attributes[key] for key in op.attributes},
        loc=op.location,
        ip=ir.InsertionPoint(op),
    )


# Attributes.


def read_attributes(op: ir.Operation) -> dict[str, ir.Attribute]:
    """An op's attributes by name."""
    try:
        return dict(op.attributes.items())
    except TypeError:
        return {name: _attribute(op, name) for name in op.attributes}


def _attribute(op: ir.Operation, name: str) -> ir.Attribute:
    """An attribute, or the op's text for the kind that the bindings refuse to give out: elements of complex numbers."""
    try:
        return op.attributes[name]
    except TypeError:
        return ir.StringAttr.get(text_of_constant(op), op.context)


def text_of_constant(op: ir.Operation) -> str:
    """The generic form of an op without operands. A copy is printed: in place, MLIR numbers all values first."""
    copy = copied(op)
    text = str(copy.get_asm(print_generic_op_form=True))
    copy.erase()
    return text


def replace_contents(module: ir.Operation, other: ir.Operation) -> None:
    """Puts what `other` holds in the place of what `module` holds."""
    block = body_of(module)
    for op in list(block.operations)[::-1]:
        op.operation.erase()
    for op in list(body_of(other).operations):
        op.operation.detach_from_parent()
        block.append(op)


# References by name from ops to functions: callees, decompositions of composites, computations of custom calls.

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
