"""Constants, split before propagation and merged after it, and MLIR's own clean-up passes."""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.ir.attributes import shape_and_dtype
from sdy_jax.ir.operations import (
    CALL,
    TERMINATORS,
    callee_of,
    copied,
    functions,
    named,
    post_order,
    read_attributes,
    renamed,
    replace_op,
    symbol,
    users,
)
from sdy_jax.shardy.passes.calls import FunctionCopies, callees_first
from sdy_jax.shardy.rules.elementwise import is_elementwise

# Every use of a constant expression gets its own copy, so that two uses may be sharded differently.
#
# A constant expression is a constant or iota, or a pure element-wise op, broadcast, reshape or slice of constant
# expressions. The broadcast of a scalar that is no constant is copied per use as well; scalars never are. A call of a
# function that holds only such ops is one of them; each copy of the call gets a copy of the function.

_LEAVES = ("sdy.constant", "stablehlo.constant", "stablehlo.iota")
_PRESERVING = ("stablehlo.broadcast_in_dim", "stablehlo.reshape", "stablehlo.slice")
_GROUP = "sdy.sharding_group"
_NAMED = "sdy.named_computation"
_SHARDING = "sdy.sharding"


def split_constants(module: ir.Operation) -> None:
    """Turns `stablehlo.constant` into `sdy.constant` and copies constant expressions per use."""
    for constant in named(module, "stablehlo.constant"):
        _to_sdy_constant(constant)
    copies = FunctionCopies(module)
    spoiled: set[ScopeKey] = set()
    for function in callees_first(functions(module)):
        computations = [op for op in post_order(function) if op.name == _NAMED]
        for scope in (*computations, function):
            _Splitter(scope, copies, spoiled).split()


ScopeKey = tuple[str, str]
"""`func.func` or `sdy.named_computation`, and a name. All named computations of one name count as one."""


def _scope_of(op: ir.Operation) -> ScopeKey | None:
    """The scope that an op is, or that it calls."""
    if op.name == CALL:
        return "func.func", callee_of(op)
    if op.name == "func.func":
        return op.name, symbol(op)
    return (op.name, ir.StringAttr(op.attributes["name"]).value) if op.name == _NAMED else None


def _to_sdy_constant(constant: ir.Operation) -> None:
    complex_ = isinstance(constant.results[0].type.element_type, ir.ComplexType)
    new = _through_text(constant) if complex_ else renamed(constant, "sdy.constant")
    replace_op(constant, new.results)


def _through_text(constant: ir.Operation) -> ir.Operation:
    """For complex elements, which the bindings cannot hand over; ten times slower."""
    bare = copied(constant)
    if _SHARDING in bare.attributes:
        del bare.attributes[_SHARDING]  # its mesh is not known outside the module
    text = bare.get_asm(print_generic_op_form=True).replace('"stablehlo.constant"', '"sdy.constant"', 1)
    bare.erase()
    new = ir.Operation.parse(text, context=constant.context).operation
    ir.InsertionPoint(constant).insert(new)
    new.location = constant.location
    if _SHARDING in constant.attributes:
        new.attributes[_SHARDING] = constant.attributes[_SHARDING]
    return new


class _Splitter:
    """One scope: the constant expressions and scalar expansions seen so far, in program order.

    `spoiled` are the scopes in which an op was seen that makes no constant expression out of constant ones. A scope
    that is not among them yet is taken for one that does.
    """

    def __init__(self, scope: ir.Operation, copies: FunctionCopies, spoiled: set[ScopeKey]) -> None:
        self._scope, self._key = scope, _scope_of(scope)
        self._function_copies, self._spoiled = copies, spoiled
        self._constants: set[ir.Value] = set()
        self._copied: list[ir.Operation] = []
        self._made_by: dict[ir.Value, ir.Operation] = {}
        """The ops that are copied, by their results."""

    def split(self) -> None:
        self._visit_regions(self._scope)
        self._erase_unused()

    def _visit_regions(self, op: ir.Operation) -> None:
        if len(op.regions):
            for inner in [child.operation for region in op.regions for block in region for child in block.operations]:
                self._visit(inner)

    def _visit(self, op: ir.Operation) -> None:
        if op.name == _GROUP:
            return
        preserves = op.name in _LEAVES or self._preserves(op)
        if preserves and self._constants.issuperset(op.operands):
            self._constants.update(op.results)
            self._copy_later(op)
        elif op.name == "stablehlo.broadcast_in_dim" and _shape(op.operands[0]) == ():
            self._copy_later(op)
        else:
            self._copy_operands(op, op, None)
        if self._key is not None and not preserves and op.name not in TERMINATORS:
            self._spoiled.add(self._key)
        if op.name != _NAMED:
            self._visit_regions(op)

    def _copy_later(self, op: ir.Operation) -> None:
        self._copied.append(op)
        self._made_by.update(dict.fromkeys(op.results, op))

    def _preserves(self, op: ir.Operation) -> bool:
        """The op makes a constant expression out of constant expressions."""
        scope = _scope_of(op)
        if scope is not None:
            return scope not in self._spoiled
        return op.name in _PRESERVING or (op.name != "sdy.sharding_constraint" and is_elementwise(op))

    def _copy_operands(
        self, op: ir.Operation, target: ir.Operation, copies: dict[ir.Value, ir.Operation] | None
    ) -> None:
        """Gives `target` (`op`, or a copy of it) its own copies of its constant operands."""
        for number, operand in enumerate(op.operands):
            source = self._made_by.get(operand)
            if source is None or _shape(operand) == ():
                continue
            copy = self._copy(source, {} if copies is None else copies)
            target.operands[number] = copy.results[ir.OpResult(operand).result_number]

    def _copy(self, op: ir.Operation, copies: dict[ir.Value, ir.Operation]) -> ir.Operation:
        """`copies`: those made for the same user, by the first result of the original."""
        first = op.results[0]
        if first in copies:
            return copies[first]
        copy = op.clone(ir.InsertionPoint(op)).operation
        self._copy_operands(op, copy, copies)
        for result, new in zip(op.results, copy.results, strict=True):
            for group in (u for u in users(result) if u.name == _GROUP):
                group.clone(ir.InsertionPoint.after(copy)).operation.operands[0] = new
        if op.name == CALL:
            self._function_copies.give_own(copy)
        copies[first] = copy
        return copy

    def _erase_unused(self) -> None:
        for op in reversed(self._copied):
            left = [user for result in op.results for user in users(result)]
            if any(user.name != _GROUP for user in left):
                continue
            for group in left:
                group.erase()
            op.erase()


def _shape(value: ir.Value) -> tuple[int, ...] | None:
    return shape_and_dtype(value.type)[0]


# The copies of a constant that got the same sharding become one again.

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
