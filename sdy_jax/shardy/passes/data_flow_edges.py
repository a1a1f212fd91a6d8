"""Data-flow edges as ops, inside of functions and between these and their calls."""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.mlir import ir

from sdy_jax.ir.operations import (
    COMPUTATIONS,
    DATA_FLOW_OPS,
    body_of,
    calls_in,
    functions,
    has_static_shape,
    just_after,
    main_function,
    manual_axes,
    named,
    owning_op,
    post_order,
    replace_op,
    users,
)
from sdy_jax.ir.shardings import TensorSharding, add_free_axes, erase_manual_axes
from sdy_jax.ir.stored_shardings import (
    function_shardings,
    list_of,
    result_attribute,
    set_function_shardings,
    set_list,
    set_sharding,
    sharding_of,
)
from sdy_jax.ir.validity import RuleError
from sdy_jax.shardy.passes.debug_info import PROPAGATION_EDGES, SHARDING_ORIGINS, sink_attributes
from sdy_jax.shardy.propagation.data_flow import FUNC_EDGE

# Data-flow edges as ops: each value that several others must be sharded like gets an `sdy.data_flow_edge`.
#
# `add_data_flow_edges` puts one after every owner before propagation; `sink_data_flow_edges` takes their shardings
# back to the op that owns them.

EDGE = "sdy.data_flow_edge"


def add_data_flow_edges(module: ir.Operation) -> None:
    """Creates an edge right after every owner of static shape, with the owner's sharding, and redirects its uses.

    An edge that is there already comes behind the new one, as it does in Shardy.
    """
    for op in list(post_order(module)):
        if op.name in DATA_FLOW_OPS:
            add_edges_of(op, again=True)


def add_edges_of(op: ir.Operation, again: bool = False) -> None:
    """Creates the edges of one data-flow op; an owner that has one keeps it, or gets a second one in front of it."""
    arguments = block_argument_owners(op)
    if arguments:
        _insert_edges(arguments, [sharding_of(argument) for argument in arguments], again=again)
    _insert_edges(op.results, list_of(op, result_attribute(op)), again=again)


def block_argument_owners(op: ir.Operation) -> Sequence[ir.Value]:
    """The block arguments that own an edge: those of manual and named computations."""
    return list(body_of(op).arguments) if op.name in COMPUTATIONS else ()


def _insert_edges(
    owners: Sequence[ir.Value], shardings: Sequence[TensorSharding | None], name: str = EDGE, again: bool = False
) -> None:
    """Creates an edge right after every owner of static shape that has none, or after all, and redirects its uses."""
    for owner, sharding in reversed(list(zip(owners, shardings, strict=True))):
        known = edge_of(owner, name)
        if not has_static_shape(owner) or (known is not None and not again):
            continue
        if known is not None:
            sharding = sharding_of(known.results[0])
        location, ip = owning_op(owner).location, just_after(owner)
        edge = ir.Operation.create(name, results=[owner.type], operands=[owner], loc=location, ip=ip)
        if sharding is not None:
            set_sharding(edge.results[0], sharding)
        owner.replace_all_uses_except(edge.results[0], edge)


def edge_of(owner: ir.Value, name: str = EDGE) -> ir.Operation | None:
    """The edge op of an owner, if there is one."""
    return next((user for user in users(owner) if user.name == name), None)


def sink_data_flow_edges(
    module: ir.Operation,
    *,
    sink_debug_sharding_origins: bool = False,
    sink_debug_propagation_edge_sharding: bool = False,
) -> None:
    """Moves the shardings of edges to their data-flow ops and replaces the edges by their inputs.

    Edges of values that own none, such as arguments of loops and functions, go with their shardings.

    Args:
      module: a `builtin.module`, edited in place.
      sink_debug_sharding_origins, sink_debug_propagation_edge_sharding: move these attributes of edges as well.
    """
    wanted = (
        (SHARDING_ORIGINS, sink_debug_sharding_origins),
        (PROPAGATION_EDGES, sink_debug_propagation_edge_sharding),
    )
    names = [name for name, is_wanted in wanted if is_wanted]
    for op in named(module, *DATA_FLOW_OPS):
        for side, owners in (("block_arg", block_argument_owners(op)), ("result", op.results)):
            for name in names:
                sink_attributes(op, [edge_of(owner) for owner in owners], side, name)
        sink_edges_of(op)
    for edge in named(module, EDGE):
        replace_op(edge, edge.operands)


def sink_edges_of(op: ir.Operation) -> None:
    """Moves the shardings of one data-flow op's edges to the op."""
    arguments = block_argument_owners(op)
    if arguments:
        found = take_edges(arguments)
        if op.name == "sdy.manual_computation":
            outer = list_of(op, "in_shardings")
            found = [f and o and add_free_axes(o, f, manual_axes(op)) for o, f in zip(outer, found, strict=True)]
        set_list(op, "in_shardings", found)
    set_list(op, result_attribute(op), take_edges(op.results))


def check_given_edges(module: ir.Operation) -> None:
    """Checks that the edges of computations have the shardings that these state for them.

    Raises:
      RuleError: one has another one, which none has that passes made.
    """
    for op in named(module, *COMPUTATIONS):
        inner = [s and erase_manual_axes(s, manual_axes(op)) for s in list_of(op, "in_shardings")]
        _check_edges(op, block_argument_owners(op), inner)
        _check_edges(op, op.results, list_of(op, "out_shardings"))


def _check_edges(op: ir.Operation, owners: Sequence[ir.Value], stated: Sequence[TensorSharding | None]) -> None:
    for owner, sharding in zip(owners, stated, strict=True):
        edge = edge_of(owner)
        found = None if edge is None else sharding_of(edge.results[0])
        if edge is not None and found is not None and sharding is not None and found.axes != sharding.axes:
            problem = f"{EDGE} has <{found}>, where {op.name} states <{sharding}>; to fix: leave edges to the passes"
            raise RuleError(problem, str(edge.location))


def take_edges(owners: Sequence[ir.Value], name: str = EDGE) -> list[TensorSharding | None]:
    """Replaces the edges of owners by the owners. Returns the edges' shardings."""
    edges = [edge_of(owner, name) for owner in owners]
    found = [None if edge is None else sharding_of(edge.results[0]) for edge in edges]
    for edge in edges:
        if edge is not None:
            replace_op(edge, edge.operands)
    return found


# Data-flow edges between functions and their calls: what is passed to a function, and what it returns, keeps one
# sharding for all calls.
#
# An `sdy.func_data_flow_edge` follows each argument of a function that is not main, and each result of a call.

_SHARDING = "sdy.sharding"


def add_func_data_flow_edges(module: ir.Operation) -> None:
    """Creates an edge after every argument of a function but main, and every call result, with its sharding."""
    main = main_function(module)
    for function in functions(module).values():
        if function != main:
            _insert_edges(body_of(function).arguments, function_shardings(function, "arg_attrs"), FUNC_EDGE)
        for call in calls_in(function):
            _insert_edges(call.results, list_of(call, _SHARDING), FUNC_EDGE)


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
