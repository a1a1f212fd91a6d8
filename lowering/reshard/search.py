"""The cheapest reshard by search: A* from the source, meeting a table that was built backwards from the target.

One permute is all a plan can need: atoms of equal size are renamed by it, so a later permute can be folded into the
earlier one. Hence two halves. Backwards from the target, Dijkstra notes for each (shard counts, unreduced set) the
cheapest continuation after a permute, which may pick any atoms: names do not matter there. Forwards, A* with the lower
bound of `ReshardProblem.bound` either reaches the target or, from any state, permutes into that table. Where the order
of the devices changes it has to permute, at a state that is not unreduced: the orders have different groups. Both
halves drop whatever costs more than a plan already known.
See docs/explanation/reshards.md#the-search.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count

from sdy_jax.lowering.reshard.moves import moves_from, moves_into
from sdy_jax.lowering.reshard.problem import ReshardProblem
from sdy_jax.lowering.reshard.states import FREE, MERGEABLE, Price, ReshardStep, State
from sdy_jax.lowering.reshard.time_bounds import least_time, least_time_through_permute

PermuteKey = tuple[tuple[int, ...], int]
"""Shard counts per dimension, and the unreduced set: what a permute keeps."""

BUDGET = 500
"""States that one half may expand per refinement. Measured (2026-11): 0.15 to 0.3 ms each; the worst reshards tried on
a 16x16 mesh took 2 s in all. On three pairs that use it up, 3,000 found no cheaper plan. Past it, the best so far is
taken."""

_SLACK = 1 + 1e-9
"""Given: prices are sums of floats, whose rounding is no difference."""


@dataclass
class _Half:
    """One half of the search: the price of each state reached so far, and the step that leads there."""

    prices: dict[State, Price] = field(default_factory=dict)
    steps: dict[State, tuple[ReshardStep, State] | None] = field(default_factory=dict)
    done: set[State] = field(default_factory=set)

    def is_less(self, state: State, price: Price) -> bool:
        """Whether no path to a state is known that is as cheap."""
        known = self.prices.get(state)
        return known is None or price < known

    def record(self, state: State, price: Price, step: ReshardStep | None, neighbour: State) -> None:
        """Records a path to a state, which is the cheapest."""
        self.prices[state] = price
        self.steps[state] = None if step is None else (step, neighbour)

    def kind_at(self, state: State) -> str:
        """The kind of the step that leads to this state."""
        found = self.steps[state]
        return found[0].kind if found else ""


@dataclass
class _Limit:
    """What a plan may cost: not more than the best one known, nor more bytes where all atoms are equally fast."""

    time: float
    wire_bytes: float

    def excludes(self, time: float, wire_bytes: float) -> bool:
        return time > self.time * _SLACK or wire_bytes > self.wire_bytes * _SLACK


def search(problem: ReshardProblem, known: Price | None = None, budget: int = BUDGET) -> list[ReshardStep] | None:
    """The cheapest steps from source to target; None where there are none within the cap, `known` or the budget."""
    infinite = float("inf")
    limit = _Limit(infinite, infinite)
    if known is not None:
        is_linear = problem.is_of_one_speed(problem.all_atoms) and not problem.cuts_tiles
        limit = _Limit(known.time, known.wire_bytes if is_linear else infinite)
    backward, table = _continuations(problem, limit, budget)
    forward = _Half()
    end = _forward(problem, limit, forward, table, backward, budget)
    if end is None:
        return None
    state, continued = end
    steps = _path_to(forward, state)
    if continued is not None:
        if continued.dims != state.dims or problem.reorders:
            steps.append(ReshardStep("collective_permute", 0, continued))
        steps.extend(_path_from(backward, continued))
    return steps


def _step_price(problem: ReshardProblem, step: ReshardStep, before: State, after: State, neighbour_kind: str) -> Price:
    price = problem.price(step.kind, step.group, before, after)
    if step.kind == neighbour_kind and step.kind in MERGEABLE:
        return Price(price.time, price.wire_bytes, 0, 0)
    return price


def _continuations(problem: ReshardProblem, limit: _Limit, budget: int) -> tuple[_Half, dict[PermuteKey, State]]:
    table: dict[PermuteKey, State] = {}
    half, order = _Half(), count()
    half.record(problem.target, FREE, None, problem.target)
    heap: list[tuple[Price, int, State]] = [(FREE, next(order), problem.target)]
    while heap and len(half.done) < budget:
        price, _, state = heapq.heappop(heap)
        if state in half.done:
            continue
        half.done.add(state)
        table.setdefault((problem.counts(state), state.unreduced), state)
        kind = half.kind_at(state)
        for step in moves_into(problem, state):
            if step.state in half.done:
                continue
            cost = price.plus(_step_price(problem, step, step.state, state, kind))
            if not half.is_less(step.state, cost) or limit.excludes(*_with_permute(problem, cost, step.state)):
                continue
            half.record(step.state, cost, step, state)
            heapq.heappush(heap, (cost, next(order), step.state))
    return half, table


def _with_permute(problem: ReshardProblem, cost: Price, state: State) -> tuple[float, float]:
    """Time and bytes of every plan whose permute leads to `state` or, through it, further back.

    Going back, the permute gets cheaper only where the tensor gets smaller: by undoing a gather, which costs at least
    what the permute saves, or by undoing sharded_to_unreduced, which is free (then the permute counts nothing). It is
    free, too, where it only changes the order of devices that all have the whole value.
    """
    may_be_free = problem.to_unreduce or (problem.reorders and problem.min_shards == 1)
    if may_be_free:
        return cost.time, cost.wire_bytes
    return cost.time + least_time_through_permute(problem, state), cost.wire_bytes + problem.local_bytes(state)


def _forward(
    problem: ReshardProblem, limit: _Limit, half: _Half, table: dict[PermuteKey, State], backward: _Half, budget: int
) -> tuple[State, State | None] | None:
    """Where the best plan leaves the forward half: at the target, or at a state and its continuation."""
    order = count()
    half.record(problem.source, FREE, None, problem.source)
    heap: list[tuple[Price, int, State, State | None]] = [(FREE, next(order), problem.source, None)]
    while heap and len(half.done) < budget:
        _, _, state, continued = heapq.heappop(heap)
        if continued is not None or (state == problem.target and not problem.reorders):
            return state, continued
        if state in half.done:
            continue
        half.done.add(state)
        price, kind = half.prices[state], half.kind_at(state)
        continued = table.get((problem.counts(state), state.unreduced))
        if continued is not None and not (problem.reorders and state.unreduced):
            total = price.plus(problem.permute_price(state)).plus(backward.prices[continued])
            if not limit.excludes(total.time, total.wire_bytes):
                limit.time = min(limit.time, total.time)
                heapq.heappush(heap, (total, next(order), state, continued))
        for step in moves_from(problem, state):
            if step.state in half.done:
                continue
            cost = price.plus(_step_price(problem, step, state, step.state, kind))
            if not half.is_less(step.state, cost) or limit.excludes(cost.time, cost.wire_bytes):
                continue
            estimate = cost.plus(_remaining(problem, step.state))
            if not limit.excludes(estimate.time, estimate.wire_bytes):
                half.record(step.state, cost, step, state)
                heapq.heappush(heap, (estimate, next(order), step.state, None))
    return None


def _remaining(problem: ReshardProblem, state: State) -> Price:
    """A lower bound for the price that remains."""
    wire = problem.bound(state)
    return Price(least_time(problem, state), wire, 1 if wire else 0, 0 if state == problem.target else 1)


def _path_to(half: _Half, state: State) -> list[ReshardStep]:
    steps = []
    while (found := half.steps[state]) is not None:
        step, state = found
        steps.append(step)
    return steps[::-1]


def _path_from(half: _Half, state: State) -> list[ReshardStep]:
    steps = []
    while (found := half.steps[state]) is not None:
        step, state = found
        steps.append(ReshardStep(step.kind, step.group, state))
    return steps
