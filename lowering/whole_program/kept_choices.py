"""Choices that are kept while all others are made: the nodes that they speak of have no other candidate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from sdy_jax.lowering.candidates.op_problem import Decision
from sdy_jax.lowering.model.enumeration import Candidate
from sdy_jax.lowering.model.nodes import Chosen
from sdy_jax.lowering.model.planning_problem import PlanningProblem
from sdy_jax.lowering.proposal.layout_plan import LayoutPlan
from sdy_jax.representation.sharding import TensorSharding


@contextmanager
def keeping(program: PlanningProblem, kept: LayoutPlan) -> Iterator[Callable[[Chosen], Chosen]]:
    """Leaves nodes meanwhile the candidates that a plan gives them, where they have these. What it gives says which
    candidates of all a choice among those is."""
    nodes = program.model.nodes
    before = [node.candidates for node in nodes]
    _keep(program, kept)
    left = [node.candidates for node in nodes]
    yield lambda chosen: [every.index(some[n]) for every, some, n in zip(before, left, chosen, strict=True)]
    for node, candidates in zip(nodes, before, strict=True):
        node.candidates = candidates


def _keep(program: PlanningProblem, kept: LayoutPlan) -> None:
    """Leaves nodes the candidates that a plan gives them, where they have these. The first candidate is where a search
    starts, so it starts from there."""
    nodes = program.model.nodes
    for number, decision in kept.ops.items():
        node = program.decided.get(number)
        found = _alike(program, nodes[node].candidates, decision) if node is not None else None
        if node is not None and found is not None:
            nodes[node].candidates = [found]
    for (number, index), node in program.edges.items():
        planned, slot = kept.edges.get(number, ()), -1 if node in program.made_outside else 0
        if index < len(planned):
            same = [c for c in nodes[node].candidates if _is_same(program, c.layouts[slot], planned[index])]
            nodes[node].candidates = same[:1] or nodes[node].candidates


def _alike(program: PlanningProblem, candidates: Sequence[Candidate], decision: Decision) -> Candidate | None:
    """The candidate that runs an op as it is decided."""
    for candidate in candidates:
        pairs = zip(candidate.layouts, decision.shardings, strict=False)
        if all(_is_same(program, layout, sharding) for layout, sharding in pairs):
            return candidate
    return None


def _is_same(program: PlanningProblem, layout: int, sharding: TensorSharding) -> bool:
    return program.table.shardings[layout].same_layout_as(sharding)
