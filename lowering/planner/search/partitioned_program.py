"""From a choice to a program: the plan that a choice makes, and a copy of the program as a placement left it.

See docs/explanation/planner.md#from-choice-to-program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from sdy_jax.ir.graph import Value
from sdy_jax.ir.operations import COMPUTATIONS
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.planner.memory.live_ranges import Peak, peak_of
from sdy_jax.lowering.planner.placement.collectives import is_user_collective
from sdy_jax.lowering.planner.problem.candidates import Candidate
from sdy_jax.lowering.planner.problem.layout_plan import BorderLayouts, LayoutPlan, PlacedProgram, PlannedUse
from sdy_jax.lowering.planner.problem.op_problem import Decision
from sdy_jax.lowering.planner.problem.planning_problem import FREE, PlanningProblem
from sdy_jax.lowering.planner.problem.program_model import Chosen
from sdy_jax.lowering.planner.schedule.collective_times import CollectiveTimes
from sdy_jax.lowering.planner.schedule.overlap import Overlap, overlap_of
from sdy_jax.lowering.planner.setting import Setting
from sdy_jax.shardy.propagation.data_flow import is_data_flow

# A copy of a program as a placement left it: what it costs, holds and sends.

_SAME = 1 + 1e-9
"""Given: times and bytes are sums of floats, whose rounding is no difference."""

_AS_FAST = 0.97
"""The share of another program's time from which on one counts as taking as long: time comes first, and then bytes.
Measured (2026-11, `scripts/bench_models`): a token of 8B from pages on 2 x 4 H100s that sends twice the bytes saves
0.029 of the time by the plan, and 0.011 by XLA's schedule; of 151 other programs none is between this and 0.99."""

PerOp = NDArray[np.float64]
"""A number per op of the program before it is partitioned."""


@dataclass(eq=False)
class PartitionedProgram:
    """A copy of the program as a placement left it, by a plan where there was one, with what it was planned with. One
    that will not be chosen may be forgotten: its figures stay, its copy of the program goes."""

    placed: PlacedProgram
    setting: Setting
    plan: LayoutPlan | None = None
    limit: Callable[[], float] = lambda: math.inf
    """Says the bytes that a device may hold."""

    @cached_property
    def cost(self) -> float:
        """What collectives and each device's own work cost."""
        return self.placed.report.work + self.sending

    @cached_property
    def exposed(self) -> float:
        """What it costs but for what is hidden, as collectives run beside work."""
        return self.cost - self.overlap.hidden

    @cached_property
    def overlap(self) -> Overlap:
        """Which collectives run beside work."""
        return overlap_of(self.placed, self._times, self.setting, lambda: self.limit() - self.peak.total)

    @cached_property
    def peak(self) -> Peak:
        """What a device holds at most."""
        return peak_of(self.placed.partitioned, self.setting.target)

    @property
    def sends(self) -> bool:
        """Whether anything is sent that the program does not send itself."""
        records = self.placed.report.collectives
        return any(record.wire_bytes and record.origin == "partitioner" for record in records)

    @cached_property
    def sending(self) -> float:
        """What collectives cost: those that were inserted, and those that the program holds itself."""
        return self._times.of(self.placed.report.collectives)

    @property
    def sending_as_written(self) -> float:
        """What the collectives of the program's own cost that stay where they are."""
        inserted = set(map(id, self.placed.inserted.values()))
        records = self.placed.report.collectives
        return self._times.of(record for record in records if record.origin == "user" and id(record) not in inserted)

    @cached_property
    def _times(self) -> CollectiveTimes:
        placed = self.placed
        return CollectiveTimes(placed.partitioned, placed.inserted, self.setting.costs, placed.mesh)

    @cached_property
    def sent(self) -> float:
        """The bytes that a device sends."""
        return sum([record.wire_bytes * record.estimated_times for record in self.placed.report.collectives])

    def sends_too_much_beside(self, other: PartitionedProgram) -> bool:
        """Whether a device sends more bytes than by another plan, and that saves no time."""
        return self.sent > other.sent * _SAME and self.exposed > _AS_FAST * other.exposed

    @property
    def is_forgotten(self) -> bool:
        """Whether its copy of the program is gone."""
        return not hasattr(self, "placed")

    def forget(self) -> None:
        """Keeps what it costs and holds, and lets the copy of the program go."""
        if not self.is_forgotten:
            _ = self.cost, self.exposed, self.sending, self.sent, self.live
            self.peak = replace(self.peak, live=(), at=())
            for graph in (self.placed.graph, self.placed.partitioned):
                graph.take_apart()
            del self.placed, self._times
            self.__dict__.pop("overlap", None)

    @cached_property
    def live(self) -> PerOp:
        """The bytes that are live while an op runs, or what was inserted before it, arguments and results included."""
        found, most = np.zeros(len(self.placed.graph.ops)), 0.0
        numbers = self.placed.remaining
        for op, live in self.peak.at:
            most = max(most, live)
            if op in numbers:
                found[numbers[op]], most = max(found[numbers[op]], most), 0.0
        return found + self.peak.border


# From a choice in the planner's model to the plan that the next placement follows.
#
# See docs/explanation/planner.md#from-choice-to-program.


def plan_of(program: PlanningProblem, chosen: Chosen, copies: Mapping[PlannedUse, int] | None = None) -> LayoutPlan:
    """What a placement has to do to run a program so; `copies` as in the plan."""
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
            candidate, decision = self._candidate(node), self._program.baseline.decided[number]
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
        """The layouts of operands of the user's collectives, which run as they do in the baseline."""
        for number, shardings in self._program.baseline.fixed.items():
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
        numbers, decided = self._program.numbers, self._program.baseline.decided
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
