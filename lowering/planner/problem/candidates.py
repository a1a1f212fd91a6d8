"""Every candidate of a program's ops and values: by strategies and atoms of the mesh, and by what the user stated.

See docs/explanation/planner.md#candidates and docs/explanation/planner.md#what-you-stated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from sdy_jax.ir.collectives import MOVING
from sdy_jax.ir.graph import Graph, Op, Value, group_of, stated_for
from sdy_jax.ir.jax_shardings import has_sub_axes
from sdy_jax.ir.meshes import Axes, AxisRef, axes_size, overlaps, sort_and_merge
from sdy_jax.ir.operations import COMPUTATIONS, manual_axes
from sdy_jax.ir.shardings import TensorMapping, TensorSharding, erase_manual_axes
from sdy_jax.lowering.ops.elementwise import carries
from sdy_jax.lowering.ops.registry import SENT, Shards, Strategy, is_forwarding, sent_by, summed_in
from sdy_jax.lowering.planner.facts.factors import canonical, dividing_factors, in_contiguous_blocks, split_factors
from sdy_jax.lowering.planner.problem.assignments import answer_of
from sdy_jax.lowering.planner.problem.candidate_prices import inside_collectives, work_time_in_shards
from sdy_jax.lowering.planner.problem.layout_plan import EdgeLayouts, PlacedLayouts
from sdy_jax.lowering.planner.problem.layout_table import AxesLists, LayoutTable, Numbers
from sdy_jax.lowering.planner.problem.op_problem import (
    Decision,
    InsideCollective,
    OpKind,
    OpProblem,
    StrategyAssignment,
    Tensor,
    work_done,
    work_in_shards,
    work_time_in,
)
from sdy_jax.lowering.planner.report import ChangedLayout
from sdy_jax.lowering.planner.setting import Memo
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.shardy.propagation.data_flow import DataFlowEdge, EdgeKind, is_carried_sum

# Every candidate to run ops of one kind: each strategy with each atom of the mesh somewhere.
#
# An atom is nowhere, splits a factor, or is *carried*: operands that must be so together stay unreduced along it, and
# so do the results. Candidates with equal layouts are one, the cheapest. See docs/explanation/planner.md#candidates.

_CARRIED = -1
_UNUSED = -2
_MOST_PADDING = 1 / 8
"""The share of a dimension up to which it may be padded where nobody asked for it. Guessed: with more, there are more
candidates that waste work; with 0, 197 tokens stay whole."""


MOST_ATOMS = 4
"""Atoms up to which all candidates are listed. Guessed, a guard of planning time: each more makes about five times as
many layouts. With more, candidates are those in which few atoms are elsewhere than in the baseline."""

_MOVED = 2
"""Atoms that may be elsewhere than in the baseline, where not all candidates are listed. Guessed, a guard as well: of
five atoms with four factors each, 2 make 181 candidates of 3,125, and 3 make 821."""

Places = tuple[int, ...]
"""Per atom its place: a factor of an op's rule or a dimension of a tensor, `_CARRIED`, or `_UNUSED`."""


def _placed(places: Sequence[Sequence[int]], baseline: Places | None) -> Iterator[Places]:
    """Each atom at any of its places; at most `_MOVED` of them elsewhere than in the baseline, if there is one."""
    if baseline is None:
        yield from itertools.product(*places)
        return
    own = [place if place in each else _UNUSED for place, each in zip(baseline, places, strict=True)]
    for count in range(_MOVED + 1):
        for atoms in itertools.combinations(range(len(own)), count):
            others = ([place for place in places[atom] if place != own[atom]] for atom in atoms)
            for moved in itertools.product(*others):
                now = dict(zip(atoms, moved, strict=True))
                yield tuple([now.get(atom, place) for atom, place in enumerate(own)])


def _places_in(lists: Mapping[int, Axes], terms: Axes, atoms: Sequence[AxisRef]) -> Places:
    """The places of atoms, by the axes of each place and those of unreduced sums."""
    every = {**lists, _CARRIED: terms}
    found = (next((p for p, axes in every.items() if any(overlaps(atom, a) for a in axes)), _UNUSED) for atom in atoms)
    return tuple(found)


class Candidate(NamedTuple):
    """A candidate of a node of the model, an op or what has no strategy, such as an edge: the numbers of the layouts of
    operands, then results; its time; the operations that one device performs; what its strategy sends; the strategy;
    of its time, that of a device's own work; and whether it repeats work of a product that the baseline shares out. The
    plan makes a `Decision` of the one that is chosen for an op."""

    layouts: tuple[int, ...]
    cost: float
    operations: float
    inside: tuple[InsideCollective, ...] = ()
    strategy: Strategy | None = None
    work: float = 0.0
    repeats: bool = False


def every_candidate(
    problem: OpProblem,
    atoms: int,
    carried: Sequence[frozenset[int]],
    lists: AxesLists,
    pads: bool,
    baseline: Places | None = None,
) -> tuple[list[Candidate], list[int]]:
    """The candidates to run an op: those with the least work come first, then those that split more.

    Args:
        problem: the op; its shardings do not matter.
        atoms: how many parts of mesh axes there are, which go somewhere together.
        carried: the sets of operands that may stay unreduced together, as sums.
        lists: numbers lists of atoms, and layouts.
        pads: whether dimensions may be split by axes that do not divide them.
        baseline: the places of atoms from which candidates may not be far; None where all candidates are listed.

    Returns:
        The candidates without those that the op refuses, and the numbers of their layouts in the order in which these
        were found. Of equal ones, those of the first strategy come first.
    """
    found: dict[tuple[int, ...], Candidate] = {}
    for strategy in problem.strategies:
        own = problem if strategy.rule is None else problem.by_rule(strategy.rule, (strategy,))
        for together in (frozenset[int](), *carried):
            places = _Places(own, strategy, bool(together), lists, atoms, pads, baseline)
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
    shape: Sequence[int],
    atoms: Sequence[AxisRef],
    table: LayoutTable,
    stated: Openness,
    summed: bool,
    pads: bool,
    baseline: TensorSharding | None = None,
) -> Iterator[int]:
    """The layouts of a tensor with each atom nowhere, in an open dimension or, if `summed`, in a sum; atoms divide
    their dimension, or if it `pads`, nearly do. Of more than `MOST_ATOMS`, those near the one in the baseline."""
    mesh = table.mesh
    free = [atom for atom in atoms if not any(overlaps(atom, axis) for axis in stated.kept)]
    dims = [dim for dim, is_open in enumerate(stated.is_open) if is_open]
    places, near = [_UNUSED, *dims, *([_CARRIED] if summed else [])], None
    if baseline is not None and len(atoms) > MOST_ATOMS:
        near = _places_in(dict(enumerate(baseline.axes)), baseline.unreduced_axes, free)
    for placed in _placed([places] * len(free), near):
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

    def __init__(
        self,
        problem: OpProblem,
        strategy: Strategy,
        carries: bool,
        lists: AxesLists,
        atoms: int,
        pads: bool,
        baseline: Places | None,
    ):
        rule, self._baseline = problem.rule, baseline
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
        for placed in sorted(_placed(places, self._baseline), key=lambda p: p.count(_UNUSED)):
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


# The candidates to run the ops of a program, the baseline's first.
#
# See docs/explanation/planner.md#candidates.

_PADDED_WORK = 1.02
"""The work that a candidate may do with its padding, beside that of the baseline. Guessed between two facts: 197 tokens
over eight devices are 1.015, and work that is repeated is twice as much or more."""


class OpCandidates:
    """The candidates of ops; those of one kind share a list. `memo`: what is known of ops alone."""

    def __init__(self, table: LayoutTable, atoms: Sequence[AxisRef], costs: CostModel, pads: bool, memo: Memo):
        self._table, self._atoms, self._costs, self._pads, self._memo = table, tuple(atoms), costs, pads, memo
        self._mesh_name, self._mesh = table.mesh_name, table.mesh
        self._mesh_atoms = "lists of axes", self._atoms, table.inverted
        self._lists = memo.once(self._mesh_atoms, self._new_lists)
        self._candidates: dict[object, list[Candidate]] = {}

    def _new_lists(self) -> AxesLists:
        return AxesLists(self._atoms, LayoutTable(self._mesh_name, self._mesh, self._table.inverted))

    def of(self, op: Op, decision: Decision) -> list[Candidate]:
        """The candidates of an op, the baseline's first; only that may be on another mesh."""
        kind, layouts = decision.kind, tuple(map(self._table.number, decision.shardings))
        carried = tuple(self._carried(op))
        sends = op.signature if op.key in SENT else None
        key = kind, layouts, decision.inside, carried, sends
        if key not in self._candidates:
            own = self._own_candidate(kind, decision, layouts)
            found = _ordered(own, self._every_candidate(kind, carried, self._baseline(decision)), kind.multiplies)
            if not self._costs.may_repeat:
                found = [candidate for candidate in found if not candidate.repeats]
            self._candidates[key] = [self._with_sent(op, candidate) for candidate in found] if sends else found
        return self._candidates[key]

    def sent(self, op: Op, shardings: Sequence[TensorSharding]) -> float:
        """The time of the collectives that an op is by itself, with its tensors in these shardings."""
        found = sent_by(op, self._mesh, shardings[: len(op.operands)])
        return sum(
            self._costs.sending_time(sent.summary.kind, sent.summary.axes, self._mesh, sent.wire_bytes)
            for sent in found
            if op.results[sent.result].uses
        )

    def _with_sent(self, op: Op, candidate: Candidate) -> Candidate:
        shardings = [self._table.shardings[layout] for layout in candidate.layouts]
        return candidate._replace(cost=candidate.cost + self.sent(op, shardings))

    def _baseline(self, decision: Decision) -> Places | None:
        """Where the atoms are in the baseline, if there are so many that candidates are listed around that."""
        if len(self._atoms) <= MOST_ATOMS:
            return None
        factors = split_factors(decision.rule, decision.shardings, self._mesh)
        return _places_in(factors, decision.shardings[-1].unreduced_axes, self._atoms)

    def _every_candidate(
        self, kind: OpKind, carried: tuple[frozenset[int], ...], baseline: Places | None
    ) -> list[Candidate]:
        key = kind, carried, baseline
        if key not in self._candidates:
            own = kind.rule, kind.strategies, kind.tensors, kind.touched
            known = "candidates", own, carried, baseline, self._pads, self._mesh_atoms
            found, layouts = self._memo.once(known, lambda: self._enumerated(kind, carried, baseline))
            numbers = {layout: self._table.number(self._lists.table.shardings[layout]) for layout in layouts}
            self._candidates[key] = [Candidate(tuple([numbers[n] for n in c[0]]), *c[1:]) for c in found]
        return self._candidates[key]

    def _enumerated(
        self, kind: OpKind, carried: tuple[frozenset[int], ...], baseline: Places | None
    ) -> tuple[list[Candidate], list[int]]:
        """The candidates, and the layouts in which they are, in numbers that no order may depend on: they say when a
        layout was first seen by any of the programs that share them."""
        return every_candidate(self._problem(kind), len(self._atoms), carried, self._lists, self._pads, baseline)

    def _problem(self, kind: OpKind) -> OpProblem:
        whole = [TensorSharding.replicated(self._mesh_name, len(shape)) for shape, _ in kind.tensors]
        tensors = tuple([Tensor(*shaped, s) for shaped, s in zip(kind.tensors, whole, strict=True)])
        return OpProblem(kind, tensors, self._mesh, self._costs)

    def _own_candidate(self, kind: OpKind, decision: Decision, layouts: tuple[int, ...]) -> Candidate:
        inside = decision.inside
        done = work_done(kind, decision.shardings, self._mesh)
        work = work_time_in(kind, done, decision.shardings, self._costs, self._mesh)
        return Candidate(layouts, work + sum(c.time for c in inside), done.operations, inside, work=work)

    def _carried(self, op: Op) -> Iterator[frozenset[int]]:
        """The sets of operands that may be partial sums together, so that the results are."""
        if not all(map(is_inexact, op.results)):
            return
        sets = (carries(op, "sum", frozenset([i])) for i in range(len(op.operands)))
        yield from dict.fromkeys(found for found in sets if found)


def _ordered(own: Candidate, every: Sequence[Candidate], multiplies: bool) -> list[Candidate]:
    """The walk's candidate first; last those that do more work than it, for products: padding may add a little."""
    alike = next((candidate for candidate in every if candidate.layouts == own.layouts), own)
    first = alike if alike.cost < own.cost else own
    most = _PADDED_WORK * max(first.operations, own.operations) if multiplies else math.inf
    others = [candidate for candidate in every if candidate.layouts != own.layouts]
    sharing = [candidate for candidate in others if candidate.operations <= most]
    return [first, *sharing, *(each._replace(repeats=True) for each in others if each.operations > most)]


def is_inexact(value: Value) -> bool:
    """Whether a value's elements are floating-point numbers, whose sums may be taken in any order."""
    return value.dtype.startswith(("f", "bf", "complex"))


# The layouts that values may have by what the user stated for them: constraints, data-flow edges, groups.
#
# See docs/explanation/planner.md#what-you-stated.

Atoms = Sequence[AxisRef]


class ConstraintCandidates:
    """The candidates of what only states layouts: the baseline's own first, then all others that what is stated
    allows. `stacks_sums`: loops may stack partial sums, which are reduced behind them."""

    def __init__(self, table: LayoutTable, pads: bool, stacks_sums: bool):
        self._table, self._pads, self._stacks_sums = table, pads, stacks_sums
        self._known: dict[tuple[tuple[int, ...], ...], list[Candidate]] = {}

    def of_constraint(self, op: Op, own: TensorSharding, atoms: Atoms, makes: bool) -> list[Candidate]:
        """The candidates of an op that states a layout of its operand, and may make a value in it: closed dimensions
        stay, open ones may be split further. A barrier to propagation states nothing."""
        (result,) = op.results
        nothing = op.name == "sdy.propagation_barrier" and not own.unreduced_axes
        stated = Openness.of_rank(result.rank) if nothing else self._openness(own, stated_for(result))
        found = self._layouts(result.shape or (), own, stated, atoms)
        return self._candidates((layout,) * (1 + makes) for layout in found)

    def of_member(self, op: Op, own: TensorSharding, atoms: Atoms) -> list[Candidate]:
        """The candidates of a member of a group; the third slot is what ties it to the others."""
        shape = op.results[0].shape or ()
        return self._candidates((n, n, n) for n in self._layouts(shape, own, Openness.of_rank(len(shape)), atoms))

    def of_border(self, shape: Sequence[int], ends: Sequence[TensorSharding], atoms: Atoms) -> list[Candidate]:
        """The candidates of an argument or a result that may have any layout of jax's arrays, or of both where it is
        carried from one to the other, in layouts that are alike at both ends."""
        layouts = self._layouts(shape, ends[0], Openness.of_rank(len(shape)), atoms, evenly=True)
        every = (layout for layout in layouts if not has_sub_axes(self._table.shardings[layout]))
        own = tuple(map(self._table.number, ends))
        return self._candidates(dict.fromkeys([own, *((n,) * len(ends) for n in every)]))

    def of_edge(self, op: Op, edge: DataFlowEdge, baseline: EdgeLayouts, atoms: Atoms) -> list[Candidate]:
        """The candidates of a data-flow edge of an op, in layouts that are alike outside and inside of it."""
        stated, sides = stated_for(edge.owner), (len(edge.sources), len(edge.targets))
        if op.name in COMPUTATIONS:
            return self._candidates(_at_ends(ends, sides) for ends in self._ends(op, edge, baseline, stated, atoms))
        own = self._table.number(baseline.sources), self._table.number(baseline.targets)
        open_ones = Openness.of_rank(edge.owner.rank) if stated is None else self._openness(baseline.sources, stated)
        summed = stated is None and is_inexact(edge.owner) and is_carried_sum(edge, self._stacks_sums)
        every = self._layouts(edge.owner.shape or (), baseline.sources, open_ones, atoms, summed)
        return self._candidates(_at_ends(ends, sides) for ends in dict.fromkeys([own, *((n, n) for n in every)]))

    def _candidates(self, layouts: Iterable[tuple[int, ...]]) -> list[Candidate]:
        """Candidates of these layouts, which cost nothing themselves; one list for all that have the same."""
        key = tuple(layouts)
        if key not in self._known:
            self._known[key] = [Candidate(each, 0.0, 0.0) for each in key]
        return self._known[key]

    def _ends(
        self, op: Op, edge: DataFlowEdge, baseline: EdgeLayouts, stated: TensorSharding | None, atoms: Atoms
    ) -> Iterator[tuple[int, int]]:
        """The layouts of sources and of targets at the border of a computation; manual axes stay where they are."""
        manual, inward = manual_axes(op), edge.kind is EdgeKind.BODY_ARGUMENT
        outer = baseline.sources if inward else baseline.targets
        outside = edge.sources[0] if inward else edge.owner
        free = [atom for atom in atoms if atom.name not in manual]
        nothing = stated is None and not manual
        open_ones = Openness.of_rank(outside.rank) if nothing else self._openness(outer, stated)
        for layout in self._layouts(outside.shape or (), outer, open_ones, free, evenly=bool(manual)):
            inner = self._table.number(erase_manual_axes(self._table.shardings[layout], manual))
            yield (layout, inner) if inward else (inner, layout)

    def _layouts(
        self,
        shape: Sequence[int],
        own: TensorSharding,
        stated: Openness,
        atoms: Atoms,
        summed: bool = False,
        evenly: bool = False,
    ) -> list[int]:
        """The layouts that are allowed, the baseline's own first."""
        first = self._table.number(own)
        if not shape or not any(stated.is_open):
            return [first]
        every = layouts_of_shape(shape, atoms, self._table, stated, summed, self._pads and not evenly, own)
        return list(dict.fromkeys([first, *every]))

    def _is_at_home(self, sharding: TensorSharding) -> bool:
        return sharding.layout[0] in (None, self._table.mesh_name)

    def _openness(self, own: TensorSharding, stated: TensorSharding | None) -> Openness:
        """What is stated, as far as the baseline followed it; closed where it did not."""
        # On a single device a sharding has no dimensions, whatever its value's rank.
        followed = stated is not None and (stated.rank, stated.unreduced_axes) == (own.rank, own.unreduced_axes)
        if stated is None or not (followed and self._is_at_home(stated) and self._is_at_home(own)):
            return Openness(own.axes, (False,) * own.rank, ())
        is_open = tuple(
            not dim.is_closed and axes[: len(dim.axes)] == dim.axes
            for dim, axes in zip(stated.dimensions, own.axes, strict=True)
        )
        leading = zip(is_open, stated.axes, own.axes, strict=True)
        fixed = tuple(given if opened else axes for opened, given, axes in leading)
        kept = (*(axis for axes in fixed for axis in axes), *stated.replicated_axes, *own.unreduced_axes)
        return Openness(fixed, is_open, kept, own.unreduced_axes, own.reduction)


def changed_statements(graph: Graph, chosen: PlacedLayouts, baseline: PlacedLayouts) -> Iterator[ChangedLayout]:
    """The constraints with open dimensions, and the members of groups, that have other layouts in one placement than in
    another."""
    for number in sorted(chosen.fixed.keys() & baseline.fixed.keys()):
        op, new, old = graph.ops[number], chosen.fixed[number][-1], baseline.fixed[number][-1]
        if not is_forwarding(op) or new.same_layout_as(old):
            continue
        (result,), stated = op.results, stated_for(op.results[0])
        name = "sdy.sharding_constraint" if group_of(op) is None else "sdy.sharding_group"
        text = "like its group" if stated is None else f"[{', '.join(map(str, stated.dimensions))}]"
        yield ChangedLayout(name, op.mlir.location, result.dtype, result.shape or (), new, old, text)


def _at_ends(ends: tuple[int, int], sides: tuple[int, int]) -> tuple[int, ...]:
    (source, target), (sources, targets) = ends, sides
    return (*(source,) * sources, *(target,) * targets)
