"""Projection of a tensor's sharding from dimensions to the factors of an op's rule, and back.

With the rule `([ij])->([i, j]) {i=2, j=4}` and an axis `"x"` of size 4, the operand `{"x"}` has `i` sharded by
`"x":(1)2` and `j` by `"x":(2)2`.
See docs/explanation/propagation.md#from-dimensions-to-factors-and-back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sdy_jax.representation.axes import add_or_merge, merge_neighbours
from sdy_jax.representation.mesh import Axes, AxisRef, Mesh, axes_size
from sdy_jax.representation.rule import TensorMapping
from sdy_jax.representation.sharding import DimensionSharding, TensorSharding


@dataclass(slots=True)
class FactorSharding:
    """The axes of one factor in one tensor, major to minor.

    `overflow` are axes of the dimension that do not fit the factor; `minor`: it is the last factor of its dimension.
    """

    axes: Axes
    overflow: Axes
    closed: bool
    minor: bool


@dataclass(slots=True)
class TensorProjection:
    """One tensor's factors. A factor behind an overflow may have no entry."""

    factors: dict[int, FactorSharding]
    replicated: Axes = ()
    unreduced: Axes = ()
    reduction: str = "sum"


def project(
    sharding: TensorSharding | None, mapping: TensorMapping, sizes: Sequence[int], mesh: Mesh
) -> TensorProjection:
    """The factor shardings of one tensor; without a sharding all are empty and open."""
    factors: dict[int, FactorSharding] = {}
    if sharding is None:
        for dim in mapping:
            for factor in dim:
                factors[factor] = FactorSharding((), (), False, factor == dim[-1])
        return TensorProjection(factors)
    for dim, dimension in zip(mapping, sharding.dimensions, strict=True):
        _project_dimension(dim, dimension, sizes, mesh, factors)
    return TensorProjection(factors, sharding.replicated_axes, sharding.unreduced_axes, sharding.reduction)


def _project_dimension(
    dim: Sequence[int],
    dimension: DimensionSharding,
    sizes: Sequence[int],
    mesh: Mesh,
    factors: dict[int, FactorSharding],
) -> None:
    """Deals the dimension's axes to its factors, major to minor; `left` are the axes not dealt yet."""
    left = list(dimension.axes)
    for factor in dim[:-1]:
        taken, room = _take(left, sizes[factor], mesh)
        overflow: Axes = ()
        if room > 1 and left:
            overflow, left = merge_neighbours(left, mesh), []
        factors[factor] = FactorSharding(taken, overflow, dimension.is_closed, False)
        if overflow:
            following = dim[dim.index(factor) + 1]
            factors[following] = FactorSharding((), (), True, following == dim[-1])
            return
    if dim:
        factors[dim[-1]] = FactorSharding(merge_neighbours(left, mesh), (), dimension.is_closed, True)


def _take(left: list[AxisRef], room: int, mesh: Mesh) -> tuple[Axes, int]:
    """Moves axes that fit a factor of size `room` out of `left`. Returns them and the room that remains."""
    taken: list[AxisRef] = []
    while left:
        axis = left[0]
        size = axis.size(mesh)
        common = math.gcd(room, size)
        if size != 1 and common == 1:
            break
        if size > common:
            taken.append(AxisRef.sub(axis.name, axis.pre_size, common))
            left[0] = AxisRef.sub(axis.name, axis.pre_size * common, size // common)
            room //= common
        else:
            taken.append(left.pop(0))
            room //= size
    return tuple(taken), room


def unproject(
    tensor: TensorProjection, mapping: TensorMapping, sizes: Sequence[int], mesh: Mesh, reference: str | Mesh
) -> TensorSharding:
    """The tensor sharding of a projection. Axes of a factor behind one that is not full are dropped."""
    dimensions = tuple(_unproject_dimension(tensor, dim, sizes, mesh) for dim in mapping)
    return TensorSharding(reference, dimensions, tensor.replicated, tensor.unreduced, tensor.reduction)


def _unproject_dimension(
    tensor: TensorProjection, dim: Sequence[int], sizes: Sequence[int], mesh: Mesh
) -> DimensionSharding:
    axes: Axes = ()
    closed = False
    for factor in dim:
        sharding = tensor.factors[factor]
        closed |= sharding.closed
        axes = _joined(axes, sharding.axes, mesh)
        if sharding.overflow:
            axes = _joined(axes, sharding.overflow, mesh)
            break
        if axes_size(sharding.axes, mesh) < sizes[factor]:
            break
    return DimensionSharding(axes, closed)


def _joined(axes: Axes, more: Axes, mesh: Mesh) -> Axes:
    return add_or_merge(axes, more[0], mesh) + more[1:] if more else axes
