"""Local improvement: each node alone gets the candidate with which the program costs least, given those of the others.

What a value costs depends on the layouts in which it is taken, not on how many users take it in each. So these are
counted, and a candidate is priced by the layouts that are left without its node: a scalar that all layers take has
thousands of users.
See docs/explanation/planner.md#moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sdy_jax.lowering.model.nodes import Chosen, ModelValue, Node
from sdy_jax.lowering.model.program_model import ProgramModel
from sdy_jax.lowering.solve.moves import Move

_ROUNDS = 10
"""Rounds of local improvement. Guessed, a guard: it ends as soon as a round changes nothing."""

LEAST = 1e-9
"""The share of the program's cost below which nothing is changed. Given: the rounding of sums, so that ties keep the
proposal."""


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
    """As `_Beside`, where holding has a price: `taken` by all uses in their order; `indices`: of those of the node, in
    the order of its `slots`."""

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
            held = self._model.holding_costs
            self._paid[number] = self._model.value_cost(value, self.chosen) if held else self._moved_now(number, value)
        return self._paid[number]

    def _moved_now(self, number: int, value: ModelValue) -> float:
        """What a value costs where holding costs nothing."""
        if value.maker is None or not value.uses:
            return 0.0
        made = self._model.layout(self.chosen, value.maker)
        taken = [layout for layout, count in self._counts(number).items() if count]
        return _Beside(value, frozenset(taken), made, (), None).paid(self._model, ())

    def _around(self, number: int) -> _Around:
        node, beside_of = self._model.nodes[number], self._held_beside if self._model.holding_costs else self._beside
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
        """As `_beside`, where holding has a price: it depends on when each use is."""
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
