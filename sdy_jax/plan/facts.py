"""What a plan is made of: the partitioned program, its collectives and border, and what it was planned with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from jax.extend.mlir import ir

from sdy_jax.annotate.program import Program
from sdy_jax.errors import SdyError
from sdy_jax.ir.graph import Graph
from sdy_jax.lowering.costs.cost_model import CostModel
from sdy_jax.lowering.interface.collective_record import CollectiveRecord
from sdy_jax.lowering.interface.notes import Note
from sdy_jax.lowering.interface.outcomes import InParts, LayoutChoice, Recomputed
from sdy_jax.lowering.interface.policy import Policy
from sdy_jax.lowering.proposal.choices import ProgramChoices
from sdy_jax.lowering.targets.target import Target
from sdy_jax.plan.border.auto_layout_notes import AutomaticLayouts
from sdy_jax.plan.border.border_moves import BorderMove
from sdy_jax.plan.border.border_specs import specs_of
from sdy_jax.plan.border.boundary import BoundaryValue
from sdy_jax.plan.border.planned_with import PlannedWith
from sdy_jax.plan.cache.emitted import CachedAs
from sdy_jax.plan.decided import NOTHING_DECIDED, Decided
from sdy_jax.plan.estimates.compared_meshes import ComparedMesh
from sdy_jax.plan.record.printing import Printed
from sdy_jax.representation.sharding import TensorSharding


@dataclass(frozen=True, repr=False)
class PlanFacts(Printed):
    """A plan's attributes.

    Attributes:
        name: the function's name.
        program: the partitioned program.
        arguments, results: the boundary values, closed-over arrays excluded.
        collectives: one record per collective of the partitioned program, the user's own included; several that run as
            one are the `members` of its record.
        notes: what moves or is computed whole because it cannot be split, by op, source line and name scope.
        stages: the module after each stage of planning.
        moves: the arguments that are passed in another layout than they enter in, if the plan was made from arrays.
        as_passed: the arguments whose shardings are those of the arrays that were passed.
        source: the source line at which the shardings of arguments and results are given; may be empty.
        layouts: the choice of layouts for the whole program; None where they were decided op by op.
        automatic: which arguments and results were left to the planner, and what the usual layouts would have cost;
            None where all are stated.
        meshes: what plans on the meshes take of which the best one was chosen, in the order in which they were given;
            none where one was given.
        decided: the numbers of microbatches that were left to the planner, and what plans with each of them take.
        planned_with: the costs and decisions that the plan was made with; None of a program on local arrays.
        work_cost: the time of one device's own work, by the cost model.
        recomputed: what is computed again so that it need not be held between a forward and a backward pass.
        blocked: the values that are made part by part, so that no device holds all of its own.
        hidden_by_work: the time of collectives that the compiler hides by itself, by the cost model.
        counted_peak: `memory.peak` where planning counted it; else 0.
        choices: what was searched for, from which the plan is made again without; as text where it was found in the
            cache; None of a program on local arrays.
        planner: makes the plan of another traced program of the same function, under a policy.
        resized: traces the function anew, all sizes of arguments that are the first number being the second.
        cached_as: what it is in the cache, beside which what is emitted is kept; None where it is not kept.
        device_kind: what the devices call themselves; empty where nobody knows.
        function: gives the partitioned function that runs it; None where there is none any more.
    """

    name: str
    program: Program
    arguments: tuple[BoundaryValue, ...]
    constants: tuple[BoundaryValue, ...]
    results: tuple[BoundaryValue, ...]
    collectives: tuple[CollectiveRecord, ...]
    notes: tuple[Note, ...]
    stages: Mapping[str, ir.Operation]
    source: str = ""
    moves: tuple[BorderMove, ...] = ()
    as_passed: frozenset[str] = frozenset()
    layouts: LayoutChoice | None = None
    planned_with: PlannedWith | None = None
    automatic: AutomaticLayouts | None = None
    meshes: tuple[ComparedMesh, ...] = ()
    decided: Decided = NOTHING_DECIDED
    work_cost: float = 0.0
    hidden_by_work: float = 0.0
    counted_peak: float = 0.0
    recomputed: Recomputed | None = None
    blocked: tuple[InParts, ...] = ()
    choices: ProgramChoices | str | None = None
    planner: Callable[[Program, Policy], Self] | None = None
    resized: Callable[[int, int], Program] | None = None
    cached_as: CachedAs | None = None
    device_kind: str = ""
    function: Callable[[], Any] = lambda: None

    @property
    def input_specs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The `PartitionSpec`s of positional and of keyword arguments, in trees like theirs: as the `in_shardings` of
        another function, or to place arrays by.

        Raises:
            UnsupportedError: an argument is split by a part of a mesh axis.

        Example:
            args, _ = plan.input_specs
            step = sdy.partition(step, mesh=mesh, in_shardings=args, out_shardings=plan.output_specs)
        """
        return specs_of(self.program.in_tree, self._on_axes_of_function(self.arguments))  # type: ignore[no-any-return]

    @property
    def output_specs(self) -> Any:
        """The `PartitionSpec`s of the results, in a tree like theirs.

        Raises:
            UnsupportedError: a result is split by a part of a mesh axis.
        """
        return specs_of(self.program.out_tree, self._on_axes_of_function(self.results))

    def _on_axes_of_function(self, values: Iterable[BoundaryValue]) -> list[tuple[str, TensorSharding]]:
        return [(value.path, self.program.on_uncut(value.sharding)) for value in values]

    @cached_property
    def graph(self) -> Graph:
        """The partitioned program as plain objects."""
        return Graph(self.stages["partitioned"])

    @property
    def costs(self) -> CostModel:
        """The cost model that the plan was made with."""
        return self.planned_with.costs if self.planned_with is not None else CostModel()

    @property
    def target(self) -> Target:
        """The devices for which the plan was made."""
        return self.planned_with.target if self.planned_with is not None else Target()

    @property
    def traced(self) -> Program:
        """The program before propagation."""
        return self.program.with_module(self.stages["traced"])

    @property
    def policy(self) -> Policy:
        """The user's decisions about partitioning."""
        return self.planned_with.policy if self.planned_with is not None else Policy()

    def replanned(self, program: Program, policy: Policy | None = None) -> Self:
        """The plan of another traced program of the same function, or under another policy."""
        if self.planner is None:
            raise SdyError(f"the plan of {self.name} is of a program on local arrays, which is not planned anew")
        return self.planner(program, policy or self.policy)

    def mlir(self, stage: str = "partitioned") -> str:
        """The module's text after a stage: "traced", "imported", "propagated" or "partitioned"; and "recomputed" or
        "blocked", where something is computed again, or part by part, for the sake of memory."""
        if stage not in self.stages:
            raise SdyError(f"no stage {stage!r}; the stages are {', '.join(self.stages)}")
        return str(self.stages[stage])
