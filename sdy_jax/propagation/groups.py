"""Sharding groups: value ids whose shardings are kept equal while propagation runs."""

from __future__ import annotations

from collections.abc import Sequence

from sdy_jax.ir.graph import Graph, Value
from sdy_jax.propagation.value_ids import ValueIds


def group_members(graph: Graph) -> list[list[Value]]:
    """The members of each group in program order; groups of one member are left out."""
    members: dict[int, list[Value]] = {}
    for op in graph.ops:
        if op.name == "sdy.sharding_group":
            members.setdefault(op.int("group_id"), []).append(op.operands[0])
    return [members[number] for number in sorted(members) if len(members[number]) > 1]


def peers(groups: Sequence[Sequence[Value]], value_ids: ValueIds) -> dict[int, tuple[int, ...]]:
    """For each value id, the value ids of the other members of its group, in order.

    As in Shardy, a member that shares the value id of another value (a loop's argument that of the loop's result)
    follows its group, which does not follow it.
    """
    found: dict[int, tuple[int, ...]] = {}
    for members in groups:
        own = [value_ids.of(value) for value in members]
        for value, value_id in zip(members, own, strict=True):
            if value_ids.values[value_id] is value:
                found[value_id] = tuple(other for other in own if other != value_id)
    return found
