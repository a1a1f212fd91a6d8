"""A lower bound for the cost of a reshard, computed from the lists of axes alone.

The choice of a strategy uses it to drop candidates whose reshards cannot be cheap enough, without planning them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from sdy_jax.lowering.costs.cost_model import CostModel
from sdy_jax.lowering.reshard.digits import Digit, received_along
from sdy_jax.representation.mesh import AxisRef, Mesh, axes_size
from sdy_jax.representation.sharding import TensorSharding


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

    `reshard.time_bounds.least_time` is the same bound on atoms.
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
            time = max(time, across / costs.bandwidth_of(axis) + fastest(max(wire - across, 0.0), mesh, costs))
    return time


def fastest(wire: float, mesh: Mesh, costs: CostModel) -> float:
    """The time that `wire` bytes take over the fastest axis of a mesh."""
    return wire / max(costs.bandwidth_of(axis.name) for axis in mesh.axes) if wire and costs.bandwidth else wire


@lru_cache(maxsize=1 << 8)
def slower_axes(mesh: Mesh, costs: CostModel) -> tuple[str, ...]:
    """The axes of a mesh that are slower than others."""
    rates = {axis.name: costs.bandwidth_of(axis.name) for axis in mesh.axes if axis.size > 1}
    return tuple([name for name, rate in rates.items() if rate < max(rates.values())])


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
