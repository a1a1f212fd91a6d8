"""The candidates for running an op, each with a lower bound for its cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sdy_jax.lowering.planning.assignments import Space, candidates_of, spaces
from sdy_jax.lowering.planning.choice import InsideCollective, Problem, Way
from sdy_jax.lowering.planning.factors import Assignment, Axes, dimension_axes, is_contiguous
from sdy_jax.lowering.planning.layouts import Head, Lists, TensorView, views
from sdy_jax.lowering.strategies.registry import Strategy
from sdy_jax.representation.mesh import axes_size
from sdy_jax.representation.sharding import TensorSharding

SLACK = 1 + 1e-9
"""A tolerance for rounding: a candidate is not dropped if its cost may equal the limit."""


class Option(NamedTuple):
    """A candidate with a lower bound for its cost.

    `work`: the time of one device's operations. `inside`: the collectives that the emitter runs. `bounds`: per tensor,
    a lower bound for its reshard, None where none is needed. `least`: the sum of all these.
    """

    way: Way
    work: float
    inside: tuple[InsideCollective, ...]
    tensors: list[TensorView]
    bounds: list[float | None]
    least: float

    def shardings(self) -> tuple[TensorSharding, ...]:
        """The shardings of the op's operands, then of its results."""
        both = zip(self.tensors, self.bounds, strict=True)
        return tuple([tensor.wanted(self.way, bound) for tensor, bound in both])


class Ways:
    """The candidates for one op: every strategy, with carried operands reduced before the op or left unreduced."""

    def __init__(self, problem: Problem, found: Space):
        candidates = candidates_of(problem, found)
        several = [spaces(problem, strategy, candidates, found) for strategy in problem.strategies]
        few = [space for listed in several if len(listed) > 1 for space in listed]
        every = [axes for space in (candidates, *few) for axes in itertools.chain(*space)]
        partial_axes = problem.partial_axes
        self._lists = Lists([*every, partial_axes], problem.mesh)
        number = self._lists.number
        numbered = [[[[number[axes] for axes in f] for f in space] for space in listed] for listed in several]
        self._modes = [
            (_Mode(problem, self._lists, strategy, partial), listed)
            for strategy, listed in zip(problem.strategies, numbered, strict=True)
            for partial in dict.fromkeys([(), partial_axes])
        ]

    def options(self, limit: float) -> list[Option]:
        """The candidates whose lower bound is within the limit."""
        return [option for mode, found in self._modes for space in found for option in mode.options(space, limit)]

    def with_assignment(self, assignment: Assignment) -> list[Option]:
        """The candidates with these axes per factor, one for each strategy that allows them."""
        head = tuple([self._lists.number[axes] for axes in assignment])
        return [mode.option(head) for mode, _ in self._modes if mode.allows(head)]


class _Mode:
    """One strategy, with carried operands reduced first, or left unreduced along the `partial` axes."""

    def __init__(self, problem: Problem, lists: Lists, strategy: Strategy, partial: Axes):
        self._problem, self._lists, self._strategy, self._partial = problem, lists, strategy, partial
        self._tensors = views(problem, lists, strategy, partial)
        self._due: list[list[TensorView]] = [[] for _ in range(len(problem.rule.factor_sizes) + 1)]
        for tensor in self._tensors:
            self._due[tensor.factors[-1] + 1 if tensor.factors else 0].append(tensor)
        self._whole = frozenset(range(len(problem.rule.factor_sizes))) - strategy.splittable
        operations = math.prod([problem.rule.factor_sizes[f] for f in _shared_factors(problem, strategy)])
        self._least_work = problem.costs.flop * operations / problem.mesh.size
        if partial and (strategy.reduction != problem.partial_kind or strategy.inside):
            # Where the op itself reduces along some factors, by another kind, no other axes may stay unreduced.
            self._whole |= strategy.partial.union(*(inside.factors for inside in strategy.inside))

    def options(self, space: Sequence[Sequence[int]], limit: float) -> list[Option]:
        """The candidates within the limit; `space` has the numbers of the lists that each factor may have."""
        problem = self._problem
        heads = self._heads(space, limit)
        if problem.rule.joint_factors:
            heads = [h for h in heads if is_contiguous(self._lists.assignment(h), problem.rule, problem.mesh)]
        return [self.option(head) for head in heads]

    def allows(self, head: Head) -> bool:
        """Whether the strategy can run the op with these lists, one per factor, none sharing a mesh digit."""
        used = self._lists.masks[self._lists.number[self._partial]]
        for factor, number in enumerate(head):
            mask = self._lists.masks[number]
            if used & mask or (number and factor in self._whole):
                return False
            used |= mask
        return is_contiguous(self._lists.assignment(head), self._problem.rule, self._problem.mesh)

    def option(self, head: Head) -> Option:
        """The candidate with these lists, one per factor."""
        problem = self._problem
        way = Way(self._strategy, tuple(self._lists.assignment(head)), self._partial)
        work, inside = problem.costs.flop * _work(problem, way), _inside_collectives(problem, way)
        bounds = [tensor.bound(head) for tensor in self._tensors]
        least = work + sum([bound or 0.0 for bound in bounds]) + sum([c.time for c in inside])
        return Option(way, work, inside, self._tensors, bounds, least)

    def _heads(self, space: Sequence[Sequence[int]], limit: float) -> list[Head]:
        """The combinations of lists that use no axis twice and whose lower bound is within the limit.

        Prefixes grow factor by factor. The bound of a tensor is added once all of its factors have a list, so most
        prefixes are dropped before they are complete.
        """
        masks, most = self._lists.masks, limit * SLACK - self._least_work
        start = sum([tensor.bound(()) or 0.0 for tensor in self._due[0]])
        heads: list[tuple[Head, int, float]] = [((), masks[self._lists.number[self._partial]], start)]
        for factor, numbers in enumerate(space):
            allowed = [n for n in numbers if not n] if factor in self._whole else numbers
            heads = [
                ((*head, number), used | masks[number], least)
                for head, used, least in heads
                for number in allowed
                if not used & masks[number]
            ]
            for tensor in self._due[factor + 1]:
                heads = [
                    (head, used, more)
                    for head, used, least in heads
                    if (more := least + (tensor.bound(head) or 0.0)) <= most
                ]
        return [head for head, _, _ in heads]


def _shared_factors(problem: Problem, strategy: Strategy) -> Iterable[int]:
    return range(len(problem.rule.factor_sizes)) if strategy.work is None else strategy.work


def _work(problem: Problem, way: Way) -> float:
    """The number of operations that one device performs."""
    return math.prod(
        problem.rule.factor_sizes[f] / axes_size(way.assignment[f], problem.mesh)
        for f in _shared_factors(problem, way.strategy)
    )


def _inside_collectives(problem: Problem, way: Way) -> tuple[InsideCollective, ...]:
    """The collectives that the emitter will run by itself."""
    mesh, costs, assignment = problem.mesh, problem.costs, way.assignment
    tensors = list(zip(problem.tensors, problem.rule.mappings, strict=True)) if way.strategy.inside else []
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
