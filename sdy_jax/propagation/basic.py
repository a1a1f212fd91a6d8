"""Basic factor propagation: all tensors of an op get one common list of axes per factor.

Also the parts that the aggressive strategy shares: which axes a factor may get, and how conflicts truncate them.
See docs/explanation/propagation.md#one-op.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sdy_jax.propagation.projection import TensorProjection
from sdy_jax.representation.axes import PrefixStatus, contains, prefix_of, prefix_status, prefix_without_overlaps
from sdy_jax.representation.mesh import Axes, AxisRef, Mesh


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
