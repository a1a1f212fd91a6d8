"""Choosing how one op is sharded: the cheapest assignment of mesh axes to the factors of its rule.

For each factor the candidates are the leading parts of the axes that its tensors already have along it. An assignment
costs the reshards of the operands to what it needs, what its strategy communicates inside, the reshards of the results
to their declared shardings (reductions included), and a little for every operation that is not shared out. Partial
operands of a linear op may be reduced before it or after it: both are priced.
Source: spec of the partitioner, sections 2.1, 2.2, 2.4 and 2.7.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sdy_jax.lowering.cost import CostModel
from sdy_jax.lowering.factors import (
    Assignment,
    Axes,
    dimension_axes,
    dividing_prefix,
    factor_axes,
    is_contiguous,
)
from sdy_jax.lowering.resharding import plan_reshard
from sdy_jax.lowering.strategies.registry import Strategy
from sdy_jax.representation.axes import overlaps, sort_and_merge, truncate_overlaps
from sdy_jax.representation.mesh import AxisRef, Mesh, axes_size
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.representation.sharding import TensorSharding

# Where all tensors of an op agree, the op runs as they say unless moving them costs less than one half: moving usually
# replicates work that is shared out now. Half is what an all_gather costs beside an all_reduce of the same value, so a
# row-parallel product keeps its all_reduce. Ops that only move data are decided by what moves alone.
_CLEAR_WIN = 2.0

# Above this many assignments the candidates are pruned to the lists that tensors have in full.
_MAX_ASSIGNMENTS = 2048


@dataclass(frozen=True, slots=True)
class Tensor:
    """What the choice must know of an operand or result: its shape, bytes per element and sharding."""

    shape: tuple[int, ...]
    itemsize: float
    sharding: TensorSharding


@dataclass(frozen=True, slots=True)
class InsideCollective:
    """A collective that the op performs itself on one block of a tensor (of operands, then results)."""

    kind: str
    axes: Axes
    tensor: int
    wire_bytes: float
    time: float


@dataclass(frozen=True, slots=True)
class Choice:
    """How an op runs: its strategy, and the sharding that each operand must and each result will have."""

    strategy: Strategy
    assignment: Assignment
    operands: tuple[TensorSharding, ...]
    results: tuple[TensorSharding, ...]
    gathered: tuple[int, ...] = ()
    """Factors whose tensors are sharded along them but that the op cannot run split along."""
    inside: tuple[InsideCollective, ...] = ()


@dataclass(frozen=True, slots=True)
class Problem:
    """One op with the shardings around it. `results` carry the declared shardings.

    `carried`: the operands that must be partial for the results to be so; none where partial operands must be reduced.
    """

    rule: OpShardingRule
    strategies: tuple[Strategy, ...]
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    mesh_name: str
    mesh: Mesh
    costs: CostModel
    carried: frozenset[int] = frozenset()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.operands + self.results

    @property
    def partial_axes(self) -> Axes:
        """The axes along which carried operands are partial, in mesh order; none if they are parts of one another."""
        found = list(dict.fromkeys(a for i in self.carried for a in self.operands[i].sharding.unreduced_axes))
        apart = not any(overlaps(a, b) for a, b in itertools.combinations(found, 2))
        return sort_and_merge(found, self.mesh) if apart else ()

    @property
    def partial_kind(self) -> str:
        return next(
            self.operands[i].sharding.reduction for i in self.carried if self.operands[i].sharding.unreduced_axes
        )


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run an op; `partial` are the axes along which its carried operands stay unreduced."""

    strategy: Strategy
    assignment: Assignment
    partial: Axes = ()


Key = tuple[float, int, bool, int, tuple[object, ...]]
Priced = tuple[Key, Way]
"""A way behind the key it is chosen by: cost, number of collectives, reduced early, less parallel work, encoding."""


def choose(problem: Problem) -> Choice:
    """The cheapest way to run the op; ties go to fewer collectives, later reductions, more parallel work, then
    the smaller encoding."""
    lists = _factor_lists(problem)
    agreed = _agreed(problem, lists)
    if agreed is not None and agreed[0][1] == 0:
        best = agreed  # nothing has to move, and the work is shared out as the values are
    else:
        ways = (w for s in problem.strategies for a in _assignments(problem, s, lists) for w in _ways(problem, s, a))
        best = min((_priced(problem, way) for way in ways), key=_key)
        if agreed is not None and agreed[1].strategy.work is None and agreed[0][0] <= _CLEAR_WIN * best[0][0]:
            best = agreed
    way = best[1]
    operands, results = shardings_under(problem, way)
    gathered = _gathered(way.strategy, lists)
    return Choice(way.strategy, way.assignment, operands, results, gathered, inside_collectives(problem, way))


def _key(priced: Priced) -> Key:
    return priced[0]


def shardings_under(problem: Problem, way: Way) -> tuple[tuple[TensorSharding, ...], tuple[TensorSharding, ...]]:
    """The operand and result shardings of a way to run the op; results carry what is left unreduced."""
    rule, mesh, name, assignment = problem.rule, problem.mesh, problem.mesh_name, way.assignment
    summed = way.strategy.partial
    kind = problem.partial_kind if way.partial else way.strategy.reduction or "sum"
    partial = sort_and_merge((*way.partial, *(a for f in summed for a in assignment[f])), mesh)
    kept = tuple(() if f in summed else axes for f, axes in enumerate(assignment))
    carried = [way.partial if i in problem.carried else () for i in range(len(problem.operands))]
    operands = tuple(
        TensorSharding.closed(name, dimension_axes(assignment, m, mesh), axes, kind if axes else "sum")
        for m, axes in zip(rule.operand_mappings, carried, strict=True)
    )
    results = tuple(
        TensorSharding.closed(name, dimension_axes(kept, m, mesh), partial, kind if partial else "sum")
        for m in rule.result_mappings
    )
    return operands, results


def _ways(problem: Problem, strategy: Strategy, assignment: Assignment) -> Iterator[Way]:
    """The op with its partial operands reduced first and, where that is possible, with partial results."""
    yield Way(strategy, assignment)
    partial = problem.partial_axes
    if not partial or any(overlaps(a, b) for axes in assignment for a in axes for b in partial):
        return
    own = strategy.partial | {f for inside in strategy.inside for f in inside.factors}
    combines = any(assignment[f] for f in own)
    if not combines or (strategy.reduction == problem.partial_kind and not strategy.inside):
        yield Way(strategy, assignment, partial)


def axis_key(axis: AxisRef, mesh: Mesh) -> tuple[int, int, int]:
    """Mesh order."""
    return (mesh.positions[axis.name], axis.pre_size, axis.size(mesh))


def _factor_lists(problem: Problem) -> list[list[Axes]]:
    """Per factor, the distinct axis lists that tensors have along it, in tensor order; tensors without it give `()`."""
    lists: list[list[Axes]] = [[] for _ in problem.rule.factor_sizes]
    for tensor, mapping in zip(problem.tensors, problem.rule.mappings, strict=True):
        if tensor.sharding.rank != len(mapping):
            continue
        projected = factor_axes(tensor.sharding.axes, mapping, problem.rule.factor_sizes, problem.mesh)
        for factor, axes in projected.items():
            if axes not in lists[factor]:
                lists[factor].append(axes)
    return lists


def _agreed(problem: Problem, lists: list[list[Axes]]) -> Priced | None:
    """The way of running the op that all tensors agree on, if there is one."""
    if any(len(found) > 1 for found in lists):
        return None
    assignment = tuple(found[0] if found else () for found in lists)
    valid = (s for s in problem.strategies if _is_valid(problem, s, assignment))
    return min((_priced(problem, way) for s in valid for way in _ways(problem, s, assignment)), key=_key, default=None)


def _is_valid(problem: Problem, strategy: Strategy, assignment: Assignment) -> bool:
    rule, mesh = problem.rule, problem.mesh
    for factor, axes in enumerate(assignment):
        if axes and (factor not in strategy.splittable or rule.factor_sizes[factor] % axes_size(axes, mesh)):
            return False
    used = [a for axes in assignment for a in axes]
    if any(overlaps(a, b) for a, b in itertools.combinations(used, 2)):
        return False
    return is_contiguous(assignment, rule, mesh)


def _assignments(problem: Problem, strategy: Strategy, lists: list[list[Axes]]) -> Iterator[Assignment]:
    """All valid assignments made of candidates, the empty one among them."""
    candidates: list[list[Axes]] = [
        _candidates([*found, *_movable(problem, f, lists)], problem.mesh) if f in strategy.splittable else [()]
        for f, found in enumerate(lists)
    ]
    if math.prod(map(len, candidates)) > _MAX_ASSIGNMENTS:
        candidates = [
            [(), *[a for a in found if a]] if f in strategy.splittable else [()] for f, found in enumerate(lists)
        ]
    if math.prod(map(len, candidates)) > _MAX_ASSIGNMENTS:
        yield from _greedy_assignments(problem, strategy, candidates)
        return
    for assignment in itertools.product(*candidates):
        if _is_valid(problem, strategy, assignment):
            yield assignment


def _movable(problem: Problem, factor: int, lists: list[list[Axes]]) -> list[Axes]:
    """Lists of other factors that this one could take over (by all_to_all), so that the work stays shared out.

    Offered to pass-through factors of an operand and every result, alone and behind what the factor has itself.
    """
    rule, count = problem.rule, len(problem.operands)
    operands, results = rule.factors_of[:count], [f for f in rule.factors_of[count:] if f]
    if not (any(factor in t for t in operands) and results and all(factor in t for t in results)):
        return []
    others = [axes for f, found in enumerate(lists) if f != factor for axes in found if axes]
    size, mesh = rule.factor_sizes[factor], problem.mesh
    moved = [
        dividing_prefix(size, (*own, *axes), mesh)
        for own in [(), *lists[factor]]
        for axes in dict.fromkeys(others)
        if not any(overlaps(a, b) for a in own for b in axes)
    ]
    return [axes for axes in dict.fromkeys(moved) if axes]


def _greedy_assignments(problem: Problem, strategy: Strategy, candidates: list[list[Axes]]) -> Iterator[Assignment]:
    """One assignment per factor order start: each factor takes its longest candidate that is still free."""
    count = len(candidates)
    yield ((),) * count
    for first in range(count):
        taken: list[Axes] = [()] * count
        for factor in [first, *(f for f in range(count) if f != first)]:
            used = [a for axes in taken for a in axes]
            for axes in sorted(candidates[factor], key=lambda c: -axes_size(c, problem.mesh)):
                trial = [*taken[:factor], truncate_overlaps(axes, used), *taken[factor + 1 :]]
                if _is_valid(problem, strategy, tuple(trial)):
                    taken = trial
                    break
        yield tuple(taken)


def _candidates(found: Sequence[Axes], mesh: Mesh) -> list[Axes]:
    """Every leading part of every list, shortest first, and the joins of two lists that share no axis."""
    prefixes: list[Axes] = [()]
    for axes in found:
        prefixes += [axes[:i] for i in range(1, len(axes) + 1) if axes[:i] not in prefixes]
    joins = [
        (*p, *q) for p, q in itertools.permutations(prefixes[1:], 2) if not any(overlaps(a, b) for a in p for b in q)
    ]
    return [*prefixes, *(j for j in joins if j not in prefixes)]


def _priced(problem: Problem, way: Way) -> Priced:
    operands, results = shardings_under(problem, way)
    inside = inside_collectives(problem, way)
    cost, steps = sum(collective.time for collective in inside), len(inside)
    pairs = [
        *((t, t.sharding, s) for t, s in zip(problem.operands, operands, strict=True)),
        *((t, s, t.sharding) for t, s in zip(problem.results, results, strict=True)),
    ]
    for tensor, source, target in pairs:
        if not source.lies_like(target):
            plan = plan_reshard(tensor.shape, tensor.itemsize, source, target, problem.mesh, problem.costs)
            cost += plan.cost
            steps += sum(1 for step in plan.steps if step.wire_bytes)
    parallelism = math.prod(axes_size(axes, problem.mesh) for axes in way.assignment)
    encoded = tuple(tuple(axis_key(a, problem.mesh) for a in axes) for axes in way.assignment)
    cost += problem.costs.flop * _work(problem, way)
    return (cost, steps, not way.partial, -parallelism, encoded), way


def _work(problem: Problem, way: Way) -> float:
    """The operations of one device."""
    factors = range(len(way.assignment)) if way.strategy.work is None else way.strategy.work
    return math.prod(problem.rule.factor_sizes[f] / axes_size(way.assignment[f], problem.mesh) for f in factors)


def inside_collectives(problem: Problem, way: Way) -> tuple[InsideCollective, ...]:
    """What the emitter will communicate."""
    mesh, costs, assignment = problem.mesh, problem.costs, way.assignment
    tensors = list(zip(problem.tensors, problem.rule.mappings, strict=True))
    found = []
    for inside in way.strategy.inside:
        axes = tuple(a for f in sorted(inside.factors) for a in assignment[f])
        if not axes:
            continue
        tensor, mapping = tensors[inside.tensor]
        block = tensor.itemsize * math.prod(tensor.shape)
        block /= math.prod(axes_size(axes, mesh) for axes in dimension_axes(assignment, mapping, mesh))
        wire = costs.wire_bytes(inside.kind, axes_size(axes, mesh), block, block)
        time = costs.time(inside.kind, axes, mesh, block, block)
        found.append(InsideCollective(inside.kind, axes, inside.tensor, wire, time))
    return tuple(found)


def _gathered(strategy: Strategy, lists: list[list[Axes]]) -> tuple[int, ...]:
    return tuple(f for f, found in enumerate(lists) if f not in strategy.splittable and any(found))
