"""Lower bounds of reshards: their time from lists of axes or from states, and the number of their collectives.

See docs/explanation/reshards.md#fast-and-slow-axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdy_jax.ir.meshes import AxisRef, Mesh, axes_size
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.reshard.problem import ReshardProblem, State, atoms_of
from sdy_jax.lowering.targets.cost_model import CostModel

# Where an axis, or an atom, cuts a tensor, and what devices that differ in it have to send each other for another
# cut.
#
# An axis of g devices behind others cuts a dimension into blocks whose number, modulo g, is the device's digit.


class Digit(NamedTuple):
    """The dimension that an axis cuts, and in how many blocks the axes before it cut that."""

    dim: int
    blocks: int


def received_along(size: int, have: Digit | None, want: Digit | None) -> float:
    """What a device receives at least from devices that differ from it in an axis, in blocks that all axes cut.

    The devices with one digit need together what they want and none of them has, and each different block of it is
    received by one of them: there are no more of these than devices.

    Args:
        size: the devices along the axis.
        have, want: where it cuts the tensor before and after; None where all devices along it have, or want, the same.

    >>> received_along(2, Digit(0, 1), None), received_along(2, Digit(0, 1), Digit(1, 1))
    (1.0, 0.5)
    """
    if have is None or have == want:
        return 0.0
    if want is None:
        return size - 1.0
    few, many = sorted((have.blocks, want.blocks))
    are_apart = have.dim != want.dim or many % (few * size) == 0  # else one digit says something of the other
    return 1 - 1 / size if are_apart else 0.0


# A lower bound for the cost of a reshard, computed from the lists of axes alone.
#
# The choice of a strategy uses it to drop candidates whose reshards cannot be cheap enough, without planning them.


class AxisLayout(NamedTuple):
    """The parts of a sharding that the bound depends on: axes per dimension, and unreduced axes."""

    axes: tuple[tuple[AxisRef, ...], ...]
    unreduced_axes: tuple[AxisRef, ...]


AnyLayout = TensorSharding | AxisLayout


def least_time(
    shape: tuple[int, ...],
    itemsize: float,
    source: AnyLayout,
    target: AnyLayout,
    mesh: Mesh,
    costs: CostModel,
) -> float:
    """The time for the bytes that some device must receive at least: over slow axes those that have to go along them,
    all others over the fastest one.

    `remaining_time` is the same bound on atoms.
    """
    whole = math.prod(shape) * itemsize
    wire = _least_bytes(whole, source, target, mesh)
    time = fastest(wire, mesh, costs)
    slow = slower_axes(mesh, costs)
    if not slow or target.unreduced_axes or not _is_even(shape, (source, target), mesh):
        return time
    used = {a.name for end in (source, target) for axes in _lists(end) for a in axes}
    block = whole / math.prod([mesh.sizes[name] for name in used])
    for axis in slow:
        across = _received_along(axis, source, target, mesh) * block
        if across:
            rest = fastest(max(wire - across, 0.0), mesh, costs)
            time = max(time, across / _speeds(mesh, costs)[axis] + rest)
    return time


def fastest(wire: float, mesh: Mesh, costs: CostModel) -> float:
    """The time that `wire` bytes take over the fastest axis of a mesh."""
    return wire / max(_speeds(mesh, costs).values(), default=1.0) if wire and costs.bandwidth else wire


@lru_cache(maxsize=1 << 8)
def slower_axes(mesh: Mesh, costs: CostModel) -> tuple[str, ...]:
    """The axes of a mesh that are slower than others."""
    speeds = _speeds(mesh, costs)
    return tuple([name for name, speed in speeds.items() if speed < max(speeds.values())])


@lru_cache(maxsize=1 << 8)
def _speeds(mesh: Mesh, costs: CostModel) -> Mapping[str, float]:
    """Bytes per second along each axis; of one with a slower major part, along the rest."""
    return {axis.name: costs.link(AxisRef(axis.name), mesh).speed for axis in mesh.axes if axis.size > 1}


def _is_even(shape: tuple[int, ...], ends: Iterable[AnyLayout], mesh: Mesh) -> bool:
    lengths = ((n, axes) for end in ends for n, axes in zip(shape, end.axes, strict=True))
    return not any(n % axes_size(axes, mesh) for n, axes in lengths if axes)


def _received_along(name: str, source: AnyLayout, target: AnyLayout, mesh: Mesh) -> float:
    """What a device receives along an axis, at least, in blocks that all axes cut: nothing where that is not known."""
    size, whole = mesh.sizes[name], AxisRef(name)
    if any(a.name == name and a != whole for end in (source, target) for axes in _lists(end) for a in axes):
        return 0.0
    if whole in source.unreduced_axes:
        return size - 1.0
    return received_along(size, *(_digit(whole, end, mesh) for end in (source, target)))


def _lists(layout: AnyLayout) -> tuple[tuple[AxisRef, ...], ...]:
    return (*layout.axes, layout.unreduced_axes)


def _digit(axis: AxisRef, layout: AnyLayout, mesh: Mesh) -> Digit | None:
    for dim, axes in enumerate(layout.axes):
        if axis in axes:
            return Digit(dim, axes_size(axes[: axes.index(axis)], mesh))
    return None


def _least_bytes(whole: float, source: AnyLayout, target: AnyLayout, mesh: Mesh) -> float:
    if source.unreduced_axes:
        return _least_to_reduce(whole, source, target, mesh)
    if target.unreduced_axes:
        return 0.0
    return missing_bytes(whole, (shares(*ends, mesh) for ends in zip(source.axes, target.axes, strict=True)))


def missing_bytes(whole: float, dimensions: Iterable[tuple[int, int]]) -> float:
    """The bytes of a device's target block that are not in its source block, at least.

    `whole`: the bytes of the tensor. `dimensions`: the `shares` of each dimension.
    """
    wanted, common = 1, 1
    for shards, both in dimensions:
        wanted *= shards
        common *= both
    return whole / wanted - (whole / common if common else 0.0)


def shares(have: Sequence[AxisRef], want: Sequence[AxisRef], mesh: Mesh) -> tuple[int, int]:
    """The size of a device's target block, and of its overlap with its source block, along one dimension.

    Both are given as denominators: (4, 8) says that the target block is 1/4 of the dimension, and that at most 1/8 of
    the dimension is in both blocks. An overlap of 0 says that for some device the blocks are disjoint.
    """
    shards = axes_size(want, mesh)
    return shards, 0 if _parted(have, want) else max(axes_size(have, mesh), shards)


def _parted(have: Sequence[AxisRef], want: Sequence[AxisRef]) -> bool:
    """Whether for some device the source and target blocks along a dimension are certain to be disjoint.

    They are if the first axes in which the two lists differ are different mesh axes, `a` and `b`: a device that is
    first along `a` and last along `b` has its blocks at opposite ends. Sub-axes of one mesh axis are not independent,
    so no such device need exist.
    """
    for a, b in zip(have, want, strict=False):
        if a != b:
            return a.name != b.name
    return False


def _least_to_reduce(whole: float, source: AnyLayout, target: AnyLayout, mesh: Mesh) -> float:
    """The bound where the source is unreduced.

    At best, g devices reduce_scatter the smallest block b that all other axes can make, which sends (1 - 1/g) b bytes
    and leaves each with b/g bytes; the rest of its target block must be received.
    """
    if target.unreduced_axes:
        return 0.0
    group = axes_size(source.unreduced_axes, mesh)
    names = {a.name for end in (source, target) for axes in _lists(end) for a in axes}
    every = math.prod([mesh.sizes[name] for name in names])
    return whole * (group - 2) / every + whole / axes_size((a for axes in target.axes for a in axes), mesh)


# Lower bounds for the time of a reshard, where some atoms are slower than others.
#
# A step over a group with a slow atom sends all of its bytes at the rate of that atom. So bytes that have to go from
# some devices to others that differ in it count at that rate, and only the others at that of the fastest atom.
# Example: along a slow x, `[{x}, {}] -> [{}, {x}]` brings half of a device's block from where x is another, whatever
# else is done. See docs/explanation/reshards.md#fast-and-slow-axes.


def remaining_time(problem: ReshardProblem, state: State) -> float:
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
    return least * received_along(size, *(_digit_of_atom(problem, each, atom) for each in (state, problem.target)))


def _digit_of_atom(problem: ReshardProblem, state: State, atom: int) -> Digit | None:
    for dim, axes in enumerate(state.dims):
        if atom in axes:
            return Digit(dim, problem.product(axes[: axes.index(atom)]))
    return None


# How many collectives reshards take at least: a reduction, a gather, and a move from dimension to dimension.

_ABSENT, _UNREDUCED = -1, -2


def steps_between(layouts: Sequence[TensorSharding], mesh: Mesh) -> NDArray[np.int64]:
    """From each of some layouts (rows) to each of them; 1 where none of the three is needed, as for a permutation.

    >>> from sdy_jax.ir.meshes import AxisRef
    >>> x, y = (AxisRef("x"),), (AxisRef("y"),)
    >>> layouts = [TensorSharding.closed("m", *of) for of in (([y], x), ([()], x), ([()],))]
    >>> steps_between(layouts, Mesh.of(x=2, y=4))[:, 2].tolist()
    [2, 1, 1]
    """
    names = {axis.name for axis in mesh.axes}
    found = [_places(layout) for layout in layouts]
    reduced, gathered, moved = np.zeros((3, len(layouts), len(layouts)), bool)
    for name in sorted(names.intersection(set[str]().union(*found))):  # the others are absent everywhere
        places = np.array([each.get(name, _ABSENT) for each in found])
        source, target = places[:, None], places[None, :]
        reduced |= (source == _UNREDUCED) & (target != _UNREDUCED)
        gathered |= (source >= 0) & (target == _ABSENT)
        moved |= (source >= 0) & (target >= 0) & (source != target)
    return np.maximum(1, reduced.astype(np.int64) + gathered + moved)


def _places(layout: TensorSharding) -> dict[str, int]:
    """Per axis, the dimension that it splits, or the first that a part of it does."""
    found = {axis.name: _UNREDUCED for axis in layout.unreduced_axes}
    for place, axes in reversed(list(enumerate(layout.axes))):
        found.update({axis.name: place for axis in axes})
    return found
