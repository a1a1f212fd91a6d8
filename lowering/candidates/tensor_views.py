"""The layouts of one op's tensors under assignments, and a lower bound for the cost of their reshards.

A search tries hundreds of assignments, most of which differ in one factor only. So the lists of axes of a problem are
numbered (0 is the empty list), and an assignment is a tuple of such numbers, one per factor of the rule. The bound of a
tensor is computed once for all assignments with the same numbers at the factors of the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TypeVar

from sdy_jax.lowering.analysis.factors import digits, dimension_axes, joined_axes
from sdy_jax.lowering.candidates.op_problem import OpProblem, StrategyAssignment
from sdy_jax.lowering.reshard.bound import (
    AnyLayout,
    AxisLayout,
    fastest,
    least_time,
    missing_bytes,
    shares,
    slower_axes,
)
from sdy_jax.lowering.reshard.planner import plan_reshard
from sdy_jax.lowering.strategies.registry import Strategy, summed_in
from sdy_jax.representation.axes import sort_and_merge
from sdy_jax.representation.mesh import Axes, Mesh
from sdy_jax.representation.sharding import TensorSharding

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
