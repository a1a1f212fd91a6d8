"""The least that a modelled program can cost: by trying everything, and by trying what can still matter.

The second goes node by node and keeps, of choices that look alike from there on, the cheapest: they look alike where
all values that are still wanted are made, and were taken, in equal layouts.
"""

import itertools
import math
from typing import NamedTuple

from sdy_jax.lowering.planner.problem.program_model import ProgramModel


def by_trying_everything(model: ProgramModel) -> float:
    return min(map(model.cost, itertools.product(*(range(len(node.candidates)) for node in model.nodes))))


class Wanted(NamedTuple):
    """A value on its way: the layout in which it was made, and the others in which it was taken so far."""

    made: int
    taken: frozenset[int]


def least_cost(model: ProgramModel, enough: float) -> float:
    """The least cost, infinite if it is more than `enough`."""
    last = {n: max(use.node for use in v.uses) for n, v in enumerate(model.values) if v.maker is not None and v.uses}
    rest = list(itertools.accumulate((least_of(node) for node in reversed(model.nodes)), initial=0.0))[::-1]
    states: dict[tuple[tuple[int, Wanted], ...], float] = {(): 0.0}
    for number, node in enumerate(model.nodes):
        found: dict[tuple[tuple[int, Wanted], ...], float] = {}
        for (state, paid), candidate in itertools.product(states.items(), node.candidates):
            cost, values = paid + node.times * candidate.cost, dict(state)
            for slot, (value, layout) in enumerate(zip(node.values, candidate.layouts, strict=True)):
                if value in last:
                    new = slot >= node.takes
                    values[value] = Wanted(layout, frozenset()) if new else with_layout(values[value], layout)
            ended = [value for value in values if last[value] == number]
            cost += sum(paid_for(model, value, values.pop(value)) for value in ended)
            hoped = sum(at_least(model, *item) for item in values.items())
            if cost + hoped + rest[number + 1] <= enough:
                key = tuple(values.items())
                found[key] = min(cost, found.get(key, math.inf))
        states = found
    return min(states.values(), default=math.inf)


def least_of(node) -> float:
    return node.times * min(candidate.cost for candidate in node.candidates)


def with_layout(wanted: Wanted, layout: int) -> Wanted:
    return wanted if layout == wanted.made else Wanted(wanted.made, wanted.taken | {layout})


def paid_for(model: ProgramModel, number: int, wanted: Wanted) -> float:
    value = model.values[number]
    return value.times * model.spread(value.shape, *wanted) if wanted.taken else 0.0


def at_least(model: ProgramModel, number: int, wanted: Wanted) -> float:
    """The dearest layout alone: reshards lead there, whatever else is made."""
    value = model.values[number]
    return value.times * max((model.prices.cost(value.shape, wanted.made, n) for n in wanted.taken), default=0.0)
