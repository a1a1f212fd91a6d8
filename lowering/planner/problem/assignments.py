"""The assignments of mesh axes to an op's factors: those considered, those that ops refuse, those that make layouts.

See docs/explanation/strategies.md#ops-that-are-asked.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from sdy_jax.ir.meshes import Axes, Mesh, axes_size, overlaps, sort_and_merge, truncate_overlaps
from sdy_jax.ir.shardings import OpShardingRule, TensorSharding
from sdy_jax.lowering.ops.registry import Refused, Shards, Strategy, Taken, summed_in
from sdy_jax.lowering.planner.facts.factors import (
    Assignment,
    are_apart,
    canonical,
    dividing_factors,
    dividing_prefix,
    factor_axes,
    is_contiguous,
    joined_axes,
    leading_uncut,
    split_factors,
)
from sdy_jax.lowering.planner.problem.op_problem import InsideCollective, OpKind, OpProblem, Shardings

# The assignments of mesh axes to factors that the search considers.
#
# The lists considered for a factor: every prefix of the axes that tensors already have along it, joins of two of
# these, and lists that it could take over from another factor.

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


# Candidates of ops that have a say of their own in their layouts: taken as they are, in other layouts, or not at all.
#
# See docs/explanation/strategies.md#ops-that-are-asked.


class Answer(NamedTuple):
    """How an op runs that was asked: its layouts, in how many shards each factor of its rule is then, and what it sends
    by itself."""

    shardings: Shardings
    shards: Shards
    inside: tuple[InsideCollective, ...]


def answer_of(problem: OpProblem, strategy: Strategy, shardings: Shardings) -> Answer | None:
    """What an op answers to layouts along a strategy that asks it; None where it refuses them."""
    assert strategy.ask is not None
    taken = strategy.ask(problem.mesh, shardings)
    if isinstance(taken, Refused):
        return None
    split = split_factors(problem.rule, taken.shardings, problem.mesh)
    shards = tuple([axes_size(split.get(f, ()), problem.mesh) for f in range(len(problem.rule.factor_sizes))])
    time, last = problem.costs.sending_time, len(taken.shardings) - 1
    inside = [
        InsideCollective(kind, axes, last, sent, time(kind, axes, problem.mesh, sent), is_exact=True)
        for (kind, axes), sent in taken.sent.items()
    ]
    return Answer(taken.shardings, shards, tuple(inside))


def refusal_of(problem: OpProblem) -> Refused | None:
    """What an op says that does not even run with nothing split; None if it does, or is not asked."""
    whole = tuple([TensorSharding.replicated(problem.mesh_name, len(tensor.shape)) for tensor in problem.tensors])
    answers = (strategy.ask(problem.mesh, whole) for strategy in problem.strategies if strategy.ask is not None)
    return next((answer for answer in answers if isinstance(answer, Refused)), None)


# Whether an op can run in given layouts: whether some assignment of axes to the factors of its rule makes them.
#
# Layouts that a search finds are made of assignments. Those that come from elsewhere, as from a file, are checked.


def runs_in(kind: OpKind, shardings: Sequence[TensorSharding], mesh: Mesh) -> bool:
    """Whether a strategy of an op can run it in these layouts of operands, then of results.

    Which operands may be unreduced together is not asked here: the verifier of the partitioned module says that.
    """
    if len(shardings) != len(kind.tensors):
        return False
    return any(_runs(strategy, strategy.rule or kind.rule, shardings, mesh) for strategy in kind.strategies)


def _runs(strategy: Strategy, rule: OpShardingRule, shardings: Sequence[TensorSharding], mesh: Mesh) -> bool:
    if any(s.rank != len(mapping) for s, mapping in zip(shardings, rule.mappings, strict=True)):
        return False
    if strategy.ask is not None:
        taken = strategy.ask(mesh, shardings)
        return isinstance(taken, Taken) and taken.shardings == tuple(shardings)
    split = _split(rule, shardings, mesh)
    if not split.keys() <= strategy.splittable:
        return False
    dividing = dividing_factors(rule) | strategy.dividing
    if any(rule.factor_sizes[f] % axes_size(axes, mesh) for f, axes in split.items() if f in dividing):
        return False
    count = len(rule.operand_mappings)
    carried = dict.fromkeys(axis for sharding in shardings[:count] for axis in sharding.unreduced_axes)
    if not are_apart([*carried, *(axis for axes in split.values() for axis in axes)]):
        return False
    for index, sharding in enumerate(shardings[count:], start=count):
        summed = [axis for f in summed_in(rule, strategy, index) for axis in split.get(f, ())]
        left = sort_and_merge([*carried, *summed], mesh) if carried or summed else ()
        if sharding.unreduced_axes != left:
            return False
    return all(_follow(rule, strategy, split, shardings, mesh))


def _split(rule: OpShardingRule, shardings: Sequence[TensorSharding], mesh: Mesh) -> dict[int, Axes]:
    """The axes of each factor that is split: those of the tensor that has most of it."""
    found = dict[int, Axes]()
    for sharding, mapping in zip(shardings, rule.mappings, strict=True):
        for factor, axes in factor_axes(sharding.axes, mapping, rule.factor_sizes, mesh).items():
            if axes_size(axes, mesh) > axes_size(found.get(factor, ()), mesh):
                found[factor] = canonical(axes, mesh)
    return found


def _follow(
    rule: OpShardingRule,
    strategy: Strategy,
    split: Mapping[int, Axes],
    shardings: Sequence[TensorSharding],
    mesh: Mesh,
) -> Iterator[bool]:
    """Whether each tensor is split as the factors of its dimensions are; results are whole along what is combined."""
    for index, (sharding, mapping) in enumerate(zip(shardings, rule.mappings, strict=True)):
        whole = summed_in(rule, strategy, index)
        assignment = [() if f in whole else split.get(f, ()) for f in range(len(rule.factor_sizes))]
        for axes, factors in zip(sharding.axes, mapping, strict=True):
            yield canonical(axes, mesh) == (joined_axes(assignment, factors, mesh) if factors else ())
