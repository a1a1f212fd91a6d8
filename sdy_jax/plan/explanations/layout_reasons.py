"""Why values have other layouts than op by op: what these save and what they cost; what constraints cost; the bound.

Planning keeps nothing of this but the choice itself: the first question builds the program's model once more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.annotate.program import Program
from sdy_jax.ir.graph import Value
from sdy_jax.ir.locations import place_of, short_source
from sdy_jax.ir.operations import CONSTRAINTS, main_function
from sdy_jax.ir.stored_shardings import function_shardings
from sdy_jax.lowering.costs.cost_model import CostModel
from sdy_jax.lowering.interface.notes import Note
from sdy_jax.lowering.interface.outcomes import LayoutChoice
from sdy_jax.lowering.interface.report import PartitionReport, is_input
from sdy_jax.lowering.interface.setting import Setting
from sdy_jax.lowering.model.enumeration import Candidate
from sdy_jax.lowering.solve.certificate import Certificate, certified
from sdy_jax.lowering.solve.clusters import Term, around, clusters, compared, improved_near, set_back
from sdy_jax.lowering.whole_program.reconstruction import Reconsidered
from sdy_jax.plan.border.planned_with import PlannedWith, input_names, to_partition
from sdy_jax.plan.explanations.layout_reason import ChosenLayout, LayoutPrice, LayoutReason, listed, sent_text
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.representation.type_text import flops_text, type_text

_LARGEST = 3
"""Parts of a price that are named. Chosen: for a reader."""

_DEAR = 0.05
"""The share of the program's cost above which a constraint is noted. Chosen: a note should be worth a change."""

_WORTH_REPEATING = 0.01
"""The share of the program's cost that repeated work has to save to be mentioned. Chosen: as `_DEAR`."""

_MOST_NODES, _MOST_TO_REPEAT = 4000, 1000
"""Nodes up to which a plan says its bound, and looks for what repeated work would save, unasked. Measured (2026-11): a
transformer of 16 layers has 3100; its bound took half as long as its plan did."""

_NEAR_CONSTRAINTS = 100
"""Nodes around the constraints of a line that may change with them. Guessed: fewer than around a cluster, as a program
has many constraints; with fewer, what one costs is overstated."""


Mark = tuple[str, int | str]
"""What tells a value in another graph of the same program: see `Naming.mark`."""


RESULTS = "out_shardings"
"""What notes on results are at; they are not printed with a plan, whose results somebody wants where they are."""


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
        self._mesh_name, self._mesh = traced.mesh_name, traced.mesh
        self._names = PartitionReport(input_names(traced))
        self._choice, self.seen = choice, self._modelled(planned.costs, choice.chosen)
        self._prices: dict[int, tuple[LayoutPrice, LayoutPrice]] = {}

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
            chosen, proposed = types
            what, _, where = self._name(number).removeprefix("the result of ").rpartition(" at ")
            found.setdefault((where, chosen, proposed), {})[what or where] = None
        for (where, chosen, proposed), names in found.items():
            yield ChosenLayout(f"{listed(list(names))} at {where}", chosen, proposed)

    def _taken(self, number: int) -> ChosenLayout:
        chosen, proposed = (
            " and ".join(dict.fromkeys(self._type(number, layout) for layout in self.seen.taken(number, choice)))
            for choice in (self.seen.chosen, self.seen.start)
        )
        return ChosenLayout(f"{self._name(number)} as its users take it", chosen, proposed)

    def _type(self, number: int, layout: TensorSharding) -> str:
        value = self.seen.values[number]
        return type_text(value.dtype, value.shape, layout, self._mesh_name)

    def _name(self, number: int) -> str:
        return self._names.name(self.seen.values[number])

    # Prices.

    def _price(self, cluster: int) -> tuple[LayoutPrice, LayoutPrice]:
        if cluster not in self._prices:
            seen = self.seen
            before = set_back(seen.model, seen.start, seen.chosen, self._clusters[cluster], seen.moves)
            self._prices[cluster] = self._difference(seen.chosen, before)
        return self._prices[cluster]

    def _difference(self, one: Sequence[int], other: Sequence[int]) -> tuple[LayoutPrice, LayoutPrice]:
        """What one choice saves beside another, and what it costs beside it."""
        terms = compared(self.seen.model, one, other)
        more, less = [t for t in terms if t.change > 0], [t for t in terms if t.change < 0]
        return self._side(more, other), self._side(less, one)

    def _side(self, terms: Sequence[Term], paying: Sequence[int]) -> LayoutPrice:
        """Terms that all rise, or all fall; `paying` is the choice that pays them."""
        cost = sum(abs(term.change) for term in terms)
        sent = sum(abs(term.change) for term in terms if not term.operations)
        operations = sum(abs(term.operations) for term in terms)
        parts = [*([self._sent(sent)] if sent else []), *([f"{flops_text(operations)} of work"] if operations else [])]
        text = (" and ".join(parts) or "nothing") + (f" in {len(terms)} places" if len(terms) > 1 else "")
        return LayoutPrice(cost, sent, operations, len(terms), tuple(self._largest(terms, paying)), text)

    def _largest(self, terms: Sequence[Term], paying: Sequence[int]) -> Iterator[str]:
        """The largest terms, those that read alike together."""
        found: dict[str, list[Term]] = {}
        for term in terms:
            found.setdefault(self._term(term, paying), []).append(term)
        by_change = sorted(found.items(), key=lambda item: -sum(abs(term.change) for term in item[1]))
        for text, alike in by_change[:_LARGEST]:
            work = sum(abs(term.operations) for term in alike)
            price = flops_text(work) if work else self._sent(sum(abs(term.change) for term in alike))
            yield f"{text} ({price}{f' in {len(alike)}' if len(alike) > 1 else ''})"

    def _term(self, term: Term, paying: Sequence[int]) -> str:
        if term.operations:
            return f"work of {self._place(term.node)}"
        if term.value is None:
            return f"inside of {self._place(term.node)}"
        kinds = listed(self.seen.collectives(term.value, paying)) or "reshards"
        return f"{kinds} of {self._name(term.value)}"

    def _place(self, node: int) -> str:
        op = self.seen.op(node)
        assert op is not None
        place = place_of(op.mlir.location)
        return f"{place.primitive or op.name} at {short_source(place.line)}"

    def _sent(self, amount: float) -> str:
        return sent_text(self.seen.costs, amount)

    # The cap on repeated work, and constraints.

    def repeating(self) -> str:
        """What products and convolutions would save if they might do more work than op by op; empty where that is
        little, or nothing."""
        costs, model, capped = self.seen.costs, self.seen.model, self._best
        if costs.repeat_work:
            return ""
        free = self._modelled(replace(costs, repeat_work=True), ())
        if all(len(a.candidates) == len(b.candidates) for a, b in zip(model.nodes, free.model.nodes, strict=True)):
            return self._repeating_in_all()
        kept = [
            next(
                i for i, candidate in enumerate(after.candidates) if candidate.layouts == before.candidates[now].layouts
            )
            for before, after, now in zip(model.nodes, free.model.nodes, capped.choice, strict=True)
        ]
        best = certified(free.model, kept)
        if capped.cost - best.cost < _WORTH_REPEATING * capped.cost:
            return self._repeating_in_all()
        return self._lifted("no product or convolution does more work", compared(free.model, best.choice, kept))

    def _repeating_in_all(self) -> str:
        """As `repeating`, where products and convolutions would repeat nothing, but other ops too much in all."""
        model, chosen, best = self.seen.model, self.seen.chosen, self._best.choice
        is_too_much = model.operations(best) > self.seen.program.most_operations
        if not is_too_much or model.cost(chosen) - model.cost(best) < _WORTH_REPEATING * model.cost(chosen):
            return ""
        return self._lifted("the program does no more work in all", compared(model, best, chosen))

    def _lifted(self, capped: str, changes: Iterable[Term]) -> str:
        saved, paid = _total(changes)
        return (
            f"{capped} than op by op; with CostModel(repeat_work=True) the program would send {self._sent(saved)} less "
            f"for {flops_text(paid)} more"
        )

    def constraints(self) -> Iterator[Note]:
        """Notes on what the user says that costs more than a twentieth of the program: constraints, by source line, and
        `out_shardings`. That is what would be saved if the values had any layout there, and what is around them made
        the best of that.

        The walk takes a value from before a constraint where that is nearer; so much as the program sends less than in
        the model may have been saved already.
        """
        seen, by_line = self.seen, dict[str, list[int]]()
        for node in range(len(seen.model.nodes)):
            op = seen.op(node)
            if op is not None and op.name in CONSTRAINTS:
                by_line.setdefault(place_of(op.mlir.location).line, []).append(node)
        cost = seen.model.cost(seen.chosen)
        least = _DEAR * cost + max(0.0, cost - self._work + self._choice.written - self._choice.sent)
        for nodes in by_line.values():
            subject = "the constraint costs" if len(nodes) == 1 else f"the {len(nodes)} constraints cost"
            price = self._stated_price(seen.constraint_candidates(nodes), least)
            if price:
                yield self._note("sharding_constraint", nodes[0], f"{subject} {price}")
        for index, name in self._stated_results:
            if seen.result_cost(index) > least and (price := self._stated_price(seen.result_candidates(index), least)):
                yield self._note(RESULTS, len(seen.model.nodes) - 1, f"that of `{name}` costs {price}")

    def _note(self, what: str, node: int, message: str) -> Note:
        op = self.seen.op(node)
        assert op is not None
        return Note.at(what, op.mlir.location, message)

    @property
    def _stated_results(self) -> Iterator[tuple[int, str]]:
        """The results whose layouts the user stated, by index, with their paths."""
        traced = self._given[1]
        stated = function_shardings(main_function(traced.module), "res_attrs")
        for index, (name, sharding) in enumerate(zip(traced.outputs, stated, strict=True)):
            if sharding is not None:
                yield index, name

    def _stated_price(self, candidates: Mapping[int, Sequence[Candidate]], least: float) -> str:
        """What is saved if nodes have further candidates, if that is more than the least; beside what is saved around
        them anyhow."""
        seen, near = self.seen, around(self.seen.model, candidates, _NEAR_CONSTRAINTS)
        with seen.freed(candidates):
            before, best = seen.chosen, improved_near(seen.model, seen.chosen, {*candidates, *near}, seen.moves)
            if seen.model.cost(before) - seen.model.cost(best) > least and len(seen.moves) > 1:
                before = improved_near(seen.model, seen.chosen, near, seen.moves)
                best = improved_near(seen.model, before, {*candidates, *near}, seen.moves)
            saved, paid = self._difference(best, before)
        if saved.cost - paid.cost <= least:
            return ""
        net, work = saved.sent - paid.sent, saved.operations - paid.operations
        price = f"{self._sent(net)} per device" if net > 0 else f"{flops_text(work)} of work"
        return f"{price}: {', '.join(saved.largest)}"


def _total(terms: Iterable[Term]) -> tuple[float, float]:
    """The communication of all terms, and how many operations fewer."""
    terms = list(terms)
    sent = sum(term.change for term in terms if not term.operations)
    return sent, -sum(term.operations for term in terms)
