"""Better choices for a whole program, from given ones: the solver's moves, then one node at a time on the true cost."""

from __future__ import annotations

from collections.abc import Sequence

from sdy_jax.lowering.planning.program_model import Chosen, ProgramModel

_ROUNDS = 10
_LEAST = 1e-9
"""The share of the program's cost below which nothing is changed."""


def improve_locally(model: ProgramModel, chosen: Sequence[int]) -> Chosen:
    """The best way of each node given the others, in the order of the program, until nothing changes."""
    found = list(chosen)
    least = _LEAST * model.cost(found)
    for _ in range(_ROUNDS):
        changed = [node for node in range(len(model.nodes)) if _improve_node(model, found, node, least)]
        if not changed:
            break
    return found


def _improve_node(model: ProgramModel, chosen: Chosen, number: int, least: float) -> bool:
    node, before = model.nodes[number], chosen[number]
    if len(node.ways) == 1:
        return False
    values = [model.values[v] for v in dict.fromkeys(node.values) if v >= 0]

    def cost() -> float:
        own = node.times * node.ways[chosen[number]].cost
        return own + sum([model.value_cost(value, chosen) for value in values])

    best, limit = before, cost() - least
    for way in range(len(node.ways)):
        if way == before or node.times * node.ways[way].cost >= limit:
            continue
        chosen[number] = way
        paid = cost()
        if paid < limit:
            best, limit = way, paid
    chosen[number] = best
    return best != before
