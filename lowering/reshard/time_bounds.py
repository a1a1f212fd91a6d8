"""Lower bounds for the time of a reshard, where some atoms are slower than others.

A step over a group with a slow atom sends all of its bytes at the rate of that atom. So bytes that have to go from some
devices to others that differ in it count at that rate, and only the others at that of the fastest atom. Example: along
a slow x, `[{x}, {}] -> [{}, {x}]` brings half of a device's block from where x is another, whatever else is done.
See docs/explanation/reshards.md#fast-and-slow-axes.
"""

from __future__ import annotations

from sdy_jax.lowering.reshard.digits import Digit, received_along
from sdy_jax.lowering.reshard.problem import ReshardProblem
from sdy_jax.lowering.reshard.states import State


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
    """The time of a permute that leads to a state, or through gathers to it: of the smallest blocks that there may be,
    at the slowest rate, with the gathers at the fastest."""
    wire = problem.local_bytes(state)
    least = min(wire, problem.least_block)
    return least / problem.slowest + (wire - least) / problem.fastest


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
