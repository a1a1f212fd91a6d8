"""Whether a propagated module says where its unreduced values are reduced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.operations import CALL, TERMINATORS
from sdy_jax.ir.stored_shardings import mesh_of
from sdy_jax.lowering.strategies.registry import is_forwarding
from sdy_jax.op_rules.dataflow import edges_of_calls, is_data_flow
from sdy_jax.propagation.edge_shardings import edge_shardings
from sdy_jax.representation.axes import braces, set_difference
from sdy_jax.representation.dialect_rules import RuleError, fail
from sdy_jax.representation.sdy_collectives import COLLECTIVE_OPS
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.representation.verify_collectives import STRICT_RULES
from sdy_jax.verification.values import location_text

_REDUCING = frozenset(("sdy.reshard", *COLLECTIVE_OPS))
"""Ops that say what becomes of an unreduced value; so do those that only state a sharding."""

Slots = dict[tuple[Op, int], list[TensorSharding | None]]


def verify_unreduced_axes(module: ir.Operation) -> None:
    """`sdy-verify-unreduced-axes`: only a reshard or a collective may end that a value is unreduced.

    The module, a `builtin.module` after propagation, stays as it is. An op that computes may make its result unreduced
    along more axes than its operands are, and so may what a value flows into.

    Raises:
      RuleError: V6, a value is unreduced along an axis, and what is made of it, or what it flows into, is not; with the
        op's location.
    """
    graph = Graph(module)
    shardings, wanted = _stated(graph)
    for op in graph.ops:
        try:
            _check(op, shardings, wanted, graph)
        except RuleError as error:
            raise RuleError(error.message, location_text(op.mlir.location)) from None


def _stated(graph: Graph) -> tuple[dict[Value, TensorSharding], Slots]:
    """The shardings of values, and those of what operands flow into."""
    shardings: dict[Value, TensorSharding] = {}
    wanted: Slots = {}

    def want(slots: Iterable[tuple[Op, int]], sharding: TensorSharding | None) -> None:
        for slot in slots:
            wanted.setdefault(slot, []).append(sharding)

    for op in graph.ops:
        shardings.update({v: v.sharding for v in op.results if v.sharding is not None})
        for sided in edge_shardings(op) if op.blocks else ():
            shardings.update(dict.fromkeys(sided.edge.targets, sided.targets))
            want(sided.edge.slots, sided.sources)
    for function in graph.functions.values():
        body = function.blocks[0]
        shardings.update({v: v.sharding for v in body.arguments if v.sharding is not None})
        for index, sharding in enumerate(graph.result_shardings(function)):
            want([(body.terminator, index)], sharding)
    for _, edge in edges_of_calls(graph):
        want(edge.slots, edge.owner.sharding)
    return shardings, wanted


def _check(op: Op, shardings: dict[Value, TensorSharding], wanted: Slots, graph: Graph) -> None:
    if op.name in _REDUCING or is_forwarding(op):
        return
    for index, value in enumerate(op.operands):
        have = shardings.get(value)
        if have is None or not have.unreduced_axes:
            continue
        for what, target in _into(op, index, shardings, wanted):
            kept = target.unreduced_axes if target is not None and target.reduction == have.reduction else ()
            lost = set_difference(have.unreduced_axes, kept, mesh_of(graph.meshes, have))
            if lost:
                problem = f"operand {index} is unreduced by {have.reduction} along {braces(lost)}, {what} is not"
                fail("V6", op.name, problem, f"{STRICT_RULES['V6']}; to fix: reduce it by an sdy.reshard before")


def _into(
    op: Op, index: int, shardings: dict[Value, TensorSharding], wanted: Slots
) -> Iterator[tuple[str, TensorSharding | None]]:
    """What an operand becomes, in words, and the sharding of that."""
    if op.name in (*TERMINATORS, CALL) or is_data_flow(op):
        yield from (("what it flows into", sharding) for sharding in wanted.get((op, index), ()))
    else:
        yield from ((f"result {number}", shardings.get(result)) for number, result in enumerate(op.results))
