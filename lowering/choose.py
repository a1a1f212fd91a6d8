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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from sdy_jax.lowering.cost import CostModel
from sdy_jax.lowering.factors import (
    Assignment,
    Axes,
    dimension_axes,
    dividing_prefix,
    factor_axes,
    is_contiguous,
)
from sdy_jax.lowering.reshard_bound import least_time
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

_SLACK = 1 + 1e-9
"""For the rounding of sums: nothing is dropped that might be a tie."""


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


@dataclass(frozen=True)
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

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.operands + self.results

    @cached_property
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
"""What ways are chosen by: cost, number of collectives, reduced early, less parallel work, encoding."""

Priced = tuple[Key, "_Option"]


def choose(problem: Problem) -> Choice:
    """The cheapest way to run the op; ties go to fewer collectives, later reductions, more parallel work, then
    the smaller encoding."""
    lists, layouts = _factor_lists(problem), _Layouts(problem)
    agreed = _agreed(layouts, lists)
    if agreed is not None and agreed[0][1] == 0:
        best: Priced | None = agreed  # nothing has to move, and the work is shared out as the values are
    else:
        ways = (w for s in problem.strategies for a in _assignments(problem, s, lists) for w in _ways(problem, s, a))
        stays = agreed is not None and agreed[1].way.strategy.work is None
        best = _cheapest(layouts, ways, agreed[0][0] / _CLEAR_WIN if agreed and stays else math.inf)
        if agreed and (best is None or (stays and agreed[0][0] <= _CLEAR_WIN * best[0][0])):
            best = agreed
    assert best is not None
    option = best[1]
    strategy, shardings, count = option.way.strategy, [p.sharding for p in option.placed], len(problem.operands)
    operands, results = tuple(shardings[:count]), tuple(shardings[count:])
    return Choice(strategy, option.way.assignment, operands, results, _gathered(strategy, lists), option.inside)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A sharding that a way wants of an operand or makes of a result, and the least that the reshard can cost from or
    to the one around the op; None where that lies alike."""

    sharding: TensorSharding
    bound: float | None


class _Layouts:
    """The shardings of a problem's tensors: ways that agree on a tensor's factors share them."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self._known: dict[tuple[int, Axes | Assignment, Axes, str], _Placed] = {}

    def of(self, way: Way) -> list[_Placed]:
        """One per tensor; results carry what is left unreduced."""
        problem, assignment, summed = self.problem, way.assignment, way.strategy.partial
        kind = problem.partial_kind if way.partial else way.strategy.reduction or "sum"
        left = sort_and_merge((*way.partial, *(a for f in summed for a in assignment[f])), problem.mesh)
        kept = tuple([() if f in summed else axes for f, axes in enumerate(assignment)])
        count, carried = len(problem.operands), problem.carried if way.partial else frozenset()
        return [
            self._placed(i, assignment, way.partial if i in carried else (), kind)
            if i < count
            else self._placed(i, kept, left, kind)
            for i in range(count + len(problem.results))
        ]

    def _placed(self, tensor: int, axes: Assignment, unreduced: Axes, kind: str) -> _Placed:
        problem = self.problem
        mapping = problem.rule.mappings[tensor]
        key = (tensor, tuple([axes[f] for factors in mapping for f in factors]), unreduced, kind)
        if key not in self._known:
            by_dim = dimension_axes(axes, mapping, problem.mesh)
            sharding = TensorSharding.closed(problem.mesh_name, by_dim, unreduced, kind if unreduced else "sum")
            self._known[key] = _Placed(sharding, self._bound(tensor, sharding))
        return self._known[key]

    def _bound(self, tensor: int, sharding: TensorSharding) -> float | None:
        given = self.problem.tensors[tensor]
        if sharding.lies_like(given.sharding):
            return None
        source, target = self.ends(tensor, sharding)
        return least_time(given.shape, given.itemsize, source, target, self.problem.mesh, self.problem.costs)

    def ends(self, tensor: int, sharding: TensorSharding) -> tuple[TensorSharding, TensorSharding]:
        """From where to where the tensor is resharded."""
        given = self.problem.tensors[tensor].sharding
        return (given, sharding) if tensor < len(self.problem.operands) else (sharding, given)


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


def _agreed(layouts: _Layouts, lists: list[list[Axes]]) -> Priced | None:
    """The way of running the op that all tensors agree on, if there is one."""
    if any(len(found) > 1 for found in lists):
        return None
    assignment = tuple(found[0] if found else () for found in lists)
    problem = layouts.problem
    valid = (s for s in problem.strategies if _is_valid(problem, s, assignment))
    return _cheapest(layouts, (way for s in valid for way in _ways(problem, s, assignment)), math.inf)


def _is_valid(problem: Problem, strategy: Strategy, assignment: Assignment) -> bool:
    rule, mesh = problem.rule, problem.mesh
    for factor, axes in enumerate(assignment):
        if axes and (factor not in strategy.splittable or rule.factor_sizes[factor] % axes_size(axes, mesh)):
            return False
    return _fits_together(problem, assignment)


def _fits_together(problem: Problem, assignment: Assignment) -> bool:
    """No axis is used twice, and every shard is one block."""
    used = [a for axes in assignment for a in axes]
    if len({a.name for a in used}) < len(used) and any(overlaps(a, b) for a, b in itertools.combinations(used, 2)):
        return False
    return is_contiguous(assignment, problem.rule, problem.mesh)


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
    sizes, mesh = problem.rule.factor_sizes, problem.mesh
    dividing = [[a for a in found if not n % axes_size(a, mesh)] for n, found in zip(sizes, candidates, strict=True)]
    for assignment in itertools.product(*dividing):
        if _fits_together(problem, assignment):
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


@dataclass(frozen=True, slots=True)
class _Option:
    """A way, the time its op computes, what that communicates inside, its tensors, and the least that all can cost."""

    way: Way
    work: float
    inside: tuple[InsideCollective, ...]
    placed: list[_Placed]
    least: float


def _option(layouts: _Layouts, way: Way, work: float) -> _Option:
    placed, inside = layouts.of(way), inside_collectives(layouts.problem, way)
    least = work + sum([p.bound or 0.0 for p in placed]) + sum([collective.time for collective in inside])
    return _Option(way, work, inside, placed, least)


def _cheapest(layouts: _Layouts, ways: Iterable[Way], limit: float) -> Priced | None:
    """The best way; None if all cost more than the limit.

    Ways are priced in the order of what they cost at least: most never are. The first one wins ties.
    """
    problem = layouts.problem
    timed = ((problem.costs.flop * _work(problem, way), way) for way in ways)
    options = [_option(layouts, way, work) for work, way in timed if work <= limit * _SLACK]
    best: tuple[Key, int] | None = None
    for number in sorted(range(len(options)), key=lambda i: options[i].least):
        if options[number].least > limit * _SLACK:
            break
        priced = _priced(layouts, options[number], limit)
        if priced is not None and (best is None or (priced, number) < best):
            best = (priced, number)
            limit = min(limit, priced[0])
    return (best[0], options[best[1]]) if best else None


def _priced(layouts: _Layouts, option: _Option, limit: float) -> Key | None:
    """The key of an option; None as soon as it is certain to cost more than the limit."""
    problem, way, least = layouts.problem, option.way, option.least
    cost, steps = sum([collective.time for collective in option.inside]), len(option.inside)
    for number, (tensor, placed) in enumerate(zip(problem.tensors, option.placed, strict=True)):
        if placed.bound is None:
            continue
        source, target = layouts.ends(number, placed.sharding)
        plan = plan_reshard(tensor.shape, tensor.itemsize, source, target, problem.mesh, problem.costs)
        cost += plan.cost
        steps += sum(1 for step in plan.steps if step.wire_bytes)
        least += plan.cost - placed.bound
        if least > limit * _SLACK:
            return None
    parallelism = math.prod(axes_size(axes, problem.mesh) for axes in way.assignment)
    encoded = tuple(tuple(axis_key(a, problem.mesh) for a in axes) for axes in way.assignment)
    return cost + option.work, steps, not way.partial, -parallelism, encoded


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
