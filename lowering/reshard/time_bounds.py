"""Lower bounds for the time of a reshard, where some atoms are slower than others.

A step over a group with a slow atom sends all of its bytes at the rate of that atom. So bytes that have to go from some
devices to others that differ in it count at that rate, and only the others at that of the fastest atom. Example: along
a slow x, `[{x}, {}] -> [{}, {x}]` brings half of a device's block from where x is another, whatever else is done.
See docs/explanation/reshards.md#fast-and-slow-axes.
"""

from __future__ import annotations

import math

from sdy_jax.lowering.reshard.digits import Digit, received_along
from sdy_jax.lowering.reshard.problem import ReshardProblem
from sdy_jax.lowering.reshard.states import State, atoms_of


def least_time(problem: ReshardProblem, state: State) -> float:
    """The time that remains from a state on, whatever the plan."""
    wire, fastest = problem.bound(state), problem.fastest
    time = wire / fastest
    for atom in problem.slow_atoms:
        across = _across(problem, state, atom)
        if across:
            time = max(time, across / problem.speed(atom) + max(wire - across, 0.0) / fastest)
    return time


def least_time_through_permute(problem: ReshardProblem, state: State) -> float:
    """The time of a permute that leads to a state, or through gathers to it, and of the sums before it: the permute of
    the smallest blocks that there may be, at the slowest rate, and the gathers at the fastest."""
    wire = problem.local_bytes(state)
    least = min(wire, problem.least_block)
    permute = least / problem.slowest + (wire - least) / problem.fastest
    summed = problem.to_reduce & ~state.unreduced
    return permute + _least_to_sum(problem, summed) if summed else permute


def _least_to_sum(problem: ReshardProblem, atoms: int) -> float:
    """The time to scatter sums along atoms, in the smallest blocks that there may be."""
    numbers = atoms_of(atoms)
    count = math.prod([problem.sizes[atom] for atom in numbers])
    times = [
        (problem.sizes[atom] - 1) / problem.speed(atom) + (count - problem.sizes[atom]) / problem.fastest
        for atom in numbers
    ]
    return problem.least_block * max(times)


def _across(problem: ReshardProblem, state: State, atom: int) -> float:
    """The bytes that a device receives in steps over an atom, at least. Sums along it are scattered at least, in the
    smallest block that there may be."""
    size, least = problem.sizes[atom], problem.least_block
    if state.unreduced >> atom & 1:
        return (size - 1) * least if problem.to_reduce >> atom & 1 else 0.0
    return least * received_along(size, *(_digit(problem, each, atom) for each in (state, problem.target)))


def _digit(problem: ReshardProblem, state: State, atom: int) -> Digit | None:
    for dim, axes in enumerate(state.dims):
        if atom in axes:
            return Digit(dim, problem.product(axes[: axes.index(atom)]))
    return None
