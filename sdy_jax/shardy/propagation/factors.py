"""Factor propagation in one op: projection of shardings to factors and back, the basic and the aggressive strategy."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sdy_jax.ir.meshes import (
    Axes,
    AxisRef,
    Mesh,
    PrefixStatus,
    add_or_merge,
    axes_size,
    contains,
    merge_neighbours,
    prefix_of,
    prefix_status,
    prefix_without_overlaps,
)
from sdy_jax.ir.shardings import DimensionSharding, TensorMapping, TensorSharding

# One step of propagation by one factor: the axes that a tensor got, and from where.


@dataclass(frozen=True, slots=True)
class Spread:
    """A factor of one of an op's tensors got axes: it had `before`, now `axes`.

    Tensors are numbered operands first, then results; `dim` is the target's dimension that the factor belongs to.
    `source` is the first tensor that had all of `axes` already, None if no single one had.
    """

    factor: int
    dim: int
    before: tuple[AxisRef, ...]
    axes: tuple[AxisRef, ...]
    source: int | None
    target: int


# Projection of a tensor's sharding from dimensions to the factors of an op's rule, and back.
#
# With the rule `([ij])->([i, j]) {i=2, j=4}` and an axis `"x"` of size 4, the operand `{"x"}` has `i` sharded by
# `"x":(1)2` and `j` by `"x":(2)2`. See docs/explanation/propagation.md#from-dimensions-to-factors-and-back.


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


# Basic factor propagation: all tensors of an op get one common list of axes per factor.
#
# Also the parts that the aggressive strategy shares: which axes a factor may get, and how conflicts truncate them.
# See docs/explanation/propagation.md#one-op.


class Direction(enum.IntEnum):
    """Who may contribute axes: operands (FORWARD), results (BACKWARD), both or none. Ordered as unions need it."""

    NONE = 0
    FORWARD = 1
    BACKWARD = 2
    BOTH = 3

    __hash__ = int.__hash__  # directions are parts of many keys, and Enum hashes names, slowly


@dataclass(frozen=True, slots=True)
class FactorProblem:
    """One op to propagate: its tensors (operands first), factor sizes, and a direction per factor."""

    tensors: tuple[TensorProjection, ...]
    num_operands: int
    sizes: tuple[int, ...]
    directions: tuple[Direction, ...]
    mesh: Mesh
    conservative: bool = False
    elementwise: bool = False

    @property
    def operands(self) -> tuple[TensorProjection, ...]:
        return self.tensors[: self.num_operands]

    @property
    def results(self) -> tuple[TensorProjection, ...]:
        return self.tensors[self.num_operands :]


def propagate_basic(problem: FactorProblem) -> set[int]:
    """Extends the tensors' factor shardings in place. Returns the indices of the changed tensors."""
    changed: set[int] = set()
    for factor in range(len(problem.sizes)):
        axes = compatible_axes(problem, factor)
        if not axes:
            continue

        def allowed(axis: AxisRef, previous: int, factor: int = factor) -> AxisRef | None:
            return _allowed_everywhere(problem, factor, axis, previous)

        axes = truncate(axes, allowed, problem)
        changed.update(n for n, tensor in enumerate(problem.tensors) if extend(tensor, factor, axes))
    return changed


def compatible_axes(problem: FactorProblem, factor: int) -> Axes:
    """The axes of a factor on which the contributing tensors agree, and those that only some of them have."""
    direction = problem.directions[factor]
    if direction == Direction.NONE:
        return ()
    groups = [problem.operands, problem.results]
    if direction == Direction.BACKWARD:
        groups.reverse()
    found: Axes = ()
    growing = True
    for tensors in groups:
        for tensor in tensors:
            if factor in tensor.factors:
                found, growing = _fold(found, growing, tensor.factors[factor].axes)
        growing = growing and direction == Direction.BOTH
    return found


def _fold(found: Axes, growing: bool, new: Axes) -> tuple[Axes, bool]:
    """Combines `found`, the axes agreed so far, with those of one more tensor. After a conflict it can only shorten."""
    for i, (old, axis) in enumerate(zip(found, new, strict=False)):
        if old == axis:
            continue
        kept = found[:i]
        if prefix_of(axis, old):
            if i + 1 < len(new):
                return (*kept, axis), False
        elif prefix_of(old, axis):
            if not growing or i + 1 < len(found):
                return (*kept, old), False
            return (*kept, *new[i:]), growing
        else:
            return kept, False
    return (found + new[len(found) :], growing) if growing else (found, growing)


AllowedPart = Callable[[AxisRef, int], AxisRef | None]
"""Given an axis and the product of the sizes before it, how much of the axis may be used."""


def truncate(axes: Axes, allowed: AllowedPart, problem: FactorProblem) -> Axes:
    """The longest allowed prefix of `axes`; its last axis may be a part of the original one."""
    kept: list[AxisRef] = []
    previous = 1
    for axis in axes:
        part = allowed(axis, previous)
        if part is None or (problem.conservative and part.sub_axis is not None):
            break
        kept.append(part)
        if part != axis:
            break
        previous *= part.size(problem.mesh)
    return tuple(kept)


def _allowed_everywhere(problem: FactorProblem, factor: int, axis: AxisRef, previous: int) -> AxisRef | None:
    part: AxisRef | None = axis
    for tensor in problem.tensors:
        if part is not None:
            part = allowed_across(tensor, factor, part)
        if part is not None:
            part = allowed_within(tensor, factor, part, previous, problem)
    return part


def allowed_across(tensor: TensorProjection, factor: int, axis: AxisRef) -> AxisRef | None:
    """The prefix of an axis that no other factor of the tensor uses."""
    part: AxisRef | None = axis
    for other, sharding in tensor.factors.items():
        if part is not None and other != factor:
            part = prefix_without_overlaps(part, (*sharding.overflow, *sharding.axes))
    return part


def allowed_within(
    tensor: TensorProjection, factor: int, axis: AxisRef, previous: int, problem: FactorProblem
) -> AxisRef | None:
    """The prefix of an axis that the factor can take in this tensor: all of it if present, or if open and dividing."""
    sharding = tensor.factors.get(factor)
    if sharding is None:
        return axis
    part = prefix_without_overlaps(axis, (*tensor.replicated, *tensor.unreduced))
    if part is None or any(contains(own, part) for own in sharding.axes):
        return part
    if not sharding.closed and not sharding.overflow:
        if sharding.minor:
            return part
        fitting = _fitting(part, problem.sizes[factor], previous, problem.mesh)
        if fitting is not None:
            return fitting
    if sharding.axes and prefix_of(sharding.axes[-1], part):
        return sharding.axes[-1]
    return None


def _fitting(axis: AxisRef, factor_size: int, previous: int, mesh: Mesh) -> AxisRef | None:
    """The part of an axis that divides what `previous` shards leave of a factor."""
    if factor_size % previous:
        return None
    size = axis.size(mesh)
    common = math.gcd(factor_size // previous, size)
    if common == size:
        return axis
    return AxisRef.sub(axis.name, axis.pre_size, common) if common > 1 else None


def extend(tensor: TensorProjection, factor: int, axes: Sequence[AxisRef]) -> bool:
    """Gives a factor these axes if its present ones are a strict prefix of them. Returns whether it did."""
    sharding = tensor.factors.get(factor)
    if sharding is None or prefix_status(sharding.axes, axes) is not PrefixStatus.STRICT:
        return False
    sharding.axes = tuple(axes)
    return True


# Aggressive factor propagation: each tensor takes what it can, and the order of factors resolves their conflicts.
#
# See docs/explanation/propagation.md#one-op.


def propagate_aggressive(problem: FactorProblem) -> set[int]:
    """Extends the tensors' factor shardings in place. Returns the indices of the changed tensors."""
    candidates = [compatible_axes(problem, factor) for factor in range(len(problem.sizes))]
    if not any(candidates):
        return set()
    order = factor_order(problem, candidates)
    first = problem.num_operands
    changed: set[int] = set()
    for number in (*range(first, len(problem.tensors)), *range(first)):
        is_operand = number < first
        if _update(problem, problem.tensors[number], is_operand, order, candidates):
            changed.add(number)
    return changed


def factor_order(problem: FactorProblem, candidates: Sequence[Axes]) -> list[int]:
    """Factors with axes to give, those with the largest source tensor first.

    A source of a factor is a tensor that has all of its candidate axes; element-wise ops prefer more shards.
    """
    sizes = [math.prod(problem.sizes[f] for f in tensor.factors) for tensor in problem.tensors]

    def key(factor: int) -> tuple[int, int, int, int]:
        axes = candidates[factor]
        size, index = _source(problem, factor, axes, sizes)
        return -size, -axes_size(axes, problem.mesh) if problem.elementwise else 0, index, factor

    return sorted((f for f, axes in enumerate(candidates) if axes), key=key)


def _source(problem: FactorProblem, factor: int, axes: Axes, sizes: Sequence[int]) -> tuple[int, int]:
    best = (-1, -1)
    for number, tensor in enumerate(problem.tensors):
        sharding = tensor.factors.get(factor)
        if sharding is None or prefix_status(axes, sharding.axes) is PrefixStatus.NOT:
            continue
        if sizes[number] > best[0]:
            best = (sizes[number], number)
    return best


def _update(
    problem: FactorProblem, tensor: TensorProjection, is_operand: bool, order: Sequence[int], candidates: Sequence[Axes]
) -> bool:
    changed = False
    for factor in order:
        sharding = tensor.factors.get(factor)
        if sharding is None or prefix_status(sharding.axes, candidates[factor]) is not PrefixStatus.STRICT:
            continue  # truncation below only shortens the candidates
        axes = _within(problem, tensor, factor, candidates[factor])
        if prefix_status(sharding.axes, axes) is not PrefixStatus.STRICT:
            continue
        axes = _across(problem, tensor, factor, axes)
        if is_operand and problem.elementwise:
            axes = _no_more_than_results(problem, factor, axes)
        changed |= extend(tensor, factor, axes)
    return changed


def _within(problem: FactorProblem, tensor: TensorProjection, factor: int, axes: Axes) -> Axes:
    return truncate(axes, lambda axis, previous: allowed_within(tensor, factor, axis, previous, problem), problem)


def _across(problem: FactorProblem, tensor: TensorProjection, factor: int, axes: Axes) -> Axes:
    return truncate(axes, lambda axis, _: allowed_across(tensor, factor, axis), problem)


def _no_more_than_results(problem: FactorProblem, factor: int, axes: Axes) -> Axes:
    """An operand is never sharded more than the results through a step between operands."""
    for result in problem.results:
        sharding = result.factors.get(factor)
        if axes and sharding is not None and prefix_status(sharding.axes, axes) is PrefixStatus.STRICT:
            axes = sharding.axes
    return axes
