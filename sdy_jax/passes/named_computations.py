"""Calls as named computations, through which shardings propagate, and named computations as calls.

`import_func_calls` puts the body of a function in the place of a call; `export_named_computations` makes each body a
function again.
"""

from __future__ import annotations

from collections import Counter

from jax.extend.mlir import ir

from sdy_jax.ir.operations import (
    CALL,
    body_of,
    callee_of,
    calls_in,
    copied,
    functions,
    module_meshes,
    post_order,
    replace_op,
    symbol,
    terminator_of,
)
from sdy_jax.ir.stored_shardings import filled, function_shardings, list_of, set_function_shardings
from sdy_jax.passes.call_graph import ORIGINAL_NAME, UniqueNames, callees_first, original_name
from sdy_jax.passes.data_flow_edges import add_edges_of, sink_edges_of
from sdy_jax.representation.attributes import shardings_to_attribute
from sdy_jax.representation.mesh import Mesh

_NAMED = "sdy.named_computation"
_OF_CALLS = ("callee", "no_inline", "arg_attrs", "res_attrs", "sdy.sharding")
_OF_COMPUTATIONS = ("name", "in_shardings", "out_shardings")


def import_func_calls(module: ir.Operation, *, add_data_flow_edges_on_named_computations: bool = True) -> None:
    """Every call becomes a named computation with the callee's body; the functions that were called are erased.

    A function's argument shardings and a call's result shardings become those of the named computation.

    Args:
      module: a `builtin.module`, edited in place.
      add_data_flow_edges_on_named_computations: also add the data-flow edges of named computations that have none.
    """
    known, meshes = functions(module), module_meshes(module)
    order = [symbol(function) for function in callees_first(known)]
    left = Counter(callee_of(call) for call in calls_in(module))
    for name in order:
        for call in calls_in(known[name]):
            callee = callee_of(call)
            left[callee] -= 1
            if callee in known:
                _import_call(call, known[callee], meshes, is_last=not left[callee])
    for name in left:
        if name in known:
            known[name].erase()
    if add_data_flow_edges_on_named_computations:
        for op in [op for op in post_order(module) if op.name == _NAMED]:
            add_edges_of(op)


def _import_call(call: ir.Operation, callee: ir.Operation, meshes: dict[str, Mesh], is_last: bool) -> None:
    attributes = {n: call.attributes[n] for n in call.attributes if n not in _OF_CALLS}
    attributes["name"] = ir.StringAttr.get(original_name(callee), call.context)
    given = filled(function_shardings(callee, "arg_attrs"), list(call.operands), meshes)
    if given is not None:
        attributes["in_shardings"] = shardings_to_attribute(tuple(given), call.context)
    if "sdy.sharding" in call.attributes:
        attributes["out_shardings"] = call.attributes["sdy.sharding"]
    new = ir.Operation.create(
        _NAMED,
        results=[r.type for r in call.results],
        operands=list(call.operands),
        attributes=attributes,
        regions=1,
        loc=call.location,
        ip=ir.InsertionPoint(call),
    )
    source = callee if is_last else copied(callee)
    _move_body(source, new, "sdy.return")
    replace_op(call, new.results)


def _move_body(source: ir.Operation, target: ir.Operation, return_name: str) -> None:
    """Moves the only block of `source` into `target`, where a terminator of this name ends it."""
    block = body_of(source)
    block.append_to(target.regions[0])
    old = terminator_of(block)
    ir.Operation.create(return_name, operands=list(old.operands), loc=old.location, ip=ir.InsertionPoint(old))
    old.erase()


def export_named_computations(module: ir.Operation) -> None:
    """Every named computation becomes a call of a new private function of its name, at the end of the module.

    Its data-flow edges go; their shardings become those of the function's arguments and of the call.
    """
    names = UniqueNames(module)
    for op in [op for op in post_order(module) if op.name == _NAMED]:
        sink_edges_of(op)
        _export(op, names, body_of(module))


def _export(op: ir.Operation, names: UniqueNames, functions_block: ir.Block) -> None:
    context, name = op.context, str(ir.StringAttr(op.attributes["name"]).value)
    type_ = ir.FunctionType.get([v.type for v in op.operands], [v.type for v in op.results], context)
    function = ir.Operation.create(
        "func.func",
        attributes={
            "sym_name": ir.StringAttr.get(names.new(name), context),
            "function_type": ir.TypeAttr.get(type_, context),
            "sym_visibility": ir.StringAttr.get("private", context),
            ORIGINAL_NAME: ir.StringAttr.get(name, context),
        },
        regions=1,
        loc=op.location,
        ip=ir.InsertionPoint(functions_block),
    )
    attributes = {n: op.attributes[n] for n in op.attributes if n not in _OF_COMPUTATIONS}
    attributes["callee"] = ir.FlatSymbolRefAttr.get(symbol(function), context)
    if "out_shardings" in op.attributes:
        attributes["sdy.sharding"] = op.attributes["out_shardings"]
    _move_body(op, function, "func.return")
    set_function_shardings(function, "arg_attrs", dict(enumerate(list_of(op, "in_shardings"))))
    call = ir.Operation.create(
        CALL,
        results=[r.type for r in op.results],
        operands=list(op.operands),
        attributes=attributes,
        loc=op.location,
        ip=ir.InsertionPoint(op),
    )
    replace_op(op, call.results)
