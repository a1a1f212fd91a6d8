"""Why values have other layouts than op by op: what these save and what they cost; what constraints cost; the bound.

Planning keeps nothing of this but the choice itself: the first question builds the program's model once more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.annotate.program import Program
from sdy_jax.ir.graph import Value
from sdy_jax.ir.locations import place_of
from sdy_jax.ir.operations import main_function
from sdy_jax.ir.stored_shardings import function_shardings
from sdy_jax.lowering.costs.cost_model import CostModel
from sdy_jax.lowering.interface.notes import Note
from sdy_jax.lowering.interface.outcomes import LayoutChoice
from sdy_jax.lowering.interface.report import PartitionReport, is_input
from sdy_jax.lowering.interface.setting import Setting
from sdy_jax.lowering.solve.certificate import Certificate, certified
from sdy_jax.lowering.solve.clusters import clusters, set_back
from sdy_jax.lowering.whole_program.reconstruction import Reconsidered
from sdy_jax.plan.border.planned_with import PlannedWith, input_names, to_partition
from sdy_jax.plan.explanations.layout_prices import Prices
from sdy_jax.plan.explanations.layout_reason import ChosenLayout, LayoutPrice, LayoutReason, listed
from sdy_jax.plan.explanations.repeated_work import saved_by_repeating
from sdy_jax.plan.explanations.stated_costs import StatedCosts
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.representation.type_text import type_text

_MOST_NODES, _MOST_TO_REPEAT = 4000, 1000
"""Nodes up to which a plan says its bound, and looks for what repeated work would save, unasked. Measured (2026-11): a
transformer of 16 layers has 3100; its bound took half as long as its plan did."""

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
        self._mesh_name, self._mesh = traced.mesh_name, traced.mesh
        self._choice, self.seen = choice, self._modelled(planned.costs, choice.chosen)
        self._prices = Prices(self.seen, PartitionReport(input_names(traced)))
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
            what, _, where = self._prices.name(number).removeprefix("the result of ").rpartition(" at ")
            found.setdefault((where, chosen, proposed), {})[what or where] = None
        for (where, chosen, proposed), names in found.items():
            yield ChosenLayout(f"{listed(list(names))} at {where}", chosen, proposed)

    def _taken(self, number: int) -> ChosenLayout:
        chosen, proposed = (
            " and ".join(dict.fromkeys(self._type(number, layout) for layout in self.seen.taken(number, choice)))
            for choice in (self.seen.chosen, self.seen.start)
        )
        return ChosenLayout(f"{self._prices.name(number)} as its users take it", chosen, proposed)

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
        if costs.repeat_work:
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
