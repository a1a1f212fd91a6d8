"""Partitioning a program by a plan for all of it.

A copy is walked first, op by op, around the shardings that propagation gave. From there the layouts of the whole program
are planned, and a second walk follows the plan. Of the two programs the cheaper one stays.
Source: spec of the planner, sections 12 and 13.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph
from sdy_jax.ir.operations import body_of
from sdy_jax.lowering.placement import partitioner
from sdy_jax.lowering.placement.kinds import Kinds
from sdy_jax.lowering.placement.modelled import ModelledProgram
from sdy_jax.lowering.placement.partitioner import Partitioner, prepared
from sdy_jax.lowering.placement.policy import Policy
from sdy_jax.lowering.placement.report import PartitionReport
from sdy_jax.lowering.placement.walked import LayoutPlan
from sdy_jax.lowering.planning.improve import improved
from sdy_jax.lowering.reshard.cost import CostModel
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.rules import RuleBook

_LEAST_SAVING = 1e-5
"""The share of the program's cost that a reshard has to save to be worth its collective."""


def partition(
    module: ir.Operation,
    mesh_name: str,
    costs: CostModel,
    rules: RuleBook | None = None,
    policy: Policy = Policy(),  # noqa: B008 - immutable
    inputs: Sequence[str] = (),
) -> PartitionReport:
    """As `partitioner.partition`, with the layouts of the whole program chosen together where the policy says so."""
    rules = rules or RuleBook()
    if policy.layouts == "local":
        return partitioner.partition(module, mesh_name, costs, rules, policy, inputs)
    graph = prepared(module, mesh_name, rules)
    proposed = Partitioner(Graph(graph.module.clone().operation), mesh_name, costs, rules, policy, inputs)
    report = proposed.run()
    plan = planned(modelled(graph, proposed, rules, policy))
    if plan is not None:
        second = Partitioner(graph, mesh_name, costs, rules, policy, inputs, plan)
        better = second.run()
        if second.cost() <= proposed.cost():
            return better
    replace_contents(module, proposed.graph.module)
    return report


def modelled(graph: Graph, proposed: Partitioner, rules: RuleBook, policy: Policy) -> ModelledProgram:
    """The model of a program of which a copy was walked; `graph` is that of the program itself."""
    meshes, costs = proposed.placement.meshes, proposed.costs

    def price(shape: tuple[int, ...], itemsize: float, source: TensorSharding, target: TensorSharding) -> float:
        return meshes.plan(shape, itemsize, source, target, costs).cost

    kinds, pads = Kinds(rules.without_overrides()), policy.uneven == "pad"
    return ModelledProgram(graph, proposed.walked, kinds, meshes.base_name, meshes.base, costs, price, pads)


def planned(program: ModelledProgram) -> LayoutPlan | None:
    """The plan for a program; None where nothing costs less than what the walk did."""
    program.model.charge_each_reshard(_LEAST_SAVING * program.model.cost(program.start))
    chosen = improved(program.model, program.start, program.table, program.atoms)
    return None if chosen == program.start else program.plan(chosen)


def replace_contents(module: ir.Operation, other: ir.Operation) -> None:
    """Puts what `other` holds in the place of what `module` holds."""
    block = body_of(module)
    for op in list(block.operations)[::-1]:
        op.operation.erase()
    for op in list(body_of(other).operations):
        op.operation.detach_from_parent()
        block.append(op)
