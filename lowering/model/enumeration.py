"""Every candidate to run ops of one kind: each strategy with each atom of the mesh somewhere.

An atom is nowhere, splits a factor, or is *carried*: operands that must be so together stay unreduced along it, and so
do the results. Candidates with equal layouts are one, the cheapest.
See docs/explanation/planner.md#candidates.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sdy_jax.lowering.analysis.factors import Assignment, canonical, dividing_factors, is_contiguous, joined_axes
from sdy_jax.lowering.candidates.candidate_prices import inside_collectives, operations_per_device, work_time_of
from sdy_jax.lowering.candidates.op_problem import InsideCollective, OpProblem, StrategyAssignment
from sdy_jax.lowering.model.layout_table import LayoutTable
from sdy_jax.lowering.strategies.registry import Strategy
from sdy_jax.representation.axes import overlaps, sort_and_merge
from sdy_jax.representation.mesh import Axes, AxisRef, axes_size
from sdy_jax.representation.sdy_collectives import MOVING

_CARRIED = -1
_UNUSED = -2
_MOST_PADDING = 1 / 8
"""The share of a dimension up to which it may be padded where nobody asked for it. Guessed: with more, there are more
candidates that waste work; with 0, 197 tokens stay whole."""


class Candidate(NamedTuple):
    """A candidate of a node of the model, an op or what has no strategy, such as an edge: the numbers of the layouts of
    operands, then results; its time; the operations that one device performs; what its strategy sends; the strategy;
    and of its time, that of a device's own work. The plan makes a `Decision` of the one that is chosen for an op."""

    layouts: tuple[int, ...]
    cost: float
    operations: float
    inside: tuple[InsideCollective, ...] = ()
    strategy: Strategy | None = None
    work: float = 0.0


def every_candidate(
    problem: OpProblem, atoms: Sequence[AxisRef], carried: Sequence[frozenset[int]], table: LayoutTable, pads: bool
) -> list[Candidate]:
    """The candidates to run an op: those with the least work come first, then those that split more.

    Args:
        problem: the op; its shardings do not matter.
        atoms: the parts of mesh axes that go somewhere together, in mesh order.
        carried: the sets of operands that may stay unreduced together, as sums.
        table: numbers layouts.
        pads: whether dimensions may be split by axes that do not divide them.
    """
    found: dict[tuple[int, ...], Candidate] = {}
    for strategy in problem.strategies:
        own = problem if strategy.rule is None else problem.by_rule(strategy.rule, (strategy,))
        for together in (frozenset[int](), *carried):
            for candidate in _OfStrategy(own, strategy, together, table, pads).candidates(atoms):
                if candidate.layouts not in found or candidate.cost < found[candidate.layouts].cost:
                    found[candidate.layouts] = candidate
    return sorted(found.values(), key=lambda candidate: candidate.operations)


class Openness(NamedTuple):
    """Which layouts a value may have by what is stated for it.

    `fixed`: per dimension, the axes that lead it. `is_open`: whether others may follow. `kept`: the axes that stay as
    they are: those of `fixed`, what is unreduced, and what nothing may be split along.
    """

    fixed: tuple[Axes, ...]
    is_open: tuple[bool, ...]
    kept: Axes
    unreduced: Axes = ()
    reduction: str = "sum"

    @classmethod
    def of_rank(cls, rank: int) -> Openness:
        """Nothing is stated."""
        return cls(((),) * rank, (True,) * rank, ())


def layouts_of_shape(
    shape: Sequence[int], atoms: Sequence[AxisRef], table: LayoutTable, stated: Openness, summed: bool, pads: bool
) -> Iterator[int]:
    """The layouts of a tensor with each atom nowhere, in an open dimension or, if `summed`, in a sum; atoms divide
    their dimension, or if it `pads`, nearly do."""
    mesh = table.mesh
    free = [atom for atom in atoms if not any(overlaps(atom, axis) for axis in stated.kept)]
    dims = [dim for dim, is_open in enumerate(stated.is_open) if is_open]
    for placed in itertools.product([_UNUSED, *dims, *([_CARRIED] if summed else [])], repeat=len(free)):
        by_place = {p: [a for a, at in zip(free, placed, strict=True) if at == p] for p in dict.fromkeys(placed)}
        by_place.pop(_UNUSED, None)
        terms = (*stated.unreduced, *by_place.pop(_CARRIED, ()))
        unreduced = sort_and_merge(terms, mesh) if terms else ()
        lists = [_continued(led, tuple(by_place.get(dim, ())), table) for dim, led in enumerate(stated.fixed)]
        if all(_divides(shape[dim], axes_size(lists[dim][0], mesh), pads) for dim in by_place):
            for axes in itertools.product(*lists):
                yield table.number_of_axes(axes, unreduced, stated.reduction)


def _continued(led: Axes, atoms: tuple[AxisRef, ...], table: LayoutTable) -> list[Axes]:
    """The axes of a dimension that some lead and these atoms follow."""
    return [canonical((*led, *order), table.mesh) for order in table.orders(atoms)]


def _divides(size: int, shards: int, pads: bool) -> bool:
    """Whether a dimension may be split into so many blocks: equal ones or, if it `pads`, with little padding."""
    rest = -size % shards
    return not rest or (pads and rest <= _MOST_PADDING * size)


class _OfStrategy:
    """The candidates of one strategy, with one set of operands that may stay unreduced."""

    def __init__(self, problem: OpProblem, strategy: Strategy, carried: frozenset[int], table: LayoutTable, pads: bool):
        self._problem, self._strategy, self._carried, self._table = problem, strategy, carried, table
        rule = problem.rule
        self._even = (
            frozenset(range(len(rule.factor_sizes))) if not pads else dividing_factors(rule) | strategy.dividing
        )
        whole = frozenset[int]()
        if carried and (strategy.reduction != "sum" or any(i.kind not in MOVING for i in strategy.inside)):
            # The op reduces along these factors itself, by another kind or at once: no other terms may be left.
            whole = strategy.partial.union(*(inside.factors for inside in strategy.inside))
        self._splittable = [f for f in sorted(strategy.splittable - whole) if rule.factor_sizes[f] > 1]

    def candidates(self, atoms: Sequence[AxisRef]) -> Iterator[Candidate]:
        places = [[_UNUSED, *self._fitting(atom), *([_CARRIED] if self._carried else [])] for atom in atoms]
        for placed in sorted(itertools.product(*places), key=lambda p: p.count(_UNUSED)):
            if self._carried and _CARRIED not in placed:
                continue
            yield from self._placed(atoms, placed)

    def _fitting(self, atom: AxisRef) -> list[int]:
        return [f for f in self._splittable if self._fits(f, (atom,))]

    def _fits(self, factor: int, axes: Axes) -> bool:
        size, shards = self._problem.rule.factor_sizes[factor], axes_size(axes, self._problem.mesh)
        return _divides(size, shards, factor not in self._even)

    def _placed(self, atoms: Sequence[AxisRef], placed: Sequence[int]) -> Iterator[Candidate]:
        """The candidates with each atom at its place: those of a factor in each order that dimensions may have."""
        by_factor: dict[int, list[AxisRef]] = {}
        for atom, place in zip(atoms, placed, strict=True):
            by_factor.setdefault(place, []).append(atom)
        by_factor.pop(_UNUSED, None)
        carried = self._table.orders(tuple(by_factor.pop(_CARRIED, ())))[0]
        lists = [self._table.orders(tuple(found)) for found in by_factor.values()]
        if not all(self._fits(factor, axes[0]) for factor, axes in zip(by_factor, lists, strict=True)):
            return
        for chosen in itertools.product(*lists):
            split = dict(zip(by_factor, chosen, strict=True))
            assignment = tuple([split.get(f, ()) for f in range(len(self._problem.rule.factor_sizes))])
            if not self._problem.rule.joint_factors or is_contiguous(
                assignment, self._problem.rule, self._problem.mesh
            ):
                yield self._candidate(assignment, carried)

    def _candidate(self, assignment: Assignment, carried: Axes) -> Candidate:
        problem, strategy = self._problem, self._strategy
        candidate = StrategyAssignment(strategy, assignment, carried)
        operations, inside = operations_per_device(problem, candidate), inside_collectives(problem, candidate)
        # Terms that are written pass op by op only: with that price, plans for all of GPT's step with FSDP weights took
        # 1.18 of the time by XLA's estimate for v5e (2026-11).
        work = work_time_of(problem, candidate._replace(partial=()), operations)
        cost = work + sum(c.time for c in inside)
        return Candidate(self._layouts(assignment, carried), cost, operations, inside, strategy, work)

    def _layouts(self, assignment: Assignment, carried: Axes) -> tuple[int, ...]:
        problem, strategy = self._problem, self._strategy
        rule, count = problem.rule, len(problem.rule.operand_mappings)
        summed = [a for f in sorted(strategy.partial) for a in assignment[f]]
        left = sort_and_merge([*carried, *summed], problem.mesh)
        whole = [() if f in strategy.partial else axes for f, axes in enumerate(assignment)] if summed else assignment
        layouts = []
        for index, mapping in enumerate(rule.mappings):
            given, unreduced = (
                (assignment, carried if index in self._carried else ()) if index < count else (whole, left)
            )
            axes = tuple([joined_axes(given, factors, problem.mesh) for factors in mapping])
            kind = "sum" if index < count or carried else strategy.reduction
            layouts.append(self._table.number_of_axes(axes, unreduced, kind))
        return tuple(layouts)
