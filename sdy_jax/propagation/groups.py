"""Sharding groups: value ids whose shardings are kept equal while propagation runs.

See docs/explanation/propagation.md#groups.
"""

from __future__ import annotations

from sdy_jax.ir.graph import Graph, Value
from sdy_jax.propagation.value_ids import ValueIds


def peers(graph: Graph, value_ids: ValueIds) -> dict[int, tuple[int, ...]]:
    """For each value id, the value ids of the other members of its group, in order.

    As in Shardy, a member that shares the value id of another value (a loop's argument that of the loop's result)
    follows its group, which does not follow it.
    """
    groups: dict[int, list[Value]] = {}
    for op in graph.ops:
        if op.name == "sdy.sharding_group":
            groups.setdefault(op.int("group_id"), []).append(op.operands[0])
    found: dict[int, tuple[int, ...]] = {}
    for _, members in sorted(groups.items()):
        own = [value_ids.of(value) for value in members]
        for value, value_id in zip(members, own, strict=True):
            if value_ids.values[value_id] is value:
                found[value_id] = tuple(other for other in own if other != value_id)
    return found
