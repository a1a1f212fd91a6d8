"""From a choice in the planner's model to the plan that the next walk follows.

See docs/explanation/planner.md#from-choice-to-program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from sdy_jax.ir.graph import Value
from sdy_jax.ir.operations import COMPUTATIONS
from sdy_jax.lowering.candidates.op_problem import Decision
from sdy_jax.lowering.insert.user_collectives import is_user_collective
from sdy_jax.lowering.model.enumeration import Candidate
from sdy_jax.lowering.model.nodes import Chosen
from sdy_jax.lowering.model.planning_problem import FREE, PlanningProblem
from sdy_jax.lowering.proposal.free_border import BorderLayouts
from sdy_jax.lowering.proposal.layout_plan import LayoutPlan, PlannedUse
from sdy_jax.op_rules.dataflow import is_data_flow
from sdy_jax.representation.sharding import TensorSharding


def plan_of(program: PlanningProblem, chosen: Chosen, copies: Mapping[PlannedUse, int] | None = None) -> LayoutPlan:
    """What a walk has to do to run a program so; `copies` as in the plan."""
    reader = _Reader(program, chosen)
    shared = dict(chain(reader.stated(), reader.shared()))
    collectives, border = dict(reader.user_collectives()), reader.border()
    return LayoutPlan(reader.ops(), shared, reader.edges(), copies or {}, tuple(chosen), collectives, border)


class _Reader:
    """What a choice says of a program."""

    def __init__(self, program: PlanningProblem, chosen: Chosen):
        self._program, self._model, self._chosen = program, program.model, chosen
        self._shardings = program.table.shardings

    def ops(self) -> dict[int, Decision]:
        """How ops run."""
        found = dict[int, Decision]()
        for number, node in self._program.decided.items():
            candidate, decision = self._candidate(node), self._program.proposed.decided[number]
            taken = tuple([self._shardings[layout] for layout in candidate.layouts[: len(decision.shardings)]])
            found[number] = decision._replace(shardings=taken, inside=candidate.inside, strategy=candidate.strategy)
        return found

    def _candidate(self, node: int) -> Candidate:
        return self._model.nodes[node].candidates[self._chosen[node]]

    def edges(self) -> dict[int, list[TensorSharding]]:
        """The layouts of data-flow edges, per op."""
        found = dict[int, list[TensorSharding]]()
        for (number, _), node in self._program.edges.items():
            layouts = self._candidate(node).layouts
            found.setdefault(number, []).append(
                self._shardings[layouts[-1 if node in self._program.made_outside else 0]]
            )
        return found

    def user_collectives(self) -> Iterator[tuple[int, TensorSharding]]:
        """The layouts of operands of the user's collectives, which run as they do in the walk."""
        for number, shardings in self._program.proposed.fixed.items():
            if is_user_collective(self._program.graph.ops[number]):
                yield number, shardings[0]

    def border(self) -> BorderLayouts:
        """The layouts of arguments and results that may have any."""
        arguments, results = dict[int, TensorSharding](), dict[int, TensorSharding]()
        for node, argument, result in self._program.free_ends:
            layouts = self._candidate(node).layouts
            if argument is not None:
                arguments[argument] = self._shardings[layouts[-1]]
            if result is not None:
                results[result] = self._shardings[layouts[0]]
        return BorderLayouts(arguments, results)

    def stated(self) -> Iterator[tuple[tuple[int, int], TensorSharding]]:
        """The layouts of constraints."""
        for number, node in self._program.constraints.items():
            yield (number, 0), self._shardings[self._candidate(node).layouts[0]]

    def shared(self) -> Iterator[tuple[tuple[int, int], TensorSharding]]:
        """Per result of an op the layout in which several users expect it."""
        numbers, decided = self._program.numbers, self._program.proposed.decided
        for value, number in self._program.values.items():
            op = value.defining_op
            if op is None or op.name in COMPUTATIONS or not (numbers[op] in decided or is_data_flow(op)):
                continue
            layout = self._shared(number) if number != FREE else self._shared_of_free(value)
            if layout is not None:
                yield (numbers[op], value.index), layout

    def _shared_of_free(self, value: Value) -> TensorSharding | None:
        """The layout in which most users take what every device can compute."""
        taken = [self._model.layout(self._chosen, port) for port in self._program.free_uses.get(value, ())]
        whole = [layout for layout in taken if not self._shardings[layout].unreduced_axes]
        return self._shardings[max(whole, key=whole.count)] if whole else None

    def _shared(self, number: int) -> TensorSharding:
        """The layout in which several users of a value expect it: the one in which it is made or, if that is unreduced,
        the one through which it goes to them most cheaply."""
        value, shardings = self._model.values[number], self._shardings
        assert value.maker is not None
        made = self._model.layout(self._chosen, value.maker)
        if not shardings[made].unreduced_axes:
            return shardings[made]
        wanted = sorted({self._model.layout(self._chosen, use) for use in value.uses} - {made})
        whole = [layout for layout in wanted if not shardings[layout].unreduced_axes]
        if not whole:  # nobody waits for the reduction
            return shardings[made]
        cost, spread = self._model.prices.cost, self._model.spread

        def through(layout: int) -> float:
            rest = frozenset(wanted) - {layout}
            return cost(value.shape, made, layout) + (spread(value.shape, layout, rest) if rest else 0.0)

        return shardings[min(whole, key=through)]
