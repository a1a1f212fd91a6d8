"""The least that a reshard can cost, from the names of the axes alone: cheap, and below what any plan costs.

It tells which reshards need no plan, because something else is cheaper in any case.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sdy_jax.lowering.reshard.cost import CostModel
from sdy_jax.representation.mesh import AxisRef, Mesh, axes_size
from sdy_jax.representation.sharding import TensorSharding


class Layout(NamedTuple):
    """What the bound depends on of a sharding."""

    axes: tuple[tuple[AxisRef, ...], ...]
    unreduced_axes: tuple[AxisRef, ...]


Placement = TensorSharding | Layout


def least_time(
    shape: tuple[int, ...],
    itemsize: float,
    source: Placement,
    target: Placement,
    mesh: Mesh,
    costs: CostModel,
) -> float:
    """The bytes that some device must receive, over the fastest axis. See `reshard_problem.Problem.bound`."""
    return fastest(_least_bytes(math.prod(shape) * itemsize, source, target, mesh), mesh, costs)


def fastest(wire: float, mesh: Mesh, costs: CostModel) -> float:
    """The time of that many bytes over the fastest axis of a mesh."""
    return wire / max(costs.bandwidth_of(axis.name) for axis in mesh.axes) if wire and costs.bandwidth else wire


def _least_bytes(whole: float, source: Placement, target: Placement, mesh: Mesh) -> float:
    if source.unreduced_axes:
        return _least_to_reduce(whole, source, target, mesh)
    if target.unreduced_axes:
        return 0.0
    return missing_bytes(whole, (shares(*ends, mesh) for ends in zip(source.axes, target.axes, strict=True)))


def missing_bytes(whole: float, dimensions: Iterable[tuple[int, int]]) -> float:
    """What a block of the target lacks, from the `shares` of each dimension of a tensor of `whole` bytes."""
    wanted, common = 1, 1
    for shards, both in dimensions:
        wanted *= shards
        common *= both
    return whole / wanted - (whole / common if common else 0.0)


def shares(have: Sequence[AxisRef], want: Sequence[AxisRef], mesh: Mesh) -> tuple[int, int]:
    """Along one dimension: how many blocks are wanted, and of how many the common part of two blocks is one at most;
    0 where some device's blocks have nothing in common."""
    shards = axes_size(want, mesh)
    return shards, 0 if _parted(have, want) else max(axes_size(have, mesh), shards)


def _parted(have: Sequence[AxisRef], want: Sequence[AxisRef]) -> bool:
    """Whether some device's blocks along a dimension are certain to have nothing in common.

    They have where the lists differ at one place first: one device is first along one axis and last along the other.
    Parts of one axis may agree in their leading digits.
    """
    for a, b in zip(have, want, strict=False):
        if a != b:
            return a.name != b.name
    return False


def _least_to_reduce(whole: float, source: Placement, target: Placement, mesh: Mesh) -> float:
    """The smallest block that can be made is scattered; what the target's block has beyond its part must arrive."""
    if target.unreduced_axes:
        return 0.0
    group = axes_size(source.unreduced_axes, mesh)
    names = {a.name for end in (source, target) for axes in (*end.axes, end.unreduced_axes) for a in axes}
    every = math.prod([mesh.sizes[name] for name in names])
    return whole * (group - 2) / every + whole / axes_size((a for axes in target.axes for a in axes), mesh)
