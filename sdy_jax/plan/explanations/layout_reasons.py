"""Why values have other layouts than op by op: what these save and cost; what the user's constraints and
`out_shardings` cost; what work that devices repeat would save; and the bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.annotate.program import Program
from sdy_jax.ir.graph import Value
from sdy_jax.ir.jax_shardings import bytes_text, flops_text, seconds_text, type_text
from sdy_jax.ir.locations import place_of, short_source
from sdy_jax.ir.operations import CONSTRAINTS, main_function
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.stored_shardings import function_shardings
from sdy_jax.lowering.planner.problem.candidates import Candidate
from sdy_jax.lowering.planner.report import LayoutChoice, Note, PartitionReport, is_input
from sdy_jax.lowering.planner.search.baseline import Reconsidered
from sdy_jax.lowering.planner.setting import Setting
from sdy_jax.lowering.planner.solve.certificate import (
    Certificate,
    Term,
    around,
    certified,
    clusters,
    compared,
    improved_near,
    set_back,
)
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.plan.stages import PlannedWith, input_names, to_partition

# Reasons for layouts that were chosen for a whole program, as a plan says them.


def sent_text(costs: CostModel, amount: float) -> str:
    """What communication costs by a cost model: bytes where that is its unit, else time."""
    return bytes_text(amount) if costs.unit == "bytes" else seconds_text(amount)


@dataclass(frozen=True, slots=True)
class LayoutPrice:
    """What a choice saves, or costs.

    Attributes:
        cost: by the cost model, in all.
        sent: the part of it that is communication: bytes per device, unless the model says how fast these are sent.
        flops: the floating-point operations of one device.
        places: how many values or ops that concerns.
        largest: the largest parts in words.
        text: `sent` and `flops` in words.
    """

    cost: float
    sent: float
    flops: float
    places: int
    largest: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return ": ".join([self.text, *([", ".join(self.largest)] if self.largest else [])])


@dataclass(frozen=True, slots=True)
class ChosenLayout:
    """The layout of some values of one line of the source, and the one that they have op by op, as types."""

    values: str
    chosen: str
    baseline: str

    def __str__(self) -> str:
        return f"{self.chosen} instead of {self.baseline}: {self.values}"


@dataclass(frozen=True, slots=True)
class LayoutReason:
    """Why some values have another layout than op by op: one choice for all of them.

    Attributes:
        changed: the values that were asked for.
        others: how many other values changed with them.
        times: how many such choices there are, as in layers that are alike.
        saves, costs: what the program would pay more, and less, if they and the others were as op by op, and what is
            around them made the best of that. By the planner's model, which does not know that a value may be computed
            again instead of sent: op by op the program may pay less than that.
        origins: the annotations from which propagation gave them the layouts that they do not have.
    """

    changed: tuple[ChosenLayout, ...]
    others: int
    saves: LayoutPrice
    costs: LayoutPrice
    origins: tuple[str, ...] = ()
    times: int = 1

    def __str__(self) -> str:
        with_others = f", with {self.others} other value{'s' if self.others > 1 else ''}" if self.others else ""
        alike = f"{self.times} times " if self.times > 1 else ""
        lines = [f"{alike}chosen for the whole program{with_others}", *(f"  {changed}" for changed in self.changed)]
        lines += [f"  propagation had it from {origin}" for origin in self.origins]
        if self.saves.cost <= self.costs.cost:
            return "\n".join([*lines, "  by itself it saves nothing"])
        return "\n".join([*lines, f"  saves {self.saves}", f"  costs {self.costs}"])


def listed(words: Sequence[str]) -> str:
    """`a, b and c`."""
    *others, last = words or [""]
    return f"{', '.join(others)} and {last}" if others else last


# What one choice of layouts for a program saves beside another one, and what it costs, in words.

_LARGEST = 3
"""Parts of a price that are named. Chosen: for a reader."""


class ChoicePrices:
    """Compares choices for one program.

    Args:
        seen: the program's model.
        names: what the user calls its values.
    """

    def __init__(self, seen: Reconsidered, names: PartitionReport):
        self._seen, self._names = seen, names

    def name(self, number: int) -> str:
        """What the user calls a value of the model."""
        return self._names.name(self._seen.values[number])

    def difference(self, one: Sequence[int], other: Sequence[int]) -> tuple[LayoutPrice, LayoutPrice]:
        """What one choice saves beside another, and what it costs beside it."""
        terms = compared(self._seen.model, one, other)
        more, less = [t for t in terms if t.change > 0], [t for t in terms if t.change < 0]
        return self._side(more, other), self._side(less, one)

    def total(self, terms: Iterable[Term]) -> tuple[float, float]:
        """The communication of all terms, and how many floating-point operations fewer."""
        terms = list(terms)
        sent = sum(term.change for term in terms if not term.operations)
        return sent, -sum(map(self._seen.flops, terms))

    def _side(self, terms: Sequence[Term], paying: Sequence[int]) -> LayoutPrice:
        """Terms that all rise, or all fall; `paying` is the choice that pays them."""
        cost = sum(abs(term.change) for term in terms)
        sent = sum(abs(term.change) for term in terms if not term.operations)
        flops = sum(abs(self._seen.flops(term)) for term in terms)
        parts = [*([self.sent(sent)] if sent else []), *([f"{flops_text(flops)} of work"] if flops else [])]
        text = (" and ".join(parts) or "nothing") + (f" in {len(terms)} places" if len(terms) > 1 else "")
        return LayoutPrice(cost, sent, flops, len(terms), tuple(self._largest(terms, paying)), text)

    def _largest(self, terms: Sequence[Term], paying: Sequence[int]) -> Iterator[str]:
        """The largest terms, those that read alike together."""
        found: dict[str, list[Term]] = {}
        for term in terms:
            found.setdefault(self._term(term, paying), []).append(term)
        by_change = sorted(found.items(), key=lambda item: -sum(abs(term.change) for term in item[1]))
        for text, alike in by_change[:_LARGEST]:
            work = sum(abs(self._seen.flops(term)) for term in alike)
            price = flops_text(work) if work else self.sent(sum(abs(term.change) for term in alike))
            yield f"{text} ({price}{f' in {len(alike)}' if len(alike) > 1 else ''})"

    def _term(self, term: Term, paying: Sequence[int]) -> str:
        if term.operations:
            return f"work of {self._place(term.node)}"
        if term.value is None:
            return f"inside of {self._place(term.node)}"
        kinds = listed(self._seen.collectives(term.value, paying)) or "reshards"
        return f"{kinds} of {self.name(term.value)}"

    def _place(self, node: int) -> str:
        op = self._seen.op(node)
        assert op is not None
        place = place_of(op.mlir.location)
        return f"{place.primitive or op.name} at {short_source(place.line)}"

    def sent(self, amount: float) -> str:
        return sent_text(self._seen.costs, amount)


# What the shardings that the user states cost a program: constraints, and `out_shardings`.

_DEAR = 0.05
"""The share of the program's cost above which a constraint is noted. Chosen: a note should be worth a change."""

_NEAR_CONSTRAINTS = 100
"""Nodes around the constraints of a line that may change with them. Guessed: fewer than around a cluster, as a program
has many constraints; with fewer, what one costs is overstated."""

RESULTS = "out_shardings"
"""What notes on results are at; they are not printed with a plan, whose results somebody wants where they are."""


class StatedCosts:
    """Notes on what the user says that costs more than a twentieth of the program. That is what would be saved if the
    values had any layout there, and what is around them made the best of that.

    Placement takes a value from before a constraint where that is nearer; so much as the program sends less than in the
    model may have been saved already.

    Args:
        seen: the program's model.
        prices: of the program.
        saved_already: how much less the program sends than in the model.
    """

    def __init__(self, seen: Reconsidered, prices: ChoicePrices, saved_already: float):
        self._seen, self._prices = seen, prices
        self._least = _DEAR * seen.model.cost(seen.chosen) + max(0.0, saved_already)

    def constraints(self) -> Iterator[Note]:
        """Notes on constraints, by source line."""
        seen, by_line = self._seen, dict[str, list[int]]()
        for node in range(len(seen.model.nodes)):
            op = seen.op(node)
            if op is not None and op.name in CONSTRAINTS:
                by_line.setdefault(place_of(op.mlir.location).line, []).append(node)
        for nodes in by_line.values():
            subject = "the constraint costs" if len(nodes) == 1 else f"the {len(nodes)} constraints cost"
            price = self._price(seen.constraint_candidates(nodes))
            if price:
                yield self._note("sharding_constraint", nodes[0], f"{subject} {price}")

    def results(self, stated: Iterable[tuple[int, str]]) -> Iterator[Note]:
        """Notes on the results whose layouts the user stated, given by index, with their paths."""
        seen = self._seen
        for index, name in stated:
            if seen.result_cost(index) > self._least and (price := self._price(seen.result_candidates(index))):
                yield self._note(RESULTS, len(seen.model.nodes) - 1, f"that of `{name}` costs {price}")

    def _note(self, what: str, node: int, message: str) -> Note:
        op = self._seen.op(node)
        assert op is not None
        return Note.at(what, op.mlir.location, message)

    def _price(self, candidates: Mapping[int, Sequence[Candidate]]) -> str:
        """What is saved if nodes have further candidates, if that is more than the least; beside what is saved around
        them anyhow."""
        seen, near = self._seen, around(self._seen.model, candidates, _NEAR_CONSTRAINTS)
        with seen.freed(candidates):
            before, best = seen.chosen, improved_near(seen.model, seen.chosen, {*candidates, *near}, seen.moves)
            if seen.model.cost(before) - seen.model.cost(best) > self._least and len(seen.moves) > 1:
                before = improved_near(seen.model, seen.chosen, near, seen.moves)
                best = improved_near(seen.model, before, {*candidates, *near}, seen.moves)
            saved, paid = self._prices.difference(best, before)
        if saved.cost - paid.cost <= self._least:
            return ""
        net, work = saved.sent - paid.sent, saved.flops - paid.flops
        price = f"{self._prices.sent(net)} per device" if net > 0 else f"{flops_text(work)} of work"
        return f"{price}: {', '.join(saved.largest)}"


# What a program would save if its devices might do more work than op by op.

_WORTH_REPEATING = 0.01
"""The share of the program's cost that repeated work has to save to be mentioned. Chosen: a note should be worth a
change."""


def saved_by_repeating(seen: Reconsidered, capped: Certificate, free: Reconsidered, prices: ChoicePrices) -> str:
    """What products and convolutions would save if they might do more work than op by op; empty where that is little,
    or nothing.

    Args:
        seen: the program's model.
        capped: its best choice.
        free: its model where they may.
        prices: of the program.
    """
    model = seen.model
    if all(len(a.candidates) == len(b.candidates) for a, b in zip(model.nodes, free.model.nodes, strict=True)):
        return _in_all(seen, capped, prices)
    kept = [
        next(i for i, candidate in enumerate(after.candidates) if candidate.layouts == before.candidates[now].layouts)
        for before, after, now in zip(model.nodes, free.model.nodes, capped.choice, strict=True)
    ]
    best = certified(free.model, kept)
    if capped.cost - best.cost < _WORTH_REPEATING * capped.cost:
        return _in_all(seen, capped, prices)
    return _lifted("no product or convolution does more work", compared(free.model, best.choice, kept), prices)


def _in_all(seen: Reconsidered, capped: Certificate, prices: ChoicePrices) -> str:
    """As `saved_by_repeating`, where products and convolutions would repeat nothing, but other ops too much in all."""
    model, chosen, best = seen.model, seen.chosen, capped.choice
    is_too_much = model.operations(best) > seen.program.most_operations
    if not is_too_much or model.cost(chosen) - model.cost(best) < _WORTH_REPEATING * model.cost(chosen):
        return ""
    return _lifted("the program does no more work in all", compared(model, best, chosen), prices)


def _lifted(capped: str, changes: Iterable[Term], prices: ChoicePrices) -> str:
    saved, paid = prices.total(changes)
    return (
        f"{capped} than op by op; with CostModel(repeat_work=True) the program would send {prices.sent(saved)} less "
        f"for {flops_text(paid)} more"
    )


# Why values have other layouts than op by op: what these save and what they cost; what constraints cost; the bound.
#
# Planning keeps nothing of this but the choice itself: the first question builds the program's model once more.

_MOST_NODES, _MOST_TO_REPEAT = 4000, 1000
"""Nodes up to which a plan says its bound, and looks for what repeated work would save, unasked. Measured (2026-11): a
transformer of 16 layers has 3100; its bound took half as long as its plan did."""

_MOST_REASONS = 50
"""Choices whose reasons a page has. Guessed: of layers that are alike there is one; each takes as long as to plan some
of the program again."""

Mark = tuple[str, int | str]
"""What tells a value in another graph of the same program: see `Naming.mark`."""


class Findings(NamedTuple):
    """What can be said about all of a program: `LayoutReasons.bound`, None where that takes longer than the plan did;
    `constraints`; and `repeating`."""

    bound: float | None
    constraints: tuple[Note, ...]
    repeating: str


class LayoutReasons:
    """Answers about a planned program, from its model, which is made once more.

    Args:
        propagated: the module after propagation.
        traced: the program that was traced.
        source: the line at which its shardings are given.
        choice: what the planner chose.
        planned: with what it was planned.
    """

    def __init__(
        self, propagated: ir.Operation, traced: Program, source: str, choice: LayoutChoice, planned: PlannedWith
    ):
        self._given = propagated, traced, source, planned
        self._mesh_name = traced.mesh_name
        self._choice, self.seen = choice, self._modelled(planned.costs, choice.chosen)
        self._prices = ChoicePrices(self.seen, PartitionReport(input_names(traced)))
        self._priced: dict[int, tuple[LayoutPrice, LayoutPrice]] = {}

    def _modelled(self, costs: CostModel, chosen: Sequence[int]) -> Reconsidered:
        propagated, traced, source, planned = self._given
        context = propagated.context
        with context, ir.Location.unknown(context):
            module, _ = to_partition(propagated, traced, source, planned.inner)
            return Reconsidered(
                module, chosen, Setting(self._mesh_name, costs, policy=planned.policy, target=planned.target)
            )

    def findings(self) -> Findings:
        """What can be said about all of the program without taking longer than the plan did."""
        is_one_axis, nodes = len(self.seen.program.atoms) == 1, len(self.seen.model.nodes)
        bound = self.bound() if is_one_axis and nodes <= _MOST_NODES else None
        repeating = self.repeating() if is_one_axis and nodes <= _MOST_TO_REPEAT else ""
        return Findings(bound, tuple(self.constraints()), repeating)

    def bound(self) -> float:
        """What a choice that does no more work than this one sends at least, by the cost model."""
        return max(0.0, self._best.bound - self._work) + self._choice.written

    @cached_property
    def _best(self) -> Certificate:
        """The best choice that was found where memory is no object, and the bound."""
        return certified(self.seen.model, self.seen.chosen)

    @property
    def _work(self) -> float:
        """The time of each device's own work, as the model knows it."""
        candidates = [
            (node.times, node.candidates[candidate])
            for node, candidate in zip(self.seen.model.nodes, self.seen.chosen, strict=True)
        ]
        return sum(times * candidate.work for times, candidate in candidates)

    def of(self, marks: Collection[Mark]) -> Iterator[LayoutReason]:
        """The reasons for the layouts of the values with these marks: one per cluster, those with most of the values
        first, and those that read alike once."""
        asked = {number for number in self.seen.values if not self._marks(number).isdisjoint(marks)}
        found = list[tuple[int, list[int], list[int]]]()
        for number, cluster in enumerate(self._clusters):
            made = [value for value in self._changed(cluster) if value in asked]
            taken = [value for value in self._taken_otherwise(cluster) if value in asked]
            if made or taken:
                found.append((number, made, taken))
        found.sort(key=lambda item: -len(item[1]))
        for reason, times in Counter(self._reason(*item) for item in found).items():
            yield replace(reason, times=times)

    def every(self) -> Iterator[tuple[frozenset[Mark], LayoutReason]]:
        """The reasons for all layouts that are not as op by op, with the marks of the values that each is for: those of
        clusters that are alike, as of layers, once. Those of most clusters first, and no more than some."""
        found = dict[frozenset[Mark], list[int]]()
        for number, cluster in enumerate(self._clusters):
            made = list(self._changed(cluster))
            found.setdefault(frozenset[Mark]().union(*map(self._marks, made)), []).append(number)
        for marks, alike in sorted(found.items(), key=lambda item: -len(item[1]))[:_MOST_REASONS]:
            made = list(self._changed(self._clusters[alike[0]]))
            yield marks, replace(self._reason(alike[0], made, []), times=len(alike))

    def _reason(self, cluster: int, made: Sequence[int], taken: Sequence[int]) -> LayoutReason:
        others = len(list(self._changed(self._clusters[cluster]))) - len(made)
        return LayoutReason((*self._made(made), *map(self._taken, taken)), others, *self._price(cluster))

    @cached_property
    def _clusters(self) -> list[list[int]]:
        return clusters(self.seen.model, self.seen.start, self.seen.chosen)

    # Values.

    @cached_property
    def _results(self) -> dict[Value, list[int]]:
        """The indices of the results that values are."""
        found: dict[Value, list[int]] = {}
        for index, value in enumerate(self.seen.graph.outputs):
            found.setdefault(value, []).append(index)
        return found

    def _marks(self, number: int) -> frozenset[Mark]:
        value = self.seen.values[number]
        found: list[Mark] = [("result", index) for index in self._results.get(value, ())]
        op = value.defining_op
        if op is not None:
            found.append((place_of(op.mlir.location).line, type_text(value.dtype, value.shape, None)))
        elif is_input(value):
            found.append(("argument", value.index))
        return frozenset(found)

    def _changed(self, cluster: Sequence[int]) -> Iterator[int]:
        """The values that a cluster makes in other layouts than op by op."""
        seen = self.seen
        for number in dict.fromkeys(made for node in cluster for made in seen.model.nodes[node].made):
            if number in seen.values and not seen.made(number, seen.chosen).same_layout_as(
                seen.made(number, seen.start)
            ):
                yield number

    def _taken_otherwise(self, cluster: Sequence[int]) -> Iterator[int]:
        """The values that a cluster takes in other layouts than op by op, of nodes that are as op by op."""
        seen, members = self.seen, set(cluster)
        for number in dict.fromkeys(v for node in cluster for v in seen.model.nodes[node].values if v >= 0):
            maker = seen.model.values[number].maker
            layouts = zip(seen.taken(number, seen.chosen), seen.taken(number, seen.start), strict=True)
            if maker is not None and maker.node not in members and any(not a.same_layout_as(b) for a, b in layouts):
                yield number

    def _made(self, numbers: Iterable[int]) -> Iterator[ChosenLayout]:
        """The layouts of some values, those of one line and type together."""
        seen, found = self.seen, dict[tuple[str, str, str], dict[str, None]]()
        for number in numbers:
            types = (self._type(number, seen.made(number, choice)) for choice in (seen.chosen, seen.start))
            chosen, baseline = types
            what, _, where = self._prices.name(number).removeprefix("the result of ").rpartition(" at ")
            found.setdefault((where, chosen, baseline), {})[what or where] = None
        for (where, chosen, baseline), names in found.items():
            yield ChosenLayout(f"{listed(list(names))} at {where}", chosen, baseline)

    def _taken(self, number: int) -> ChosenLayout:
        chosen, baseline = (
            " and ".join(dict.fromkeys(self._type(number, layout) for layout in self.seen.taken(number, choice)))
            for choice in (self.seen.chosen, self.seen.start)
        )
        return ChosenLayout(f"{self._prices.name(number)} as its users take it", chosen, baseline)

    def _type(self, number: int, layout: TensorSharding) -> str:
        value = self.seen.values[number]
        return type_text(value.dtype, value.shape, layout, self._mesh_name)

    # Prices, and what they say of all of the program.

    def _price(self, cluster: int) -> tuple[LayoutPrice, LayoutPrice]:
        if cluster not in self._priced:
            seen = self.seen
            before = set_back(seen.model, seen.start, seen.chosen, self._clusters[cluster], seen.moves)
            self._priced[cluster] = self._prices.difference(seen.chosen, before)
        return self._priced[cluster]

    def repeating(self) -> str:
        """What products and convolutions would save if they might do more work than op by op; empty where that is
        little, or nothing."""
        costs = self.seen.costs
        if costs.may_repeat:
            return ""
        free = self._modelled(replace(costs, repeat_work=True), ())
        return saved_by_repeating(self.seen, self._best, free, self._prices)

    def constraints(self) -> Iterator[Note]:
        """Notes on what the user says that costs much of the program: constraints, and `out_shardings`."""
        cost = self.seen.model.cost(self.seen.chosen)
        stated = StatedCosts(self.seen, self._prices, cost - self._work + self._choice.written - self._choice.sent)
        yield from stated.constraints()
        yield from stated.results(self._stated_results)

    @property
    def _stated_results(self) -> Iterator[tuple[int, str]]:
        """The results whose layouts the user stated, by index, with their paths."""
        traced = self._given[1]
        stated = function_shardings(main_function(traced.module), "res_attrs")
        for index, (name, sharding) in enumerate(zip(traced.outputs, stated, strict=True)):
            if sharding is not None:
                yield index, name
