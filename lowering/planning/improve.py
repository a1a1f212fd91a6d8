"""Better choices for a whole program, from given ones.

Each *move* leaves every node a few of its ways and solves what is then a small problem for all nodes at once: those that
differ in one atom only, or those that keep all atoms together. In the end each node is tried alone on the true cost.
Source: spec of the planner, sections 4 and 12.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

import numpy as np

from sdy_jax.lowering.planning.enumerated import Way
from sdy_jax.lowering.planning.layout_table import LayoutTable, ShapeClass
from sdy_jax.lowering.planning.program_model import Chosen, ModelValue, Port, ProgramModel
from sdy_jax.lowering.planning.solver import Ports, Problem, solve
from sdy_jax.representation.axes import overlaps
from sdy_jax.representation.mesh import AxisRef

_MOST_MOVES = 12
_ROUNDS = 10
_LEAST = 1e-9
"""The share of the program's cost below which nothing is changed."""

Keeps = Callable[[Way, Way], bool]
"""`keeps(way, now)`: whether a move allows a way to a node that has the way `now`."""


def improved(model: ProgramModel, start: Sequence[int], table: LayoutTable, atoms: Sequence[AxisRef]) -> Chosen:
    """A choice that costs no more than the start, and the start where none was found that costs less."""
    moves = _moves(table, atoms)
    best, failed = list(start), 0
    least = model.cost(best)
    for _, move in zip(range(_MOST_MOVES), cycle(moves)):
        found = _Restricted(model, best, move).solved()
        cost = model.cost(found)
        if cost < least * (1 - _LEAST):
            best, least, failed = found, cost, 0
        else:
            failed += 1
        if failed == len(moves):
            break
    nearby = moves[-len(atoms) :]
    tried = [improve_locally(model, best, nearby), improve_locally(model, start, nearby), list(start)]
    costs = [model.cost(choice) for choice in tried]
    lowest = min(costs)
    return next(c for c, cost in reversed(list(zip(tried, costs, strict=True))) if cost <= lowest * (1 + _LEAST))


def _moves(table: LayoutTable, atoms: Sequence[AxisRef]) -> list[Keeps]:
    if len(atoms) < 2:
        return [lambda way, now: True]

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


class _Restricted:
    """The problem in which each node may only have the ways that a move leaves it, and its own."""

    def __init__(self, model: ProgramModel, now: Sequence[int], keeps: Keeps):
        self._model, self._now = model, now
        self._kept: dict[tuple[int, int], list[int]] = {}
        self._prices: dict[object, np.ndarray] = {}
        self._columns: dict[tuple[int, int], tuple[list[int], np.ndarray]] = {}
        self._allowed = [self._allowed_ways(node, keeps) for node in range(len(model.nodes))]

    def solved(self) -> Chosen:
        """The best choice that the solver finds."""
        model = self._model
        self._learn_prices()
        costs = [self._own_costs(number) for number in range(len(model.nodes))]
        number_of, problem_costs, start = list[int](), list[np.ndarray](), list[int]()
        homes = dict[int, tuple[int, list[int]]]()
        for number, node in enumerate(model.nodes):
            number_of.append(len(problem_costs))
            problem_costs.append(costs[number])
            start.append(0)
            for made in dict.fromkeys(node.values):
                value = model.values[made]
                if made >= 0 and value.maker is not None and value.maker.node == number and len(self._uses(value)) > 1:
                    layouts = self._layouts_around(value)
                    homes[made] = len(problem_costs), layouts
                    problem_costs.append(self._home_costs(value, layouts))
                    start.append(layouts.index(model.layout(self._now, value.maker)))
        problem = Problem(problem_costs)
        for made, value in enumerate(model.values):
            if value.maker is not None and value.uses:
                self._add_edges(problem, number_of, value, homes.get(made))
        choice = solve(problem, start).choice
        return [self._allowed[number][choice[number_of[number]]] for number in range(len(model.nodes))]

    def _learn_prices(self) -> None:
        """Prices all reshards that may occur, class by class: at once they cost little more than one by one."""
        found: dict[ShapeClass, dict[int, None]] = {}
        for value in self._model.values:
            if value.maker is not None and value.uses:
                found.setdefault(value.shape, {}).update(dict.fromkeys(self._layouts_around(value)))
        for of, layouts in found.items():
            self._model.prices.learn(of, layouts)

    def _own_costs(self, number: int) -> np.ndarray:
        """The costs of a node's ways, and of holding what they make for a single use."""
        model, node = self._model, self._model.nodes[number]
        costs = node.times * np.array([node.ways[way].cost for way in self._allowed[number]])
        if not model.holding:
            return costs
        for made in dict.fromkeys(node.values):
            value = model.values[made]
            single = (
                made >= 0 and value.maker is not None and value.maker.node == number and len(self._uses(value)) == 1
            )
            if single and not value.is_argument:
                assert value.maker is not None
                layouts, column = self._column(value.maker)
                held = [model.prices.local_bytes(value.shape, n) * (value.needed[0][0] - number) for n in layouts]
                costs = costs + model.holding * np.array(held)[column]
        return costs

    def _home_costs(self, value: ModelValue, layouts: list[int]) -> np.ndarray:
        """What it costs to hold a value of several users in each layout."""
        model = self._model
        if not model.holding:
            return np.zeros(len(layouts))
        assert value.maker is not None
        made = self._column(value.maker)[0] if value.is_argument else []
        first = min(begin for begin, _ in value.needed) if value.is_argument else value.maker.node
        extent = max(end for _, end in value.needed) - first + 1
        held = [0.0 if n in made else model.prices.local_bytes(value.shape, n) * extent for n in layouts]
        return model.holding * np.array(held)

    def _allowed_ways(self, number: int, keeps: Keeps) -> list[int]:
        ways, now = self._model.nodes[number].ways, self._now[number]
        key = id(ways), now
        if key not in self._kept:
            others = [i for i, way in enumerate(ways) if i != now and keeps(way, ways[now])]
            self._kept[key] = [now, *others]
        return self._kept[key]

    def _uses(self, value: ModelValue) -> list[Port]:
        """The places where a value is taken; one for all slots of a node that take it in equal layouts."""
        found: dict[object, Port] = {}
        for use in value.uses:
            layouts, column = self._column(use)
            found.setdefault((use.node, tuple(layouts), column.tobytes()), use)
        return list(found.values())

    def _column(self, port: Port) -> tuple[list[int], np.ndarray]:
        """The layouts that a port may have, in order, and for each allowed way the index of its own."""
        allowed, ways = self._allowed[port.node], self._model.nodes[port.node].ways
        key = id(allowed), port.slot
        if key not in self._columns:
            each = [ways[way].layouts[port.slot] for way in allowed]
            layouts = sorted(set(each))
            index = {layout: i for i, layout in enumerate(layouts)}
            self._columns[key] = layouts, np.array([index[layout] for layout in each])
        return self._columns[key]

    def _layouts_around(self, value: ModelValue) -> list[int]:
        assert value.maker is not None
        found = {layout for port in (value.maker, *value.uses) for layout in self._column(port)[0]}
        return sorted(found)

    def _prices_to(self, value: ModelValue, sources: list[int], use: Port, targets: list[int]) -> np.ndarray:
        """The prices of bringing a value to a use, and of holding what is brought there as long as that takes."""
        model = self._model
        prices = self._matrix(value.shape, sources, targets)
        begin, end = value.needed[value.uses.index(use)]
        if not model.holding:
            return prices
        held = np.array([model.prices.local_bytes(value.shape, target) * (end - begin + 1) for target in targets])
        apart = np.array([[source != target for target in targets] for source in sources])
        return prices + apart * held * (model.holding / value.times)

    def _matrix(self, of: ShapeClass, sources: list[int], targets: list[int]) -> np.ndarray:
        key = of, tuple(sources), tuple(targets)
        if key not in self._prices:
            self._prices[key] = self._model.prices.matrix(of, sources, targets)
        return self._prices[key]

    def _add_edges(
        self, problem: Problem, number_of: list[int], value: ModelValue, home: tuple[int, list[int]] | None
    ) -> None:
        assert value.maker is not None
        (made, rows), uses, maker = self._column(value.maker), self._uses(value), number_of[value.maker.node]
        if home is None:
            taken, columns = self._column(uses[0])
            ports = Ports(rows, columns, self._prices_to(value, made, uses[0], taken), value.times)
            problem.add(maker, number_of[uses[0].node], ports)
            return
        number, layouts = home
        every = np.arange(len(layouts))
        problem.add(maker, number, Ports(rows, every, self._matrix(value.shape, made, layouts), value.times))
        for use in uses:
            taken, columns = self._column(use)
            prices = self._prices_to(value, layouts, use, taken)
            if len(made) == 1:
                prices = np.minimum(prices, self._prices_to(value, made, use, taken))
            problem.add(number, number_of[use.node], Ports(every, columns, prices, value.times))


def improve_locally(model: ProgramModel, chosen: Sequence[int], nearby: Sequence[Keeps]) -> Chosen:
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

    for _ in range(_ROUNDS):
        changed = [node for node in range(len(model.nodes)) if _improve_node(model, found, node, others(node), least)]
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
