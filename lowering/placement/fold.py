"""Ops that take over what ops beside them do: a pad before a window moves no element by itself."""

from __future__ import annotations

from sdy_jax.ir.graph import Graph
from sdy_jax.lowering.strategies.registry import FOLDS


def fold(graph: Graph) -> Graph:
    """Folds ops of a module as their families say. Returns the graph of what there is then; some of it may be dead."""
    folded = [FOLDS[op.name](op) for op in graph.ops if op.name in FOLDS]
    return Graph(graph.module) if any(folded) else graph
