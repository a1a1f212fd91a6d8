"""Every use of a constant expression gets its own copy, so that two uses may be sharded differently.

A constant expression is a constant or iota, or a pure element-wise op, broadcast, reshape or slice of constant
expressions. The broadcast of a scalar that is no constant is copied per use as well; scalars never are.
"""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.graph import Graph, Op
from sdy_jax.passes.walk import named, users
from sdy_jax.rules.predicates import is_elementwise

_LEAVES = ("sdy.constant", "stablehlo.constant", "stablehlo.iota")
_PRESERVING = ("stablehlo.broadcast_in_dim", "stablehlo.reshape", "stablehlo.slice")
_GROUP = "sdy.sharding_group"


def split_constants(module: ir.Operation) -> None:
    """Turns `stablehlo.constant` into `sdy.constant` and copies constant expressions per use."""
    for constant in named(module, "stablehlo.constant"):
        _to_sdy_constant(constant)
    graph = Graph(module)
    for function in graph.functions.values():
        for op in function.walk():
            if op.name == "sdy.named_computation":
                _Splitter().split(op)
        _Splitter().split(function)


def _to_sdy_constant(constant: ir.Operation) -> None:
    complex_ = isinstance(constant.results[0].type.element_type, ir.ComplexType)
    new = _through_text(constant) if complex_ else _created(constant)
    constant.results[0].replace_all_uses_with(new.results[0])
    constant.erase()


def _created(constant: ir.Operation) -> ir.Operation:
    return ir.Operation.create(
        "sdy.constant",
        results=[constant.results[0].type],
        attributes={name: constant.attributes[name] for name in constant.attributes},
        loc=constant.location,
        ip=ir.InsertionPoint(constant),
    )


def _through_text(constant: ir.Operation) -> ir.Operation:
    """For complex elements, which the bindings cannot hand over; ten times slower."""
    text = constant.get_asm(print_generic_op_form=True).replace('"stablehlo.constant"', '"sdy.constant"', 1)
    new = ir.Operation.parse(text, context=constant.context).operation
    ir.InsertionPoint(constant).insert(new)
    new.location = constant.location
    return new


class _Splitter:
    """One scope: the constant expressions and scalar expansions seen so far, in program order."""

    def __init__(self) -> None:
        self.constants: set[Op] = set()
        self.copied: dict[Op, None] = {}

    def split(self, scope: Op) -> None:
        for block in scope.blocks:
            for op in block.ops:
                self._visit(op)
        self._erase_unused()

    def _visit(self, op: Op) -> None:
        if op.name == _GROUP:
            return
        if self._is_constant(op):
            self.constants.add(op)
            self.copied[op] = None
        elif op.name == "stablehlo.broadcast_in_dim" and op.operands[0].rank == 0:
            self.copied[op] = None
        else:
            self._copy_operands(op, op.mlir, None)
        if op.name == "sdy.named_computation":
            return
        for block in op.blocks:
            for inner in block.ops:
                self._visit(inner)

    def _is_constant(self, op: Op) -> bool:
        if op.name in _LEAVES:
            return True
        return is_constant_preserving(op) and all(v.defining_op in self.constants for v in op.operands)

    def _copy_operands(self, op: Op, target: ir.Operation, copies: dict[Op, ir.Operation] | None) -> None:
        """Gives `target` (`op`, or a copy of it) its own copies of its constant operands."""
        for number, operand in enumerate(op.operands):
            source = operand.defining_op
            if source is None or source not in self.copied or operand.shape == ():
                continue
            copy = self._copy(source, {} if copies is None else copies)
            target.operands[number] = copy.results[operand.index]

    def _copy(self, op: Op, copies: dict[Op, ir.Operation]) -> ir.Operation:
        if op in copies:
            return copies[op]
        copy = op.mlir.clone(ir.InsertionPoint(op.mlir)).operation
        self._copy_operands(op, copy, copies)
        for result, new in zip(op.results, copy.results, strict=True):
            for group in (u for u in users(result.mlir) if u.name == _GROUP):
                group.clone(ir.InsertionPoint.after(copy)).operation.operands[0] = new
        copies[op] = copy
        return copy

    def _erase_unused(self) -> None:
        for op in reversed(self.copied):
            left = [user for result in op.mlir.results for user in users(result)]
            if any(user.name != _GROUP for user in left):
                continue
            for group in left:
                group.erase()
            op.mlir.erase()


def is_constant_preserving(op: Op) -> bool:
    """The op makes a constant expression out of constant expressions."""
    if op.name == "sdy.named_computation":
        return all(o.name in _LEAVES or is_constant_preserving(o) for o in op.blocks[0].ops[:-1])
    return op.name in _PRESERVING or (op.name != "sdy.sharding_constraint" and is_elementwise(op))
