"""Data-flow edges as ops: each value that several others must be sharded like gets an `sdy.data_flow_edge`.

`add_data_flow_edges` puts one after every owner before propagation; `sink_data_flow_edges` takes their shardings back
to the op that owns them.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.mlir import ir

from sdy_jax.ir.graph import post_order
from sdy_jax.passes.debug_info import PROPAGATION_EDGES, SHARDING_ORIGINS, sink_attributes
from sdy_jax.passes.stored_shardings import COMPUTATIONS, list_of, set_list, sharding_of
from sdy_jax.passes.walk import body_of, has_static_shape, just_after, named, users
from sdy_jax.propagation.edges import add_free_axes, erase_manual_axes, manual_axes
from sdy_jax.representation.attributes import sharding_attributes
from sdy_jax.representation.sharding import TensorSharding

EDGE = "sdy.data_flow_edge"
DATA_FLOW_OPS = ("stablehlo.while", "stablehlo.case", "stablehlo.if", "stablehlo.optimization_barrier", *COMPUTATIONS)


def add_data_flow_edges(module: ir.Operation) -> None:
    """Creates an edge right after every owner of static shape, with the owner's sharding, and redirects its uses."""
    for op in list(post_order(module)):
        if op.name in DATA_FLOW_OPS:
            add_edges_of(op)


def add_edges_of(op: ir.Operation) -> None:
    """Creates the edges of one data-flow op; an owner that has one keeps it."""
    arguments = block_argument_owners(op)
    if arguments:
        manual = manual_axes(op)
        shardings = list_of(op, "in_shardings", len(arguments))
        _add_edges(arguments, [s and erase_manual_axes(s, manual) for s in shardings])
    _add_edges(op.results, list_of(op, result_attribute(op), len(op.results)))


def block_argument_owners(op: ir.Operation) -> Sequence[ir.Value]:
    """The block arguments that own an edge: those of manual and named computations."""
    return list(body_of(op).arguments) if op.name in COMPUTATIONS else ()


def result_attribute(op: ir.Operation) -> str:
    """Where an op keeps the shardings of its results."""
    return "out_shardings" if op.name in COMPUTATIONS else "sdy.sharding"


def _add_edges(owners: Sequence[ir.Value], shardings: Sequence[TensorSharding | None]) -> None:
    for owner, sharding in reversed(list(zip(owners, shardings, strict=True))):
        if not has_static_shape(owner) or edge_of(owner) is not None:
            continue
        attributes = {} if sharding is None else sharding_attributes("sharding", sharding, owner.context)
        location = owner.owner.owner.location if isinstance(owner, ir.BlockArgument) else owner.owner.location
        edge = ir.Operation.create(
            EDGE, results=[owner.type], operands=[owner], attributes=attributes, loc=location, ip=just_after(owner)
        )
        owner.replace_all_uses_except(edge.results[0], edge)


def edge_of(owner: ir.Value) -> ir.Operation | None:
    """The edge op of an owner, if there is one."""
    return next((user for user in users(owner) if user.name == EDGE), None)


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
        edge.results[0].replace_all_uses_with(edge.operands[0])
        edge.erase()


def sink_edges_of(op: ir.Operation) -> None:
    """Moves the shardings of one data-flow op's edges to the op."""
    arguments = block_argument_owners(op)
    if arguments:
        found = _sink(arguments)
        if op.name == "sdy.manual_computation":
            outer = list_of(op, "in_shardings", len(arguments))
            found = [f and o and add_free_axes(o, f, manual_axes(op)) for o, f in zip(outer, found, strict=True)]
        set_list(op, "in_shardings", found, list(op.operands))
    set_list(op, result_attribute(op), _sink(op.results), list(op.results))


def _sink(owners: Sequence[ir.Value]) -> list[TensorSharding | None]:
    found: list[TensorSharding | None] = []
    for owner in owners:
        edge = edge_of(owner)
        if edge is None:
            found.append(None)
            continue
        found.append(sharding_of(edge.results[0]))
        edge.results[0].replace_all_uses_with(owner)
        edge.erase()
    return found
