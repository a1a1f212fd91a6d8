"""Every call and every composite is replaced by the body it stands for; functions that nothing names then are removed.

A function's argument and result shardings mean: the caller's values pass through a sharding constraint there.
"""

from __future__ import annotations

from collections.abc import Callable

from jax.extend.mlir import ir

from sdy_jax.errors import ShardingError
from sdy_jax.ir.operations import body_of, functions, main_function, named, pre_order, symbol
from sdy_jax.ir.stored_shardings import function_shardings, list_of, stating
from sdy_jax.passes.call_graph import Functions, callees_first, remove_all_but
from sdy_jax.representation.sharding import TensorSharding

_CALLEE = {"func.call": "callee", "stablehlo.composite": "decomposition"}
"""The ops that stand for a function's body, and the attribute that names the function."""


def inline_calls(module: ir.Operation) -> None:
    """Inlines all calls, nested ones and those inside regions included. Beside the main function and public ones, what
    other ops name stays, such as the computations of custom calls.

    Raises:
      ShardingError: a function calls itself, directly or through others.
    """
    known = functions(module)
    if len(known) < 2:
        return
    _inline(known, known)
    remove_all_but(module, symbol(main_function(module)))


def inline_functions(module: ir.Operation, chosen: Callable[[ir.Operation], bool]) -> None:
    """Inlines all calls of some of the functions, which are removed then, unless one is the main function.

    Raises:
      ShardingError: one of them calls itself, directly or through others of them.
    """
    known = functions(module)
    inlined = {name: function for name, function in known.items() if chosen(function)}
    if not inlined:
        return
    _inline(known, inlined)
    main = main_function(module)
    for function in inlined.values():
        if function != main:
            function.erase()


def _inline(known: Functions, inlined: Functions) -> None:
    """Inlines the callees first, so that a copied body holds no call of what is to be inlined."""

    def inlined_by(function: ir.Operation) -> list[str]:
        return [name for call in named(function, *_CALLEE) if (name := _called(call)) in inlined]

    for function in callees_first(known, inlined_by):
        for call in named(function, *_CALLEE):
            callee = _called(call)
            if callee not in known:
                raise ShardingError(f"call of @{callee}, which the module does not define (in @{symbol(function)})")
            if callee in inlined:
                _inline_call(call, known[callee])


def _called(call: ir.Operation) -> str:
    return str(ir.FlatSymbolRefAttr(call.attributes[_CALLEE[call.name]]).value)


def _inline_call(call: ir.Operation, callee: ir.Operation) -> None:
    copy = callee.clone(ir.InsertionPoint.after(callee))
    block = body_of(copy)
    for argument, operand, sharding in zip(
        block.arguments, list(call.operands), function_shardings(copy, "arg_attrs"), strict=True
    ):
        argument.replace_all_uses_with(_constrained(operand, sharding, ir.InsertionPoint(call), call.location))
    *body, terminator = [op.operation for op in block.operations]
    for op in body:
        _locate(op, call.location)
        op.move_before(call)
    for result, returned, sharding in zip(
        call.results, list(terminator.operands), _result_shardings(call, callee), strict=True
    ):
        result.replace_all_uses_with(_constrained(returned, sharding, ir.InsertionPoint(call), call.location))
    copy.erase()
    call.erase()


def _locate(op: ir.Operation, caller: ir.Location) -> None:
    """Adds the call's location: lines and scopes in a function that jax lowers once are those inside of it."""
    for inner in pre_order(op):
        inner.location = ir.Location.callsite(inner.location, [caller], caller.context)


def _result_shardings(call: ir.Operation, callee: ir.Operation) -> list[TensorSharding | None]:
    """The call's own shardings, else those of the function it calls."""
    if "sdy.sharding" in call.attributes:
        return list_of(call, "sdy.sharding")
    return function_shardings(callee, "res_attrs")


def _constrained(
    value: ir.Value, sharding: TensorSharding | None, ip: ir.InsertionPoint, location: ir.Location
) -> ir.Value:
    if sharding is None:
        return value
    return stating("sdy.sharding_constraint", value, sharding, location, ip).results[0]
