"""Decisions how ops run: the cheapest assignment of axes to the factors of an op's rule, shared by equal ops.

See docs/explanation/strategies.md#candidates-for-one-op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter, itemgetter
from typing import NamedTuple

from sdy_jax.ir.graph import Op, Value
from sdy_jax.ir.meshes import Axes, axes_size, mesh_order
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.ops.elementwise import carries
from sdy_jax.lowering.ops.products import pace
from sdy_jax.lowering.ops.registry import Strategy
from sdy_jax.lowering.planner.facts.factors import are_apart, dividing_factors
from sdy_jax.lowering.planner.facts.fusion import Touched, Touches
from sdy_jax.lowering.planner.facts.loops import times_as_often
from sdy_jax.lowering.planner.placement.value_placement import ValuePlacement, has_one_user
from sdy_jax.lowering.planner.problem.assignments import agreed_assignment, factor_lists, materialized_lists, refusal_of
from sdy_jax.lowering.planner.problem.candidate_prices import BoundedCandidate, CandidatePrices
from sdy_jax.lowering.planner.problem.op_problem import Decision, Kinds, OpKind, OpProblem, Shardings, Tensor
from sdy_jax.lowering.planner.setting import Setting
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.lowering.targets.target import Target

# Choosing how one op is sharded: the cheapest assignment of mesh axes to the factors of its rule.
#
# For each factor the candidates are the leading parts of the axes that its tensors already have along it, where users
# expect them or in other layouts that are materialized. An assignment costs the reshards of the operands to what it
# needs, what its strategy communicates inside, the reshards of the results to their declared shardings (reductions
# included), and a little for every operation that is not shared out. Partial operands of a linear op may be reduced
# before it or after it: both are priced. An op around which all tensors agree runs as they say: what else its users
# could take is weighed where layouts are chosen for the whole program. See
# docs/explanation/strategies.md#candidates-for-one-op.

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


# Decisions how ops run, remembered: equal ops with equal shardings around them share one.

_NONE: frozenset[int] = frozenset()

_CONVERT = "stablehlo.convert"
"""Partial sums are reduced before it, in the narrower type, unless a plan for the whole program says otherwise."""

_UNREDUCED = attrgetter("unreduced_axes")


class _Around(NamedTuple):
    """What is around an op: shardings of operands, then those declared for results; the operands that stay unreduced
    together; per operand, the op's executions for each time that it is computed (none where all are 1), and the layouts
    in which it is materialized; the operands that take no reshard of their own."""

    shardings: Shardings
    carried: frozenset[int]
    executions: tuple[int, ...]
    materialized: tuple[Shardings, ...]
    free: frozenset[int]


class Decisions:
    """The decisions for the ops of one program."""

    def __init__(self, placement: ValuePlacement, setting: Setting):
        self._placement, self._meshes = placement, placement.meshes
        self._costs, self._kinds, self._memo = setting.costs, kinds_of(setting), setting.memo
        self._made: dict[object, Decision] = {}

    def of(self, op: Op, planned: Decision | None = None) -> Decision | None:
        """The decision for an op whose operands have been placed, as planned where it is; None where it has no rule."""
        placed = self._placement.of(op.operands)
        around = (*placed, *map(self._placement.declared, op.results))
        if planned is not None:
            return self._as_planned(around, planned)
        kind = self._kinds.of(op)
        if kind is None:
            return None
        seen = _Around(
            around,
            self._carried(op, placed, around) if any(map(_UNREDUCED, placed)) else _NONE,
            self._executions_per_operand(op),
            self._placement.materialized_layouts_of(op.operands),
            self._placement.free_among(op.operands) | _given_before(op.operands, kind),
        )
        made = self._made.get((kind, seen))
        if made is None:
            made = self._made[kind, seen] = self._decided(op, kind, seen)
        return made

    def _as_planned(self, around: Shardings, planned: Decision) -> Decision:
        kind, gathered, strategy = planned.kind, planned.gathered, planned.strategy
        if strategy is not None and strategy.rule is None:
            sharded = self._memo.once(("sharded factors", kind, around), lambda: self._sharded_factors(kind, around))
            gathered = gathered_factors(sharded, strategy)
        return _noted(Decision(kind, planned.shardings, gathered, planned.inside), around)

    def _sharded_factors(self, kind: OpKind, around: Shardings) -> tuple[int, ...]:
        tensors = [Tensor(*shaped, s) for shaped, s in zip(kind.tensors, around, strict=True)]
        return sharded_factors(OpProblem(kind, tuple(tensors), self._meshes.base, self._costs))

    def _decided(self, op: Op, kind: OpKind, seen: _Around) -> Decision:
        mesh = self._mesh_of(op, seen.shardings)
        tensors = [Tensor(*shaped, s) for shaped, s in zip(kind.tensors, _on_mesh(seen.shardings, mesh), strict=True)]
        for index, times in enumerate(seen.executions):
            tensors[index] = tensors[index]._replace(share=1 / times)
        for index in seen.free:
            tensors[index] = tensors[index]._replace(share=0.0)
        for index, found in enumerate(seen.materialized):
            tensors[index] = tensors[index]._replace(materialized=_on_mesh(found, mesh))
        cuts = self._placement.cuts
        made = choose(OpProblem(kind, tuple(tensors), self._meshes.base, self._costs, seen.carried, cuts))
        if mesh != self._meshes.base_name:
            made = made._replace(shardings=tuple([self._meshes.settled(s, s.rank) for s in made.shardings]))
        return _noted(made, seen.shardings)

    def _executions_per_operand(self, op: Op) -> tuple[int, ...]:
        """Per operand, the op's executions for each time that it is computed; empty where all are 1.

        An operand from outside of a loop is resharded once, before the loop, so that costs less.
        """
        if op.block is None or op.block.parent.block is None:
            return ()
        executions = tuple([times_as_often(op, value) for value in op.operands])
        return executions if max(executions, default=1) > 1 else ()

    def _mesh_of(self, op: Op, around: Shardings) -> str:
        return self._meshes.name_of_op(around, (*op.operands, *op.results))

    def _carried(self, op: Op, placed: Sequence[TensorSharding], around: Shardings) -> frozenset[int]:
        """The indices of operands to keep unreduced, so that the results are; none if the op cannot pass them on."""
        partial = {i: sharding for i, sharding in enumerate(placed) if sharding.unreduced_axes}
        if len({(s.reduction, s.mesh) for s in partial.values()}) != 1:
            return _NONE
        kind, mesh = next((s.reduction, s.mesh) for s in partial.values())
        if mesh != self._mesh_of(op, around) or op.name == _CONVERT:
            return _NONE
        wanted = carries(op, kind, frozenset(partial)) or _NONE
        # Making other operands partial pays only where the result can meet another partial value.
        return wanted if wanted == set(partial) or _can_pass_on(op, kind) else _NONE


def kinds_of(setting: Setting) -> Kinds:
    """The kinds of ops, as they are decided about in a setting."""
    rules, touches = setting.rules.without_overrides(), _touches(setting.costs, setting.target)
    return Kinds(rules, setting.policy.halo_exchange, touches, lambda op: pace(op, setting.costs))


def _noted(made: Decision, around: Shardings) -> Decision:
    """The decision with whether it leaves all as it is around the op."""
    alike = all(a is b or a.same_layout_as(b) for a, b in zip(around, made.shardings, strict=True))
    return made._replace(at_rest=alike and not made.gathered and not made.inside)


def _touches(costs: CostModel, target: Target) -> Callable[[Op], tuple[Touched, ...]] | None:
    """What ops read from memory and write to it, where that has a price."""
    return Touches(target.compiler.fusion) if costs.memory else None


def _given_before(operands: Sequence[Value], kind: OpKind) -> frozenset[int]:
    """The operands that are moved together with an earlier one: the same value, along the same factors."""
    if len(set(operands)) == len(operands):
        return _NONE
    rules = dict.fromkeys([kind.rule, *(strategy.rule for strategy in kind.strategies if strategy.rule is not None)])
    seen = set[object]()
    found = set[int]()
    for index, value in enumerate(operands):
        key = (value, *(tuple(rule.operand_mappings[index]) for rule in rules))
        if key in seen:
            found.add(index)
        seen.add(key)
    return frozenset(found)


def _on_mesh(shardings: Shardings, mesh: str) -> Shardings:
    """The shardings with the symbol of one mesh in place of their own; the axes keep their names."""
    return tuple([s if s.mesh == mesh else replace(s, mesh=mesh) for s in shardings])


def _can_pass_on(op: Op, kind: str) -> bool:
    if not op.results or not has_one_user(op, op.results[0]):
        return False
    user, index = op.results[0].uses[0]
    return user.name != _CONVERT and carries(user, kind, frozenset([index])) is not None
