"""Better choices for a program from given ones: the solver over all candidates, moves, and steps of single nodes.

See docs/explanation/planner.md#moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import NamedTuple

from sdy_jax.ir.meshes import AxisRef
from sdy_jax.lowering.planner.problem.layout_table import LayoutTable
from sdy_jax.lowering.planner.problem.planning_problem import PlanningProblem
from sdy_jax.lowering.planner.problem.program_model import Chosen, ModelValue, Node, ProgramModel
from sdy_jax.lowering.planner.solve.moves import Move, RestrictedProgram, Solved, everything, learn_prices, moves_of

# Local improvement: each node alone gets the candidate with which the program costs least, given those of the others.
#
# What a value costs depends on the layouts in which it is taken, not on how many users take it in each. So these are
# counted, and a candidate is priced by the layouts that are left without its node: a scalar that all layers take has
# thousands of users. See docs/explanation/planner.md#moves.

_ROUNDS = 10
"""Rounds of local improvement. Guessed, a guard: it ends as soon as a round changes nothing."""

LEAST = 1e-9
"""The share of the program's cost below which nothing is changed. Given: the rounding of sums, so that ties keep the
baseline."""


def improved_locally(model: ProgramModel, chosen: Sequence[int], nearby: Sequence[Move], cost: float) -> Chosen:
    """The best of the candidates of each node that some move allows, given the others, until nothing changes; `cost`:
    that of the choice."""
    search = _LocalSearch(model, chosen, nearby, LEAST * cost)
    waiting: Iterable[int] = range(len(model.nodes))
    for _ in range(_ROUNDS):
        changed = [node for node in waiting if search.improve(node)]
        waiting = sorted({other for node in changed for other in model.neighbours(node)})
        if not changed:
            break
    return search.chosen


class _Beside(NamedTuple):
    """A value that a node takes or makes, as all other nodes leave it: `taken`: the layouts in which these take it;
    `made`: that in which one of them makes it. `slots`: those of the node that take it; `maker`: the one that makes it.
    """

    value: ModelValue
    taken: frozenset[int]
    made: int
    slots: tuple[int, ...]
    maker: int | None

    def own(self, layouts: Sequence[int]) -> tuple[int, ...]:
        """Those of the node's layouts that the value is taken or made in."""
        slots = self.slots if self.maker is None else (*self.slots, self.maker)
        return tuple([layouts[slot] for slot in slots])

    def paid(self, model: ProgramModel, layouts: Sequence[int]) -> float:
        """What the value costs if the node has these layouts."""
        made = self.made if self.maker is None else layouts[self.maker]
        wanted = self.taken.union([layouts[slot] for slot in self.slots]) - {made}
        return self.value.times * model.spread(self.value.shape, made, wanted) if wanted else 0.0


class _HeldBeside(NamedTuple):
    """As `_Beside`, where memory has a multiplier: `taken` by all uses in their order; `indices`: of those of the node,
    in the order of its `slots`."""

    value: ModelValue
    taken: list[int]
    made: int
    indices: list[int]
    slots: list[int]
    maker: int | None

    def own(self, layouts: Sequence[int]) -> tuple[int, ...]:
        """Those of the node's layouts that the value is taken or made in."""
        slots = self.slots if self.maker is None else [*self.slots, self.maker]
        return tuple([layouts[slot] for slot in slots])

    def paid(self, model: ProgramModel, layouts: Sequence[int]) -> float:
        """What the value costs if the node has these layouts."""
        taken = list(self.taken)
        for index, slot in zip(self.indices, self.slots, strict=True):
            taken[index] = layouts[slot]
        return model.paid(self.value, self.made if self.maker is None else layouts[self.maker], taken)


class _Around:
    """A node and the values around it, as all other nodes leave them."""

    def __init__(self, model: ProgramModel, node: Node, beside: Sequence[_Beside | _HeldBeside]):
        self._model, self._node, self._beside = model, node, beside
        self._paid: list[dict[tuple[int, ...], float]] = [{} for _ in beside]

    def cost(self, candidate: int, limit: float) -> float:
        """What all of them cost with a candidate of the node; infinite where that is not below a limit."""
        layouts = self._node.candidates[candidate].layouts
        own, paid = self._node.times * self._node.candidates[candidate].cost, 0.0
        for beside, known in zip(self._beside, self._paid, strict=True):
            taken = beside.own(layouts)
            if taken not in known:  # several candidates take the value alike
                known[taken] = beside.paid(self._model, layouts)
            paid += known[taken]
            if own + paid >= limit:
                return math.inf
        return own + paid


class _Near(NamedTuple):
    """The candidates that a node may change to, and what the cheapest of them costs itself."""

    candidates: list[int]
    least: float


class _LocalSearch:
    """A choice that changes node by node. Invariant: `_taken` counts per value, of those that were asked for, the uses
    in each layout under it."""

    def __init__(self, model: ProgramModel, chosen: Sequence[int], nearby: Sequence[Move], least: float) -> None:
        self._model, self._nearby, self.chosen, self._least = model, nearby, list(chosen), least
        self._near: dict[tuple[int, int], _Near] = {}
        self._taken: dict[int, dict[int, int]] = {}
        self._paid: dict[int, float] = {}
        """Per value that was asked for, what it costs under the choice."""

    def improve(self, number: int) -> bool:
        """Gives a node its best candidate; whether that is another one."""
        node, before, near = self._model.nodes[number], self.chosen[number], self._near_of(number)
        if not near.candidates:
            return False
        limit = self._cost_now(node, before) - self._least
        if node.times * near.least >= limit:  # most nodes: what is around them need not be looked at
            return False
        around, best = self._around(number), before
        for candidate in near.candidates:
            if node.times * node.candidates[candidate].cost < limit and (paid := around.cost(candidate, limit)) < limit:
                best, limit = candidate, paid
        if best == before:
            return False
        self._choose(number, best)
        return True

    def _near_of(self, number: int) -> _Near:
        candidates, now = self._model.nodes[number].candidates, self.chosen[number]
        key = id(candidates), now
        if key not in self._near:
            others = sorted({candidate for move in self._nearby for candidate in move.others(candidates, now)})
            self._near[key] = _Near(others, min([candidates[other].cost for other in others], default=0.0))
        return self._near[key]

    def _choose(self, number: int, candidate: int) -> None:
        node, before = self._model.nodes[number], self._model.nodes[number].candidates[self.chosen[number]]
        for slot, value in enumerate(node.values[: node.takes]):
            if value in self._taken:
                counts, layout = self._taken[value], node.candidates[candidate].layouts[slot]
                counts[before.layouts[slot]] -= 1
                counts[layout] = counts.get(layout, 0) + 1
        for value in node.values:
            self._paid.pop(value, None)
        self.chosen[number] = candidate

    def _cost_now(self, node: Node, now: int) -> float:
        """What a node and the values around it cost with its present candidate."""
        return node.times * node.candidates[now].cost + sum(map(self._paid_now, _values_around(node)))

    def _paid_now(self, number: int) -> float:
        """What a value costs."""
        if number not in self._paid:
            value = self._model.values[number]
            held = self._model.charges_memory
            self._paid[number] = self._model.value_cost(value, self.chosen) if held else self._moved_now(number, value)
        return self._paid[number]

    def _moved_now(self, number: int, value: ModelValue) -> float:
        """What a value costs where memory costs nothing."""
        if value.maker is None or not value.uses:
            return 0.0
        made = self._model.layout(self.chosen, value.maker)
        taken = [layout for layout, count in self._counts(number).items() if count]
        return _Beside(value, frozenset(taken), made, (), None).paid(self._model, ())

    def _around(self, number: int) -> _Around:
        node, beside_of = self._model.nodes[number], self._held_beside if self._model.charges_memory else self._beside
        return _Around(self._model, node, [b for value in _values_around(node) if (b := beside_of(number, value))])

    def _beside(self, node: int, number: int) -> _Beside | None:
        """A value around a node; None if it costs nothing."""
        value, around = self._model.values[number], self._model.nodes[node]
        if value.maker is None or not value.uses:
            return None
        slots = tuple([slot for slot, taken in enumerate(around.values[: around.takes]) if taken == number])
        maker = value.maker.slot if value.maker.node == node else None
        now = around.candidates[self.chosen[node]].layouts
        taken = self._taken_beside(number, [now[slot] for slot in slots])
        return _Beside(value, taken, self._model.layout(self.chosen, value.maker), slots, maker)

    def _held_beside(self, node: int, number: int) -> _HeldBeside | None:
        """As `_beside`, where memory has a multiplier: it depends on when each use is."""
        value = self._model.values[number]
        if value.maker is None or not value.uses:
            return None
        taken = [self._model.layout(self.chosen, use) for use in value.uses]
        indices = [index for index, use in enumerate(value.uses) if use.node == node]
        slots = [value.uses[index].slot for index in indices]
        maker = value.maker.slot if value.maker.node == node else None
        return _HeldBeside(value, taken, self._model.layout(self.chosen, value.maker), indices, slots, maker)

    def _taken_beside(self, number: int, own: Sequence[int]) -> frozenset[int]:
        """The layouts in which a value is taken beside these uses."""
        return frozenset([layout for layout, count in self._counts(number).items() if count > own.count(layout)])

    def _counts(self, number: int) -> dict[int, int]:
        if number not in self._taken:
            uses = self._model.values[number].uses
            counts = self._taken[number] = {}
            for use in uses:
                layout = self._model.layout(self.chosen, use)
                counts[layout] = counts.get(layout, 0) + 1
        return self._taken[number]


def _values_around(node: Node) -> list[int]:
    """The numbers of the values that a node takes and makes, each once."""
    return [number for number in dict.fromkeys(node.values) if number >= 0]


# Better choices for a whole program, from given ones.
#
# All candidates are left to all nodes, and the solver chooses for all at once. Where it cannot prove that nothing
# costs much less, *moves* from the same start are tried, too: each leaves every node a few of its candidates, those
# that differ in one atom only, or those that keep all atoms together. All candidates once more after them found
# nothing in seven of seven solves of an LSTM's step on 2 x 4 (2026-11). In the end each node is tried alone on the
# true cost. See docs/explanation/planner.md#moves.

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


# Choices for a planning problem, as many as planning may take the time for.

_WIDE = 200_000
"""Candidates of all nodes from which on a choice near another one is made by changes of one node after the other.
Measured (2026-11): the step of a pipeline of 2 stages on parts 2 x 2 x 2 has 441,000; three multipliers of memory took
26 of 38 CPU s of planning by solves, whose last trial held 4.4 MB at 1.02 of the cost of the first, and 1 s so, which
held 4.0 MB at 1.04. Steps of four layers on 4 x 2 have 30,000 to 40,000, and are solved in 0.3 s."""


class Improver:
    """Makes choices for a planning problem; `left` is how many may still be made."""

    def __init__(self, program: PlanningProblem, left: float = math.inf):
        self.program, self.left = program, left

    def improved(self, start: Chosen, nearby: bool = False) -> Chosen:
        """A choice that costs no more than a given one, or than the baseline's; that itself where none may be made.

        `nearby`: the given one was the best at prices that were a little different.
        """
        program = self.program
        if start != program.start:
            start = min(program.start, start, key=program.model.cost)
        if self.left < 1:
            return start
        self.left -= 1
        is_wide = nearby and sum(len(node.candidates) for node in program.model.nodes) >= _WIDE
        return (improved_nearby if is_wide else improved)(program.model, start, program.table, program.atoms)
