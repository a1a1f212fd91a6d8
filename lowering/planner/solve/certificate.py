"""How good a choice is: a lower bound for what a program costs, and the worth of clusters of changed nodes.

See docs/explanation/planner.md#how-good-it-is and docs/explanation/planner.md#questions.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdy_jax.lowering.planner.problem.candidates import Candidate
from sdy_jax.lowering.planner.problem.layout_table import ValueClass
from sdy_jax.lowering.planner.problem.program_model import Chosen, ModelValue, Node, Port, ProgramModel
from sdy_jax.lowering.planner.solve.moves import Column, Move, different
from sdy_jax.lowering.planner.solve.pbqp import PBQP, Ports
from sdy_jax.lowering.planner.solve.solver import solve

# A lower bound for what a program costs, whatever the choice of layouts; and small exact problems on the true cost.
#
# The solver knows the costs of pairs only. A value that several nodes take therefore gets a *supply*: the set of
# layouts in which it exists. With its maker a supply costs the cheapest reshards that lead to all of them, and
# nothing with a user that takes one of them. So the problem is the exact one, and its bound holds for the true cost.
# Where a value may exist in very many sets of layouts, only the small ones are listed, and what users take beyond
# them costs too little: a bound still, though no longer the best one. See docs/explanation/planner.md#how-good-it-is.

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
    """The best choice that was found, no dearer than the given one, with a bound for all; memory has no multiplier
    here."""
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
        problem = PBQP([*own, *(np.zeros(len(supplies.reached)) for *_, supplies in shared)])
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

    def _add_reshard(self, problem: PBQP, value: ModelValue, use: Port) -> None:
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
        self, problem: PBQP, number: int, value: ModelValue, uses: Sequence[Port], supplies: _Supplies
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


# What choices of layouts are worth: clusters of nodes that changed together, and the price of each.
#
# A *cluster* is nodes that run otherwise than in the baseline and are connected by values that now go from one to the
# other for free: one reason serves all of them. Its worth is what the program costs more if the cluster is as
# in the baseline and its surroundings make the best of that. See docs/explanation/planner.md#questions.

NEAR = 300
"""Nodes around a cluster, or a freed node, that may change with it: some five layers of a transformer. Guessed: with
fewer, a question is told a price that is too high, as the surroundings cannot make the best of the change."""


class Term(NamedTuple):
    """By how much a part of the program costs more under one choice than under another.

    `value`: the number of the value whose reshards these are; None where it is the node's own. `operations`: how many
    more one device performs, where the term is the node's work.
    """

    change: float
    node: int
    value: int | None = None
    operations: float = 0.0


def clusters(model: ProgramModel, start: Sequence[int], chosen: Sequence[int]) -> list[list[int]]:
    """The clusters of a choice, by their first node; each in order."""
    moved = [n for n, node in enumerate(model.nodes) if not _alike(node, start[n], chosen[n])]
    leader = {n: n for n in moved}

    def led(node: int) -> int:
        while leader[node] != node:
            leader[node] = leader[leader[node]]
            node = leader[node]
        return node

    for one, other in _joined(model, start, chosen):
        if one in leader and other in leader:
            first, second = sorted((led(one), led(other)))
            leader[second] = first
    found: dict[int, list[int]] = {}
    for node in moved:
        found.setdefault(led(node), []).append(node)
    return list(found.values())


def _alike(node: Node, one: int, other: int) -> bool:
    return one == other or node.candidates[one].layouts == node.candidates[other].layouts


def _joined(model: ProgramModel, start: Sequence[int], chosen: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The pairs of nodes between which a value goes for free: from where it is made, or from one copy to both."""
    for value in model.values:
        if value.maker is None:
            continue
        made, first = model.layout(chosen, value.maker), dict[int, int]()
        for use in value.uses:
            taken = model.layout(chosen, use)
            if not model.prices.cost(value.shape, made, taken):
                yield value.maker.node, use.node
            elif taken != model.layout(start, use):
                yield first.setdefault(taken, use.node), use.node


def around(model: ProgramModel, nodes: Collection[int], most: int = NEAR) -> set[int]:
    """At most so many nodes next to some others, and next to these, nearest first."""
    found, members = dict.fromkeys(nodes), set(nodes)
    waiting = deque(nodes)
    while waiting and len(found) < len(members) + most:
        for other in model.neighbours(waiting.popleft()):
            if other not in found and len(found) < len(members) + most:
                found[other] = None
                waiting.append(other)
    return set(found) - members


def improved_near(model: ProgramModel, chosen: Sequence[int], near: Collection[int], moves: Sequence[Move]) -> Chosen:
    """The best choice that was found if only some nodes may change, each as the moves allow."""
    best = list(chosen)
    for move in moves:
        kept = {node: (best[node], *move.others(model.nodes[node].candidates, best[node])) for node in near}
        best = changed(model, best, kept)
    return best


def set_back(
    model: ProgramModel, start: Sequence[int], chosen: Sequence[int], cluster: Collection[int], moves: Sequence[Move]
) -> Chosen:
    """The choice with a cluster as in the baseline, and the best that was found around it."""
    back, members = list(chosen), set(cluster)
    for node in members:
        back[node] = start[node]
    return improved_near(model, back, around(model, members) - members, moves)


def compared(model: ProgramModel, one: Sequence[int], other: Sequence[int]) -> list[Term]:
    """What another choice pays more or less than one, part by part, the largest changes first."""
    found, values = list[Term](), dict[int, None]()
    for number, node in enumerate(model.nodes):
        if one[number] != other[number]:
            found += _own_terms(number, node, node.candidates[one[number]], node.candidates[other[number]])
            values.update(dict.fromkeys(value for value in node.values if value >= 0))
    for number in values:
        value = model.values[number]
        change = model.value_cost(value, other) - model.value_cost(value, one)
        found.append(Term(change, value.maker.node if value.maker else -1, number))
    return sorted((term for term in found if term.change), key=lambda term: (-abs(term.change), term.node))


def _own_terms(number: int, node: Node, one: Candidate, other: Candidate) -> Iterator[Term]:
    sent = sum(c.time for c in other.inside) - sum(c.time for c in one.inside)
    yield Term(node.times * sent, number)
    work = node.times * (other.cost - one.cost - sent)
    yield Term(work, number, None, node.times * (other.operations - one.operations))
