"""Preparation of a propagated module before layouts are chosen: folds, scalar regions, and each other rewrite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.lowering.ops.registry import FOLDS, SETTLED_FOLDS, is_forwarding
from sdy_jax.lowering.planner.rewrites.dead_code import erase_dead_code
from sdy_jax.lowering.planner.rewrites.loop_rewrites import (
    change_in_place,
    narrow_stacks,
    sink_into_loops,
    use_invariants_from_outside,
)
from sdy_jax.lowering.planner.rewrites.piece_joins import join_pieces
from sdy_jax.lowering.planner.setting import Setting

# Ops that take over what ops beside them do: a pad before a window moves no element by itself.


def fold(graph: Graph) -> Graph:
    """Folds ops of a module as their families say. Returns the graph of what there is then; some of it may be dead."""
    folded = [any(each(op) for each in FOLDS.get(op.name, ())) for op in graph.ops]
    return Graph(graph.module) if any(folded) else graph


def fold_settled(ops: Iterable[Op]) -> Iterator[ir.Operation]:
    """Folds ops of a placed module as their families say. Yields those that were taken over, which nobody reads now."""
    for op in ops:
        if op.name in SETTLED_FOLDS and (taken_over := SETTLED_FOLDS[op.name](op)) is not None:
            yield taken_over


# Regions that compute on single elements, such as the body of a reduction: shardings stated in them mean nothing.
#
# jax states them for every value of a program with manual axes, also there. They are removed before anything asks
# what a region computes, and before it is run.


def forget_shardings_inside(op: Op) -> list[Op]:
    """Removes shardings, and the ops that only state one, from the regions of `op`: in its module and in the graph.

    Returns:
        The ops that were erased.
    """
    inside = [inner for block in op.blocks for child in block.ops for inner in child.walk()]
    for inner in inside:
        for index, value in enumerate(inner.operands):
            origin = _origin(value)
            if origin is not value:
                inner.operands[index] = origin
                inner.mlir.operands[index] = origin.mlir
        if "sdy.sharding" in inner.mlir.attributes:
            del inner.mlir.attributes["sdy.sharding"]
    erased = [inner for inner in reversed(inside) if is_forwarding(inner)]
    for inner in erased:
        assert inner.block is not None
        inner.block.ops.remove(inner)
        inner.mlir.erase()
    return erased


def _origin(value: Value) -> Value:
    while value.defining_op is not None and is_forwarding(value.defining_op):
        value = value.defining_op.operands[0]
    return value


# Preparation: a propagated module is rewritten before layouts are chosen, each rewrite in turn.

PREPARED = "sdy_jax.prepared"
"""The attribute of a module that was prepared for placement, and may have been changed then."""


def prepared(module: ir.Operation, setting: Setting) -> Graph:
    """The graph of a propagated module that is about to be placed: joined, folded, and without dead code; that of one
    that was prepared before as it is."""
    graph = Graph(module)
    if PREPARED in module.attributes:
        return graph
    use_invariants_from_outside(graph)
    graph = _changed(sink_into_loops, erase_dead_code(fold(graph)))
    graph = narrow_stacks(_changed(change_in_place, graph))
    mesh_name, rule_of = setting.mesh_name, setting.rules.without_overrides().rule_of
    return _changed(lambda graph: join_pieces(graph, mesh_name, graph.meshes[mesh_name], rule_of), graph)


def _changed(change: Callable[[Graph], Graph], graph: Graph) -> Graph:
    """The graph after a change, without what is dead then."""
    changed = change(graph)
    return graph if changed is graph else erase_dead_code(changed)
