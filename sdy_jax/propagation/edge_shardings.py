"""The shardings that data-flow ops state for their edges, as sources and as targets of an edge have them.

The border of a manual or named computation states shardings in outer terms; inside of a manual one, only free axes are
left of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.operations import COMPUTATIONS, manual_axes
from sdy_jax.op_rules.dataflow import DataFlowEdge, EdgeKind, edges_of
from sdy_jax.representation.attributes import shardings_from_attribute, shardings_to_attribute
from sdy_jax.representation.manual_axes import erase_manual_axes
from sdy_jax.representation.sharding import TensorSharding

_STATED = {EdgeKind.BODY_ARGUMENT: "in_shardings", EdgeKind.RESULT: "out_shardings"}
"""Where a computation states the sharding of an edge, in outer terms."""


@dataclass(frozen=True, slots=True)
class EdgeSharding:
    """A data-flow edge with the sharding that its sources must have and the one that its targets have.

    The two are one, but at the border of a manual computation, where one of them is the inner view.
    """

    edge: DataFlowEdge
    sources: TensorSharding
    targets: TensorSharding


def edge_shardings(op: Op) -> list[EdgeSharding]:
    """The edges for which a data-flow op states shardings, with those shardings."""
    stated = ((edge, _stated(op, edge)) for edge in edges_of(op))
    return [_both_sides(op, edge, sharding) for edge, sharding in stated if sharding is not None]


def settle_edges(
    graph: Graph, op: Op, settled: Callable[[Value, TensorSharding | None], TensorSharding]
) -> list[EdgeSharding]:
    """Settles what is stated for each edge: `settled(value, stated)` is stored in its place, and returned by edge.

    `value` is the one with the edge's outer sharding: the owner, or the operand that flows into a body's argument.
    """
    outcome: list[EdgeSharding] = []
    for _, same_kind in groupby(edges_of(op), key=lambda edge: edge.kind):
        edges = list(same_kind)
        stated = [_stated(op, edge) for edge in edges]
        found = [settled(_outer_value(edge), s) for edge, s in zip(edges, stated, strict=True)]
        if any(s is not None for s in stated) and found != stated:
            _store(graph, op, edges, found)
        outcome += [_both_sides(op, edge, s) for edge, s in zip(edges, found, strict=True)]
    return outcome


def state_edges(graph: Graph, op: Op, shardings: Sequence[TensorSharding]) -> None:
    """States these shardings, in outer terms, for the first edges of a data-flow op."""
    for _, same_kind in groupby(zip(edges_of(op), shardings, strict=False), key=lambda pair: pair[0].kind):
        edges, found = zip(*same_kind, strict=True)
        _store(graph, op, edges, found)


def state_body_arguments(graph: Graph, op: Op, sharding_of: Callable[[Value], TensorSharding]) -> None:
    """Writes the shardings of a computation's body arguments, if the computation states none."""
    if op.name in COMPUTATIONS and "in_shardings" not in op.attributes:
        edges = [edge for edge in edges_of(op) if edge.kind is EdgeKind.BODY_ARGUMENT]
        _store(graph, op, edges, [sharding_of(edge.owner) for edge in edges])


def _both_sides(op: Op, edge: DataFlowEdge, outer: TensorSharding) -> EdgeSharding:
    inner = erase_manual_axes(outer, manual_axes(op))
    sides = (outer, inner) if edge.kind is EdgeKind.BODY_ARGUMENT else (inner, outer)
    return EdgeSharding(edge, *sides)


def _outer_value(edge: DataFlowEdge) -> Value:
    return edge.sources[0] if edge.kind is EdgeKind.BODY_ARGUMENT else edge.owner


def _stated(op: Op, edge: DataFlowEdge) -> TensorSharding | None:
    if op.name not in COMPUTATIONS:
        return edge.owner.sharding
    name = _STATED[edge.kind]
    return shardings_from_attribute(op.attributes[name])[edge.owner.index] if name in op.attributes else None


def _store(graph: Graph, op: Op, edges: Sequence[DataFlowEdge], shardings: Sequence[TensorSharding]) -> None:
    if op.name not in COMPUTATIONS:
        for edge, sharding in zip(edges, shardings, strict=True):
            graph.set_sharding(edge.owner, sharding)
        return
    kind, mesh = edges[0].kind, shardings[0].mesh
    known = {edge.owner: sharding for edge, sharding in zip(edges, shardings, strict=True)}
    owners = op.results if kind is EdgeKind.RESULT else op.blocks[0].arguments
    every = tuple(known.get(v) or TensorSharding.replicated(mesh, v.rank) for v in owners)
    op.mlir.attributes[_STATED[kind]] = op.attributes[_STATED[kind]] = shardings_to_attribute(every, op.mlir.context)
