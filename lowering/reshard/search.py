"""The cheapest reshard by search (A*), and the moves of the search: the collectives that may follow or precede a state.

See docs/explanation/reshards.md#the-search.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, count

from sdy_jax.ir.collectives import BY_STRIPS
from sdy_jax.lowering.reshard.bounds import least_time_through_permute
from sdy_jax.lowering.reshard.bounds import remaining_time as least_time
from sdy_jax.lowering.reshard.problem import (
    FREE,
    MERGEABLE,
    Price,
    ReshardProblem,
    ReshardStep,
    State,
    atoms_of,
    mask_of,
)
from sdy_jax.lowering.reshard.relayouts import Atoms

# The moves of the reshard search: every collective that may follow, or precede, a state.
#
# All states that are yielded respect the memory cap (`ReshardProblem.min_shards`), given that the state they come
# from does, and blocks are joined to blocks or cut into blocks (`ReshardProblem.fits`), or relaid by strips. Permutes
# are not moves: the search adds them between its two halves.

MAX_PARAMS = 3
"""Pairs of dimensions that one all_to_all may exchange. Guessed, a guard: more never paid in the reshards that were
sampled, and each multiplies the moves of a state."""

_Single = tuple[int, int, Atoms, Atoms]
"""A dimension that loses atoms, the one that gets them, what the first keeps, and what is moved."""


def moves_from(problem: ReshardProblem, state: State) -> Iterator[ReshardStep]:
    """The steps that lead from `state` to another state."""
    shards = problem.shards(state)
    yield from _slices(problem, state)
    yield from _reductions(problem, state)
    yield from _unreductions(problem, state, shards)
    yield from _exchanges(problem, state)
    yield from _gathers(problem, state, shards)
    yield from _relayouts(problem, state, problem.target.dims)


def moves_into(problem: ReshardProblem, state: State) -> Iterator[ReshardStep]:
    """The steps that lead from another state (the one in the step) to `state`."""
    shards = problem.shards(state)
    yield from _slices_undone(problem, state, shards)
    yield from _reductions_undone(problem, state, shards)
    yield from _unreductions_undone(problem, state)
    yield from _exchanges(problem, state)
    yield from _gathers_undone(problem, state)
    yield from _relayouts(problem, state, problem.source.dims)


def _slices(problem: ReshardProblem, state: State) -> Iterator[ReshardStep]:
    for atom in atoms_of(problem.sliceable & ~problem.used(state)):
        yield from (ReshardStep("all_slice", 1 << atom, s) for s in _appended(problem, state, atom, state.unreduced))
    if not problem.is_even:
        yield from _whole_slices(problem, state)


def _whole_slices(problem: ReshardProblem, state: State) -> Iterator[ReshardStep]:
    """All of what the target wants in a dimension that is whole: part of it may not lead to blocks."""
    for dim, (have, want) in enumerate(zip(state.dims, problem.target.dims, strict=True)):
        atoms = mask_of(want)
        if len(want) > 1 and not have and not atoms & problem.used(state):
            yield ReshardStep("all_slice", atoms, state.with_dim(dim, want))


def _appended(problem: ReshardProblem, state: State, atom: int, unreduced: int) -> Iterator[State]:
    """The atom at the end of each dimension that has room for it."""
    for dim, axes in enumerate(state.dims):
        longer = (*axes, atom)
        if problem.fits(dim, axes, longer):
            yield state.with_dim(dim, longer, unreduced)


def _reductions(problem: ReshardProblem, state: State) -> Iterator[ReshardStep]:
    open_atoms = atoms_of(state.unreduced & problem.to_reduce)
    for atom in open_atoms:
        rest = state.unreduced & ~(1 << atom)
        yield from (ReshardStep("reduce_scatter", 1 << atom, s) for s in _appended(problem, state, atom, rest))
    for mask in _subsets(open_atoms):
        yield ReshardStep("all_reduce", mask, State(state.dims, state.unreduced & ~mask))


def _subsets(atoms: list[int]) -> Iterator[int]:
    for length in range(len(atoms), 0, -1):
        yield from (mask_of(chosen) for chosen in combinations(atoms, length))


def _unreductions(problem: ReshardProblem, state: State, shards: int) -> Iterator[ReshardStep]:
    for atom in atoms_of(problem.to_unreduce & ~problem.used(state)):
        yield ReshardStep("replicated_to_unreduced", 1 << atom, State(state.dims, state.unreduced | 1 << atom))
    for dim, axes in enumerate(state.dims):
        if axes and problem.to_unreduce >> axes[-1] & 1 and _may_drop_last(problem, dim, axes, shards):
            bit = 1 << axes[-1]
            yield ReshardStep("sharded_to_unreduced", bit, state.with_dim(dim, axes[:-1], state.unreduced | bit))


def _exchanges(problem: ReshardProblem, state: State) -> Iterator[ReshardStep]:
    """All all_to_alls; the inverse of one is another, so these are the moves of both directions."""
    singles = list[_Single]()
    for src, axes in enumerate(state.dims):
        for cut in range(len(axes)):
            if not problem.fits(src, axes[:cut], axes):
                continue
            for tgt, longer in enumerate(state.dims):
                if tgt != src and problem.fits(tgt, longer, longer + axes[cut:]):
                    singles.append((src, tgt, axes[:cut], axes[cut:]))
    for length in range(1, min(MAX_PARAMS, len(state.dims) // 2) + 1):
        yield from (_exchange(state, chosen) for chosen in _apart(singles, length))


def _apart(singles: Sequence[_Single], length: int, taken: int = 0, first: int = 0) -> Iterator[tuple[_Single, ...]]:
    """So many of these, from `first` on, between dimensions of their own, none of those in the mask `taken`."""
    for number in range(first, len(singles)):
        src, tgt, *_ = single = singles[number]
        dims = 1 << src | 1 << tgt
        if dims & taken:
            continue
        if length == 1:
            yield (single,)
            continue
        yield from ((single, *others) for others in _apart(singles, length - 1, taken | dims, number + 1))


def _exchange(state: State, chosen: Sequence[_Single]) -> ReshardStep:
    dims, group = list(state.dims), 0
    for src, tgt, kept, moved in chosen:
        dims[src] = kept
        dims[tgt] = state.dims[tgt] + moved
        for atom in moved:
            group |= 1 << atom
    return ReshardStep("all_to_all", group, State(tuple(dims), state.unreduced))


def _gathers(problem: ReshardProblem, state: State, shards: int) -> Iterator[ReshardStep]:
    for dim, axes in enumerate(state.dims):
        for cut in range(len(axes) - 1, -1, -1):
            if shards // problem.product(axes[cut:]) < problem.min_shards:
                break
            if problem.fits(dim, axes[:cut], axes):
                yield ReshardStep("all_gather", mask_of(axes[cut:]), state.with_dim(dim, axes[:cut]))


def _relayouts(problem: ReshardProblem, state: State, ends: Sequence[Atoms]) -> Iterator[ReshardStep]:
    """A dimension in the blocks that it has at an end of the problem, or in larger ones on the way there; and another
    one along atoms that it has then no more, or without atoms that it has then."""
    if problem.is_even or not problem.strips:
        return
    for dim, (axes, end) in enumerate(zip(state.dims, ends, strict=True)):
        elsewhere = problem.used(state) & ~mask_of(axes)
        for length in range(len(end), 0, -1):
            other = end[:length]
            if not problem.has_to_relay(dim, axes, other):
                continue
            for after in _beside(problem, state.with_dim(dim, other), dim, mask_of(other) & elsewhere, ends):
                if problem.shards(after) >= problem.min_shards and problem.change(state, after):
                    yield ReshardStep(BY_STRIPS, mask_of((*axes, *other)), after)


def _beside(problem: ReshardProblem, state: State, dim: int, twice: int, ends: Sequence[Atoms]) -> Iterator[State]:
    """The state, if no atom is in it twice; those in which another dimension has less, or all that it has at an end."""
    if not twice:
        yield state
    for other, (axes, end) in enumerate(zip(state.dims, ends, strict=True)):
        if other == dim:
            continue
        kept = next((i for i, atom in enumerate(axes) if twice >> atom & 1), len(axes))
        if twice and mask_of(axes[kept:]) == twice:
            yield state.with_dim(other, axes[:kept])
        more = end[len(axes) :]
        if not twice and more and end[: len(axes)] == axes and not mask_of(more) & problem.used(state):
            yield state.with_dim(other, end)


def _may_drop_last(problem: ReshardProblem, dim: int, axes: Atoms, shards: int) -> bool:
    """Whether the last atom of a dimension may go, within the memory cap."""
    return shards // problem.sizes[axes[-1]] >= problem.min_shards and problem.fits(dim, axes[:-1], axes)


def _slices_undone(problem: ReshardProblem, state: State, shards: int) -> Iterator[ReshardStep]:
    for dim, axes in enumerate(state.dims):
        if axes and problem.sliceable >> axes[-1] & 1 and _may_drop_last(problem, dim, axes, shards):
            yield ReshardStep("all_slice", 1 << axes[-1], state.with_dim(dim, axes[:-1]))


def _reductions_undone(problem: ReshardProblem, state: State, shards: int) -> Iterator[ReshardStep]:
    for dim, axes in enumerate(state.dims):
        if axes and problem.to_reduce >> axes[-1] & 1 and _may_drop_last(problem, dim, axes, shards):
            bit = 1 << axes[-1]
            yield ReshardStep("reduce_scatter", bit, state.with_dim(dim, axes[:-1], state.unreduced | bit))
    for mask in _subsets(atoms_of(problem.to_reduce & ~problem.used(state))):
        yield ReshardStep("all_reduce", mask, State(state.dims, state.unreduced | mask))


def _unreductions_undone(problem: ReshardProblem, state: State) -> Iterator[ReshardStep]:
    for atom in atoms_of(problem.to_unreduce & state.unreduced):
        rest = state.unreduced & ~(1 << atom)
        yield ReshardStep("replicated_to_unreduced", 1 << atom, State(state.dims, rest))
        yield from (ReshardStep("sharded_to_unreduced", 1 << atom, s) for s in _appended(problem, state, atom, rest))


def _gathers_undone(problem: ReshardProblem, state: State) -> Iterator[ReshardStep]:
    """What precedes is a permute, which may rename: one unused atom of each sort stands for all."""
    sorts: dict[tuple, int] = {}
    for atom in atoms_of(problem.all_atoms & ~problem.used(state)):
        role = (problem.to_reduce >> atom & 1, problem.to_unreduce >> atom & 1)
        sorts.setdefault((problem.links[atom], role), atom)
    for atom in sorts.values():
        yield from (ReshardStep("all_gather", 1 << atom, s) for s in _appended(problem, state, atom, state.unreduced))


# The cheapest reshard by search: A* from the source, meeting a table that was built backwards from the target.
#
# One permute is all a plan can need: atoms of equal size are renamed by it, so a later permute can be folded into the
# earlier one. Hence two halves. Backwards from the target, Dijkstra notes for each (shard counts, unreduced set) the
# cheapest continuation after a permute, which may pick any atoms: names do not matter there. Forwards, A* with the
# lower bound of `ReshardProblem.bound` either reaches the target or, from any state, permutes into that table. Where
# the order of the devices changes it has to permute, at a state that is not unreduced: the orders have different
# groups. Both halves drop whatever costs more than a plan already known. See docs/explanation/reshards.md#the-search.

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
