"""Every candidate to run ops of one kind: each strategy with each atom of the mesh somewhere.

An atom is nowhere, splits a factor, or is *carried*: operands that must be so together stay unreduced along it, and so
do the results. Candidates with equal layouts are one, the cheapest.
See docs/explanation/planner.md#candidates.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sdy_jax.lowering.analysis.factors import canonical, dividing_factors, in_contiguous_blocks
from sdy_jax.lowering.candidates.answers import answer_of
from sdy_jax.lowering.candidates.candidate_prices import inside_collectives, work_time_in_shards
from sdy_jax.lowering.candidates.op_problem import InsideCollective, OpProblem, StrategyAssignment
from sdy_jax.lowering.candidates.op_work import work_in_shards
from sdy_jax.lowering.model.axes_lists import AxesLists, Numbers
from sdy_jax.lowering.model.layout_table import LayoutTable
from sdy_jax.lowering.strategies.registry import Shards, Strategy, summed_in
from sdy_jax.representation.axes import overlaps, sort_and_merge
from sdy_jax.representation.mesh import Axes, AxisRef, axes_size
from sdy_jax.representation.rule import TensorMapping
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
    problem: OpProblem, atoms: int, carried: Sequence[frozenset[int]], lists: AxesLists, pads: bool
) -> tuple[list[Candidate], list[int]]:
    """The candidates to run an op: those with the least work come first, then those that split more.

    Args:
        problem: the op; its shardings do not matter.
        atoms: how many parts of mesh axes there are, which go somewhere together.
        carried: the sets of operands that may stay unreduced together, as sums.
        lists: numbers lists of atoms, and layouts.
        pads: whether dimensions may be split by axes that do not divide them.

    Returns:
        The candidates without those that the op refuses, and the numbers of their layouts in the order in which these
        were found. Of equal ones, those of the first strategy come first.
    """
    found: dict[tuple[int, ...], Candidate] = {}
    for strategy in problem.strategies:
        own = problem if strategy.rule is None else problem.by_rule(strategy.rule, (strategy,))
        for together in (frozenset[int](), *carried):
            places = _Places(own, strategy, bool(together), lists, atoms, pads)
            for candidate in _OfStrategy(own, strategy, together, lists).candidates(places):
                if candidate.layouts not in found or candidate.cost < found[candidate.layouts].cost:
                    found[candidate.layouts] = candidate
    numbers = list(dict.fromkeys(itertools.chain(*found)))
    return sorted(found.values(), key=lambda candidate: candidate.operations), numbers


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

    def __init__(self, problem: OpProblem, strategy: Strategy, carried: frozenset[int], lists: AxesLists):
        self._problem, self._strategy, self._lists = problem, strategy, lists
        self._work_of: dict[Shards, tuple[float, float]] = {}
        count = len(problem.rule.operand_mappings)
        views = [
            _View(m, index >= count, index in carried, summed_in(problem.rule, strategy, index))
            for index, m in enumerate(problem.rule.mappings)
        ]
        self._views = list(dict.fromkeys(views))
        self._view_of = [self._views.index(view) for view in views]

    def candidates(self, places: _Places) -> Iterator[Candidate]:
        """The candidates with atoms at these places."""
        rule, sizes = self._problem.rule, self._lists.sizes
        for atoms, carried in places:
            for chosen in itertools.product(*map(self._lists.orders, atoms.values())):
                split = dict(zip(atoms, chosen, strict=True))
                numbers = tuple([split.get(factor, 0) for factor in range(len(rule.factor_sizes))])
                shards = tuple([sizes[number] for number in numbers])
                if not rule.joint_factors or in_contiguous_blocks(shards, rule):
                    candidate = self._candidate(numbers, shards, carried)
                    if candidate is not None:
                        yield candidate

    def _candidate(self, numbers: Numbers, shards: Shards, carried: int) -> Candidate | None:
        """The candidate; None where the op is asked and refuses it."""
        layouts, inside = self._layouts(numbers, carried), tuple[InsideCollective, ...]()
        if self._strategy.ask is not None:
            table = self._lists.table
            answer = answer_of(self._problem, self._strategy, tuple([table.shardings[n] for n in layouts]))
            if answer is None:
                return None
            layouts, shards, inside = tuple(map(table.number, answer.shardings)), answer.shards, answer.inside
        if self._strategy.inside:
            assignment = tuple([self._lists.axes[number] for number in numbers])
            inside = inside_collectives(self._problem, StrategyAssignment(self._strategy, assignment))
        operations, work = self._work(shards)
        cost = work + sum(c.time for c in inside)
        return Candidate(layouts, cost, operations, inside, self._strategy, work)

    def _work(self, shards: Shards) -> tuple[float, float]:
        """The operations that a device performs, and their time.

        Terms that are written pass op by op only: with that price, plans for all of GPT's step with FSDP weights took
        1.18 of the time by XLA's estimate for v5e (2026-11).
        """
        if shards not in self._work_of:
            work = work_in_shards(self._strategy, self._problem.rule, shards)
            self._work_of[shards] = work.operations, work_time_in_shards(self._problem, shards, work)
        return self._work_of[shards]

    def _layouts(self, numbers: Numbers, carried: int) -> tuple[int, ...]:
        found = [self._layout(view, numbers, carried) for view in self._views]
        return tuple([found[view] for view in self._view_of])

    def _layout(self, view: _View, numbers: Numbers, carried: int) -> int:
        unreduced = carried if view.is_made or view.is_carried else 0
        if view.summed:
            unreduced = self._lists.merged((carried, *[numbers[factor] for factor in view.summed]))
            numbers = tuple([0 if factor in view.summed else n for factor, n in enumerate(numbers)])
        kind = self._strategy.reduction if view.is_made and not carried else "sum"
        dimensions = [numbers[f[0]] if len(f) == 1 else self._joined(numbers, f) for f in view.mapping]
        return self._lists.layout(tuple(dimensions), unreduced, kind)

    def _joined(self, numbers: Numbers, factors: Sequence[int]) -> int:
        return self._lists.joined(tuple([numbers[factor] for factor in factors]))


class _View(NamedTuple):
    """What the layout of a tensor depends on beside an assignment: tensors with equal views are in equal layouts."""

    mapping: TensorMapping
    is_made: bool
    is_carried: bool
    summed: tuple[int, ...]


class _Places:
    """Where a number of atoms may go with a strategy: each nowhere, to a factor that it fits, or, if operands carry
    sums, into these."""

    def __init__(self, problem: OpProblem, strategy: Strategy, carries: bool, lists: AxesLists, atoms: int, pads: bool):
        rule = problem.rule
        self._sizes, self._carries, self._lists, self._atoms = rule.factor_sizes, carries, lists, atoms
        self._even = dividing_factors(rule) | strategy.dividing if pads else frozenset(range(len(rule.factor_sizes)))
        whole = frozenset[int]()
        if carries and (strategy.reduction != "sum" or any(i.kind not in MOVING for i in strategy.inside)):
            # The op reduces along these factors itself, by another kind or at once: no other terms may be left.
            whole = strategy.partial.union(*(inside.factors for inside in strategy.inside))
        self._splittable = [f for f in sorted(strategy.splittable - whole) if rule.factor_sizes[f] > 1]
        self._known: dict[tuple[int, int], bool] = {}

    def __iter__(self) -> Iterator[tuple[dict[int, int], int]]:
        """The atoms of each factor that has some, and the list of those that are carried; those that leave fewer
        nowhere come first."""
        carried = [_CARRIED] if self._carries else []
        each = range(self._atoms)
        places = [[_UNUSED, *(f for f in self._splittable if self._fits(f, 1 << atom)), *carried] for atom in each]
        for placed in sorted(itertools.product(*places), key=lambda p: p.count(_UNUSED)):
            atoms = dict[int, int]()
            for atom, place in enumerate(placed):
                atoms[place] = atoms.get(place, 0) | 1 << atom
            atoms.pop(_UNUSED, None)
            unreduced = atoms.pop(_CARRIED, 0)
            if (unreduced or not self._carries) and all(self._fits(*both) for both in atoms.items()):
                yield atoms, self._lists.orders(unreduced)[0]

    def _fits(self, factor: int, atoms: int) -> bool:
        key = factor, atoms
        if key not in self._known:
            shards = self._lists.sizes[self._lists.orders(atoms)[0]]
            self._known[key] = _divides(self._sizes[factor], shards, factor not in self._even)
        return self._known[key]
