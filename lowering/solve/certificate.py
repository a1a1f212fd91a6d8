"""A lower bound for what a program costs, whatever the choice of layouts; and small exact problems on the true cost.

The solver knows the costs of pairs only. A value that several nodes take therefore gets a *supply*: the set of layouts
in which it exists. With its maker a supply costs the cheapest reshards that lead to all of them, and nothing with a
user that takes one of them. So the problem is the exact one, and its bound holds for the true cost. Where a value may
exist in very many sets of layouts, only the small ones are listed, and what users take beyond them costs too little: a
bound still, though no longer the best one.
See docs/explanation/planner.md#how-good-it-is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdy_jax.lowering.model.layout_table import ValueClass
from sdy_jax.lowering.model.nodes import Chosen, ModelValue, Port
from sdy_jax.lowering.model.program_model import ProgramModel
from sdy_jax.lowering.solve.columns import Column, different
from sdy_jax.lowering.solve.solver import Ports, Problem, solve

Costs = NDArray[np.float64]

Allowed = Mapping[int, Sequence[int]]
"""Per node that may change, the candidates that it may have, the present one among them."""

MOST_SUPPLIES = 400
"""Sets of layouts of one value up to which all sets of a size are listed. One axis has at most some dozen. Measured
(2026-11): two have some 300 sets of two layouts, with which bounds were 1e-5 below the result, and 0.2 to 0.5 below
with single ones."""


class Certificate(NamedTuple):
    """A choice, what it costs, and the cost below which there is none."""

    choice: Chosen
    cost: float
    bound: float


def certified(model: ProgramModel, chosen: Sequence[int]) -> Certificate:
    """The best choice that was found, no dearer than the given one, with a bound for all; holding has no price here."""
    choice, bound = _Exact(
        model, chosen, {n: range(len(node.candidates)) for n, node in enumerate(model.nodes)}
    ).solved()
    choice = _cheaper(model, chosen, choice)
    cost = model.cost(choice)
    return Certificate(choice, cost, min(cost, bound))


def changed(model: ProgramModel, chosen: Sequence[int], allowed: Allowed) -> Chosen:
    """The best choice that was found if only some nodes may change, no dearer than the given one."""
    return _cheaper(model, chosen, _Exact(model, chosen, allowed).solved()[0])


def _cheaper(model: ProgramModel, one: Sequence[int], other: Sequence[int]) -> Chosen:
    return list(other if model.cost(other) < model.cost(one) else one)


class _Supplies(NamedTuple):
    """The sets of layouts in which a value may exist.

    `reached`: the layouts to which reshards lead; `closed`: these and all that come from them for free. `beyond`: what
    a user pays at least for a layout that the largest sets, of `most` layouts, lack.
    """

    reached: list[frozenset[int]]
    closed: list[frozenset[int]]
    beyond: Mapping[int, float]
    most: int

    def price(self, supply: int, taken: int) -> float:
        """What a user of a supply pays for a layout."""
        if taken in self.closed[supply]:
            return 0.0
        return self.beyond.get(taken, np.inf) if len(self.reached[supply]) == self.most else np.inf


class _Exact:
    """The part of a program that may change as a problem of the solver: the nodes that make or take its values, then
    the supplies of values that several nodes take."""

    def __init__(self, model: ProgramModel, chosen: Sequence[int], allowed: Allowed):
        self._model, self._chosen = model, chosen
        touched = dict.fromkeys(value for node in sorted(allowed) for value in model.nodes[node].values if value >= 0)
        self._values = [model.values[value] for value in touched if model.values[value].maker is not None]
        ends = (port.node for value in self._values for port in (_maker(value), *value.uses))
        self._allowed = {node: allowed.get(node, (chosen[node],)) for node in sorted({*allowed, *ends})}
        self._number = {node: number for number, node in enumerate(self._allowed)}
        self._columns: dict[tuple[int, object, int], Column] = {}
        self._supplies: dict[object, _Supplies] = {}
        self._prices: dict[object, Costs] = {}

    def solved(self) -> tuple[Chosen, float]:
        """The solver's choice for all nodes, and its bound for the part."""
        own, start = list[Costs](), list[int]()
        for node, candidates in self._allowed.items():
            own.append(
                self._model.nodes[node].times
                * np.array([self._model.nodes[node].candidates[w].cost for w in candidates])
            )
            start.append(list(candidates).index(self._chosen[node]))
        used = [(value, different(value.uses, self._column)) for value in self._values]
        shared = [(value, uses, self._supplies_of(value, uses)) for value, uses in used if len(uses) > 1]
        problem = Problem([*own, *(np.zeros(len(supplies.reached)) for *_, supplies in shared)])
        for value, uses in used:
            if len(uses) == 1:
                self._add_reshard(problem, value, uses[0])
        for number, (value, uses, supplies) in enumerate(shared, len(own)):
            self._add_supply(problem, number, value, uses, supplies)
            start.append(self._present_supply(value, uses, supplies))
        solution, choice = solve(problem, start), list(self._chosen)
        for (node, candidates), candidate in zip(self._allowed.items(), solution.choice, strict=False):
            choice[node] = candidates[candidate]
        return choice, solution.bound

    def _column(self, port: Port) -> Column:
        candidates, allowed = self._model.nodes[port.node].candidates, self._allowed[port.node]
        key = id(candidates), len(candidates) if isinstance(allowed, range) else tuple(allowed), port.slot
        if key not in self._columns:
            self._columns[key] = Column.of(candidates, allowed, port.slot)
        return self._columns[key]

    def _add_reshard(self, problem: Problem, value: ModelValue, use: Port) -> None:
        maker = _maker(value)
        (sources, rows), (targets, cols) = self._column(maker), self._column(use)
        key = value.shape, tuple(sources), tuple(targets)
        if key not in self._prices:
            self._prices[key] = self._model.prices.matrix(value.shape, sources, targets)
        edge = Ports(rows, cols, self._prices[key], value.times)
        problem.add(self._number[maker.node], self._number[use.node], edge)

    # Values that several nodes take.

    def _supplies_of(self, value: ModelValue, uses: Sequence[Port]) -> _Supplies:
        wanted = tuple(sorted({layout for use in uses for layout in self._column(use).layouts}))
        made = tuple(self._column(_maker(value)).layouts)
        key = value.shape, wanted, made, len(uses)
        if key not in self._supplies:
            self._supplies[key] = self._new_supplies(value.shape, wanted, made, len(uses))
        return self._supplies[key]

    def _new_supplies(self, of: ValueClass, wanted: Sequence[int], made: Sequence[int], users: int) -> _Supplies:
        """All sets of layouts that as many users may want, or all up to a size."""
        prices = self._model.prices
        prices.learn(of, (*wanted, *made))
        free = {a: frozenset([b for b in wanted if not prices.cost(of, a, b)]) for a in wanted}
        found, most = _closed_sets(free, min(users, len(wanted)))
        beyond = dict[int, float]()
        if most < min(users, len(wanted)):
            # Each further layout is reached by a reshard of its own, which those that take it share: at most all users
            # but those of the set itself.
            nearest = {
                b: min([p for a in (*wanted, *made) if (p := prices.cost(of, a, b))], default=0.0) for b in wanted
            }
            beyond = {b: min(nearest[a] for a in wanted if b in free[a]) / (users - most) for b in wanted}
        return _Supplies(list(found.values()), list(found), beyond, most)

    def _spread(self, value: ModelValue, made: int, reached: frozenset[int]) -> float:
        rest = reached - {made}
        return self._model.spread(value.shape, made, rest) if rest else 0.0

    def _present_supply(self, value: ModelValue, uses: Sequence[Port], supplies: _Supplies) -> int:
        """The cheapest supply for the layouts that users take now."""
        made, taken = (
            self._model.layout(self._chosen, _maker(value)),
            [self._model.layout(self._chosen, u) for u in uses],
        )

        def cost(supply: int) -> float:
            paid = sum([supplies.price(supply, layout) for layout in taken])
            return paid + self._spread(value, made, supplies.reached[supply]) if paid < np.inf else paid

        return min(range(len(supplies.reached)), key=cost)

    def _add_supply(
        self, problem: Problem, number: int, value: ModelValue, uses: Sequence[Port], supplies: _Supplies
    ) -> None:
        maker, every = _maker(value), np.arange(len(supplies.reached))
        sources, rows = self._column(maker)
        key: object = (id(supplies), tuple(sources), "made")
        if key not in self._prices:
            self._prices[key] = _array([self._spread(value, a, s) for s in supplies.reached] for a in sources)
        problem.add(self._number[maker.node], number, Ports(rows, every, self._prices[key], value.times))
        for use in uses:
            targets, cols = self._column(use)
            key = id(supplies), tuple(targets)
            if key not in self._prices:
                self._prices[key] = _array([supplies.price(s, b) for b in targets] for s in every.tolist())
            problem.add(number, self._number[use.node], Ports(every, cols, self._prices[key], value.times))


def _closed_sets(free: Mapping[int, frozenset[int]], most: int) -> tuple[dict[frozenset[int], frozenset[int]], int]:
    """Sets of layouts of which none comes from another for free, by all that does come from them; those of at most
    `most` layouts, or up to the size that is returned."""
    found: dict[frozenset[int], frozenset[int]] = {}
    for size in range(1, most + 1):
        new = dict(found)
        for layouts in itertools.combinations(free, size):
            if size > 1 and any(b in free[a] for a, b in itertools.permutations(layouts, 2)):
                continue
            new.setdefault(frozenset().union(*(free[a] for a in layouts)), frozenset(layouts))
            if size > 1 and len(new) > MOST_SUPPLIES:
                return found, size - 1
        if len(new) == len(found):
            break
        found = new
    return found, most


def _maker(value: ModelValue) -> Port:
    assert value.maker is not None
    return value.maker


def _array(rows: Iterable[Sequence[float]]) -> Costs:
    return np.array(list(rows))
