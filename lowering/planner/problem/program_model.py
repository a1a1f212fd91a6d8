"""The model of a program: nodes that choose among candidates, values that lead from node to node, and prices.

See docs/explanation/planner.md#the-problem.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from sdy_jax.lowering.planner.problem.candidates import Candidate
from sdy_jax.lowering.planner.problem.layout_table import Prices, ValueClass

# The nodes and values of a program's model.
#
# A node takes values (*ports*) in the layouts of its candidate and makes values in others.

Chosen = list[int]
"""Per node, the number of the chosen candidate."""


class Port(NamedTuple):
    """A node's slot: the position of a value in its candidates' layouts."""

    node: int
    slot: int


@dataclass(slots=True)
class Node:
    """An op, an edge of control flow, or the border: `candidates` in the order in which ties are decided, and how often
    it runs. `values`: per slot, the number of its value; -1 where a slot costs nothing in any layout. The first `takes`
    slots are those of values that it takes."""

    candidates: list[Candidate]
    times: float
    values: list[int]
    takes: int

    @property
    def made(self) -> list[int]:
        """The numbers of the values that the node makes."""
        return [value for value in self.values[self.takes :] if value >= 0]


@dataclass(slots=True)
class ModelValue:
    """A value: its class, how often it is made, where it is made and taken.

    Where memory has a multiplier, or copies are recomputed, `place_uses` has said the rest:
    `born`: the node from which on it is there. `needed`: per use, the first and the last node for which it must be.
    `is_at_hand`: it takes no memory of its own in the layout in which it is made: it is an argument, or its users
    compute it. `is_held_rounded`: a device holds it, and its copies, as products alone take it.
    """

    shape: ValueClass
    times: float
    maker: Port | None = None
    uses: list[Port] = field(default_factory=list)
    born: int = field(default=0, init=False)
    needed: list[tuple[int, int]] = field(default_factory=list, init=False)
    is_at_hand: bool = field(default=False, init=False)
    is_held_rounded: bool = field(default=False, init=False)


class CopyInLayout(NamedTuple):
    """A copy of a value in another layout: its uses in order of time, its bytes on a device, and what it costs to make
    it again."""

    uses: list[Port]
    bytes: float
    cost: float


# A program as the planner of layouts sees it: nodes that choose among candidates, values, prices.
#
# A node takes values (*ports*) in the layouts of its candidate and makes values in others. What the program costs is
# the sum of the candidates' own costs and, per value, of the cheapest set of reshards that leads from the layout in
# which it is made to all those in which it is taken: a layout is paid for once, whoever takes it. Where memory has a
# multiplier, what a reshard made may be given up between two uses and recomputed for the second, from the layout in
# which the value was made. See docs/explanation/planner.md#the-problem.


def _uses_of_copies(value: ModelValue, made: int, taken: Sequence[int]) -> dict[int, list[int]]:
    """The indices of a value's uses in other layouts than the one in which it is made, by layout, in order of time."""
    found = dict[int, list[int]]()
    for use, layout in enumerate(taken):
        if layout != made:
            found.setdefault(layout, []).append(use)
    return {layout: sorted(uses, key=value.needed.__getitem__) for layout, uses in found.items()}


class _Copy(NamedTuple):
    """What it costs to hold a value in a layout in which it is not made, and for which uses it is recomputed: where
    they begin, in order."""

    cost: float
    again: list[int]


class ProgramModel:
    """The nodes and values of a program, and what choices cost."""

    def __init__(self, prices: Prices):
        self.prices = prices
        self.nodes: list[Node] = []
        self.values: list[ModelValue] = []
        self.work_multiplier = 1.0
        """The Lagrange multiplier of work, a multiple of what the cost model says."""
        self._held_before: list[float] = []
        """Per node, what it costs to hold a byte from the start of the program to before the node."""
        self._spread: dict[tuple[ValueClass, int, frozenset[int]], float] = {}

    def add_value(self, shape: ValueClass, times: float) -> int:
        self.values.append(ModelValue(shape, times))
        return len(self.values) - 1

    def add_node(self, candidates: list[Candidate], times: float, takes: Sequence[int], makes: Sequence[int]) -> int:
        """Adds a node that takes and makes these values, in the order of its candidates' layouts."""
        number = len(self.nodes)
        self.nodes.append(Node(candidates, times, [*takes, *makes], len(takes)))
        for slot, value in enumerate(takes):
            if value >= 0:
                self.values[value].uses.append(Port(number, slot))
        for slot, value in enumerate(makes, len(takes)):
            if value >= 0:
                self.values[value].maker = Port(number, slot)
        return number

    def add_member(
        self, candidates: list[Candidate], times: float, takes: Sequence[int], makes: Sequence[int], tie: int
    ) -> int:
        """Adds a node that takes and makes these values, and then the tie, which the first node with it makes."""
        tied, number = self.values[tie], len(self.nodes)
        if tied.maker is None:
            tied.born = number
            return self.add_node(candidates, times, takes, [*makes, tie])
        tied.needed.append((number, number))
        return self.add_node(candidates, times, [*takes, tie], makes)

    def charge_each_reshard(self, least: float) -> None:
        """Adds to the price of every reshard that sends anything, for each of its collectives."""
        self.prices.add_to_each(least)
        self._spread.clear()

    def set_work_multiplier(self, multiplier: float) -> None:
        """Sets the Lagrange multiplier of work."""
        dearer, self.work_multiplier = multiplier / self.work_multiplier, multiplier
        known: dict[int, list[Candidate]] = {}
        for node in self.nodes:
            candidates = node.candidates
            if id(candidates) not in known:
                paid = [candidate.work * (dearer - 1) for candidate in candidates]
                dear = [
                    candidate._replace(cost=candidate.cost + n, work=candidate.work + n)
                    for candidate, n in zip(candidates, paid, strict=True)
                ]
                known[id(candidates)] = dear if any(paid) else candidates
        for node in self.nodes:
            node.candidates = known[id(node.candidates)]

    def set_memory_multipliers(self, multipliers: Sequence[float]) -> None:
        """Sets the Lagrange multiplier of memory at each node: what it costs to hold a byte there."""
        self._held_before = [0.0, *accumulate(multipliers)] if any(multipliers) else []

    @property
    def charges_memory(self) -> bool:
        """Whether memory has a multiplier."""
        return bool(self._held_before)

    def memory_price(self, begin: int, end: int) -> float:
        """What it costs to hold a byte at the nodes from one to another, both included."""
        return self._held_before[end + 1] - self._held_before[begin] if end >= begin else 0.0

    def neighbours(self, node: int) -> Iterator[int]:
        """The nodes that make or take a value that this one makes or takes."""
        for number in self.nodes[node].values:
            if number >= 0:
                value = self.values[number]
                yield from (use.node for use in value.uses)
                if value.maker is not None:
                    yield value.maker.node

    def layout(self, chosen: Sequence[int], port: Port) -> int:
        """The layout of a port under a choice."""
        return self.nodes[port.node].candidates[chosen[port.node]].layouts[port.slot]

    def cost(self, chosen: Sequence[int]) -> float:
        """What the program costs under a choice."""
        candidates = [node.candidates[candidate] for node, candidate in zip(self.nodes, chosen, strict=True)]
        own = sum([node.times * candidate.cost for node, candidate in zip(self.nodes, candidates, strict=True)])
        layouts = [candidate.layouts for candidate in candidates]
        return own + sum([self._paid(value, layouts) for value in self.values])

    def operations(self, chosen: Sequence[int]) -> float:
        """The operations that one device performs under a choice."""
        return sum([node.times * node.candidates[c].operations for node, c in zip(self.nodes, chosen, strict=True)])

    def work(self, chosen: Sequence[int]) -> float:
        """What the operations that have a price cost on one device under a choice."""
        return sum([node.times * node.candidates[c].work for node, c in zip(self.nodes, chosen, strict=True)])

    def value_cost(self, value: ModelValue, chosen: Sequence[int]) -> float:
        """What it costs to bring a value from where it is made to where it is taken, and to hold it in between."""
        if value.maker is None or not value.uses:
            return 0.0
        return self.paid(value, self.layout(chosen, value.maker), [self.layout(chosen, use) for use in value.uses])

    def _paid(self, value: ModelValue, layouts: Sequence[tuple[int, ...]]) -> float:
        """As `value_cost`, with the layouts of the slots of all nodes."""
        if value.maker is None or not value.uses:
            return 0.0
        made, taken = layouts[value.maker.node][value.maker.slot], [layouts[node][slot] for node, slot in value.uses]
        return self.paid(value, made, taken)

    def paid(self, value: ModelValue, made: int, taken: Sequence[int]) -> float:
        """As `value_cost`, with the layouts in which the value is made and taken, of which there are some."""
        wanted = frozenset(taken) - {made}
        paid = value.times * self.spread(value.shape, made, wanted) if wanted else 0.0
        return paid + self._held(value, made, taken) if self._held_before else paid

    def mean_reshard(self, chosen: Sequence[int]) -> float:
        """What bringing a value to where it is taken costs each time, on average over all that is paid: what costs next
        to nothing hardly counts, however often it occurs."""
        found = [(cost, value.times) for value in self.values if (cost := self.value_cost(value, chosen))]
        return sum(cost * cost / times for cost, times in found) / sum(cost for cost, _ in found) if found else 0.0

    def held(self, chosen: Sequence[int]) -> float:
        """What it costs to hold all values."""
        found = 0.0
        for value in self.values:
            if value.maker is not None and value.uses:
                taken = [self.layout(chosen, use) for use in value.uses]
                found += self._held(value, self.layout(chosen, value.maker), taken)
        return found

    def copies(self, value: ModelValue, chosen: Sequence[int]) -> Iterator[CopyInLayout]:
        """The copies of a value in other layouts than that in which it is made."""
        if value.maker is None:
            return
        made, taken = self.layout(chosen, value.maker), [self.layout(chosen, use) for use in value.uses]
        for layout, uses in _uses_of_copies(value, made, taken).items():
            size = self.bytes_of(value, layout)
            yield CopyInLayout([value.uses[n] for n in uses], size, self._recompute_cost(value, made, layout))

    def bytes_of(self, value: ModelValue, layout: int) -> float:
        """What a device holds of a value in a layout."""
        return self.prices.local_bytes(value.shape, layout, value.is_held_rounded)

    def _held(self, value: ModelValue, made: int, taken: Sequence[int]) -> float:
        """What it costs to hold a value in its layouts, or to make some again: where it is made, until it is taken last
        in that layout, or a copy is made of it; in others, from the first use to the last that a copy serves. What has
        one use, or none in another layout, as most values, has no copy that could be made again."""
        if taken.count(made) == len(taken):
            return self._held_as_made(value, made, max([end for _, end in value.needed]))
        if len(taken) == 1:
            return self._held_whole(value, made, taken)
        anew = self._held_recomputed(value, made, taken)
        return anew if value.is_at_hand else min(anew, self._held_whole(value, made, taken))

    def _held_whole(self, value: ModelValue, made: int, taken: Sequence[int]) -> float:
        """As `_held`, if nothing is recomputed."""
        first, last = dict[int, int](), dict[int, int]()
        for layout, (begin, end) in zip(taken, value.needed, strict=True):
            first[layout], last[layout] = min(begin, first.get(layout, begin)), max(end, last.get(layout, end))
        if made in last:
            held = self._held_as_made(value, made, last.pop(made))
        else:
            held = self._held_until_moved(value, made, last)
        return held + sum([self._price(value, n, first[n], end) for n, end in last.items()])

    def _held_recomputed(self, value: ModelValue, made: int, taken: Sequence[int]) -> float:
        """As `_held`, if what costs more to hold than to recompute is recomputed."""
        copies = self._copies(value, made, taken)
        until = [end for layout, (_, end) in zip(taken, value.needed, strict=True) if layout == made]
        until += [begin for copy in copies.values() for begin in copy.again]
        held = self._held_as_made(value, made, max(until)) if until else self._held_until_moved(value, made, copies)
        return held + sum([copy.cost for copy in copies.values()])

    def _held_until_moved(self, value: ModelValue, made: int, wanted: Collection[int]) -> float:
        """What it costs to hold a value until it is first taken, if nobody takes it as it is made: where all want it in
        one layout that is smaller, it is moved at once."""
        until = min(begin for begin, _ in value.needed)
        held = self._held_as_made(value, made, until)
        if len(wanted) > 1 or not held:
            return held
        return min(held, *(self._price(value, layout, value.born, until) for layout in wanted))

    def _held_as_made(self, value: ModelValue, made: int, until: int) -> float:
        return 0.0 if value.is_at_hand else self._price(value, made, value.born, until)

    def _price(self, value: ModelValue, layout: int, begin: int, end: int) -> float:
        return self.bytes_of(value, layout) * self.memory_price(begin, end)

    def _copies(self, value: ModelValue, made: int, taken: Sequence[int]) -> dict[int, _Copy]:
        """What the copies in other layouts cost, by layout."""
        found = _uses_of_copies(value, made, taken).items()
        return {n: self._copy(value, made, n, [value.needed[use] for use in uses]) for n, uses in found}

    def _recompute_cost(self, value: ModelValue, made: int, layout: int) -> float:
        """What it costs to make a copy again."""
        return value.times * self.prices.cost(value.shape, made, layout) if self.prices.is_whole(made) else math.inf

    def _copy(self, value: ModelValue, made: int, layout: int, extents: Sequence[tuple[int, int]]) -> _Copy:
        (begin, end), *others = extents
        cost, again, anew = 0.0, list[int](), self._recompute_cost(value, made, layout)
        for first, last in others:
            if anew < self._price(value, layout, end + 1, first - 1):
                cost += anew + self._price(value, layout, begin, end)
                begin, end = first, last
                again += [begin] if anew else []
            end = max(end, last)
        return _Copy(cost + self._price(value, layout, begin, end), again)

    def spread(self, shape: ValueClass, made: int, wanted: frozenset[int]) -> float:
        """The cost of the cheapest reshards that lead from one layout to all others, from layout to layout."""
        if len(wanted) == 1:
            return self.prices.cost(shape, made, next(iter(wanted)))
        key = shape, made, wanted
        if key not in self._spread:
            ordered = sorted(wanted)
            self._spread[key] = min([self._grown(shape, made, first, ordered) for first in [None, *ordered]])
        return self._spread[key]

    def _grown(self, shape: ValueClass, made: int, first: int | None, wanted: Iterable[int]) -> float:
        """The cost of adding layouts nearest first, one of them at the very beginning."""
        cost, left = 0.0, {target: self.prices.cost(shape, made, target) for target in wanted}
        while left:
            nearest = first if first is not None else min(left, key=left.__getitem__)
            first = None
            cost += left.pop(nearest)
            for target, known in left.items():
                left[target] = min(known, self.prices.cost(shape, nearest, target))
        return cost
