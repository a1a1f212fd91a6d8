"""Choosing how one op is sharded: the cheapest assignment of mesh axes to the factors of its rule.

For each factor the candidates are the leading parts of the axes that its tensors already have along it, where users
expect them or in other layouts that are materialized. An assignment costs the reshards of the operands to what it
needs, what its strategy communicates inside, the reshards of the results to their declared shardings (reductions
included), and a little for every operation that is not shared out. Partial operands of a linear op may be reduced
before it or after it: both are priced. An op around which all tensors agree runs as they say: what else its users could
take is weighed where layouts are chosen for the whole program.
See docs/explanation/strategies.md#candidates-for-one-op.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter

from sdy_jax.lowering.analysis.factors import are_apart, dividing_factors
from sdy_jax.lowering.candidates.answers import refusal_of
from sdy_jax.lowering.candidates.assignments import agreed_assignment, factor_lists, materialized_lists
from sdy_jax.lowering.candidates.candidate_prices import BoundedCandidate, CandidatePrices
from sdy_jax.lowering.candidates.op_problem import Decision, OpProblem
from sdy_jax.lowering.strategies.registry import Strategy
from sdy_jax.representation.axes import mesh_order
from sdy_jax.representation.mesh import Axes, axes_size

Key = tuple[float, int, bool, int, tuple[object, ...]]
"""The order of candidates: by cost, collectives, early reduction, less parallel work, then a unique encoding."""

_SLACK = 1 + 1e-9
"""A tolerance for rounding: a candidate is priced if its cost may equal the best. Given: costs are sums of floats."""

Priced = tuple[Key, BoundedCandidate]


def choose(problem: OpProblem) -> Decision:
    """The cheapest candidate. Ties go to fewer collectives, later reductions, more parallel work, then the smaller
    encoding.

    Raises:
        ShardingError: the op is asked and refuses all of them.
    """
    if _is_settled(problem):
        return Decision(problem.kind, tuple([tensor.sharding for tensor in problem.tensors]))
    best = _best(problem)[1]
    strategy = best.candidate.strategy
    sharded = sharded_factors(problem) if strategy.rule is None else ()
    return Decision(problem.kind, best.shardings(), gathered_factors(sharded, strategy), best.inside)


def sharded_factors(problem: OpProblem) -> tuple[int, ...]:
    """The factors along which tensors are split."""
    return tuple([factor for factor, found in enumerate(factor_lists(problem)) if any(found)])


def gathered_factors(sharded: Sequence[int], strategy: Strategy) -> tuple[int, ...]:
    """Those of the factors along which tensors are split that the strategy cannot run split."""
    return tuple([factor for factor in sharded if factor not in strategy.splittable])


def _best(problem: OpProblem) -> Priced:
    own, *others = _by_rule(problem)
    best = _cheapest_by_rule(own)
    if best is not None and not best[0][1]:
        return best
    found = [best, *map(_cheapest_by_rule, filter(_may_be_cheaper, others))]
    allowed = [priced for priced in found if priced is not None]
    if not allowed:
        refusal = refusal_of(problem)
        assert refusal is not None
        raise refusal.failure()
    return min(allowed, key=_rank)


def _rank(priced: Priced) -> tuple[object, ...]:
    """The order of candidates by different rules: as by one, where of equal ones of an op that is asked those by its
    own rule come last, which says nothing of some operands."""
    key, bounded = priced
    strategy = bounded.candidate.strategy
    return *key[:3], strategy.ask is not None and strategy.rule is None, *key[3:]


def _by_rule(problem: OpProblem) -> list[OpProblem]:
    """The problem with the strategies that speak of the op's own rule; then one for each other rule."""
    rules = dict.fromkeys([None, *(strategy.rule for strategy in problem.strategies)])
    if len(rules) == 1:
        return [problem]
    return [
        problem.by_rule(rule or problem.rule, tuple(s for s in problem.strategies if s.rule is rule)) for rule in rules
    ]


def _may_be_cheaper(problem: OpProblem) -> bool:
    """Whether strategies by another rule than the op's are worth a look: the op is asked, or a tensor is split along
    what they send."""
    if any(strategy.ask is not None for strategy in problem.strategies):
        return True
    lists = factor_lists(problem)
    sending = {f for strategy in problem.strategies for inside in strategy.inside for f in inside.factors}
    return any(axes for f in sending for axes in lists[f])


def _cheapest_by_rule(problem: OpProblem) -> Priced | None:
    """The cheapest candidate by the rule of some strategies; None where the op refuses all of them.

    The assignment on which all tensors agree is taken, where nothing has to move, or the op computes what it makes:
    whether all around it had better be split otherwise is a question for the whole program.
    """
    candidates, agreed = CandidatePrices(problem, materialized_lists(problem)), agreed_assignment(factor_lists(problem))
    together = _cheapest(problem, candidates.with_assignment(agreed)) if agreed is not None else None
    if together is not None and (together[0][1] == 0 or _computes(together[1])):
        return together
    best = _cheapest(problem, candidates.all())
    found = [priced for priced in (together, best) if priced is not None]
    return min(found, key=itemgetter(0), default=None)


def _is_settled(problem: OpProblem) -> bool:
    """Whether the op has one strategy for its rule and that can run it in the given shardings, without any reshard.

    That is the usual case, and needs no search. Problems with a sharded dimension of several factors are left to the
    search, so every shard is a contiguous block here.
    """
    strategy, *others = (strategy for strategy in problem.strategies if strategy.rule is None)
    if others or strategy.ask is not None:
        return False
    if any(t.materialized and t.sharding not in t.materialized for t in problem.tensors):
        return False
    found: dict[int, Axes] = {}
    for tensor, mapping in zip(problem.tensors, problem.rule.mappings, strict=True):
        lists = tensor.sharding.axes
        if tensor.sharding.unreduced_axes or len(lists) != len(mapping):
            return False
        for axes, factors in zip(lists, mapping, strict=True):
            if axes and len(factors) > 1:
                return False
            for factor in factors:
                if found.setdefault(factor, axes) != axes:
                    return False
    return _runs_apart(problem, strategy, {factor: axes for factor, axes in found.items() if axes})


def _runs_apart(problem: OpProblem, strategy: Strategy, split: Mapping[int, Axes]) -> bool:
    """Whether the strategy runs the op under this assignment without collectives and without unreduced results."""
    factors = split.keys()
    if not factors <= strategy.splittable - strategy.partial or any(factors & i.factors for i in strategy.inside):
        return False
    sizes, mesh, dividing = problem.rule.factor_sizes, problem.mesh, dividing_factors(problem.rule) | strategy.dividing
    divides = all(not sizes[factor] % axes_size(axes, mesh) for factor, axes in split.items() if factor in dividing)
    return divides and are_apart([a for axes in split.values() for a in axes])


def _computes(bounded: BoundedCandidate) -> bool:
    """Whether an op computes, and sends nothing meanwhile."""
    return bounded.candidate.strategy.work is None and not bounded.inside


def _cheapest(problem: OpProblem, candidates: Sequence[BoundedCandidate]) -> Priced | None:
    """The cheapest candidate; the first of equals.

    Candidates are priced in the order of their lower bounds, until a bound exceeds the best price: a reshard takes some
    milliseconds to plan. Of a transformer's step on 2 x 4 that is split by batch and sequence 41 are planned instead of
    300, in 0.7 instead of 2.0 seconds.
    """
    best: tuple[Key, int] | None = None
    for number in sorted(range(len(candidates)), key=lambda i: candidates[i].least):
        limit = best[0][0] * _SLACK if best else math.inf
        if candidates[number].least > limit:
            break
        key = _key(problem, candidates[number], limit)
        if key is not None and (best is None or (key, number) < best):
            best = key, number
    return (best[0], candidates[best[1]]) if best else None


def _key(problem: OpProblem, bounded: BoundedCandidate, limit: float) -> Key | None:
    """The sort key of a candidate; None as soon as its cost is known to exceed the limit."""
    candidate, least = bounded.candidate, bounded.least
    cost, steps = sum([collective.time for collective in bounded.inside]), len(bounded.inside)
    for tensor, bound in zip(bounded.tensors, bounded.bounds, strict=True):
        if bound is None:
            continue
        paid, count = tensor.reshard(candidate)
        cost += paid
        steps += count
        least += paid - bound
        if least > limit:
            return None
    shards = math.prod(axes_size(axes, problem.mesh) for axes in candidate.assignment)
    encoded = tuple(tuple(mesh_order(problem.mesh, a) for a in axes) for axes in candidate.assignment)
    return cost + bounded.work, steps, not candidate.partial, -shards, encoded
