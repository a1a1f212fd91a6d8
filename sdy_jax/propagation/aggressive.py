"""Aggressive factor propagation: each tensor takes what it can, and the order of factors resolves their conflicts.

See docs/explanation/propagation.md#one-op.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from sdy_jax.propagation.basic import (
    FactorProblem,
    allowed_across,
    allowed_within,
    compatible_axes,
    extend,
    truncate,
)
from sdy_jax.propagation.projection import TensorProjection
from sdy_jax.representation.axes import PrefixStatus, prefix_status
from sdy_jax.representation.mesh import Axes, axes_size


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
