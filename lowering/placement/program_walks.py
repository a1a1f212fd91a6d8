"""The walks over copies of a program, of which the first one proposes and others follow plans.

See docs/explanation/planner.md#from-choice-to-program.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from sdy_jax.ir.graph import Graph
from sdy_jax.ir.operations import CONSTRAINTS, copied, main_function
from sdy_jax.ir.stored_shardings import set_function_shardings
from sdy_jax.lowering.placement import model_builder
from sdy_jax.lowering.placement.base_mesh import stated_at_manual
from sdy_jax.lowering.placement.free_border import FreeBorder
from sdy_jax.lowering.placement.memory_errors import border_too_large, too_large
from sdy_jax.lowering.placement.modelled import ModelledProgram
from sdy_jax.lowering.placement.partitioner import Partitioner
from sdy_jax.lowering.placement.policy import Policy
from sdy_jax.lowering.placement.report import PartitionReport
from sdy_jax.lowering.placement.setting import Setting
from sdy_jax.lowering.placement.walked import LayoutPlan
from sdy_jax.lowering.placement.within_memory import PRICES, Room, Walk, best_choice, tried
from sdy_jax.lowering.planning.cuts import stated_cuts
from sdy_jax.lowering.planning.layout_table import LayoutTable, Prices
from sdy_jax.lowering.reshard.cost import CostModel
from sdy_jax.representation.mesh import AxisRef
from sdy_jax.representation.sdy_collectives import COLLECTIVE_OPS
from sdy_jax.representation.sharding import TensorSharding

_LEAST_GAIN = 0.005
"""The share of what the proposal sends that a plan has to save in all. Guessed: a reader looks for few differences,
each with its reason; with less, plans differ from what propagation said for nothing that a clock shows."""

_TOLERATED = 0.01
"""The share of what the proposal holds that a plan may hold more, on devices whose memory is not known. Guessed: the
estimate is no better than that; with none, plans that save much are refused for some kilobytes."""

_HOLDING = 0.04
"""The share of a program's cost that it is worth to hold nothing instead of all that a device has. Measured (2026-11,
`scripts/bench_models`, 8B model, 256 chips of v5e): weights that are gathered once before a loop of 32 layers, instead
of in each trip, save a hundredth of the time, and hold twice of what such a chip has. With less, they are gathered
before it."""

_MOST_ATOMS = 4
"""Axes, or parts of axes, up to which a program is planned. Guessed, a guard of planning time: each more makes about
five times as many layouts; programs on more stay op by op."""


class ProposingWalk(NamedTuple):
    """The walk that proposes, what it was made with, and the parts of mesh axes that it knows."""

    setting: Setting
    walker: Partitioner
    report: PartitionReport
    atoms: tuple[AxisRef, ...]

    @property
    def can_be_planned(self) -> bool:
        """Whether the program is on few enough axes."""
        return len(self.atoms) <= _MOST_ATOMS


def proposing_walk(graph: Graph, setting: Setting) -> ProposingWalk:
    """The walk over a copy of a program that proposes.

    Of one that cuts axes into too many parts it is a walk that cuts them where the program itself does, if that makes
    few enough.
    """
    found = _proposing_walk(graph, setting)
    if found.can_be_planned:
        return found
    stated = [*_stated_shardings(graph)]
    if any(sharding.mesh != setting.mesh_name for sharding in stated):
        return found
    whole = _proposing_walk(graph, replace(setting, cuts=stated_cuts(stated, found.walker.mesh)))
    return whole if whole.can_be_planned else found


def _proposing_walk(graph: Graph, setting: Setting) -> ProposingWalk:
    walker = Partitioner(Graph(copied(graph.module)), setting)
    report = walker.run()
    return ProposingWalk(setting, walker, report, walker.walked.atoms(walker.mesh, setting.costs.major_parts))


def _stated_shardings(graph: Graph) -> Iterator[TensorSharding]:
    """What the border, constraints, manual computations and the user's collectives state."""
    yield from (value.sharding for value in graph.arguments if value.sharding is not None)
    yield from (sharding for sharding in graph.result_shardings(graph.main) if sharding is not None)
    for op in graph.main.walk():
        if op.name in CONSTRAINTS | COLLECTIVE_OPS:
            yield from (value.sharding for value in op.results if value.sharding is not None)
        yield from stated_at_manual(op)


class ProgramWalks:
    """The walks over copies of a prepared program; the first one proposes.

    Args:
        graph: the program.
        setting: what it is planned with.
        border: the arguments and results that may have any layout.
        known: what a program costs that is known to fit; dearer ones need not be found.
    """

    def __init__(
        self,
        graph: Graph,
        setting: Setting,
        border: FreeBorder = FreeBorder(),  # noqa: B008 - immutable
        known: float = math.inf,
    ):
        self.graph, self._border, self._known = graph, border, known
        proposing = proposing_walk(graph, setting)
        self.setting, self._atoms = proposing.setting, proposing.atoms
        self.costs, self.policy = setting.costs, setting.policy
        self.proposed = Walk(proposing.walker, proposing.report, setting.target)
        self.mesh = proposing.walker.mesh

    def of(self, graph: Graph) -> ProgramWalks:
        """The walks over another form of the program."""
        return ProgramWalks(graph, self.setting, self._border)

    def _walk(self, plan: LayoutPlan) -> Walk:
        copy = copied(self.graph.module)
        main = main_function(copy)
        set_function_shardings(main, "arg_attrs", plan.border.arguments)
        set_function_shardings(main, "res_attrs", plan.border.results)
        walker = Partitioner(Graph(copy), self.setting, plan)
        return Walk(walker, walker.run(), self.setting.target)

    @cached_property
    def limit(self) -> float:
        """The bytes that a device may hold."""
        if self.setting.available:
            return self.setting.limit
        return (1 + _TOLERATED) * self.proposed.peak.total

    def saved(self, walk: Walk) -> float:
        """What a walk saves of what the proposal costs, and holds."""
        proposed = self.proposed
        byte = self.room.byte(min(walk.cost, proposed.cost))
        return proposed.cost - walk.cost + byte * (proposed.peak.total - walk.peak.total)

    @cached_property
    def room(self) -> Room:
        """What the program may hold, and send."""
        return Room(self.limit, self.setting.target.memory, _HOLDING, self.costs.unit == "seconds", self._known)

    @property
    def can_be_planned(self) -> bool:
        """As `ProposingWalk.can_be_planned`."""
        return len(self._atoms) <= _MOST_ATOMS

    @cached_property
    def least_gain(self) -> float:
        """What a plan has to save."""
        return _LEAST_GAIN * self.proposed.walker.sending_time()

    @property
    def _latency(self) -> float:
        """That of a gather along an axis, the slowest one."""
        axes = [AxisRef(axis.name) for axis in self.mesh.axes if axis.size > 1]
        return max([self.costs.rate("all_gather", (axis,), self.mesh).fixed for axis in axes], default=0.0)

    def found(self, prices: int = PRICES) -> list[Walk]:
        """All walks that were tried, the proposal first, which is alone where it sends nothing and fits.

        Args:
            prices: of holding, that are tried at most where the cheapest one does not fit.

        Raises:
            MemoryLimitError: arguments and results alone, where they are stated, hold more than what is stated.
        """
        walked, peak = self.proposed.walker.walked, self.proposed.peak
        if self.policy.memory is not None and peak.border > self.limit:
            raise border_too_large(self.graph, walked, peak.total, self.setting.inputs, self.mesh, self.limit)
        must_plan = self.proposed.sends or not self.room.fits(self.proposed)
        return self.planned(prices) if must_plan else [self.proposed]

    def planned(self, prices: int = PRICES) -> list[Walk]:
        """The walks by plans that were tried, the proposal first. Where the model promises little it is alone."""
        if not self.can_be_planned:
            return [self.proposed]
        program = modelled(self.graph, self.proposed.walker, self._atoms, self.policy, self._border)
        best = best_choice(program, self._latency)
        if self.room.fits(self.proposed) and program.saved(best) < self.least_gain:
            return [self.proposed]
        return tried(program, best, self.proposed, self.room, self._walk, prices)

    def fitting(self, walks: Sequence[Walk]) -> list[Walk]:
        """Those that keep within the limit, and send no more bytes than the proposal where that does, by a model of
        time; if there are none, and the limit is what devices have, the one that holds least.

        Raises:
            MemoryLimitError: there are none, and the limit is stated.
        """
        found = self.allowed(walks)
        if found:
            return found
        least = min(walks, key=lambda walk: walk.peak.total)
        if self.policy.memory is not None:
            raise too_large(least.peak, self.limit)
        return [least]

    def allowed(self, walks: Sequence[Walk]) -> list[Walk]:
        """Those that keep within the limit, and send no more than they may; perhaps none."""
        return [walk for walk in walks if self.room.allows(walk, self.proposed)]

    def best(self, fitting: Sequence[Walk]) -> Walk:
        """The best of the walks that fit; the proposal, where no other one saves enough."""
        best = self.room.best(fitting)
        return self.proposed if self.proposed in fitting and self.saved(best) < self.least_gain else best


def modelled(
    graph: Graph,
    proposed: Partitioner,
    atoms: tuple[AxisRef, ...],
    policy: Policy,
    border: FreeBorder = FreeBorder(),  # noqa: B008 - immutable
) -> ModelledProgram:
    """The model of a program of which a copy was walked; `graph` is that of the program itself, `atoms` the parts of
    mesh axes that the walk knows, `border` what may have any layout."""
    meshes = proposed.placement.meshes

    def price(
        costs: CostModel, shape: tuple[int, ...], itemsize: float, source: TensorSharding, target: TensorSharding
    ) -> float:
        return meshes.plan(shape, itemsize, source, target, costs).cost

    table = LayoutTable(meshes.base_name, meshes.base, proposed.walked.inverted(atoms))
    prices = Prices(table, proposed.costs, price, proposed.target.arrays)
    return model_builder.modelled(graph, proposed.walked, table, atoms, proposed.costs, prices, policy, border)
