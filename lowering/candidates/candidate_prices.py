"""The candidates for running an op, each with a lower bound for its cost, so that few have to be priced."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from sdy_jax.lowering.analysis.factors import Assignment, is_contiguous
from sdy_jax.lowering.candidates.answers import answer_of
from sdy_jax.lowering.candidates.assignments import Space, considered_lists, spaces
from sdy_jax.lowering.candidates.op_problem import InsideCollective, OpProblem, StrategyAssignment
from sdy_jax.lowering.candidates.op_work import DeviceWork, work_in_shards, work_time
from sdy_jax.lowering.candidates.tensor_views import NumberedLists, Numbers, StatedView, TensorView, views
from sdy_jax.lowering.strategies.registry import Inside, Shards, Strategy
from sdy_jax.lowering.strategies.shards import block_shape
from sdy_jax.representation.mesh import Axes, axes_size
from sdy_jax.representation.sdy_collectives import MOVING
from sdy_jax.representation.sharding import TensorSharding

_MOST_REPEATED = 1.5
"""Work is repeated where it is that many times the least: less is padding, or rows that shards compute both. Guessed
between padding (1.02) and the least repetition there is (2): below, padded products are refused; above, an op may run
on half of the axes."""


class BoundedCandidate(NamedTuple):
    """A strategy's assignment for one problem with a lower bound for its cost: few are priced in full.

    `operations`: those of one device; `work`: their time. `inside`: the collectives that the emitter runs. `bounds`:
    per tensor, a lower bound for its reshard, None where none is needed. `least`: the sum of all these.
    """

    candidate: StrategyAssignment
    operations: float
    work: float
    inside: tuple[InsideCollective, ...]
    tensors: list[TensorView]
    bounds: list[float | None]
    least: float

    def shardings(self) -> tuple[TensorSharding, ...]:
        """The shardings of the op's operands, then of its results."""
        both = zip(self.tensors, self.bounds, strict=True)
        return tuple([tensor.wanted(self.candidate, bound) for tensor, bound in both])


class CandidatePrices:
    """The candidates for one op: every strategy, with carried operands reduced before the op or left unreduced."""

    def __init__(self, problem: OpProblem, found: Space):
        considered = considered_lists(problem, found)
        several = [spaces(problem, strategy, considered, found) for strategy in problem.strategies]
        few = [space for listed in several if len(listed) > 1 for space in listed]
        every = [axes for space in (considered, *few) for axes in itertools.chain(*space)]
        partial_axes = problem.partial_axes
        self._lists = NumberedLists([*every, partial_axes], problem.mesh)
        number = self._lists.number
        numbered = [[[[number[axes] for axes in f] for f in space] for space in listed] for listed in several]
        self._modes = [
            (_Mode(problem, self._lists, strategy, partial), listed)
            for strategy, listed in zip(problem.strategies, numbered, strict=True)
            for partial in dict.fromkeys([(), partial_axes])
        ]
        self._problem = problem

    def all(self) -> list[BoundedCandidate]:
        """All candidates; where work has to be shared, those that repeat none."""
        return self._sharing(self._every)

    def with_assignment(self, assignment: Assignment) -> list[BoundedCandidate]:
        """The candidates with these axes per factor, one for each strategy that allows them."""
        numbers = tuple([self._lists.number[axes] for axes in assignment])
        found = [mode.candidate(numbers) for mode, _ in self._modes if mode.allows(numbers)]
        return self._sharing([bounded for bounded in found if bounded is not None])

    @cached_property
    def _every(self) -> list[BoundedCandidate]:
        return [found for mode, spaces in self._modes for space in spaces for found in mode.candidates(space)]

    def _sharing(self, found: list[BoundedCandidate]) -> list[BoundedCandidate]:
        if not self._problem.shares_work:
            return found
        most = _MOST_REPEATED * min([bounded.operations for bounded in self._every], default=0.0)
        return [bounded for bounded in found if bounded.operations <= most]


class _Mode:
    """One strategy, with carried operands reduced first, or left unreduced along the `partial` axes."""

    def __init__(self, problem: OpProblem, lists: NumberedLists, strategy: Strategy, partial: Axes):
        self._problem, self._lists, self._strategy, self._partial = problem, lists, strategy, partial
        self._tensors = views(problem, lists, strategy, partial)
        self._whole = frozenset(range(len(problem.rule.factor_sizes))) - strategy.splittable
        reduces = any(inside.kind not in MOVING for inside in strategy.inside)
        if partial and (strategy.reduction != problem.partial_kind or reduces):
            # Where the op itself reduces along some factors, by another kind, no other axes may stay unreduced.
            self._whole |= strategy.partial.union(*(inside.factors for inside in strategy.inside))

    def candidates(self, space: Sequence[Sequence[int]]) -> list[BoundedCandidate]:
        """The candidates; `space` has the numbers of the lists that each factor may have."""
        rule, mesh, found = self._problem.rule, self._problem.mesh, self._apart(space)
        if rule.joint_factors:
            found = [numbers for numbers in found if is_contiguous(self._lists.assignment(numbers), rule, mesh)]
        return [bounded for bounded in map(self.candidate, found) if bounded is not None]

    def allows(self, numbers: Numbers) -> bool:
        """Whether the strategy can run the op with these lists, one per factor, none sharing a mesh digit."""
        used = self._lists.masks[self._lists.number[self._partial]]
        for factor, number in enumerate(numbers):
            mask = self._lists.masks[number]
            if used & mask or not self._may_have(factor, number):
                return False
            used |= mask
        return is_contiguous(self._lists.assignment(numbers), self._problem.rule, self._problem.mesh)

    def _may_have(self, factor: int, number: int) -> bool:
        """Whether a factor may be sharded along the list of this number."""
        if not number or factor in self._whole:
            return not number
        shards = axes_size(self._lists.axes[number], self._problem.mesh)
        return factor not in self._strategy.dividing or not self._problem.rule.factor_sizes[factor] % shards

    def candidate(self, numbers: Numbers) -> BoundedCandidate | None:
        """The candidate with these lists, one per factor; None where the op is asked and refuses it."""
        candidate = StrategyAssignment(self._strategy, tuple(self._lists.assignment(numbers)), self._partial)
        if self._strategy.ask is not None:
            return self._as_answered(candidate)
        done = work_per_device(self._problem, candidate)
        work, inside = work_time_of(self._problem, candidate, done), inside_collectives(self._problem, candidate)
        return _bounded(candidate, done, work, inside, self._tensors, numbers)

    def _as_answered(self, candidate: StrategyAssignment) -> BoundedCandidate | None:
        """A candidate in the layouts in which the op runs instead of these."""
        problem = self._problem
        answer = answer_of(problem, self._strategy, tuple([view.sharding(candidate) for view in self._tensors]))
        if answer is None:
            return None
        done = work_in_shards(self._strategy, problem.rule, answer.shards)
        work = work_time_in_shards(problem, answer.shards, done)
        pairs = zip(self._tensors, answer.shardings, strict=True)
        return _bounded(candidate, done, work, answer.inside, [StatedView(*pair) for pair in pairs], ())

    def _apart(self, space: Sequence[Sequence[int]]) -> list[Numbers]:
        """The combinations of lists that use no axis twice."""
        masks = self._lists.masks
        found: list[tuple[Numbers, int]] = [((), masks[self._lists.number[self._partial]])]
        for factor, numbers in enumerate(space):
            allowed = [n for n in numbers if self._may_have(factor, n)]
            found = [
                ((*before, number), used | masks[number])
                for before, used in found
                for number in allowed
                if not used & masks[number]
            ]
        return [numbers for numbers, _ in found]


def _bounded(
    candidate: StrategyAssignment,
    done: DeviceWork,
    work: float,
    inside: tuple[InsideCollective, ...],
    tensors: list[TensorView],
    numbers: Numbers,
) -> BoundedCandidate:
    bounds = [tensor.bound(numbers) for tensor in tensors]
    least = work + sum([bound or 0.0 for bound in bounds]) + sum([c.time for c in inside])
    return BoundedCandidate(candidate, done.operations, work, inside, tensors, bounds, least)


def work_per_device(problem: OpProblem, candidate: StrategyAssignment) -> DeviceWork:
    """What one device performs."""
    shards = tuple([axes_size(axes, problem.mesh) for axes in candidate.assignment])
    return work_in_shards(candidate.strategy, problem.rule, shards)


def work_time_of(problem: OpProblem, candidate: StrategyAssignment, work: DeviceWork) -> float:
    """The time of one device's own work."""
    count = len(problem.rule.operand_mappings)
    written = range(count, len(problem.tensors)) if candidate.partial and problem.costs.memory else ()
    shards = tuple([axes_size(axes, problem.mesh) for axes in candidate.assignment])
    return work_time_in_shards(problem, shards, work, written)


def work_time_in_shards(problem: OpProblem, shards: Shards, work: DeviceWork, written: Sequence[int] = ()) -> float:
    """Likewise, where each factor is in so many shards; `written`: results that are written whatever is said of
    them."""
    tensors = zip(problem.tensors, problem.rule.mappings, strict=True)
    elements = (math.prod(block_shape(tensor.shape, mapping, shards)) for tensor, mapping in tensors)
    return work_time(problem.kind, work, elements, problem.costs, written)


def inside_collectives(problem: OpProblem, candidate: StrategyAssignment) -> tuple[InsideCollective, ...]:
    """The collectives that the emitter will run by itself."""
    mesh, assignment = problem.mesh, candidate.assignment
    shards = tuple([axes_size(axes, mesh) for axes in assignment]) if candidate.strategy.inside else ()
    found = []
    for inside in candidate.strategy.inside:
        axes = tuple(a for f in sorted(inside.factors) for a in assignment[f])
        tensor, mapping = problem.tensors[inside.tensor], problem.rule.mappings[inside.tensor]
        if axes and inside.sent is not None:
            found += _stated(problem, inside, axes, tensor.itemsize, shards)
        elif axes:
            block = tensor.itemsize * math.prod(block_shape(tensor.shape, mapping, shards))
            found.append(_of_block(problem, inside, axes, block))
    return tuple(found)


def _stated(problem: OpProblem, inside: Inside, axes: Axes, itemsize: float, shards: Shards) -> list[InsideCollective]:
    assert inside.sent is not None
    sent = itemsize * inside.sent(shards)
    if not sent:
        return []
    count = inside.count(shards) if inside.count else 1
    wire = sent / count
    time = problem.costs.sending_time(inside.kind, axes, problem.mesh, wire)
    return [InsideCollective(inside.kind, axes, inside.tensor, wire, time, is_exact=True)] * count


def _of_block(problem: OpProblem, inside: Inside, axes: Axes, block: float) -> InsideCollective:
    wire = problem.costs.wire_bytes(inside.kind, axes_size(axes, problem.mesh), block, block)
    time = problem.costs.time(inside.kind, axes, problem.mesh, block, block)
    return InsideCollective(inside.kind, axes, inside.tensor, wire, time)
