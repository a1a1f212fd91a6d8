"""Reshards: written where the partitioner moves data, turned into collectives; and collectives made cheaper."""

from __future__ import annotations

from dataclasses import replace

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph
from sdy_jax.ir.operations import module_meshes, pre_order
from sdy_jax.ir.stored_shardings import mesh_of
from sdy_jax.lowering.costs.cost_model import CostModel
from sdy_jax.lowering.insert.inserted_ops import create_collective
from sdy_jax.lowering.insert.partitioner import partition_locally
from sdy_jax.lowering.interface.policy import Policy
from sdy_jax.lowering.interface.setting import Setting
from sdy_jax.lowering.reshard.plan import Collective
from sdy_jax.partitioning.chains import RESHARD, Chain, chains, closed
from sdy_jax.passes.inline_calls import inline_calls
from sdy_jax.propagation.edge_shardings import edge_shardings
from sdy_jax.representation.attributes import sharding_attributes
from sdy_jax.representation.axes import set_difference
from sdy_jax.representation.sdy_collectives import COLLECTIVE_OPS, REDUCING_OPS, UNREDUCING_OPS, SdyCollective

_ROUNDING = 1e-6
"""Bytes that are no difference. Given: they are sums of floats."""

_POLICY = Policy()
_WRITTEN = "sdy_jax.written"
"""What marks the program's own collectives while it is partitioned."""


def partition_into_reshards(module: ir.Operation, policy: Policy = _POLICY) -> None:
    """`sdy-insert-explicit-reshards` in its full version: every op gets the shardings that it can run with.

    They are those of the cheapest partitioning, and a reshard leads to each of them from another one. Partial results
    are marked as unreduced and reduced by an all_reduce. Functions that are called are inlined.

    Args:
      module: a `builtin.module` with closed shardings, edited in place.
      policy: how the program is partitioned.

    Raises:
      UnsupportedError: an op cannot be partitioned.
    """
    inline_calls(module)
    base = base_mesh(module)
    if base is None:
        return
    for op in pre_order(module):
        if op.name in COLLECTIVE_OPS:
            op.attributes[_WRITTEN] = ir.UnitAttr.get(module.context)
    partition_locally(module, Setting(base, CostModel(), policy=policy))
    for chain in chains(module, _is_made, _is_made):
        _write_as_reshard(chain)
    for op in pre_order(module):
        if _WRITTEN in op.attributes:
            del op.attributes[_WRITTEN]


def base_mesh(module: ir.Operation) -> str | None:
    """The mesh with axes that the most values of the main function are on, the first of equals."""
    meshes, count, graph = module_meshes(module), dict[str, int](), Graph(module)
    stated = [*(v.sharding for v in graph.arguments), *graph.result_shardings(graph.main)]
    for op in graph.main.walk():
        stated += [v.sharding for v in op.results]
        stated += [s for sided in edge_shardings(op) for s in (sided.sources, sided.targets)] if op.blocks else []
    for sharding in stated:
        if sharding is not None and isinstance(sharding.mesh, str) and meshes[sharding.mesh].axes:
            count[sharding.mesh] = count.get(sharding.mesh, 0) + 1
    return max(count, key=lambda name: count[name], default=None)


def _is_made(op: ir.Operation) -> bool:
    is_step = op.name == RESHARD or (op.name in COLLECTIVE_OPS and op.name not in UNREDUCING_OPS)
    return is_step and _WRITTEN not in op.attributes


def _write_as_reshard(chain: Chain) -> None:
    """An all_reduce of what the chain reduces, and a reshard for everything else."""
    have, tail, current = closed(chain.source), chain.ops[-1], chain.value
    ip = ir.InsertionPoint(tail)
    reduced = set_difference(have.unreduced_axes, chain.target.unreduced_axes, mesh_of(chain.meshes, have))
    if reduced:
        left = set_difference(have.unreduced_axes, reduced, mesh_of(chain.meshes, have))
        have, kind = replace(have, unreduced_axes=left, reduction=have.reduction if left else "sum"), have.reduction
        step = Collective(SdyCollective("all_reduce", reduced), have, 0.0, kind)
        current = create_collective(step, current, tail.location, ip)
    if not have.same_layout_as(closed(chain.target)):
        current = _create_reshard(chain, current, ip)
    chain.replace_by(current)


def _create_reshard(chain: Chain, value: ir.Value, ip: ir.InsertionPoint) -> ir.Value:
    attributes = sharding_attributes("sharding", closed(chain.target), value.context)
    location = chain.ops[-1].location
    return ir.Operation.create(RESHARD, [value.type], [value], attributes, loc=location, ip=ip).results[0]


def reshards_to_collectives(module: ir.Operation, *, keep_redundant_reshards: bool = False) -> None:
    """`sdy-reshard-to-collectives`: every reshard becomes the cheapest collectives that do what it says.

    A reduction right before a reshard, and reshards in a row, are planned together with it.

    Args:
      module: a `builtin.module`, edited in place.
      keep_redundant_reshards: leave a reshard that changes nothing; else it is removed.

    Raises:
      UnsupportedError: a reshard leads to a mesh with other axes or devices.
    """
    planned = (RESHARD, *REDUCING_OPS)
    for chain in chains(module, lambda op: op.name in planned, lambda op: op.name == RESHARD):
        plan = chain.plan()
        if plan.steps or not keep_redundant_reshards:
            chain.replace_with(plan)
        elif len(chain.ops) > 1:
            chain.replace_by(_create_reshard(chain, chain.value, ir.InsertionPoint(chain.ops[-1])))


def optimize_collectives(module: ir.Operation) -> None:
    """`sdy-optimize-collectives`: collectives in a row become others that send fewer bytes, or as many in fewer ops.

    Args:
      module: a `builtin.module`, edited in place.
    """
    for chain in chains(module, _is_collective, _is_collective):
        plan, now = chain.plan(), chain.wire_bytes()
        saved = now - plan.wire_bytes
        if saved > _ROUNDING or (saved > -_ROUNDING and len(plan.steps) < len(chain.ops)):
            chain.replace_with(plan)


def _is_collective(op: ir.Operation) -> bool:
    return op.name in COLLECTIVE_OPS
