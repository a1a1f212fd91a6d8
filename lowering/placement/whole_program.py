"""Partitioning a program by a plan for all of it.

A copy is walked first, op by op, around the shardings that propagation gave. From there the layouts of the whole
program are planned, and a second walk follows the plan. Where that program holds more than it may, holding gets a
price, which rises until it fits. Of all programs that fit the cheapest one stays.
Source: spec of the planner, sections 9, 12 and 13.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.errors import SdyError
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.operations import body_of
from sdy_jax.lowering.placement import partitioner
from sdy_jax.lowering.placement.live_bytes import Peak, peak_of
from sdy_jax.lowering.placement.modelled import ModelledProgram
from sdy_jax.lowering.placement.partitioner import Partitioner, prepared
from sdy_jax.lowering.placement.policy import Policy
from sdy_jax.lowering.placement.report import ChangedLayout, LayoutChoice, PartitionReport
from sdy_jax.lowering.placement.walked import LayoutPlan
from sdy_jax.lowering.planning.improve import improved
from sdy_jax.lowering.planning.program_model import Chosen
from sdy_jax.lowering.reshard.cost import CostModel
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.representation.type_text import bytes_text
from sdy_jax.rules import RuleBook

_LEAST_SAVING = 1e-5
"""The share of the program's cost that a reshard has to save to be worth its collective."""

_TRIES = 8
"""Prices of holding that are tried."""

_DEARER = 4.0
"""By how much the price of holding rises from try to try."""

_CLOSER = 2
"""Prices that are tried between the lowest at which the program fits and the highest at which it does not."""


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

    def walked(plan: LayoutPlan | None) -> _Walk:
        copy = Graph(graph.module.clone().operation)
        walker = Partitioner(copy, mesh_name, costs, rules, policy, inputs, plan)
        report = walker.run()
        return _Walk(walker, report, walker.cost(), peak_of(Graph(copy.module), products_fuse=policy.products_fuse))

    proposed = walked(None)
    limit = policy.memory if policy.memory is not None else max(proposed.peak.total, policy.device_memory)
    program = modelled(graph, proposed.walker, policy)
    walks = _tried(program, proposed, limit, walked)
    fitting = [walk for walk in walks if walk.peak.total <= limit]
    if not fitting:
        raise SdyError(_too_large(min(walks, key=lambda walk: walk.peak.total).peak, limit))
    best = min(fitting, key=lambda walk: walk.cost)
    best.report.layouts = _choice(graph, best, proposed)
    replace_contents(module, best.walker.graph.module)
    return best.report


class _Walk(NamedTuple):
    """A walk over a copy of the program: what it inserted, what that costs, and what a device holds at most."""

    walker: Partitioner
    report: PartitionReport
    cost: float
    peak: Peak


def _choice(graph: Graph, best: _Walk, proposed: _Walk) -> LayoutChoice:
    plan, changed = best.walker.plan, tuple(_changed(graph, best.walker, proposed.walker))
    sent = best.walker.sending_time(), proposed.walker.sending_time()
    written = best.walker.sending_time(("user",))
    return LayoutChoice(best.cost, proposed.cost, changed, *sent, plan.chosen if plan is not None else (), written)


def _changed(graph: Graph, chosen: Partitioner, proposed: Partitioner) -> Iterator[ChangedLayout]:
    """The results that one walk makes in other layouts than another."""
    for number, decision in chosen.walked.decided.items():
        op, before = graph.ops[number], proposed.walked.decided[number]
        count = len(op.operands)
        for value, new, old in zip(op.results, decision.shardings[count:], before.shardings[count:], strict=True):
            if not new.same_layout_as(old) and value.shape:
                yield ChangedLayout(op.name, op.mlir.location, value.dtype, value.shape, new, old)


def modelled(graph: Graph, proposed: Partitioner, policy: Policy) -> ModelledProgram:
    """The model of a program of which a copy was walked; `graph` is that of the program itself."""
    meshes, costs = proposed.placement.meshes, proposed.costs

    def price(shape: tuple[int, ...], itemsize: float, source: TensorSharding, target: TensorSharding) -> float:
        return meshes.plan(shape, itemsize, source, target, costs).cost

    return ModelledProgram(graph, proposed.walked, meshes.base_name, meshes.base, costs, price, policy)


def best_choice(program: ModelledProgram) -> Chosen:
    """The best choice that was found, if holding costs nothing."""
    model, start = program.model, program.start
    model.charge_each_reshard(_LEAST_SAVING * model.cost(start))
    return improved(model, start, program.table, program.atoms)


def _tried(
    program: ModelledProgram, proposed: _Walk, limit: float, walked: Callable[[LayoutPlan], _Walk]
) -> list[_Walk]:
    """The walks by the best choice and, where it does not fit, at rising prices of holding until one fits, and then a
    little below. A walk that does not fit and costs more than the proposal, which does, ends it: those that hold less
    cost more."""
    model, known = program.model, {tuple(program.start): proposed}

    def followed(chosen: Chosen) -> _Walk:
        key = tuple(chosen)
        if key not in known:
            known[key] = walked(program.plan(chosen))
        return known[key]

    best = best_choice(program)
    if followed(best).peak.total <= limit:
        return list(known.values())
    price, low, high = _first_price(program, best), 0.0, math.inf
    most, closer = proposed.cost if proposed.peak.total <= limit else math.inf, 0
    for _ in range(_TRIES if price else 0):
        model.holding = price
        walk = followed(improved(model, program.start, program.table, program.atoms))
        fits = walk.peak.total <= limit
        low, high = (low, price) if fits else (price, high)
        if closer == _CLOSER or (not fits and walk.cost > most):
            break
        closer += high < math.inf
        price = min(price * _DEARER, math.sqrt(low * high) or high / _DEARER)
    return list(known.values())


def _first_price(program: ModelledProgram, best: Chosen) -> float:
    """The price of holding at which the best choice would cost a quarter of what it saves beside the walk's more; 0
    where it holds nothing that could be given up."""
    model, start = program.model, program.start
    saved, held = model.cost(start) - model.cost(best), model.held(best)
    more = held - model.held(start) if held > model.held(start) else held
    return max(saved, _LEAST_SAVING * model.cost(start)) / more / _DEARER if more else 0.0


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
