"""The solution of an abstract reshard: the direct plan, or that of the search where it may not be the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from sdy_jax.lowering.reshard.problem import (
    FREE,
    MERGEABLE,
    AtomCut,
    Price,
    ReshardProblem,
    ReshardStep,
    State,
    atoms_of,
    coarse_cuts,
    fine_cuts,
    mask_of,
    refined,
    same_cost,
)
from sdy_jax.lowering.reshard.relayouts import Atoms
from sdy_jax.lowering.reshard.search import search

# The direct reshard: reduce, slice, permute, exchange, gather, in that order. No search.
#
# It is the plan that Shardy's own algorithm would choose in the usual cases; the search starts from its price, and it
# stands where the search gives up. Works on problems whose atoms are so fine that none has to be split.

Lists = list[list[int]]


def greedy(problem: ReshardProblem) -> list[ReshardStep] | None:
    """Steps from source to target, or None where this order of steps does not get there."""
    steps = _reduced(problem)
    state = steps[-1].state if steps else problem.source
    goal = _goal(problem)
    for permute in (_reorder if problem.reorders else _permute, _permute):
        for phase in (_slice, permute, _exchange_in_place, _exchange_anywhere, _gather):
            for step in phase(problem, state, goal):
                steps.append(step)
                state = step.state
    steps += _unreduced(problem, state)
    state = steps[-1].state if steps else state
    states = [problem.source, *(s.state for s in steps)]
    legal = all(problem.leads(*ends) for ends in pairwise(states))
    legal = legal and all(problem.shards(s) >= problem.min_shards for s in states[1:])
    return steps if state == problem.target and legal else None


def last_resort(problem: ReshardProblem) -> list[ReshardStep]:
    """Reduce, gather everything and slice again: always possible, never cheap."""
    steps = _reduced(problem)
    unreduced = steps[-1].state.unreduced if steps else problem.source.unreduced
    empty = State(((),) * len(problem.shape), unreduced)
    sharded = problem.used(steps[-1].state if steps else problem.source) & ~unreduced
    if sharded:
        steps.append(ReshardStep("all_gather", sharded, empty))
    if problem.reorders:
        steps.append(ReshardStep("collective_permute", 0, empty))
    if problem.to_unreduce:
        empty = State(empty.dims, unreduced | problem.to_unreduce)
        steps.append(ReshardStep("replicated_to_unreduced", problem.to_unreduce, empty))
    if problem.sliceable:
        steps.append(ReshardStep("all_slice", problem.sliceable, problem.target))
    return steps


def _reduced(problem: ReshardProblem) -> list[ReshardStep]:
    """Scatter what the target wants next in a dimension, all-reduce the rest."""
    steps, state = [], problem.source
    for dim, want in enumerate(problem.target.dims):
        while (have := state.dims[dim]) == want[: len(have)] and len(want) > len(have):
            atom = want[len(have)]
            longer = (*have, atom)
            if not problem.to_reduce & state.unreduced >> atom & 1 or not problem.fits(dim, have, longer):
                break
            state = state.with_dim(dim, longer, state.unreduced & ~(1 << atom))
            steps.append(ReshardStep("reduce_scatter", 1 << atom, state))
    rest = state.unreduced & problem.to_reduce
    if rest:
        steps.append(ReshardStep("all_reduce", rest, State(state.dims, state.unreduced & ~rest)))
    return steps


def _goal(problem: ReshardProblem) -> tuple[Atoms, ...]:
    """The target's dimensions, and behind them the atoms that become unreduced in their dimension."""
    goal = []
    for dim, want in enumerate(problem.target.dims):
        longer = want + tuple(a for a in problem.source.dims[dim] if problem.to_unreduce >> a & 1)
        goal.append(longer if problem.fits(dim, want, longer) else want)
    return tuple(goal)


def _unreduced(problem: ReshardProblem, state: State) -> list[ReshardStep]:
    steps = []
    spare = problem.to_unreduce & ~problem.used(state)
    if spare:
        state = State(state.dims, state.unreduced | spare)
        steps.append(ReshardStep("replicated_to_unreduced", spare, state))
    dims = tuple(tuple(a for a in axes if not problem.to_unreduce >> a & 1) for axes in state.dims)
    if dims != state.dims:
        group = problem.used(state) & ~state.unreduced & problem.to_unreduce
        steps.append(ReshardStep("sharded_to_unreduced", group, State(dims, state.unreduced | group)))
    return steps


def _common(have: Atoms, want: Atoms) -> int:
    """The length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(have, want, strict=False)) if a != b), min(len(have), len(want)))


def _open_parts(state: State, goal: tuple[Atoms, ...]) -> tuple[list[Atoms], list[Atoms]]:
    """Per dimension, the atoms to remove and the atoms to add behind the common prefix."""
    cuts = [_common(have, want) for have, want in zip(state.dims, goal, strict=True)]
    present = [have[c:] for have, c in zip(state.dims, cuts, strict=True)]
    missing = [want[c:] for want, c in zip(goal, cuts, strict=True)]
    return present, missing


def _slice(problem: ReshardProblem, state: State, goal: tuple[Atoms, ...]) -> list[ReshardStep]:
    """Slices missing atoms that are unused: in their own dimension while it has room, else in any that has."""
    present, missing = _open_parts(state, goal)
    sizes = [(problem.product(i), problem.product(o)) for i, o in zip(present, missing, strict=True)]
    room = [o // math.gcd(i, o) for i, o in sizes]
    used, dims, pool = problem.used(state), [list(axes) for axes in state.dims], []
    for dim, atoms in enumerate(missing):
        for atom in atoms:
            if not used >> atom & 1 and not _place(problem, dims, room, (dim,), atom):
                pool.append(atom)
    for atom in pool:
        _place(problem, dims, room, range(len(dims)), atom)
    after = State(tuple(map(tuple, dims)), state.unreduced)
    return [ReshardStep("all_slice", problem.used(after) & ~used, after)] if after != state else []


def _place(problem: ReshardProblem, dims: Lists, room: list[int], choice: tuple[int, ...] | range, atom: int) -> bool:
    for dim in choice:
        if room[dim] % problem.sizes[atom] == 0 and problem.fits(dim, tuple(dims[dim]), (*dims[dim], atom)):
            dims[dim].append(atom)
            room[dim] //= problem.sizes[atom]
            return True
    return False


def _permute(problem: ReshardProblem, state: State, goal: tuple[Atoms, ...]) -> list[ReshardStep]:
    if not _needs_permute(problem, state, goal):
        return []
    after = _rebuilt(problem, state, goal)
    return [] if after is None or after == state else [ReshardStep("collective_permute", 0, after)]


def _reorder(problem: ReshardProblem, state: State, goal: tuple[Atoms, ...]) -> list[ReshardStep]:
    """The permute to the other order of the devices, which moves what else a permute would."""
    return _permute(problem, state, goal) or [ReshardStep("collective_permute", 0, state)]


def _needs_permute(problem: ReshardProblem, state: State, goal: tuple[Atoms, ...]) -> bool:
    present, missing = _open_parts(state, goal)
    sizes = problem.sizes
    if any(i and o and sizes[i[0]] == sizes[o[0]] for i, o in zip(present, missing, strict=True)):
        return True
    wanted = mask_of(a for axes in goal for a in axes)
    used = problem.used(state)
    appearing = {sizes[a] for a in atoms_of(wanted & ~used)}
    if any(sizes[a] in appearing for a in atoms_of(used & ~wanted & ~state.unreduced)):
        return True
    for phase in (_exchange_in_place, _gather):
        steps = phase(problem, state, goal)
        state = steps[-1].state if steps else state
    return state.dims != goal


def _rebuilt(problem: ReshardProblem, state: State, goal: tuple[Atoms, ...]) -> State | None:
    """A state with the same shard counts, and the atoms where the target has them."""
    present, missing = _open_parts(state, goal)
    room = [problem.product(i) for i in present]
    heads: Lists = [list(h[: len(h) - len(i)]) for h, i in zip(state.dims, present, strict=True)]
    tails: Lists = [[] for _ in present]
    later: list[int] = []
    for dim, atoms in enumerate(missing):
        fitting = 0
        for atom in atoms:
            if room[dim] % problem.sizes[atom]:
                break
            room[dim] //= problem.sizes[atom]
            fitting += 1
        heads[dim] += atoms[:fitting]
        later += atoms[fitting:]
    for atom in later:
        _take(problem, tails, room, range(len(room)), atom, len)
    wanted = mask_of(a for axes in goal for a in axes)
    for dim, atoms in enumerate(present):
        for atom in atoms:
            if not wanted >> atom & 1:
                _take(problem, tails, room, (dim, *range(len(room))), atom, _front)
    if any(r != 1 for r in room):
        return None
    dims = tuple(tuple(h + t) for h, t in zip(heads, tails, strict=True))
    return State(dims, state.unreduced)


def _front(_: list[int]) -> int:
    return 0


def _take(
    problem: ReshardProblem,
    tails: Lists,
    room: list[int],
    choice: Iterable[int],
    atom: int,
    where: Callable[[list[int]], int],
) -> None:
    """Puts the atom into the first dimension with room for it, if any."""
    for dim in choice:
        if room[dim] % problem.sizes[atom] == 0 and room[dim] > 1:
            tails[dim].insert(where(tails[dim]), atom)
            room[dim] //= problem.sizes[atom]
            return


def _exchange_in_place(problem: ReshardProblem, state: State, goal: tuple[Atoms, ...]) -> list[ReshardStep]:
    return _exchanges(problem, state, goal, in_place=True)


def _exchange_anywhere(problem: ReshardProblem, state: State, goal: tuple[Atoms, ...]) -> list[ReshardStep]:
    return _exchanges(problem, state, goal, in_place=False)


def _exchanges(problem: ReshardProblem, state: State, goal: tuple[Atoms, ...], in_place: bool) -> list[ReshardStep]:
    """All_to_alls of maximal suffixes that are wanted in one other dimension (and, at first, land in place there)."""
    home = {atom: dim for dim, axes in enumerate(goal) for atom in axes}
    steps: list[ReshardStep] = []
    while (step := _next_exchange(problem, state, goal, home, in_place)) and len(steps) < len(problem.sizes):
        steps.append(step)
        state = step.state
    return steps


def _next_exchange(
    problem: ReshardProblem, state: State, goal: tuple[Atoms, ...], home: dict[int, int], in_place: bool
) -> ReshardStep | None:
    present, _ = _open_parts(state, goal)
    for src, atoms in enumerate(present):
        for cut in range(len(atoms)):
            moved = atoms[cut:]
            targets = {home.get(a, src) for a in moved}
            if len(targets) != 1 or src in targets:
                continue
            tgt = targets.pop()
            longer = state.dims[tgt] + moved
            if problem.fits(tgt, state.dims[tgt], longer) and (not in_place or goal[tgt][: len(longer)] == longer):
                kept = state.dims[src][: len(state.dims[src]) - len(moved)]
                return ReshardStep("all_to_all", mask_of(moved), state.with_dim(src, kept).with_dim(tgt, longer))
    return None


def _gather(problem: ReshardProblem, state: State, goal: tuple[Atoms, ...]) -> list[ReshardStep]:
    """Gather, in every dimension at once, the suffix that nothing wants."""
    wanted = mask_of(a for axes in goal for a in axes)
    present, _ = _open_parts(state, goal)
    dims = []
    for axes, atoms in zip(state.dims, present, strict=True):
        idle = next((i for i, a in enumerate(reversed(atoms)) if wanted >> a & 1), len(atoms))
        dims.append(axes[: len(axes) - idle])
    after = State(tuple(dims), state.unreduced)
    return [ReshardStep("all_gather", problem.used(state) & ~problem.used(after), after)] if after != state else []


# The best steps for an abstract problem: the direct plan, or what the search finds where that may not be the best.
#
# Plans are compared by (time, wire bytes, communicating ops, ops). The direct plan is returned on ties, and at once
# where it meets the lower bound. The search runs on whole atoms first, then on their parts (mostly primes).

MAX_PARTS = 6
"""With more parts than that the search often gives up: it takes larger ones. Measured (2026-11, planning of
`scripts/bench_models`): of 315 reshards of an 8B model on 256 devices, cut in 7 and 8, larger parts changed 49 (0.54 to
1.22 of the price) in half the time, and no plan."""

_SLACK = 1 + 1e-9
"""Given: prices are sums of floats, whose rounding is no difference."""

_FIRST = 2
"""Cuts of the axes of which one has to lead to something better than the direct plan, or no others are tried. Measured
(2026-11, planning of `scripts/bench_models`): of 241 reshards of an 8B model on 2 x 16 x 16 none was found later, and
these tries took a third of the time."""

_FEW_PARTS = 4
"""With more parts than that no further cut is tried after one beyond the first that led to nothing. Measured (2026-11,
planning of `scripts/bench_models`): of 76 reshards of that model one was then found for 0.997 of the price, in two and
a half times as long."""

ReshardSolution = tuple[AtomCut, tuple[ReshardStep, ...], Price]


@lru_cache(maxsize=1 << 14)
def solved(problem: ReshardProblem) -> ReshardSolution:
    """The best steps, and how the atoms were cut for them. Memoized without names: equal problems share it."""
    whole: AtomCut = tuple((n,) for n in problem.sizes)
    if problem.source == problem.target and not problem.reorders:
        return whole, (), FREE
    one = _single_step(problem)
    if one is not None and problem.is_of_one_speed(one.group) and not problem.cuts_tiles:
        return whole, (one,), priced(problem, one, problem.source)
    cuts = fine_cuts(problem)
    best = direct = before = _direct(problem, cuts[0])
    least, parts = problem.bound(problem.source), sum(map(len, cuts[0]))
    tried = dict.fromkeys([whole, *(cuts if parts <= MAX_PARTS else coarse_cuts(problem))])
    for number, cut in enumerate(tried):
        is_idle = best is direct if parts <= _FEW_PARTS else best is before
        if best and (_is_best(problem, best[2], least) or (number >= _FIRST and is_idle)):
            break
        before, best = best, _better(best, _searched(refined(problem, cut), cut, best))
    return best or _uncapped(problem)


def _is_best(problem: ReshardProblem, price: Price, least: float) -> bool:
    """Whether a plan sends the least bytes that there are, over the fastest atoms, in one collective."""
    quickest = same_cost(price.time, least / problem.fastest)
    return same_cost(price.wire_bytes, least) and (
        quickest or (price.communicating == 1 and problem.is_of_one_speed(problem.all_atoms) and not problem.cuts_tiles)
    )


def _single_step(problem: ReshardProblem) -> ReshardStep | None:
    """The one step that does it all, where it is certainly the best: target and source differ in one way only."""
    source, target = problem.source, problem.target
    if problem.reorders:
        return _single_permute(problem)
    if source.dims == target.dims:
        if not problem.to_unreduce:
            return ReshardStep("all_reduce", problem.to_reduce, target)
        return None if problem.to_reduce else ReshardStep("replicated_to_unreduced", problem.to_unreduce, target)
    if not problem.leads(source, target):
        return None
    pairs = list(zip(source.dims, target.dims, strict=True))
    if source.unreduced == target.unreduced:
        if all(have[: len(want)] == want for have, want in pairs):
            return ReshardStep("all_gather", problem.used(source) & ~problem.used(target), target)
        appended = problem.used(target) & ~problem.used(source)
        if _appends(problem, pairs, appended):
            return ReshardStep("all_slice", appended, target)
    # In padded blocks more may be scattered than an all_reduce sends.
    if problem.is_even and not problem.to_unreduce and _appends(problem, pairs, problem.to_reduce):
        return ReshardStep("reduce_scatter", problem.to_reduce, target)
    return None


def _single_permute(problem: ReshardProblem) -> ReshardStep | None:
    """Slicing before and gathering after a permute saves nothing; so with equal shards the permute does it all."""
    source, target = problem.source, problem.target
    whole = not source.unreduced and not target.unreduced
    return (
        ReshardStep("collective_permute", 0, target)
        if whole and problem.counts(source) == problem.counts(target)
        else None
    )


def _appends(problem: ReshardProblem, pairs: list[tuple[tuple[int, ...], tuple[int, ...]]], atoms: int) -> bool:
    """Target dimensions are the source's with exactly these atoms behind."""
    if any(want[: len(have)] != have for have, want in pairs):
        return False
    return mask_of(a for have, want in pairs for a in want[len(have) :]) == atoms


def _direct(problem: ReshardProblem, cut: AtomCut) -> ReshardSolution | None:
    fine = refined(problem, cut)
    steps = greedy(fine)
    return None if steps is None else (cut, *_merged(fine, steps))


def _searched(problem: ReshardProblem, cut: AtomCut, known: ReshardSolution | None) -> ReshardSolution | None:
    steps = search(problem, known[2] if known else None)
    return None if steps is None else (cut, *_merged(problem, steps))


def _better(first: ReshardSolution | None, second: ReshardSolution | None) -> ReshardSolution | None:
    """The cheaper one; the first on ties of time, bytes and communicating steps."""
    if first is None or second is None:
        return first or second
    a, b = first[2], second[2]
    for x, y in ((a.time, b.time), (a.wire_bytes, b.wire_bytes), (a.communicating, b.communicating)):
        if not same_cost(x, y):
            return first if x < y else second
    return first


def _uncapped(problem: ReshardProblem) -> ReshardSolution:
    """No way within the memory cap: dimensions are too small to hold what has to be sliced first."""
    cut = fine_cuts(problem)[0]
    fine = replace(refined(problem, cut), min_shards=1)
    best: ReshardSolution = (cut, *_merged(fine, last_resort(fine)))
    return _better(best, _searched(fine, cut, best)) or best


def _merged(problem: ReshardProblem, steps: list[ReshardStep]) -> tuple[tuple[ReshardStep, ...], Price]:
    """Neighbours of one kind become one step where that costs no more, each for itself: that small collectives share
    latency is no reason to cut one in two. And the price of it all."""
    kept: list[tuple[State, ReshardStep, Price]] = []
    before = problem.source
    for step in steps:
        price = priced(problem, step, before)
        if kept and kept[-1][1].kind == step.kind and step.kind in MERGEABLE:
            start, last, _ = kept[-1]
            joined = ReshardStep(step.kind, last.group | step.group, step.state)
            apart = _alone(problem, last, start) + _alone(problem, step, before)
            if _alone(problem, joined, start) <= apart * _SLACK:
                kept[-1] = (start, joined, priced(problem, joined, start))
                before = step.state
                continue
        kept.append((before, step, price))
        before = step.state
    total = FREE
    for _, _, price in kept:
        total = total.plus(price)
    return tuple(step for _, step, _ in kept), total


def _alone(problem: ReshardProblem, step: ReshardStep, before: State) -> float:
    return problem.time_alone(step.kind, step.group, before, step.state)


def priced(problem: ReshardProblem, step: ReshardStep, before: State) -> Price:
    if step.kind == "collective_permute":
        return problem.permute_price(before)
    return problem.price(step.kind, step.group, before, step.state)
