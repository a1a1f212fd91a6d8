"""The candidates for running an op with lower bounds of their costs, from the layouts of its tensors in each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple, TypeVar

from sdy_jax.ir.collectives import MOVING
from sdy_jax.ir.meshes import Axes, Mesh, axes_size, sort_and_merge
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.ops.registry import Inside, Shards, Strategy, summed_in
from sdy_jax.lowering.ops.shards import block_shape
from sdy_jax.lowering.planner.facts.factors import Assignment, digits, dimension_axes, is_contiguous, joined_axes
from sdy_jax.lowering.planner.problem.assignments import Space, answer_of, considered_lists, spaces
from sdy_jax.lowering.planner.problem.op_problem import (
    DeviceWork,
    InsideCollective,
    OpProblem,
    StrategyAssignment,
    work_in_shards,
    work_time,
)
from sdy_jax.lowering.reshard.bounds import (
    AnyLayout,
    AxisLayout,
    fastest,
    least_time,
    missing_bytes,
    shares,
    slower_axes,
)
from sdy_jax.lowering.reshard.planner import plan_reshard

# The layouts of one op's tensors under assignments, and a lower bound for the cost of their reshards.
#
# A search tries hundreds of assignments, most of which differ in one factor only. So the lists of axes of a problem
# are numbered (0 is the empty list), and an assignment is a tuple of such numbers, one per factor of the rule. The
# bound of a tensor is computed once for all assignments with the same numbers at the factors of the tensor.

Numbers = tuple[int, ...]
"""An assignment as the numbers of its lists of axes, or the part of one."""

E = TypeVar("E")

_NONE: frozenset[int] = frozenset()
_COST = attrgetter("cost")


_KEPT, _KEPT_OF_FEW, _FEW = 0.75, 2**-10, 2**24
"""What a byte costs that a device keeps through a loop, beside one on the wire: `_KEPT_OF_FEW` for up to `_FEW` of
them, a thousandth of the memory of a 16 GiB device; else `_KEPT`.

Layers of a large stack that is split by layers are gathered one by one and not all before the loop: after an all_to_all
to another dimension this sends half as much again on two devices, an eighth on eight. It is less than 1, so that layers
without another dimension to be split along are gathered at once: as partial sums they would send twice as much. Small
stacks are gathered at once wherever that sends less; where it sends as much nothing is kept. Guessed
within these bounds."""

_Shares = dict[Numbers, tuple[bool, tuple[int, int]]]
"""A memo for one dimension of a tensor. Key: the list numbers of the dimension's factors. Value: whether the axes
equal the given ones, and the result of `shares` for the two."""

_Dims = list[tuple[_Shares, Axes, tuple[int, ...]]]
"""One entry per dimension of a given sharding: the memo, the dimension's axes, and its factors."""


class NumberedLists:
    """The numbering of a problem's lists of axes; `masks` has, per list, a bit mask of the mesh digits in it."""

    def __init__(self, lists: Iterable[Axes], mesh: Mesh):
        self.number: dict[Axes, int] = {(): 0}
        for axes in lists:
            self.number.setdefault(axes, len(self.number))
        self.axes = list(self.number)
        bits = digits([a for axes in self.axes for a in axes], mesh)
        self.masks = [sum({bits[axis] for axis in axes}) for axes in self.axes]

    def assignment(self, numbers: Numbers) -> list[Axes]:
        """The lists of axes that the numbers stand for."""
        return [self.axes[number] for number in numbers]


class TensorView:
    """One tensor of a problem under the assignments of one strategy.

    `summed`: the factors whose axes the strategy leaves unreduced in this tensor; `partial`: the axes along which an
    unreduced operand stays unreduced. `around`: for an operand the shardings in which its value exists, for a result
    the one declared sharding.
    """

    def __init__(
        self, problem: OpProblem, lists: NumberedLists, tensor: int, summed: frozenset[int], partial: Axes, kind: str
    ):
        self._problem, self._lists, self._tensor = problem, lists, problem.tensors[tensor]
        self._mapping, self._is_result = problem.rule.mappings[tensor], tensor >= len(problem.rule.operand_mappings)
        self._summed, self._partial, self._kind = summed, partial, kind
        self.around = self._tensor.materialized or (self._tensor.sharding,)
        is_of_one_speed = not slower_axes(problem.mesh, problem.costs)
        self._by_dimension = is_of_one_speed and not partial and not any(s.unreduced_axes for s in self.around)
        self._factors = sorted(problem.rule.factors_of[tensor] | summed)
        self._bounds: dict[Numbers, float | None] = {}
        self._dims: list[_Dims] = [
            [({}, axes, factors) for axes, factors in zip(around.axes, self._mapping, strict=False)]
            for around in self.around
        ]

    def bound(self, numbers: Numbers) -> float | None:
        """A lower bound for the reshard between the op's layout and the one around it; None where they are equal."""
        key = tuple([numbers[f] for f in self._factors])
        if key not in self._bounds:
            is_whole = self._by_dimension and not any(map(numbers.__getitem__, self._summed))
            pairs = zip(self.around, self._dims, strict=True)
            least = [self._least_of_whole(numbers, dims) if is_whole else self._least(numbers, s) for s, dims in pairs]
            apart = [cost for cost in least if cost is not None]
            self._bounds[key] = self._tensor.share * min(apart) if len(apart) == len(least) else None
        return self._bounds[key]

    def _least(self, numbers: Numbers, given: TensorSharding) -> float | None:
        tensor, problem = self._tensor, self._problem
        layout = self._layout(self._lists.assignment(numbers))
        kind = given.reduction if given.unreduced_axes else "sum"
        if layout == (given.axes, given.unreduced_axes, kind):
            return None
        ends: tuple[AnyLayout, AnyLayout] = self._ends(given, AxisLayout(*layout[:2]))
        return least_time(tensor.shape, tensor.itemsize, *ends, problem.mesh, problem.costs)

    def _least_of_whole(self, numbers: Numbers, dims: _Dims) -> float | None:
        """`_least` where nothing is unreduced, and no axis slower than others: the bound is then a product over
        dimensions, each remembered."""
        tensor, problem = self._tensor, self._problem
        found, alike = [], True
        for known, given, factors in dims:
            key = tuple([numbers[f] for f in factors])
            if key not in known:
                axes = joined_axes(self._lists.assignment(numbers), factors, problem.mesh)
                known[key] = axes == given, shares(*self._ends(given, axes), problem.mesh)
            same, share = known[key]
            found.append(share)
            alike = alike and same
        if alike:
            return None
        whole = math.prod(tensor.shape) * tensor.itemsize
        return fastest(missing_bytes(whole, found), problem.mesh, problem.costs)

    def _layout(self, assignment: Mapping[int, Axes] | Sequence[Axes]) -> tuple[tuple[Axes, ...], Axes, str]:
        """The axes of each dimension, the unreduced axes, and the kind of their reduction."""
        mesh = self._problem.mesh
        summed = [a for f in sorted(self._summed) for a in assignment[f]]
        if summed:
            assignment = {f: () if f in self._summed else assignment[f] for f in self._factors}
        left = sort_and_merge([*self._partial, *summed], mesh) if summed else self._partial
        return dimension_axes(assignment, self._mapping, mesh), left, self._kind if left else "sum"

    def sharding(self, candidate: StrategyAssignment) -> TensorSharding:
        """The sharding of the tensor inside the op: the one required of an operand, or produced for a result."""
        return TensorSharding.closed(self._problem.mesh_name, *self._layout(candidate.assignment))

    def wanted(self, candidate: StrategyAssignment, bound: float | None) -> TensorSharding:
        """As `sharding`; the object given around the op itself where a `bound` of None says that the two are equal."""
        return self.around[0] if bound is None and len(self.around) == 1 else self.sharding(candidate)

    def reshard(self, candidate: StrategyAssignment) -> tuple[float, int]:
        """The cost of the reshard between the op's layout and the sharding around it, and the number of collectives."""
        tensor, problem = self._tensor, self._problem
        inside, plans = self.sharding(candidate), []
        for around in self.around:
            source, target = self._ends(around, inside)
            plans.append(plan_reshard(tensor.shape, tensor.itemsize, source, target, problem.mesh, problem.costs))
        plan = min(plans, key=_COST)
        cost = plan.cost + self._kept(inside) if plan.cost and tensor.share < 1 else plan.cost
        return tensor.share * cost, sum([1 for step in plan.steps if step.wire_bytes and tensor.share])

    def _kept(self, inside: TensorSharding) -> float:
        """What it costs that every device holds more of a value while a loop runs than it did before."""
        tensor, mesh = self._tensor, self._problem.mesh
        before, after = (math.prod(s.local_shape(tensor.shape, mesh)) for s in (self.around[0], inside))
        kept = max(0, after - before) * tensor.itemsize
        return (_KEPT if kept > _FEW else _KEPT_OF_FEW) * fastest(kept, mesh, self._problem.costs)

    def _ends(self, around: E, inside: E) -> tuple[E, E]:
        """The source and target of the reshard: operands are resharded before the op, results after it."""
        return (inside, around) if self._is_result else (around, inside)


class StatedView(TensorView):
    """A view of a tensor in the layout that an op asks for, whatever the assignment."""

    def __init__(self, view: TensorView, stated: TensorSharding):
        self.__dict__.update(view.__dict__)
        self._stated, self._by_dimension, self._factors, self._bounds = stated, False, [], {}

    def _layout(self, assignment: Mapping[int, Axes] | Sequence[Axes]) -> tuple[tuple[Axes, ...], Axes, str]:
        return self._stated.axes, self._stated.unreduced_axes, "sum"


def views(problem: OpProblem, lists: NumberedLists, strategy: Strategy, partial: Axes) -> list[TensorView]:
    """A view of each tensor under a strategy; carried operands stay unreduced along the `partial` axes."""
    kind = problem.partial_kind if partial else strategy.reduction
    carried, count = problem.carried if partial else _NONE, len(problem.rule.operand_mappings)
    summed = [frozenset(summed_in(problem.rule, strategy, i)) for i in range(len(problem.tensors))]
    return [
        TensorView(problem, lists, i, summed[i], partial if i >= count or i in carried else (), kind)
        for i in range(len(problem.tensors))
    ]


# The candidates for running an op, each with a lower bound for its cost, so that few have to be priced.

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
