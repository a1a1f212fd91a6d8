"""Better choices for a whole program, from given ones.

All candidates are left to all nodes, and the solver chooses for all at once. Where it cannot prove that nothing costs
much less, *moves* from the same start are tried, too: each leaves every node a few of its candidates, those that differ
in one atom only, or those that keep all atoms together. All candidates once more after them found nothing in seven of
seven solves of an LSTM's step on 2 x 4 (2026-11). In the end each node is tried alone on the true cost.
See docs/explanation/planner.md#moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

from sdy_jax.lowering.model.layout_table import LayoutTable
from sdy_jax.lowering.model.nodes import Chosen
from sdy_jax.lowering.model.program_model import ProgramModel
from sdy_jax.lowering.solve.local_search import LEAST, improved_locally
from sdy_jax.lowering.solve.moves import Move, everything, moves_of
from sdy_jax.lowering.solve.restriction import RestrictedProgram, Solved, learn_prices
from sdy_jax.representation.mesh import AxisRef

_MOST_MOVES = 12
"""Moves that are tried. Guessed, a guard: two axes have three moves, and it ends once all of them fail in a row."""

_MOST_AT_ONCE = 600
"""Candidates of a node up to which all candidates are left to all nodes: those of three axes, but not of four. Guessed,
a guard of planning time and memory: tables have the square of that."""


def improved(model: ProgramModel, start: Sequence[int], table: LayoutTable, atoms: Sequence[AxisRef]) -> Chosen:
    """A choice that costs no more than the start, and the start where none was found that costs less."""
    moves, costs = moves_of(table, atoms), _Costs(model)
    best = _all_at_once(costs, start)
    choice = best.choice
    if moves and not best.is_least:
        moved = _moved(costs, list(start), moves)
        choice = moved if costs.is_cheaper(moved, choice) else choice
    return _node_by_node(costs, start, choice, moves, atoms)


def improved_nearby(model: ProgramModel, start: Sequence[int], table: LayoutTable, atoms: Sequence[AxisRef]) -> Chosen:
    """As `improved`, by changes of one node after the other alone, which take a small part of the time."""
    return _node_by_node(_Costs(model), start, list(start), moves_of(table, atoms), atoms)


def _node_by_node(
    costs: _Costs, start: Sequence[int], choice: Chosen, moves: Sequence[Move], atoms: Sequence[AxisRef]
) -> Chosen:
    found = improved_locally(costs.model, choice, moves[-len(atoms) :] or [everything()], costs.of(choice))
    return found if costs.is_cheaper(found, start) else list(start)


class _Costs:
    """What choices cost, each of which is summed up once."""

    def __init__(self, model: ProgramModel):
        self.model = model
        self._known: dict[tuple[int, ...], float] = {}

    def of(self, chosen: Sequence[int]) -> float:
        key = tuple(chosen)
        if key not in self._known:
            self._known[key] = self.model.cost(chosen)
        return self._known[key]

    def is_cheaper(self, found: Sequence[int], other: Sequence[int]) -> bool:
        return list(found) != list(other) and self.of(found) < self.of(other) * (1 - LEAST)


def _all_at_once(costs: _Costs, start: Sequence[int]) -> Solved:
    """What the solver chooses from all candidates of all nodes, if these are few enough and that costs less; else the
    start."""
    if max(len(node.candidates) for node in costs.model.nodes) > _MOST_AT_ONCE:
        return Solved(list(start), is_least=False)
    found = RestrictedProgram(costs.model, start, everything()).solved()
    return found if costs.is_cheaper(found.choice, start) else found._replace(choice=list(start))


def _moved(costs: _Costs, start: Chosen, moves: Sequence[Move]) -> Chosen:
    """What the moves lead to, one after the other, until none leads further: all have failed in a row, or all others
    since one did not, which left nothing of its own kind to be found."""
    model, best, failed, others = costs.model, start, 0, len(moves)
    first = {move: RestrictedProgram(model, start, move) for move in moves}
    learn_prices(model, first.values())
    for _, move in zip(range(_MOST_MOVES), cycle(moves)):
        program = first[move] if best is start else RestrictedProgram(model, best, move)
        found = program.solved().choice
        if costs.is_cheaper(found, best):
            best, failed, others = found, 0, len(moves) - 1
        else:
            failed += 1
        if failed == others:
            break
    return best
