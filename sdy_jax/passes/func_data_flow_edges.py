"""Data-flow edges between functions and their calls: what is passed to a function, and what it returns, keeps one
sharding for all calls.

An `sdy.func_data_flow_edge` follows each argument of a function that is not main, and each result of a call.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.mlir import ir

from sdy_jax.ir.operations import body_of, calls_in, functions, main_function
from sdy_jax.ir.stored_shardings import function_shardings, list_of, set_function_shardings, set_list
from sdy_jax.op_rules.dataflow import FUNC_EDGE
from sdy_jax.passes.data_flow_edges import edge_of, insert_edges, take_edges
from sdy_jax.representation.sharding import TensorSharding

_SHARDING = "sdy.sharding"


def add_func_data_flow_edges(module: ir.Operation) -> None:
    """Creates an edge after every argument of a function but main, and every call result, with its sharding."""
    main = main_function(module)
    for function in functions(module).values():
        if function != main:
            insert_edges(body_of(function).arguments, function_shardings(function, "arg_attrs"), FUNC_EDGE)
        for call in calls_in(function):
            insert_edges(call.results, list_of(call, _SHARDING), FUNC_EDGE)


def sink_func_data_flow_edges(module: ir.Operation) -> None:
    """Moves the shardings of these edges to the functions' arguments and the calls, and removes the edges.

    What was sharded itself, but has an edge that is not, becomes open on its mesh.
    """
    for function in functions(module).values():
        found = _sink(body_of(function).arguments, function_shardings(function, "arg_attrs"))
        set_function_shardings(function, "arg_attrs", dict(enumerate(found)))
        for call in calls_in(function):
            set_list(call, _SHARDING, _sink(call.results, list_of(call, _SHARDING)))


def _sink(owners: Sequence[ir.Value], given: Sequence[TensorSharding | None]) -> list[TensorSharding | None]:
    have_edges = [edge_of(owner, FUNC_EDGE) is not None for owner in owners]
    kept = [
        s and (TensorSharding.fully_open(s.mesh, s.rank) if e else s) for s, e in zip(given, have_edges, strict=True)
    ]
    return [new or old for new, old in zip(take_edges(owners, FUNC_EDGE), kept, strict=True)]
