"""The reshards of a program's values: their plans, and the collectives of these as they run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sdy_jax.ir.graph import Graph, Value
from sdy_jax.lowering.analysis.program_meshes import ProgramMeshes
from sdy_jax.lowering.analysis.rounding import rounded_values
from sdy_jax.lowering.costs.cost_model import CostModel
from sdy_jax.lowering.emission.wire_bytes import sent_by_step
from sdy_jax.lowering.interface.collective_record import Moved
from sdy_jax.lowering.interface.setting import Setting
from sdy_jax.lowering.reshard.lines import Lines, along_lines
from sdy_jax.lowering.reshard.plan import Collective, ReshardPlan
from sdy_jax.lowering.targets.tiles import last_cut
from sdy_jax.representation.sdy_collectives import REDUCING
from sdy_jax.representation.sharding import TensorSharding


@dataclass(frozen=True, slots=True)
class Reshards:
    """What decides how values are moved.

    `rounded`: the values that are rounded before they are moved. `lines`: as a reduce-scatter runs on a torus.
    """

    meshes: ProgramMeshes
    costs: CostModel
    rounded: frozenset[Value]
    lines: Lines

    @classmethod
    def of(cls, graph: Graph, meshes: ProgramMeshes, setting: Setting) -> Reshards:
        """Those of the values of a program."""
        costs = setting.costs
        return cls(meshes, costs, rounded_values(graph, costs), setting.target.parts_of_axes)

    def plan(self, value: Value, source: TensorSharding, target: TensorSharding) -> ReshardPlan:
        """The cheapest collectives that bring a value from one sharding to another."""
        costs = self.costs.of_rounded if value in self.rounded else self.costs
        return self.meshes.plan(value.shape or (), value.itemsize, source, target, costs)

    def steps(self, value: Value, source: TensorSharding, target: TensorSharding) -> Iterator[Collective]:
        """The steps of a reshard, as they run."""
        shape, before = value.shape or (), source
        for step in self.plan(value, source, target).steps:
            yield from along_lines(step, before, shape, value.itemsize, self.lines, self.meshes.base)
            before = step.result

    def moves(self, value: Value, source: TensorSharding, target: TensorSharding) -> Iterator[tuple[Collective, Moved]]:
        """The steps of a reshard, as they run, each with what its record says."""
        mesh, shape, before = self.meshes.base, value.shape or (), source
        for step in self.steps(value, source, target):
            reduction = step.reduction if step.op.kind in REDUCING else ""
            cut = last_cut(shape, before.shard_counts(mesh), step.result.shard_counts(mesh))
            sent = sent_by_step(step, value, mesh)
            yield step, Moved(step.op.summary, step.result, sent, reduction, cut, value in self.rounded)
            before = step.result
