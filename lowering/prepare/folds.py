"""Ops that take over what ops beside them do: a pad before a window moves no element by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph, Op
from sdy_jax.lowering.strategies.registry import FOLDS, SETTLED_FOLDS


def fold(graph: Graph) -> Graph:
    """Folds ops of a module as their families say. Returns the graph of what there is then; some of it may be dead."""
    folded = [any(each(op) for each in FOLDS.get(op.name, ())) for op in graph.ops]
    return Graph(graph.module) if any(folded) else graph


def fold_settled(ops: Iterable[Op]) -> Iterator[ir.Operation]:
    """Folds ops of a walked module as their families say. Yields those that were taken over, which nobody reads now."""
    for op in ops:
        if op.name in SETTLED_FOLDS and (taken_over := SETTLED_FOLDS[op.name](op)) is not None:
            yield taken_over
