"""Moves, which leave each node a few candidates, and the PBQP that a move leaves, with Steiner nodes of values.

See docs/explanation/planner.md#moves and docs/explanation/planner.md#steiner-nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdy_jax.ir.meshes import AxisRef, overlaps
from sdy_jax.lowering.planner.problem.candidates import Candidate
from sdy_jax.lowering.planner.problem.layout_table import LayoutTable, ValueClass
from sdy_jax.lowering.planner.problem.program_model import Chosen, ModelValue, Port, ProgramModel
from sdy_jax.lowering.planner.solve.pbqp import PBQP, Ports, identity, zeros
from sdy_jax.lowering.planner.solve.solver import solve

# The layouts that ports of nodes may have, where each node may only have some of its candidates.


class Column(NamedTuple):
    """The layouts that a port may have, in order, and for each candidate of its node the index of its own."""

    layouts: list[int]
    of_candidate: NDArray[np.intp]

    @classmethod
    def of(cls, candidates: Sequence[Candidate], allowed: Iterable[int], slot: int) -> Column:
        """The column of a slot of a node that may have these of its candidates."""
        each = [candidates[candidate].layouts[slot] for candidate in allowed]
        index = {layout: i for i, layout in enumerate(sorted(set(each)))}
        return cls(list(index), np.array([index[layout] for layout in each]))


def different(uses: Iterable[Port], column: Callable[[Port], Column]) -> list[Port]:
    """The uses of a value, one for all slots of a node that take it in equal layouts."""
    found: dict[object, Port] = {}
    for use in uses:
        layouts, of_candidate = column(use)
        found.setdefault((use.node, tuple(layouts), of_candidate.tobytes()), use)
    return list(found.values())


# Moves: the candidates that each node may take instead of the one it has, if not all of them.
#
# See docs/explanation/planner.md#moves.

Layouts = NDArray[np.generic]
"""The numbers of layouts, or what is said of each, by candidate and slot."""

Allowed = Callable[[int], Layouts]
"""Per candidate and slot, whether a node may have it that has the candidate of this index: it may have those all of
whose slots say so."""


class Move:
    """What a move allows; remembered, as many nodes share their candidates.

    Args:
        allowed: of the layouts of candidates, what a node with one of them may have.
    """

    def __init__(self, allowed: Callable[[Layouts], Allowed]):
        self._allowed = allowed
        self._of_candidates: dict[int, tuple[Sequence[Candidate], Allowed]] = {}
        self._others: dict[tuple[int, int], list[int]] = {}

    def others(self, candidates: Sequence[Candidate], now: int) -> list[int]:
        """The other candidates that a node may take that has one of them."""
        key = id(candidates), now
        if key not in self._others:
            if id(candidates) not in self._of_candidates:
                layouts = np.array([candidate.layouts for candidate in candidates], dtype=np.intp).reshape(
                    len(candidates), -1
                )
                self._of_candidates[id(candidates)] = candidates, self._allowed(layouts)
            slots = self._of_candidates[id(candidates)][1](now)
            self._others[key] = [
                candidate for candidate in np.flatnonzero(slots.all(axis=1)).tolist() if candidate != now
            ]
        return self._others[key]


def everything() -> Move:
    """The move that leaves every node all candidates."""
    return Move(lambda layouts: lambda now: np.ones_like(layouts))


def moves_of(table: LayoutTable, atoms: Sequence[AxisRef]) -> list[Move]:
    """The moves that leave each node a few candidates of many: those that keep all atoms together, and per atom those
    that differ in this one only; none along one atom, where nodes have few."""
    if len(atoms) < 2:
        return []

    def along(atom: AxisRef) -> Move:
        without = _OfEach(lambda layout: table.without(layout, (atom,)))

        def allowed(layouts: Layouts) -> Allowed:
            rest = without(layouts)
            return lambda now: np.equal(rest, rest[now])

        return Move(allowed)

    is_whole = _OfEach(lambda layout: _holds_all_or_none(table, layout, atoms))

    def together(layouts: Layouts) -> Allowed:
        whole = is_whole(layouts)
        return lambda now: whole

    return [Move(together), *map(along, atoms)]


class _OfEach:
    """A function of layouts that is asked for each one once, and for arrays of them at a time."""

    _UNKNOWN = -1

    def __init__(self, function: Callable[[int], int]):
        self._function, self._known = function, np.zeros(0, np.intp)

    def __call__(self, layouts: Layouts) -> Layouts:
        more = int(layouts.max(initial=-1)) + 1 - len(self._known)
        if more > 0:
            self._known = np.pad(self._known, (0, more), constant_values=self._UNKNOWN)
        found = self._known[layouts]
        if (found == self._UNKNOWN).any():
            for layout in np.unique(layouts[found == self._UNKNOWN]).tolist():
                self._known[layout] = self._function(layout)
            found = self._known[layouts]
        return found


def _holds_all_or_none(table: LayoutTable, layout: int, atoms: Sequence[AxisRef]) -> bool:
    """Whether all atoms are in one place of a layout, or none is anywhere."""
    sharding = table.shardings[layout]
    used = [axes for axes in (*sharding.axes, sharding.unreduced_axes) if axes]
    return not used or (len(used) == 1 and all(any(overlaps(a, b) for b in used[0]) for a in atoms))


# The PBQP that a move leaves: each node has a few candidates, and the solver chooses for all at once.
#
# A value that several nodes take has a *Steiner node*, a layout through which it goes to them: so that what they share
# is paid for once, though the solver knows pairs only. Holding a value is charged to its Steiner node, or to its maker
# where it has none. Where memory has a multiplier, the uses of an argument fall into *phases*, between which holding
# costs most: each has a Steiner node of its own, which takes the value from the one before, held in between, or anew
# from where it is made. See docs/explanation/planner.md#steiner-nodes.

Costs = NDArray[np.float64]

_LITTLE = 1e-3
"""The share of a choice's cost below which it does not matter what other choices may save. Measured (2026-11,
`scripts/bench_bytes --only lstm`): moves from a choice that was so close took a sixth of the planning of an LSTM's step
on 2 x 4, and found nothing."""

_MOST_PHASES = 3
"""Phases of a value's uses: forward, backward, update. Guessed: each is one more node per value; with 2, weights that
are gathered for the backward pass are held until the update."""


class _SteinerNode(NamedTuple):
    """The Steiner node of a value for some of its uses: its number in the problem, its candidates, and the first and
    the last node for which it is there, where that has a price."""

    number: int
    layouts: list[int]
    uses: list[Port]
    begin: int
    end: int


class Solved(NamedTuple):
    """A choice. `is_least`: by the solver's model no other one costs much less."""

    choice: Chosen
    is_least: bool


class RestrictedProgram:
    """A program in which each node may only have the candidates that a move leaves it, and its own."""

    def __init__(self, model: ProgramModel, now: Sequence[int], move: Move):
        self._model, self._now = model, now
        self._kept: dict[tuple[int, int], list[int]] = {}
        self._columns: dict[tuple[int, int], Column] = {}
        self._matrices: dict[object, Costs] = {}
        self._own: dict[tuple[int, float], Costs] = {}
        self._allowed = [self._allowed_candidates(node, move) for node in range(len(model.nodes))]
        self._uses = [self._different_uses(value) for value in model.values]

    def solved(self) -> Solved:
        """The best choice that the solver finds: no worse than the present one, as far as it sees."""
        learn_prices(self._model, [self])
        costs, start = list[Costs](), list[int]()
        numbers, steiner_nodes = list[int](), dict[int, list[_SteinerNode]]()
        for node in range(len(self._model.nodes)):
            numbers.append(len(costs))
            costs.append(self._node_costs(node))
            start.append(0)
            for made in self._model.nodes[node].made:
                steiner_nodes[made] = self._steiner_nodes(self._model.values[made], self._uses[made], len(costs))
                for steiner in steiner_nodes[made]:
                    costs.append(self._steiner_costs(self._model.values[made], steiner))
                    start.append(steiner.layouts.index(self._model.layout(self._now, self._maker(made))))
        problem = PBQP(costs)
        for made, uses in enumerate(self._uses):
            if uses:
                self._add_edges(problem, numbers, made, steiner_nodes[made])
        _settle(problem, start, sorted(set(range(len(costs))).difference(numbers)))
        solution = solve(problem, start, refines=True)
        chosen = [solution.choice[number] for number in numbers]
        choice = [allowed[index] for allowed, index in zip(self._allowed, chosen, strict=True)]
        return Solved(choice, solution.is_within(_LITTLE))

    # Candidates and layouts.

    def _allowed_candidates(self, node: int, move: Move) -> list[int]:
        candidates, now = self._model.nodes[node].candidates, self._now[node]
        key = id(candidates), now
        if key not in self._kept:
            self._kept[key] = [now, *move.others(candidates, now)]
        return self._kept[key]

    def _column(self, port: Port) -> Column:
        allowed, candidates = self._allowed[port.node], self._model.nodes[port.node].candidates
        key = id(allowed), port.slot
        if key not in self._columns:
            self._columns[key] = Column.of(candidates, allowed, port.slot)
        return self._columns[key]

    def _different_uses(self, value: ModelValue) -> list[Port]:
        """The places where a value is taken; none where nobody makes it."""
        return different(value.uses if value.maker is not None else (), self._column)

    def _maker(self, made: int) -> Port:
        return self._maker_of(self._model.values[made])

    def _maker_of(self, value: ModelValue) -> Port:
        assert value.maker is not None
        return value.maker

    def _layouts_around(self, value: ModelValue) -> list[int]:
        assert value.maker is not None
        return sorted({layout for port in (value.maker, *value.uses) for layout in self._column(port).layouts})

    # Costs.

    def layouts(self) -> Iterator[tuple[ValueClass, Iterable[int]]]:
        """The layouts between which values may have to be moved, with the values' classes."""
        for value, uses in zip(self._model.values, self._uses, strict=True):
            if uses:
                yield value.shape, self._layouts_around(value)

    def _steiner_nodes(self, value: ModelValue, uses: list[Port], number: int) -> list[_SteinerNode]:
        """The Steiner nodes of a value, one per phase, numbered from here; none for a value with a single use."""
        if len(uses) < 2:
            return []
        layouts = self._layouts_around(value)
        if not self._model.charges_memory:
            return [_SteinerNode(number, layouts, uses, 0, 0)]
        places = {use: place for place, use in enumerate(value.uses)}
        needed = [value.needed[places[use]] for use in uses]
        phases = [list(range(len(uses)))]
        if value.is_at_hand and len(self._column(self._maker_of(value)).layouts) == 1:
            phases = _phases(needed, self._model.memory_price)
        ends = [[needed[i] for i in phase] for phase in phases]
        return [
            _SteinerNode(
                number + n, layouts, [uses[i] for i in phase], min(b for b, _ in found), max(e for _, e in found)
            )
            for n, (phase, found) in enumerate(zip(phases, ends, strict=True))
        ]

    def _held(self, value: ModelValue, layouts: Sequence[int], begin: int, end: int) -> Costs:
        """What it costs to hold a value in each of some layouts from one node to another."""
        price = self._model.memory_price(begin, end)
        return price * np.array([self._model.bytes_of(value, n) for n in layouts])

    def _node_costs(self, number: int) -> Costs:
        """The costs of a node's candidates."""
        node, allowed = self._model.nodes[number], self._allowed[number]
        key = id(allowed), node.times
        if key not in self._own:
            self._own[key] = node.times * np.array([node.candidates[candidate].cost for candidate in allowed])
        return self._own[key]

    def _held_until(self, value: ModelValue, made: Sequence[int], use: Port, taken: Sequence[int]) -> Costs:
        """What it costs to hold a value until its only use, from each of some layouts in which it is made to each in
        which it is taken, in the smaller of both."""
        if value.is_at_hand:
            return np.zeros((len(made), len(taken)))
        begin, _ = value.needed[value.uses.index(use)]
        ends = (self._held(value, layouts, value.born, begin) for layouts in (made, taken))
        return np.minimum.outer(*ends)

    def _steiner_costs(self, value: ModelValue, steiner: _SteinerNode) -> Costs:
        """What it costs to hold a value of several users in each layout."""
        if not self._model.charges_memory:
            return zeros(len(steiner.layouts))
        costs = self._held(value, steiner.layouts, steiner.begin if value.is_at_hand else value.born, steiner.end)
        return np.where(np.isin(steiner.layouts, self._at_hand(value)), 0.0, costs)

    def _at_hand(self, value: ModelValue) -> list[int]:
        """The layouts in which a value takes no memory of its own."""
        return self._column(self._maker_of(value)).layouts if value.is_at_hand else []

    def _matrix(self, of: ValueClass, sources: list[int], targets: list[int]) -> Costs:
        key = of, tuple(sources), tuple(targets)
        if key not in self._matrices:
            self._matrices[key] = self._model.prices.matrix(of, sources, targets)
        return self._matrices[key]

    def _prices_to(self, value: ModelValue, sources: list[int], use: Port, targets: list[int]) -> Costs:
        """The prices of bringing a value to a use, and of holding what is brought there as long as that takes."""
        prices = self._matrix(value.shape, sources, targets)
        if not self._model.charges_memory:
            return prices
        begin, end = value.needed[value.uses.index(use)]
        moved = np.not_equal.outer(sources, targets)
        return prices + moved * self._held(value, targets, begin, end) / value.times

    def _add_edges(self, problem: PBQP, numbers: list[int], made: int, steiner_nodes: list[_SteinerNode]) -> None:
        """Adds the reshards of a value: from its maker to its only use, or to its Steiner node and from there to all
        uses."""
        value, maker = self._model.values[made], self._maker(made)
        sources, rows = self._column(maker)
        if not steiner_nodes:
            (use,) = self._uses[made]
            targets, columns = self._column(use)
            direct = self._prices_to(value, sources, use, targets)
            if self._model.charges_memory:
                direct = direct + self._held_until(value, sources, use, targets) / value.times
            problem.add(numbers[maker.node], numbers[use.node], Ports(rows, columns, direct, value.times))
            return
        every = identity(len(steiner_nodes[0].layouts))
        to_steiner = Ports(rows, every, self._matrix(value.shape, sources, steiner_nodes[0].layouts), value.times)
        problem.add(numbers[maker.node], steiner_nodes[0].number, to_steiner)
        for steiner, following in pairwise(steiner_nodes):
            onward = Ports(every, every, self._onward(value, steiner, following), value.times)
            problem.add(steiner.number, following.number, onward)
        for steiner in steiner_nodes:
            for use in steiner.uses:
                targets, columns = self._column(use)
                prices = self._prices_to(value, steiner.layouts, use, targets)
                if len(sources) == 1:  # what is always made in one layout may go to each user from there
                    prices = np.minimum(prices, self._prices_to(value, sources, use, targets))
                problem.add(steiner.number, numbers[use.node], Ports(every, columns, prices, value.times))

    def _onward(self, value: ModelValue, steiner: _SteinerNode, following: _SteinerNode) -> Costs:
        """The prices from a Steiner node to that of the next phase: held in between, or recomputed from where it is at
        hand."""
        layouts, at_hand = steiner.layouts, self._at_hand(value)
        held = self._held(value, layouts, steiner.end + 1, following.begin - 1) / value.times
        held = np.where(np.isin(layouts, at_hand), 0.0, held)
        kept = self._matrix(value.shape, layouts, layouts) + held[:, None]
        return np.minimum(kept, self._matrix(value.shape, at_hand, layouts))


def learn_prices(model: ProgramModel, programs: Iterable[RestrictedProgram]) -> None:
    """Prices all reshards that may occur in some programs, class by class: at once they cost little more than one by
    one."""
    found: dict[ValueClass, dict[int, None]] = {}
    for of, layouts in chain.from_iterable(program.layouts() for program in programs):
        found.setdefault(of, {}).update(dict.fromkeys(layouts))
    for of, layouts in found.items():
        model.prices.learn(of, layouts)


def _phases(needed: Sequence[tuple[int, int]], memory_price: Callable[[int, int], float]) -> list[list[int]]:
    """The indices of uses in order of time, cut where it costs most to hold a value between them."""
    order = sorted(range(len(needed)), key=needed.__getitem__)
    ends = list(accumulate([needed[i][1] for i in order], max))
    gaps = [memory_price(end + 1, needed[i][0] - 1) for end, i in zip(ends, order[1:], strict=False)]
    widest = sorted(range(len(gaps)), key=lambda n: -gaps[n])[: _MOST_PHASES - 1]
    cuts = [0, *sorted(n + 1 for n in widest if gaps[n] > 0), len(order)]
    return [order[a:b] for a, b in pairwise(cuts)]


def _settle(problem: PBQP, start: list[int], steiner_nodes: Sequence[int]) -> None:
    """Gives each Steiner node, in place, the candidate that costs least beside those of its neighbours."""
    edges: dict[int, list[tuple[int, Ports]]] = {steiner: [] for steiner in steiner_nodes}
    for edge in problem.edges:
        if edge.first in edges:
            edges[edge.first].append((edge.second, edge.ports))
        if edge.second in edges:
            edges[edge.second].append((edge.first, edge.ports.turned))
    for steiner, around in edges.items():
        costs = problem.costs[steiner]
        for other, (rows, cols, prices, weight) in around:
            costs = costs + weight * prices[rows, cols[start[other]]]
        if costs.min() < costs[start[steiner]]:
            start[steiner] = int(costs.argmin())
