"""The least that a reshard can cost, from the names of the axes alone: cheap, and below what any plan costs.

It tells which reshards need no plan, because something else is cheaper in any case.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from sdy_jax.lowering.cost import CostModel
from sdy_jax.representation.mesh import AxisRef, Mesh, axes_size
from sdy_jax.representation.sharding import TensorSharding


def least_time(
    shape: tuple[int, ...],
    itemsize: float,
    source: TensorSharding,
    target: TensorSharding,
    mesh: Mesh,
    costs: CostModel,
) -> float:
    """The bytes that some device must receive, over the fastest axis. See `reshard_problem.Problem.bound`."""
    wire = _least_bytes(shape, itemsize, source, target, mesh)
    return wire / max(costs.bandwidth_of(axis.name) for axis in mesh.axes) if wire and costs.bandwidth else wire


def _least_bytes(
    shape: tuple[int, ...], itemsize: float, source: TensorSharding, target: TensorSharding, mesh: Mesh
) -> float:
    whole = math.prod(shape) * itemsize
    if source.unreduced_axes:
        return _least_to_reduce(whole, source, target, mesh)
    if target.unreduced_axes:
        return 0.0
    wanted, common = 1, 1
    for have, want in zip(source.axes, target.axes, strict=True):
        shards = axes_size(want, mesh)
        wanted *= shards
        common *= 0 if _parted(have, want) else max(axes_size(have, mesh), shards)
    return whole / wanted - (whole / common if common else 0.0)


def _parted(have: Sequence[AxisRef], want: Sequence[AxisRef]) -> bool:
    """Whether some device's blocks along a dimension are certain to have nothing in common.

    They have where the lists differ at one place first: one device is first along one axis and last along the other.
    Parts of one axis may agree in their leading digits.
    """
    return next((a.name != b.name for a, b in zip(have, want, strict=False) if a != b), False)


def _least_to_reduce(whole: float, source: TensorSharding, target: TensorSharding, mesh: Mesh) -> float:
    """The smallest block that can be made is scattered; what the target's block has beyond its part must arrive."""
    if target.unreduced_axes:
        return 0.0
    group = axes_size(source.unreduced_axes, mesh)
    every = math.prod(mesh.sizes[name] for name in _names(source, target))
    return whole * (group - 2) / every + whole / axes_size((a for axes in target.axes for a in axes), mesh)


def _names(*shardings: TensorSharding) -> Iterable[str]:
    axes = (a for s in shardings for listed in (*s.axes, s.unreduced_axes) for a in listed)
    return {axis.name: None for axis in axes}
