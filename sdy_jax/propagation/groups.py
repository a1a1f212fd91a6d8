"""Sharding groups: places whose shardings are kept equal while propagation runs."""

from __future__ import annotations

from collections.abc import Sequence

from sdy_jax.graph import Graph, Value


def group_members(graph: Graph) -> list[list[Value]]:
    """The members of each group in program order; groups of one member are left out."""
    members: dict[int, list[Value]] = {}
    for op in graph.ops:
        if op.name == "sdy.sharding_group":
            members.setdefault(op.int("group_id"), []).append(op.operands[0])
    return [members[number] for number in sorted(members) if len(members[number]) > 1]


def peers(groups: Sequence[Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """For each place, the other members of its group, in order."""
    return {place: tuple(p for p in group if p != place) for group in groups for place in group}
