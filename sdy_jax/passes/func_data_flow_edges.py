"""Data-flow edges between functions and their calls: what is passed to a function, and what it returns, keeps one
sharding for all calls.

An `sdy.func_data_flow_edge` follows each argument of a function that is not main, and each result of a call.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.mlir import ir

from sdy_jax.ir.calls import calls_in, owning_op
from sdy_jax.ir.graph import main_function
from sdy_jax.passes.stored_shardings import function_shardings, list_of, set_function_sharding, set_list, sharding_of
from sdy_jax.passes.walk import body_of, functions, has_static_shape, just_after, rank, users
from sdy_jax.representation.attributes import shardings_to_attribute
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.rules.dataflow import FUNC_EDGE

_SHARDING = "sdy.sharding"


def add_func_data_flow_edges(module: ir.Operation) -> None:
    """Creates an edge after every argument of a function but main, and every call result, with its sharding."""
    main = main_function(module)
    for function in functions(module).values():
        if function != main:
            _add(list(body_of(function).arguments), function_shardings(function, "arg_attrs"))
        for call in calls_in(function):
            _add(list(call.results), list_of(call, _SHARDING, len(call.results)))


def _add(owners: Sequence[ir.Value], shardings: Sequence[TensorSharding | None]) -> None:
    for owner, sharding in reversed(list(zip(owners, shardings, strict=True))):
        if not has_static_shape(owner):
            continue
        attributes = {} if sharding is None else {_SHARDING: shardings_to_attribute((sharding,), owner.context)}
        edge = ir.Operation.create(
            FUNC_EDGE,
            results=[owner.type],
            operands=[owner],
            attributes=attributes,
            loc=owning_op(owner).location,
            ip=just_after(owner),
        )
        owner.replace_all_uses_except(edge.results[0], edge)


def sink_func_data_flow_edges(module: ir.Operation) -> None:
    """Moves the shardings of these edges to the functions' arguments and the calls, and removes the edges.

    What was sharded itself, but has an edge that is not, becomes open on its mesh.
    """
    for function in functions(module).values():
        given = function_shardings(function, "arg_attrs")
        for index, sharding in enumerate(_sink(list(body_of(function).arguments), given)):
            if sharding != given[index]:
                set_function_sharding(function, "arg_attrs", index, sharding)
        for call in calls_in(function):
            results = list(call.results)
            set_list(call, _SHARDING, _sink(results, list_of(call, _SHARDING, len(results))), results)


def _sink(owners: Sequence[ir.Value], given: Sequence[TensorSharding | None]) -> list[TensorSharding | None]:
    found: list[TensorSharding | None] = []
    for owner, old in zip(owners, given, strict=True):
        edge = next((user for user in users(owner) if user.name == FUNC_EDGE), None)
        if edge is None:
            found.append(old)
            continue
        found.append(sharding_of(edge.results[0]) or (old and TensorSharding.fully_open(old.mesh, rank(owner))))
        edge.results[0].replace_all_uses_with(owner)
        edge.erase()
    return found
