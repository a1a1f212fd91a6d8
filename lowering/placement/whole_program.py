"""Partitioning a program by a plan for all of it.

A copy is walked first, op by op, around the shardings that propagation gave. From there the layouts of the whole
program are planned, and a second walk follows the plan. Where that program holds more than it may, others are tried
that hold less (`within_memory.py`). Of all programs that fit the cheapest one stays. A program that sends nothing as it
is proposed stays so: no plan could send less, and what every device computes was asked for. So does one on many axes.
Source: spec of the planner, sections 9, 12 and 13.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jax.extend.mlir import ir

from sdy_jax.errors import SdyError
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.operations import body_of
from sdy_jax.lowering.placement import model_builder, partitioner
from sdy_jax.lowering.placement.live_bytes import Peak, peak_of
from sdy_jax.lowering.placement.modelled import ModelledProgram
from sdy_jax.lowering.placement.partitioner import Partitioner, prepared
from sdy_jax.lowering.placement.policy import Policy
from sdy_jax.lowering.placement.report import ChangedLayout, LayoutChoice, PartitionReport
from sdy_jax.lowering.placement.stated import changed_statements
from sdy_jax.lowering.placement.walked import LayoutPlan
from sdy_jax.lowering.placement.within_memory import Walk, tried
from sdy_jax.lowering.planning.layout_table import LayoutTable
from sdy_jax.lowering.reshard.cost import CostModel
from sdy_jax.representation.mesh import AxisRef
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.representation.type_text import bytes_text
from sdy_jax.rules import RuleBook

_LEAST_GAIN = 0.005
"""The share of what the proposal sends that a plan has to save in all: a reader looks for few differences, each with
its reason."""

_TOLERATED = 0.01
"""The share of what the proposal holds that a plan may hold more, by default: the estimate is no better than that."""

_MOST_ATOMS = 4
"""Axes, or parts of axes, up to which a program is planned: each more makes about five times as many layouts."""


def partition(
    module: ir.Operation,
    mesh_name: str,
    costs: CostModel,
    rules: RuleBook | None = None,
    policy: Policy = Policy(),  # noqa: B008 - immutable
    inputs: Sequence[str] = (),
) -> PartitionReport:
    """As `partitioner.partition`, with the layouts of the whole program chosen together where the policy says so.

    Raises:
        SdyError: no program was found that keeps within the policy's memory.
    """
    rules = rules or RuleBook()
    if policy.layouts != "global":
        return partitioner.partition(module, mesh_name, costs, rules, policy, inputs)
    graph = prepared(module, mesh_name, rules)

    def walked(plan: LayoutPlan | None) -> Walk:
        copy = Graph(graph.module.clone().operation)
        walker = Partitioner(copy, mesh_name, costs, rules, policy, inputs, plan)
        report = walker.run()
        return Walk(walker, report, walker.cost(), peak_of(Graph(copy.module), products_fuse=policy.products_fuse))

    proposed = walked(None)
    limit = policy.memory
    if limit is None:
        limit = max((1 + _TOLERATED) * proposed.peak.total, policy.device_memory)
    walks, mesh = [proposed], proposed.walker.placement.meshes.base
    atoms = proposed.walker.walked.atoms(mesh)
    is_planned = len(atoms) <= _MOST_ATOMS
    if is_planned and (proposed.sends or proposed.peak.total > limit):
        walks = tried(modelled(graph, proposed.walker, atoms, policy), proposed, limit, walked)
    fitting = [walk for walk in walks if walk.peak.total <= limit]
    if not fitting:
        raise SdyError(_too_large(min(walks, key=lambda walk: walk.peak.total).peak, limit))
    best = min(fitting, key=lambda walk: walk.cost)
    if proposed in fitting and best.cost > proposed.cost - _LEAST_GAIN * proposed.walker.sending_time():
        best = proposed
    if is_planned:
        best.report.layouts = _choice(graph, best, proposed)
    replace_contents(module, best.walker.graph.module)
    return best.report


def _choice(graph: Graph, best: Walk, proposed: Walk) -> LayoutChoice:
    plan, changed = best.walker.plan, tuple(_changed(graph, best.walker, proposed.walker))
    sent = best.walker.sending_time(), proposed.walker.sending_time()
    written = best.walker.sending_time(("user",))
    return LayoutChoice(best.cost, proposed.cost, changed, *sent, plan.chosen if plan is not None else (), written)


def _changed(graph: Graph, chosen: Partitioner, proposed: Partitioner) -> Iterator[ChangedLayout]:
    """The results that one walk makes in other layouts than another."""
    yield from changed_statements(graph, chosen.walked, proposed.walked)
    for number, decision in chosen.walked.decided.items():
        op, before = graph.ops[number], proposed.walked.decided[number]
        count = len(op.operands)
        for value, new, old in zip(op.results, decision.shardings[count:], before.shardings[count:], strict=True):
            if not new.same_layout_as(old) and value.shape:
                yield ChangedLayout(op.name, op.mlir.location, value.dtype, value.shape, new, old)


def modelled(graph: Graph, proposed: Partitioner, atoms: tuple[AxisRef, ...], policy: Policy) -> ModelledProgram:
    """The model of a program of which a copy was walked; `graph` is that of the program itself, `atoms` the parts of
    mesh axes that the walk knows."""
    meshes, costs = proposed.placement.meshes, proposed.costs

    def price(shape: tuple[int, ...], itemsize: float, source: TensorSharding, target: TensorSharding) -> float:
        return meshes.plan(shape, itemsize, source, target, costs).cost

    table = LayoutTable(meshes.base_name, meshes.base)
    return model_builder.modelled(graph, proposed.walked, table, atoms, costs, price, policy)


def _too_large(peak: Peak, limit: float) -> str:
    largest = "; ".join(f"{bytes_text(live.bytes)} of {live.value.type} at {live.source}" for live in peak.live[:5])
    return (
        f"memory={bytes_text(limit)} is not enough: the least that was found is {bytes_text(peak.total)} per device "
        f"({bytes_text(peak.arguments)} of arguments, {bytes_text(peak.results)} of results, {bytes_text(peak.bytes)} "
        f"in between). The largest values at the peak: {largest}; to fix: split these, or compute them again "
        "(jax.checkpoint)"
    )


def replace_contents(module: ir.Operation, other: ir.Operation) -> None:
    """Puts what `other` holds in the place of what `module` holds."""
    block = body_of(module)
    for op in list(block.operations)[::-1]:
        op.operation.erase()
    for op in list(body_of(other).operations):
        op.operation.detach_from_parent()
        block.append(op)
