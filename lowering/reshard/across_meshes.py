"""Reshards between meshes that have the same axes and devices, the devices in different orders.

A permute leads from any blocks to any others of the same shard counts, also on another mesh: `plan_reshard` finds the
plans with one. Cheaper plans may go through a sharding that is the same on both meshes, because every device has the
same coordinate along all of its axes. The change of mesh is then a permute that sends nothing, since a permute is the
dialect's only op that may change the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from sdy_jax.lowering.costs.cost_model import CostModel
from sdy_jax.lowering.reshard.plan import Collective, ReshardPlan
from sdy_jax.lowering.reshard.planner import plan_reshard
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.sdy_collectives import SdyCollective
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.runtime.device_orders import common_part, hold_the_same


@lru_cache(maxsize=1 << 12)
def plan_across(
    shape: tuple[int, ...],
    itemsize: float,
    source: TensorSharding,
    target: TensorSharding,
    meshes: tuple[Mesh, Mesh],
    costs: CostModel,
) -> ReshardPlan:
    """The cheapest collectives from a sharding on the first of two meshes to one on the second.

    Args:
        shape, itemsize, source, target, costs: as in `Reshards.plan`; the shardings name different meshes.
        meshes: the source's and the target's mesh. They have the same axes; their devices are in different orders.
    """
    if _is_whole(source) and _is_whole(target) and _coincide(source, target, meshes):
        return ReshardPlan((_renamed(target),), 0.0, 0.0)
    plans = [plan_reshard(shape, itemsize, source, target, meshes[0], costs)]
    for shared in dict.fromkeys(_shared(source, target, meshes)):
        there = replace(shared, mesh=target.mesh)
        before = plan_reshard(shape, itemsize, source, shared, meshes[0], costs)
        after = plan_reshard(shape, itemsize, there, target, meshes[1], costs)
        plans.append(_joined(_joined(before, ReshardPlan((_renamed(there),), 0.0, 0.0)), after))
    cap = min(_shards(source, meshes[0]), _shards(target, meshes[0]))
    return min(plans, key=lambda plan: (_fewest_shards(plan, meshes[0]) < cap, plan.cost, plan.wire_bytes))


def _is_whole(sharding: TensorSharding) -> bool:
    return not sharding.unreduced_axes


def _coincide(source: TensorSharding, target: TensorSharding, meshes: tuple[Mesh, Mesh]) -> bool:
    alike = source.shard_counts(meshes[0]) == target.shard_counts(meshes[1])
    return alike and hold_the_same(source, meshes[0], target, meshes[1])


def _renamed(sharding: TensorSharding) -> Collective:
    """A permute that sends nothing, and states on which of several equal meshes a value is sharded."""
    return Collective(SdyCollective("collective_permute"), sharding, 0.0)


def _shared(source: TensorSharding, target: TensorSharding, meshes: tuple[Mesh, Mesh]) -> Iterator[TensorSharding]:
    """The parts of source and target, on the source's mesh, whose axes coincide on both meshes."""
    for end in (source, target):
        yield TensorSharding.closed(source.mesh, [common_part(axes, *meshes) for axes in end.axes])


def _joined(first: ReshardPlan, second: ReshardPlan) -> ReshardPlan:
    return ReshardPlan(first.steps + second.steps, first.wire_bytes + second.wire_bytes, first.cost + second.cost)


def _shards(sharding: TensorSharding, mesh: Mesh) -> int:
    return math.prod(sharding.shard_counts(mesh))


def _fewest_shards(plan: ReshardPlan, mesh: Mesh) -> int:
    return min(_shards(step.result, mesh) for step in plan.steps)
