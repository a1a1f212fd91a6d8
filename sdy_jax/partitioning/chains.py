"""Chains of collectives and reshards: one value on its way from one sharding to another.

What lies between the ends of a chain has no other users, so a chain is one reshard, however it is written, and may be
planned anew. A reduction at its head may combine along axes of which its operand's sharding says nothing: the operand
is then unreduced along them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from jax.extend.mlir import ir

from sdy_jax.errors import UnsupportedError
from sdy_jax.ir.locations import source_line
from sdy_jax.ir.operations import defining_op, module_meshes, pre_order, replace_op, users
from sdy_jax.ir.stored_shardings import mesh_of, set_sharding, sharding_of
from sdy_jax.ir.tensor_types import itemsize, shape_and_dtype
from sdy_jax.lowering.costs.cost_model import CostModel
from sdy_jax.lowering.insert.inserted_ops import create_collective
from sdy_jax.lowering.reshard.across_meshes import plan_across
from sdy_jax.lowering.reshard.plan import Collective, ReshardPlan
from sdy_jax.lowering.reshard.planner import Reshards
from sdy_jax.passes.constraints import current_sharding
from sdy_jax.representation.attributes import reduction_from_attributes
from sdy_jax.representation.axes import set_difference, sort_and_merge
from sdy_jax.representation.mesh import Axes, Mesh, axes_size
from sdy_jax.representation.sdy_collectives import REDUCING_OPS, SdyCollective, collective_from_attributes
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.runtime.device_orders import hold_the_same, same_devices

RESHARD = "sdy.reshard"
Test = Callable[[ir.Operation], bool]

_TAKE_ANYTHING = ("all_slice", "all_reduce", "reduce_scatter")
"""The collectives whose operand may be without a sharding."""
_COSTS = CostModel()


@dataclass(frozen=True, slots=True)
class Chain:
    """Ops from head to tail, and the shardings at both ends."""

    ops: tuple[ir.Operation, ...]
    source: TensorSharding
    target: TensorSharding
    meshes: dict[str, Mesh]

    @property
    def value(self) -> ir.Value:
        """What the chain takes."""
        return self.ops[0].operands[0]

    def plan(self) -> ReshardPlan:
        """The cheapest collectives that lead from its source to its target.

        Raises:
          UnsupportedError: its ends are on meshes with other axes or devices.
        """
        shape, dtype = shape_and_dtype(self.value.type)
        source, target, first, second = self._on_one_name()
        if first.axes != second.axes or not same_devices(first, second):
            raise UnsupportedError(
                f"{source_line(self.ops[-1].location)}: a reshard from <{self.source}> to <{self.target}> leads from "
                f"the mesh {first} to {second}; both must have the same axes and devices"
            )
        if source.mesh == target.mesh:
            return Reshards(first, _COSTS, strips=False).plan(shape or (), itemsize(dtype), source, target)
        return plan_across(shape or (), itemsize(dtype), source, target, (first, second), _COSTS)

    def _on_one_name(self) -> tuple[TensorSharding, TensorSharding, Mesh, Mesh]:
        """Both ends with their meshes, under one name where these are equal; a mesh without axes is the other's."""
        source, target = closed(self.source), closed(self.target)
        first, second = mesh_of(self.meshes, source), mesh_of(self.meshes, target)
        if not first.axes:
            return replace(source, mesh=target.mesh), target, second, second
        if not second.axes or first == second:
            return source, replace(target, mesh=source.mesh), first, first
        return source, target, first, second

    def replace_with(self, plan: ReshardPlan) -> None:
        """Writes a plan's collectives in its place."""
        tail, current = self.ops[-1], self.value
        if plan.steps and plan.steps[0].kind not in _TAKE_ANYTHING and current_sharding(current) is None:
            set_sharding(current, self.source)
        for step in (*self._freed_of_axes_of_one(plan), *plan.steps):
            current = create_collective(step, current, tail.location, ir.InsertionPoint(tail))
        self.replace_by(current)

    def _freed_of_axes_of_one(self, plan: ReshardPlan) -> list[Collective]:
        """A permute that moves nothing, where the source says axes of size one: plans know none of them, and the
        operand of a plan's first collective has to be split as that says."""
        mesh, axes = mesh_of(self.meshes, self.source), self.source.axes
        left = tuple(tuple(a for a in of_dim if axes_size([a], mesh) > 1) for of_dim in axes)
        if left == axes or not plan.steps or plan.steps[0].kind == "collective_permute":
            return []
        source = self.source
        freed = TensorSharding.closed(source.mesh, left, source.unreduced_axes, source.reduction)
        return [Collective(SdyCollective("collective_permute"), freed, 0.0)]

    def replace_by(self, value: ir.Value) -> None:
        """Lets its users take this value, and erases its ops."""
        tail, *others = reversed(self.ops)
        replace_op(tail, [value])
        for op in others:
            op.erase()

    def wire_bytes(self) -> float:
        """What a device sends in it as it is, if all of it are collectives."""
        shape, dtype = shape_and_dtype(self.value.type)
        size, sent, source = math.prod(shape or ()) * itemsize(dtype), 0.0, self.source
        for op in self.ops:
            target = sharding_of(op.results[0])
            assert target is not None
            sent += self._sent(op, source, target, size)
            source = target
        return sent

    def _sent(self, op: ir.Operation, source: TensorSharding, target: TensorSharding, size: float) -> float:
        kind, first, mesh = _kind(op), mesh_of(self.meshes, source), mesh_of(self.meshes, target)
        before, after = (size / math.prod(s.shard_counts(mesh)) for s in (source, target))
        if kind == "collective_permute":
            still = not source.unreduced_axes and hold_the_same(source, first, target, mesh)
            return 0.0 if still else _COSTS.wire_bytes(kind, mesh.size, before, after)
        axes = collective_from_attributes(kind, op.attributes).all_axes
        return _COSTS.wire_bytes(kind, axes_size(axes, mesh), before, after)


def chains(module: ir.Operation, is_link: Test, is_tail: Test) -> list[Chain]:
    """The longest chains of links that end in a tail; they share no ops."""
    meshes, found, taken = module_meshes(module), list[Chain](), set[ir.Operation]()
    for tail in filter(is_tail, reversed(pre_order(module))):
        target = None if tail in taken else sharding_of(tail.results[0])
        if target is not None:
            ops = _joined(tail, is_link, meshes)
            taken.update(ops)
            found.append(Chain(ops, _source(ops[0], target, meshes), target, meshes))
    return found


def _joined(tail: ir.Operation, is_link: Test, meshes: dict[str, Mesh]) -> tuple[ir.Operation, ...]:
    ops, kinds = [tail], _reductions(tail)
    while not _newly_combined(ops[0], current_sharding(ops[0].operands[0]), meshes):
        before = defining_op(ops[0].operands[0])
        if before is None or not is_link(before) or before.block != tail.block or len(users(before.results[0])) > 1:
            break
        kinds |= _reductions(before)
        if len(kinds) > 1:
            break
        ops.insert(0, before)
    return tuple(ops)


def _reductions(op: ir.Operation) -> set[str]:
    """By what a collective combines, and by what its result is left to be combined."""
    stated = sharding_of(op.results[0])
    left = {stated.reduction} if stated is not None and stated.unreduced_axes else set()
    return left | ({reduction_from_attributes(op.attributes)} if op.name in REDUCING_OPS else set())


def _newly_combined(op: ir.Operation, operand: TensorSharding | None, meshes: dict[str, Mesh]) -> Axes:
    """The axes along which a reduction combines and its operand is not said to be unreduced."""
    if op.name not in REDUCING_OPS:
        return ()
    axes = collective_from_attributes(_kind(op), op.attributes).all_axes
    return axes if operand is None else set_difference(axes, operand.unreduced_axes, mesh_of(meshes, operand))


def _source(head: ir.Operation, target: TensorSharding, meshes: dict[str, Mesh]) -> TensorSharding:
    operand = current_sharding(head.operands[0]) or TensorSharding.replicated(target.mesh, target.rank)
    new = _newly_combined(head, operand, meshes)
    if not new:
        return operand
    unreduced = sort_and_merge([*operand.unreduced_axes, *new], mesh_of(meshes, operand))
    return replace(operand, unreduced_axes=unreduced, reduction=reduction_from_attributes(head.attributes))


def closed(sharding: TensorSharding) -> TensorSharding:
    """As collectives state it: closed, nothing explicitly replicated."""
    return TensorSharding.closed(sharding.mesh, sharding.axes, sharding.unreduced_axes, sharding.reduction)


def _kind(op: ir.Operation) -> str:
    return str(op.name).removeprefix("sdy.")
