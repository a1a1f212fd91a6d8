"""Better choices for a whole program, from given ones.

All ways are left to all nodes, and the solver chooses for all at once. Where it cannot prove that nothing costs less,
*moves* come before that: each leaves every node a few of its ways, those that differ in one atom only, or those that
keep all atoms together. In the end each node is tried alone on the true cost.
Source: spec of the planner, sections 4 and 12.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle

from sdy_jax.lowering.planning.enumerated import Way
from sdy_jax.lowering.planning.layout_table import LayoutTable
from sdy_jax.lowering.planning.program_model import Chosen, ProgramModel
from sdy_jax.lowering.planning.restricted import Keeps, RestrictedProgram, Solved
from sdy_jax.representation.axes import overlaps
from sdy_jax.representation.mesh import AxisRef

_MOST_MOVES, _ROUNDS = 12, 10
"""Moves that are tried, and rounds of local improvement."""

_MOST_AT_ONCE = 600
"""Ways of a node up to which all ways are left to all nodes: those of three axes, but not of four."""

_LEAST = 1e-9
"""The share of the program's cost below which nothing is changed."""


def improved(model: ProgramModel, start: Sequence[int], table: LayoutTable, atoms: Sequence[AxisRef]) -> Chosen:
    """A choice that costs no more than the start, and the start where none was found that costs less."""
    moves = moves_of(table, atoms)
    best = _all_at_once(model, start)
    if moves and not best.is_least:
        moved = _all_at_once(model, _moved(model, list(start), moves))
        best = moved if _is_cheaper(model, moved.choice, best.choice) else best
    found = _improve_locally(model, best.choice, moves[-len(atoms) :] or [everything])
    return found if _is_cheaper(model, found, start) else list(start)


def _all_at_once(model: ProgramModel, start: Sequence[int]) -> Solved:
    """What the solver chooses from all ways of all nodes, if these are few enough and that costs less; else the
    start."""
    if max(len(node.ways) for node in model.nodes) > _MOST_AT_ONCE:
        return Solved(list(start), is_least=False)
    found = RestrictedProgram(model, start, everything).solved()
    return found if _is_cheaper(model, found.choice, start) else found._replace(choice=list(start))


def _moved(model: ProgramModel, start: Chosen, moves: Sequence[Keeps]) -> Chosen:
    """What the moves lead to, one after the other, until none leads further: all have failed in a row, or all others
    since one did not, which left nothing of its own kind to be found."""
    best, least, failed, others = start, model.cost(start), 0, len(moves)
    for _, move in zip(range(_MOST_MOVES), cycle(moves)):
        found = RestrictedProgram(model, best, move).solved().choice
        cost = model.cost(found)
        if cost < least * (1 - _LEAST):
            best, least, failed, others = found, cost, 0, len(moves) - 1
        else:
            failed += 1
        if failed == others:
            break
    return best


def everything(way: Way, now: Way) -> bool:
    """The move that leaves every node all ways."""
    return True


def _is_cheaper(model: ProgramModel, found: Sequence[int], other: Sequence[int]) -> bool:
    return list(found) != list(other) and model.cost(found) < model.cost(other) * (1 - _LEAST)


def moves_of(table: LayoutTable, atoms: Sequence[AxisRef]) -> list[Keeps]:
    """The moves that leave each node a few ways of many; none along one atom, where nodes have few."""
    if len(atoms) < 2:
        return []

    def along(atom: AxisRef) -> Keeps:
        axes = (atom,)
        return lambda way, now: all(
            table.without(a, axes) == table.without(b, axes) for a, b in zip(way.layouts, now.layouts, strict=True)
        )

    def together(way: Way, now: Way) -> bool:
        return all(_holds_all_or_none(table, layout, atoms) for layout in way.layouts)

    return [together, *map(along, atoms)]


def _holds_all_or_none(table: LayoutTable, layout: int, atoms: Sequence[AxisRef]) -> bool:
    """Whether all atoms are in one place of a layout, or none is anywhere."""
    sharding = table.shardings[layout]
    used = [axes for axes in (*sharding.axes, sharding.unreduced_axes) if axes]
    return not used or (len(used) == 1 and all(any(overlaps(a, b) for b in used[0]) for a in atoms))


def _improve_locally(model: ProgramModel, chosen: Sequence[int], nearby: Sequence[Keeps]) -> Chosen:
    """The best of the ways of each node that some move allows, given the others, until nothing changes."""
    found = list(chosen)
    least = _LEAST * model.cost(found)
    near: dict[tuple[int, int], list[int]] = {}

    def others(node: int) -> list[int]:
        ways, now = model.nodes[node].ways, found[node]
        key = id(ways), now
        if key not in near:
            near[key] = [i for i, way in enumerate(ways) if i != now and any(keeps(way, ways[now]) for keeps in nearby)]
        return near[key]

    waiting: Iterable[int] = range(len(model.nodes))
    for _ in range(_ROUNDS):
        changed = [node for node in waiting if _improve_node(model, found, node, others(node), least)]
        waiting = sorted({other for node in changed for other in model.neighbours(node)})
        if not changed:
            break
    return found


def _improve_node(model: ProgramModel, chosen: Chosen, number: int, others: Sequence[int], least: float) -> bool:
    node, before = model.nodes[number], chosen[number]
    if not others:
        return False
    values = [model.values[v] for v in dict.fromkeys(node.values) if v >= 0]

    def cost() -> float:
        own = node.times * node.ways[chosen[number]].cost
        return own + sum([model.value_cost(value, chosen) for value in values])

    best, limit = before, cost() - least
    for way in others:
        if node.times * node.ways[way].cost >= limit:
            continue
        chosen[number] = way
        paid = cost()
        if paid < limit:
            best, limit = way, paid
    chosen[number] = best
    return best != before
