"""From a choice in the planner's model to the plan that the next walk follows.

See docs/explanation/planner.md#from-choice-to-program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from sdy_jax.ir.graph import Value
from sdy_jax.ir.operations import COMPUTATIONS
from sdy_jax.lowering.placement.copies import PlannedUse
from sdy_jax.lowering.placement.free_border import BorderLayouts
from sdy_jax.lowering.placement.modelled import FREE, ModelledProgram
from sdy_jax.lowering.placement.walked import LayoutPlan
from sdy_jax.lowering.placement.written import is_written_collective
from sdy_jax.lowering.planning.choice import PlannedOp
from sdy_jax.lowering.planning.enumerated import Way
from sdy_jax.lowering.planning.program_model import Chosen
from sdy_jax.op_rules.dataflow import is_data_flow
from sdy_jax.representation.sharding import TensorSharding


def plan_of(program: ModelledProgram, chosen: Chosen, copies: Mapping[PlannedUse, int] | None = None) -> LayoutPlan:
    """What a walk has to do to run a program so; `copies` as in the plan."""
    reader = _Reader(program, chosen)
    homes = dict(chain(reader.stated(), reader.homes()))
    written, border = dict(reader.written()), reader.border()
    return LayoutPlan(reader.ops(), homes, reader.edges(), copies or {}, tuple(chosen), written, border)


class _Reader:
    """What a choice says of a program."""

    def __init__(self, program: ModelledProgram, chosen: Chosen):
        self._program, self._model, self._chosen = program, program.model, chosen
        self._shardings = program.table.shardings

    def ops(self) -> dict[int, PlannedOp]:
        """How ops run."""
        found = dict[int, PlannedOp]()
        for number, node in self._program.decided.items():
            way, decision = self._way(node), self._program.walked.decided[number]
            taken = tuple([self._shardings[layout] for layout in way.layouts[: len(decision.shardings)]])
            found[number] = PlannedOp(taken, way.inside, way.strategy, decision.choice.gathered)
        return found

    def _way(self, node: int) -> Way:
        return self._model.nodes[node].ways[self._chosen[node]]

    def edges(self) -> dict[int, list[TensorSharding]]:
        """The layouts of data-flow edges, per op."""
        found = dict[int, list[TensorSharding]]()
        for (number, _), node in self._program.edges.items():
            layouts = self._way(node).layouts
            found.setdefault(number, []).append(
                self._shardings[layouts[-1 if node in self._program.made_outside else 0]]
            )
        return found

    def written(self) -> Iterator[tuple[int, TensorSharding]]:
        """The layouts of operands of the user's collectives, which run as they do in the walk."""
        for number, shardings in self._program.walked.fixed.items():
            if is_written_collective(self._program.graph.ops[number]):
                yield number, shardings[0]

    def border(self) -> BorderLayouts:
        """The layouts of arguments and results that may have any."""
        arguments, results = dict[int, TensorSharding](), dict[int, TensorSharding]()
        for node, argument, result in self._program.free_ends:
            layouts = self._way(node).layouts
            if argument is not None:
                arguments[argument] = self._shardings[layouts[-1]]
            if result is not None:
                results[result] = self._shardings[layouts[0]]
        return BorderLayouts(arguments, results)

    def stated(self) -> Iterator[tuple[tuple[int, int], TensorSharding]]:
        """The layouts of constraints."""
        for number, node in self._program.constraints.items():
            yield (number, 0), self._shardings[self._way(node).layouts[0]]

    def homes(self) -> Iterator[tuple[tuple[int, int], TensorSharding]]:
        """Per result of an op the layout in which several users expect it."""
        numbers, decided = self._program.numbers, self._program.walked.decided
        for value, number in self._program.values.items():
            op = value.defining_op
            if op is None or op.name in COMPUTATIONS or not (numbers[op] in decided or is_data_flow(op)):
                continue
            home = self._home(number) if number != FREE else self._home_of_free(value)
            if home is not None:
                yield (numbers[op], value.index), home

    def _home_of_free(self, value: Value) -> TensorSharding | None:
        """The layout in which most users take what every device can compute."""
        taken = [self._model.layout(self._chosen, port) for port in self._program.free_uses.get(value, ())]
        whole = [layout for layout in taken if not self._shardings[layout].unreduced_axes]
        return self._shardings[max(whole, key=whole.count)] if whole else None

    def _home(self, number: int) -> TensorSharding:
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
