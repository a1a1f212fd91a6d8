"""Choosing how one op is sharded: the cheapest assignment of mesh axes to the factors of its rule.

For each factor the candidates are the leading parts of the axes that its tensors already have along it. An assignment
costs the reshards of the operands to what it needs, what its strategy communicates inside, the reshards of the results
to their declared shardings (reductions included), and a little for every operation that is not shared out.
Source: spec of the partitioner, sections 2.1, 2.2 and 2.4.
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
from sdy_jax.representation.axes import overlaps, truncate_overlaps
from sdy_jax.representation.mesh import AxisRef, Mesh, axes_size
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.representation.sharding import TensorSharding

# Where all tensors of an op agree, the op runs as they say unless moving them costs less than one half: moving usually
# replicates work that is shared out now. Half is what an all_gather costs beside an all_reduce of the same value, so a
# row-parallel product keeps its all_reduce.
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
class Choice:
    """How an op runs: its strategy, and the sharding that each operand must and each result will have."""

    strategy: Strategy
    assignment: Assignment
    operands: tuple[TensorSharding, ...]
    results: tuple[TensorSharding, ...]
    gathered: tuple[int, ...] = ()
    """Factors whose tensors are sharded along them but that the op cannot run split along."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One op with the shardings around it. `results` carry the declared shardings."""

    rule: OpShardingRule
    strategies: tuple[Strategy, ...]
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    mesh_name: str
    mesh: Mesh
    costs: CostModel

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.operands + self.results


Priced = tuple[tuple[float, int, int, tuple[object, ...]], Strategy, Assignment]
"""A way to run an op behind the key it is chosen by: cost, number of collectives, less parallel work, encoding."""


def choose(problem: Problem) -> Choice:
    """The cheapest way to run the op; ties go to fewer collectives, more parallel work, then the smaller encoding."""
    lists = _factor_lists(problem)
    agreed = _agreed(problem, lists)
    if agreed is not None and agreed[0][1] == 0:
        best = agreed  # nothing has to move, and the work is shared out as the values are
    else:
        best = min(
            (_priced(problem, s, a) for s in problem.strategies for a in _assignments(problem, s, lists)),
            key=lambda priced: priced[0],
        )
        if agreed is not None and agreed[0][0] <= _CLEAR_WIN * best[0][0]:
            best = agreed
    _, strategy, assignment = best
    operands, results = shardings_under(problem, strategy, assignment)
    return Choice(strategy, assignment, operands, results, _gathered(strategy, lists))


def shardings_under(
    problem: Problem, strategy: Strategy, assignment: Assignment
) -> tuple[tuple[TensorSharding, ...], tuple[TensorSharding, ...]]:
    """The operand and result shardings that an assignment stands for; results carry what is left unreduced."""
    rule, mesh = problem.rule, problem.mesh
    partial = sorted((a for f in rule.reduction for a in assignment[f]), key=lambda a: axis_key(a, mesh))
    operands = tuple(
        TensorSharding.closed(problem.mesh_name, dimension_axes(assignment, m, mesh)) for m in rule.operand_mappings
    )
    results = tuple(
        TensorSharding.closed(
            problem.mesh_name, dimension_axes(assignment, m, mesh), partial, strategy.reduction or "sum"
        )
        for m in rule.result_mappings
    )
    return operands, results


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
    valid = [_priced(problem, s, assignment) for s in problem.strategies if _is_valid(problem, s, assignment)]
    return min(valid, key=lambda priced: priced[0], default=None)


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


def _priced(problem: Problem, strategy: Strategy, assignment: Assignment) -> Priced:
    operands, results = shardings_under(problem, strategy, assignment)
    cost, steps = strategy.inside_bytes, 0
    pairs = [
        *((t, t.sharding, s) for t, s in zip(problem.operands, operands, strict=True)),
        *((t, s, t.sharding) for t, s in zip(problem.results, results, strict=True)),
    ]
    for tensor, source, target in pairs:
        if not source.lies_like(target):
            plan = plan_reshard(tensor.shape, tensor.itemsize, source, target, problem.mesh, problem.costs)
            cost += plan.cost
            steps += len(plan.steps)
    parallelism = math.prod(axes_size(axes, problem.mesh) for axes in assignment)
    flops = math.prod(problem.rule.factor_sizes)
    encoded = tuple(tuple(axis_key(a, problem.mesh) for a in axes) for axes in assignment)
    return (cost + problem.costs.flop * flops / parallelism, steps, -parallelism, encoded), strategy, assignment


def _gathered(strategy: Strategy, lists: list[list[Axes]]) -> tuple[int, ...]:
    return tuple(f for f, found in enumerate(lists) if f not in strategy.splittable and any(found))
