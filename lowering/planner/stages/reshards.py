"""Reshards as a stage: written where the partitioner moves data, turned into collectives, and chains made cheaper."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from jax.extend.mlir import ir

from sdy_jax.base.errors import UnsupportedError
from sdy_jax.ir.attributes import itemsize, reduction_from_attributes, shape_and_dtype, sharding_attributes
from sdy_jax.ir.collectives import (
    COLLECTIVE_OPS,
    REDUCING_OPS,
    UNREDUCING_OPS,
    SdyCollective,
    collective_from_attributes,
)
from sdy_jax.ir.device_orders import hold_the_same, same_devices
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.locations import source_line
from sdy_jax.ir.meshes import Axes, Mesh, axes_size, set_difference, sort_and_merge
from sdy_jax.ir.operations import (
    body_of,
    defining_op,
    functions,
    main_function,
    module_meshes,
    named,
    pre_order,
    rank,
    replace_op,
    returned_by,
    users,
)
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.stored_shardings import (
    SIDES,
    function_shardings,
    mesh_of,
    set_function_shardings,
    set_sharding,
    sharding_of,
)
from sdy_jax.lowering.planner.placement.collectives import create_collective
from sdy_jax.lowering.planner.placement.program_placement import partition_locally
from sdy_jax.lowering.planner.setting import Policy, Setting
from sdy_jax.lowering.reshard.planner import Collective, ReshardPlan, ReshardPlanner, plan_across
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.shardy.passes.calls import inline_calls
from sdy_jax.shardy.passes.constraints import current_sharding
from sdy_jax.shardy.passes.reshard_steps import reshard_steps
from sdy_jax.shardy.propagation.data_flow import edge_shardings
from sdy_jax.shardy.rules import Compat

# Chains of collectives and reshards: one value on its way from one sharding to another.
#
# What lies between the ends of a chain has no other users, so a chain is one reshard, however it is written, and may
# be planned anew. A reduction at its head may combine along axes of which its operand's sharding says nothing: the
# operand is then unreduced along them.

RESHARD = "sdy.reshard"
Test = Callable[[ir.Operation], bool]

_TAKE_ANYTHING = ("all_slice", "all_reduce", "reduce_scatter")
"""The collectives whose operand may be without a sharding."""
_COSTS = CostModel()


@dataclass(frozen=True, slots=True)
class ReshardChain:
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
            return ReshardPlanner(first, _COSTS, strips=False).plan(shape or (), itemsize(dtype), source, target)
        return plan_across(shape or (), itemsize(dtype), source, target, (first, second), _COSTS)

    def documented_plan(self) -> ReshardPlan | None:
        """Shardy's collectives; None where there are none for it."""
        source, target, first, second = self._on_one_name()
        if source.mesh != target.mesh or first != second:
            return None
        steps = reshard_steps(shape_and_dtype(self.value.type)[0] or (), source, target, first)
        return None if steps is None else ReshardPlan(tuple(Collective(*step, 0.0) for step in steps), 0.0, 0.0)

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
        if plan.steps:
            first = plan.steps[0]
            is_unstated = first.kind not in _TAKE_ANYTHING and current_sharding(current) is None
            if is_unstated or first.result.unreduced_axes:
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


def chains(module: ir.Operation, is_link: Test, is_tail: Test) -> list[ReshardChain]:
    """The longest chains of links that end in a tail; they share no ops."""
    meshes, found, taken = module_meshes(module), list[ReshardChain](), set[ir.Operation]()
    for tail in filter(is_tail, reversed(pre_order(module))):
        target = None if tail in taken else sharding_of(tail.results[0])
        if target is not None:
            ops = _joined(tail, is_link, meshes)
            taken.update(ops)
            found.append(ReshardChain(ops, _source(ops[0], target, meshes), target, meshes))
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


# Reshards: written where the partitioner moves data, turned into collectives; and collectives made cheaper.

_ROUNDING = 1e-6
"""Bytes that are no difference. Given: they are sums of floats."""

_POLICY = Policy()
_WRITTEN = "sdy_jax.written"
"""What marks the program's own collectives while it is partitioned."""


def partition_into_reshards(module: ir.Operation, marks_partial: bool = False, policy: Policy = _POLICY) -> None:
    """`sdy-insert-explicit-reshards` in its full version: every op gets the shardings that it can run with.

    They are those of the cheapest partitioning, and a reshard leads to each of them from another one. Partial results
    are reduced by an all_reduce. Functions that are called are inlined.

    Args:
      module: a `builtin.module` with closed shardings, edited in place.
      marks_partial: whether partial results say that they are unreduced.
      policy: how the program is partitioned.

    Raises:
      UnsupportedError: an op cannot be partitioned.
    """
    inline_calls(module)
    base = base_mesh(module)
    if base is None:
        return
    mark_written(module)
    partition_main(module, Setting(base, CostModel(), policy=policy))
    for chain in chains(module, _is_made, _is_made):
        _write_as_reshard(chain)
    forget_written(module, marks_partial)


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


def partition_main(module: ir.Operation, setting: Setting) -> None:
    """Partitions the main function; arguments and results that say nothing of being whole go on saying nothing."""
    main = main_function(module)
    unstated = {side: [i for i, s in enumerate(function_shardings(main, side)) if s is None] for side in SIDES}
    partition_locally(module, setting)
    for side, indices in unstated.items():
        found = function_shardings(main, side)
        set_function_shardings(main, side, dict.fromkeys(i for i in indices if _is_whole(found[i])))


def _is_whole(sharding: TensorSharding | None) -> bool:
    return sharding is not None and sharding.is_fully_replicated and not sharding.unreduced_axes


def _is_unreduced(value: ir.Value) -> bool:
    stated = sharding_of(value)
    return stated is not None and bool(stated.unreduced_axes)


def mark_written(module: ir.Operation) -> None:
    """Marks the program's own collectives, and the ops that it states to be unreduced, before it is partitioned."""
    for op in pre_order(module):
        if op.name in COLLECTIVE_OPS or any(_is_unreduced(result) for result in op.results):
            op.attributes[_WRITTEN] = ir.UnitAttr.get(module.context)


def forget_written(module: ir.Operation, marks_partial: bool = False) -> None:
    """Removes the marks, reductions of nothing, and, unless partial results are to say that they are, "unreduced"."""
    if not marks_partial:
        _unmark_partial_results(module)
    for op in pre_order(module):
        if op.name in REDUCING_OPS and not collective_from_attributes(_kind(op), op.attributes).all_axes:
            replace_op(op, list(op.operands))
        elif _WRITTEN in op.attributes:
            del op.attributes[_WRITTEN]


def _unmark_partial_results(module: ir.Operation) -> None:
    """What only reductions of all its terms use says nothing of these, unless the program did."""
    for op in pre_order(module):
        if _WRITTEN in op.attributes or op.name in COLLECTIVE_OPS:
            continue
        for result in op.results:
            stated, taking = sharding_of(result), users(result)
            if stated is not None and stated.unreduced_axes and taking and all(_reduces(u, stated) for u in taking):
                set_sharding(result, replace(stated, unreduced_axes=(), reduction="sum"))


def _reduces(user: ir.Operation, stated: TensorSharding) -> bool:
    if user.name not in REDUCING_OPS:
        return False
    return set(stated.unreduced_axes) <= set(collective_from_attributes(_kind(user), user.attributes).all_axes)


def _is_made(op: ir.Operation) -> bool:
    is_step = op.name == RESHARD or (op.name in COLLECTIVE_OPS and op.name not in UNREDUCING_OPS)
    return is_step and _WRITTEN not in op.attributes


def _write_as_reshard(chain: ReshardChain) -> None:
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


def _create_reshard(chain: ReshardChain, value: ir.Value, ip: ir.InsertionPoint) -> ir.Value:
    attributes = sharding_attributes("sharding", closed(chain.target), value.context)
    location = chain.ops[-1].location
    return ir.Operation.create(RESHARD, [value.type], [value], attributes, loc=location, ip=ip).results[0]


def reshards_to_collectives(
    module: ir.Operation, *, keep_redundant_reshards: bool = False, compat: Compat = "shardy"
) -> None:
    """`sdy-reshard-to-collectives`: every reshard becomes the collectives that Shardy makes of it.

    With `compat=sdy_jax` they are the cheapest, and a reduction right before a reshard, and reshards in a row, are
    planned together with it. So they are where Shardy's would not move blocks of equal sizes.

    Args:
      module: a `builtin.module`, edited in place.
      keep_redundant_reshards: leave a reshard that changes nothing; else it is removed.
      compat: whose collectives; see `Compat`.

    Raises:
      UnsupportedError: a reshard leads to a mesh with other axes or devices.
    """
    planned = (RESHARD, *REDUCING_OPS) if compat == "sdy_jax" else ()
    for chain in chains(module, lambda op: op.name in planned, lambda op: op.name == RESHARD):
        plan = chain.plan() if compat == "sdy_jax" else chain.documented_plan() or chain.plan()
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


# Values that are stated to be on one device.


def resolve_single_device_shardings(
    module: ir.Operation, *, partition_count: str = "1", replica_count: str = "1"
) -> None:
    """`sdy-resolve-single-device-sharding`: what is on one device is on all, each of which computes it.

    So nothing has to be sent from that device to the others. A module without a mesh that has axes stays as it is.

    Args:
      module: a `builtin.module`, edited in place.
      partition_count, replica_count: change nothing here; nothing is sent.

    Raises:
      UnsupportedError: an op with side effects is on one device, and must not run on all.
    """
    base, meshes = base_mesh(module), module_meshes(module)
    if base is None:
        return

    def is_single(sharding: TensorSharding | None) -> bool:
        return sharding is not None and mesh_of(meshes, sharding).is_maximal

    for op in pre_order(module):
        if op.name in ("func.func", "builtin.module"):
            continue
        if not any(is_single(sharding_of(result)) for result in op.results):
            continue
        if "has_side_effect" in op.attributes and ir.BoolAttr(op.attributes["has_side_effect"]).value:
            raise UnsupportedError(
                f"{source_line(op.location)}: {op.name} has side effects and is on one device; to fix: take its "
                "sharding away to run it on every device, or its side effects"
            )
        for result in op.results:
            set_sharding(result, TensorSharding.replicated(base, rank(result)))
    for function in functions(module).values():
        sides = {"arg_attrs": list(body_of(function).arguments), "res_attrs": returned_by(function)}
        for side, values in sides.items():
            single = [i for i, s in enumerate(function_shardings(function, side)) if is_single(s)]
            whole = {i: TensorSharding.replicated(base, rank(values[i])) for i in single}
            set_function_shardings(function, side, whole)


# What is left to XLA's collective matmul: the gathers and scatters around a dot_general.

_DOT = "stablehlo.dot_general"


def remove_around_dots(module: ir.Operation) -> None:
    """`sdy-remove-all-gather-reduce-scatter-for-cmv1`: a dot_general takes and makes blocks that do not fit together.

    An all_gather that one operand of a dot_general alone takes is removed, and so is a reduce_scatter that alone takes
    its result. The rewriter of collective matmuls looks for such dots and does both while it multiplies.

    Args:
      module: a `builtin.module`, edited in place.
    """
    for dot in named(module, _DOT):
        for index, operand in enumerate(list(dot.operands)):
            gather = defining_op(operand)
            if gather is not None and gather.name == "sdy.all_gather" and len(users(operand)) == 1:
                dot.operands[index] = gather.operands[0]
                gather.erase()
        taking = users(dot.results[0])
        if len(taking) == 1 and taking[0].name == "sdy.reduce_scatter" and _adds(taking[0]):
            scattered = sharding_of(taking[0].results[0])
            assert scattered is not None
            replace_op(taking[0], list(dot.results))
            set_sharding(dot.results[0], scattered)


def _adds(scatter: ir.Operation) -> bool:
    return reduction_from_attributes(scatter.attributes) == "sum"
