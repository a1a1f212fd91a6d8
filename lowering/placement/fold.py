"""Ops that take over what ops beside them do: a pad before a window moves no element by itself."""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph
from sdy_jax.lowering.placement.dead_code import erase_dead_code
from sdy_jax.lowering.strategies.registry import FOLDS, LAST_FOLDS


def fold(graph: Graph) -> Graph:
    """Folds ops of a module as their families say. Returns the graph of what there is then; some of it may be dead."""
    folded = [FOLDS[op.name](op) for op in graph.ops if op.name in FOLDS]
    return Graph(graph.module) if any(folded) else graph


def fold_last(module: ir.Operation) -> None:
    """Folds ops of a partitioned program, in which no layout is chosen any more, and erases what is dead then."""
    graph = Graph(module)
    folded = [LAST_FOLDS[op.name](op) for op in graph.ops if op.name in LAST_FOLDS]
    if any(folded):
        erase_dead_code(Graph(module))
