"""The assignments of mesh axes to factors that the search considers.

The lists considered for a factor: every prefix of the axes that tensors already have along it, joins of two of these,
and lists that it could take over from another factor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from sdy_jax.lowering.analysis.cuts import leading_uncut
from sdy_jax.lowering.analysis.factors import (
    Assignment,
    are_apart,
    dividing_factors,
    dividing_prefix,
    factor_axes,
    is_contiguous,
)
from sdy_jax.lowering.candidates.op_problem import OpProblem
from sdy_jax.lowering.strategies.registry import Strategy
from sdy_jax.representation.axes import overlaps, truncate_overlaps
from sdy_jax.representation.mesh import Axes, axes_size
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.representation.sharding import TensorSharding

Space = list[list[Axes]]
"""Per factor, the lists considered. An assignment picks one list per factor, with no axis used twice."""

_MAX_ASSIGNMENTS = 2048
"""Above this many assignments the candidates are pruned to the lists that tensors have in full. Guessed, a guard
against products of many factors: ops with more factors lose candidates that split a tensor's list in two."""


def factor_lists(problem: OpProblem) -> Space:
    """Per factor, the distinct lists that tensors have along it, in tensor order."""
    return _lists(problem, [(tensor.sharding,) for tensor in problem.tensors])


def materialized_lists(problem: OpProblem) -> Space:
    """As `factor_lists`, with those of all layouts in which operands are materialized behind."""
    return _lists(problem, [(tensor.sharding, *tensor.materialized) for tensor in problem.tensors])


def _lists(problem: OpProblem, shardings: Sequence[Sequence[TensorSharding]]) -> Space:
    lists: Space = [[] for _ in problem.rule.factor_sizes]
    for of_tensor, mapping in zip(shardings, problem.rule.mappings, strict=True):
        for sharding in of_tensor:
            if sharding.rank != len(mapping):
                continue
            projected = factor_axes(sharding.axes, mapping, problem.rule.factor_sizes, problem.mesh)
            for factor, axes in projected.items():
                whole = leading_uncut(axes, problem.cuts, problem.mesh)
                if whole not in lists[factor]:
                    lists[factor].append(whole)
    return lists


def agreed_assignment(lists: Space) -> Assignment | None:
    """The assignment on which all tensors agree, where there is one."""
    if any(len(found) > 1 for found in lists):
        return None
    return tuple([found[0] if found else () for found in lists])


def considered_lists(problem: OpProblem, lists: Space) -> Space:
    """The lists considered for each factor, whatever the strategy."""
    sizes, mesh, takers = problem.rule.factor_sizes, problem.mesh, _takers(problem.rule)
    taken = [_movable(problem, f, lists) if f in takers else [] for f in range(len(lists))]
    every = [_leading_parts([*found, *more]) for found, more in zip(lists, taken, strict=True)]
    padded = [_padded(problem, f, found) for f, found in enumerate(lists)]
    return [
        [a for a in found if a in may_pad or not n % axes_size(a, mesh)]
        for n, found, may_pad in zip(sizes, every, padded, strict=True)
    ]


def _padded(problem: OpProblem, factor: int, found: Sequence[Axes]) -> frozenset[Axes]:
    """The lists along which a factor may be sharded without being divided: those that tensors have, in whole axes."""
    if factor in dividing_factors(problem.rule):
        return frozenset()
    return frozenset(axes[:i] for axes in found for i in range(1, len(axes) + 1))


def spaces(problem: OpProblem, strategy: Strategy, considered: Space, lists: Space) -> list[Space]:
    """The spaces that a strategy searches: one; where that is too large, one for each of a few assignments."""
    space = _splittable(strategy, considered)
    if math.prod(map(len, space)) > _MAX_ASSIGNMENTS:
        full = [[(), *(a for a in found if a and a in known)] for known, found in zip(considered, lists, strict=True)]
        space = _splittable(strategy, full)
    if math.prod(map(len, space)) <= _MAX_ASSIGNMENTS:
        return [space]
    return [[[axes] for axes in assignment] for assignment in _greedy_assignments(problem, strategy, space)]


def _splittable(strategy: Strategy, space: Space) -> Space:
    return [found if f in strategy.splittable else [()] for f, found in enumerate(space)]


def _takers(rule: OpShardingRule) -> frozenset[int]:
    """The factors of an operand and of every result that has any."""
    count = len(rule.operand_mappings)
    results = [factors for factors in rule.factors_of[count:] if factors]
    return frozenset[int]().union(*rule.factors_of[:count]).intersection(*results) if results else frozenset()


def _movable(problem: OpProblem, factor: int, lists: Space) -> list[Axes]:
    """Lists of other factors that this one could take over (by all_to_all), so that the work stays shared out.

    They are offered alone and behind what the factor has itself.
    """
    others = [axes for f, found in enumerate(lists) if f != factor for axes in found if axes]
    size, mesh = problem.rule.factor_sizes[factor], problem.mesh
    moved = [
        leading_uncut(dividing_prefix(size, (*own, *axes), mesh), problem.cuts, mesh)
        for own in dict.fromkeys([(), *lists[factor]])
        for axes in dict.fromkeys(others)
        if not any(overlaps(a, b) for a in own for b in axes)
    ]
    return [axes for axes in dict.fromkeys(moved) if axes]


def _leading_parts(found: Sequence[Axes]) -> list[Axes]:
    """Every leading part of every list, shortest first, and the joins of two that share no axis."""
    if not found:
        return [()]
    parts = list(dict.fromkeys([(), *(axes[:i] for axes in found for i in range(1, len(axes) + 1))]))
    joins = [(*p, *q) for p, q in itertools.permutations(parts[1:], 2) if not any(overlaps(a, b) for a in p for b in q)]
    return list(dict.fromkeys([*parts, *joins])) if joins else parts


def _greedy_assignments(problem: OpProblem, strategy: Strategy, space: Space) -> Iterator[Assignment]:
    """One assignment per factor order start: each factor takes its longest candidate that is still free."""
    count = len(space)
    yield ((),) * count
    for first in range(count):
        taken: list[Axes] = [()] * count
        for factor in [first, *(f for f in range(count) if f != first)]:
            used = [a for axes in taken for a in axes]
            for axes in sorted(space[factor], key=lambda c: -axes_size(c, problem.mesh)):
                trial = (*taken[:factor], truncate_overlaps(axes, used), *taken[factor + 1 :])
                if _is_valid(problem, strategy, trial):
                    taken = list(trial)
                    break
        yield tuple(taken)


def _is_valid(problem: OpProblem, strategy: Strategy, assignment: Assignment) -> bool:
    rule, mesh = problem.rule, problem.mesh
    for factor, axes in enumerate(assignment):
        if axes and factor not in strategy.splittable:
            return False
    return are_apart([a for axes in assignment for a in axes]) and is_contiguous(assignment, rule, mesh)
