"""The direct reshard: reduce, slice, permute, exchange, gather, in that order. No search.

It is the plan that Shardy's own algorithm would choose in the usual cases; the search starts from its price, and it
stands where the search gives up. Works on problems whose atoms are so fine that none has to be split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import pairwise

from sdy_jax.lowering.reshard.problem import ReshardProblem
from sdy_jax.lowering.reshard.states import ReshardStep, State, atoms_of, mask_of
from sdy_jax.lowering.strips.relayout import Atoms

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
