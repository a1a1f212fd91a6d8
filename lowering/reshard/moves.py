"""The moves of the reshard search: every collective that may follow, or precede, a state.

All states that are yielded respect the memory cap (`ReshardProblem.min_shards`), given that the state they come from
does, and blocks are joined to blocks or cut into blocks (`ReshardProblem.fits`), or relaid by strips. Permutes are not
moves: the search adds them between its two halves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from sdy_jax.lowering.reshard.problem import ReshardProblem
from sdy_jax.lowering.reshard.states import ReshardStep, State, atoms_of, mask_of
from sdy_jax.lowering.strips.relayout import Atoms
from sdy_jax.representation.sdy_collectives import BY_STRIPS

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
    for count in range(len(atoms), 0, -1):
        yield from (mask_of(chosen) for chosen in combinations(atoms, count))


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
    for count in range(1, min(MAX_PARAMS, len(state.dims) // 2) + 1):
        yield from (_exchange(state, chosen) for chosen in _apart(singles, count))


def _apart(singles: Sequence[_Single], count: int, taken: int = 0, first: int = 0) -> Iterator[tuple[_Single, ...]]:
    """So many of these, from `first` on, between dimensions of their own, none of those in the mask `taken`."""
    for number in range(first, len(singles)):
        src, tgt, *_ = single = singles[number]
        dims = 1 << src | 1 << tgt
        if dims & taken:
            continue
        if count == 1:
            yield (single,)
            continue
        yield from ((single, *others) for others in _apart(singles, count - 1, taken | dims, number + 1))


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
        for count in range(len(end), 0, -1):
            other = end[:count]
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
