"""Propagation as passes, by Shardy's names; what users state, recorded before it and kept after it; and shardings at
borders: of manual computations before it, of programs after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Literal

from jax.extend.mlir import ir

from sdy_jax.base.errors import ShardingError
from sdy_jax.ir.attributes import manual_axes_to_attribute, shardings_from_attribute, shardings_to_attribute
from sdy_jax.ir.graph import IN_GROUP, STATED, STATED_INSIDE, Graph, derived_results
from sdy_jax.ir.locations import source_line
from sdy_jax.ir.meshes import AxisRef, Mesh, set_difference, sort_and_merge
from sdy_jax.ir.operations import (
    DATA_FLOW_OPS,
    body_of,
    functions,
    just_after,
    main_function,
    manual_axes,
    module_meshes,
    named,
    rank,
    replace_op,
    terminator_of,
)
from sdy_jax.ir.shardings import DimensionSharding, TensorSharding, manual_prefix
from sdy_jax.ir.stored_shardings import (
    function_shardings,
    list_of,
    map_shardings,
    mesh_of,
    set_function_shardings,
    set_list,
    sharding_of,
    stating,
)
from sdy_jax.shardy.passes.constraints import (
    CONSTRAINT,
    GROUP,
    current_sharding,
    drop_rules,
    group_id,
    place_of_group,
    synchronize_groups,
    write_rules,
)
from sdy_jax.shardy.passes.data_flow_edges import block_argument_owners, edge_of
from sdy_jax.shardy.passes.debug_info import DebugInfo
from sdy_jax.shardy.propagation import propagate
from sdy_jax.shardy.propagation.engine import Engine
from sdy_jax.shardy.rules import Compat, RuleBook

# Shardings at the border of a manual computation: outside, manual axes lead each dimension; inside, only free axes.
#
# `clean_manual_axes` completes the shardings there.


def clean_manual_axes(module: ir.Operation) -> None:
    """Sorts manual axes in mesh order and adds the unmentioned ones to each sharding's replicated axes."""
    meshes = module_meshes(module)
    for op in named(module, "sdy.manual_computation"):
        _clean(op, meshes)


def _clean(op: ir.Operation, meshes: dict[str, Mesh]) -> None:
    manual = manual_axes(op)
    lists = {name: list_of(op, name) for name in ("in_shardings", "out_shardings")}
    common = _common_mesh([s for shardings in lists.values() for s in shardings if s], meshes)
    if common is None:
        if manual and len(body_of(op).operations) > 1:
            raise ShardingError(
                f"manual computation with manual axes {list(manual)} but without in_shardings and "
                f"out_shardings, at {source_line(op.location)}; to fix: give it a sharding"
            )
        return
    mesh = meshes[common] if isinstance(common, str) else common
    ordered = tuple(sorted(manual, key=mesh.positions.__getitem__))
    op.attributes["manual_axes"] = manual_axes_to_attribute(ordered, op.context)
    for (name, shardings), values in zip(lists.items(), (op.operands, op.results), strict=True):
        if name not in op.attributes:
            continue
        cleaned = [
            _complete(s, ordered, common, mesh) if isinstance(v.type, ir.ShapedType) else s
            for s, v in zip(shardings, values, strict=True)
            if s
        ]
        op.attributes[name] = shardings_to_attribute(tuple(cleaned), op.context)


def _common_mesh(shardings: Sequence[TensorSharding], meshes: dict[str, Mesh]) -> str | Mesh | None:
    """The first mesh that is not empty, else the first."""
    for sharding in shardings:
        if not mesh_of(meshes, sharding).is_empty:
            return sharding.mesh
    return shardings[0].mesh if shardings else None


def _complete(sharding: TensorSharding, manual: Sequence[str], common: str | Mesh, mesh: Mesh) -> TensorSharding:
    used = [axis for axes in sharding.axes for axis in axes]
    used += [*sharding.replicated_axes, *sharding.unreduced_axes]
    missing = set_difference([AxisRef(name) for name in manual], used, mesh)
    if not missing:
        return sharding
    replicated = sort_and_merge([*sharding.replicated_axes, *missing], mesh)
    return TensorSharding(common, sharding.dimensions, replicated, sharding.unreduced_axes, sharding.reduction)


# Propagation as passes: Shardy's names and options.

StrategyName = Literal["aggressive", "basic", "basic-then-aggressive"]


def _propagate(
    module: ir.Operation,
    rules: RuleBook | None = None,
    *,
    user_priorities: bool,
    propagation_strategy: StrategyName = "aggressive",
    run_op_priority_propagation: bool = True,
    conservative_propagation: bool = False,
    keep_sharding_rules: bool = False,
    debug_sharding_origins: bool = False,
    debug_propagation_edge_sharding: bool = False,
    module_dump_directory: str = "",
    compat: Compat = "shardy",
) -> None:
    """Propagates and erases dead ops.

    Args:
      module: a `builtin.module`, edited in place.
      rules: those of its ops, if somebody else wants to know them, too; made with the same options.
      user_priorities: one propagation per user priority.
      propagation_strategy: how factors propagate.
      run_op_priority_propagation: five fixed points in which more and more ops take part, instead of one.
      conservative_propagation: leave out factors along which a result's shard is not one operand's, and sub-axes.
      keep_sharding_rules: leave `sdy.sharding_rule` on the ops that have a rule. Otherwise only custom ones stay.
      debug_sharding_origins, debug_propagation_edge_sharding: write where each axis came from.
      module_dump_directory: accepted; nothing is written there.
      compat: `"shardy"` propagates as Shardy does; `"sdy_jax"` also by rules that Shardy does not have; see `Compat`.
    """
    synchronize_groups(module)
    graph = Graph(module)
    debug = DebugInfo(graph, origins=debug_sharding_origins, edges=debug_propagation_edge_sharding)
    engine = Engine(
        graph,
        strategy=propagation_strategy,
        op_priorities=run_op_priority_propagation,
        conservative=conservative_propagation,
        recorder=debug.events,
        rules=rules or RuleBook(conservative_propagation, compat),
    )
    propagate(engine, user_priorities=user_priorities)
    debug.write(engine)
    if keep_sharding_rules:
        write_rules(graph, conservative_propagation, compat)
    else:
        drop_rules(op.mlir for op in graph.ops)
    for op in engine.liveness.dead:
        op.mlir.erase()


aggressive_propagate = partial(_propagate, user_priorities=False, run_op_priority_propagation=False)
basic_propagate = partial(aggressive_propagate, propagation_strategy="basic")
op_priority_propagate = partial(_propagate, user_priorities=False)
user_priority_propagate = partial(_propagate, user_priorities=True)


# What users state of shardings, kept beside what propagation makes of it.
#
# Propagation fills open dimensions in, and export closes them. The partitioner may fill them in otherwise, where that
# costs less: it asks here which dimensions were open, and which values are to be sharded alike.

_MANUAL = "sdy.manual_computation"


def record_statements(module: ir.Operation) -> None:
    """Records what constraints with open dimensions, and data-flow edges, state before propagation."""
    for op in named(module, CONSTRAINT, *DATA_FLOW_OPS):
        if op.name == CONSTRAINT:
            stated = sharding_of(op.results[0])
            if stated is not None and not stated.is_fully_closed:
                _record(op, STATED, op.results, [stated])
            continue
        arguments = block_argument_owners(op)
        _record(op, STATED_INSIDE, arguments, _stated_for(op, "in_shardings", arguments))
        _record(op, STATED, op.results, _stated_for(op, "out_shardings", op.results))


def _stated_for(op: ir.Operation, border: str, owners: Sequence[ir.Value]) -> list[TensorSharding | None]:
    """What is stated for the edges of some owners: at the border of a manual computation, else at the edges."""
    if op.name == _MANUAL:
        return list_of(op, border)
    edges = [edge_of(owner) for owner in owners]
    derived = derived_results(op.attributes) if border == "out_shardings" else ()
    return [
        None if edge is None or number in derived else sharding_of(edge.results[0]) for number, edge in enumerate(edges)
    ]


def _record(op: ir.Operation, name: str, values: Sequence[ir.Value], found: Sequence[TensorSharding | None]) -> None:
    mesh = next((sharding.mesh for sharding in found if sharding is not None), None)
    if mesh is not None:
        every = [s or TensorSharding.fully_open(mesh, rank(v)) for s, v in zip(found, values, strict=True)]
        op.attributes[name] = shardings_to_attribute(tuple(every), op.context)


def keep_statements(module: ir.Operation) -> None:
    """After propagation: members of a group go through a reshard each, which says the group; constraints that state
    nothing are gone."""
    groups: dict[int, list[ir.Operation]] = {}
    for op in named(module, GROUP):
        groups.setdefault(group_id(op), []).append(op)
    for members in groups.values():
        if len(members) > 1:
            _reshard_alike(module, members)
        for op in members:
            op.erase()
    for op in named(module, CONSTRAINT):
        if STATED in op.attributes and _states_nothing(op):
            replace_op(op, op.operands)


def _reshard_alike(module: ir.Operation, members: Sequence[ir.Operation]) -> None:
    values = [op.operands[0] for op in members]
    found = (sharding for sharding in map(current_sharding, values) if sharding is not None)
    alike = next(found, None) or TensorSharding.replicated(next(iter(module_meshes(module))), rank(values[0]))
    for op, value in zip(members, values, strict=True):
        location = ir.Location.name("sharding_group", place_of_group(op), op.context)
        reshard = stating("sdy.reshard", value, alike, location, just_after(value))
        reshard.attributes[IN_GROUP] = op.attributes["group_id"]
        value.replace_all_uses_except(reshard.results[0], reshard)


def _states_nothing(constraint: ir.Operation) -> bool:
    (stated,) = shardings_from_attribute(constraint.attributes[STATED])
    return stated == TensorSharding.fully_open(stated.mesh, stated.rank)


# What happens to shardings after propagation: divisible at the border of the program, then closed everywhere.


def close_shardings(module: ir.Operation) -> None:
    """Closes every dimension of every sharding and drops explicit replication."""
    map_shardings(module, TensorSharding.closed_like)


def remove_sub_axes(module: ir.Operation) -> None:
    """In main's open dimensions, drops the first sub-axis and all axes after it."""

    def whole(sharding: TensorSharding, _: ir.Value) -> TensorSharding:
        dimensions = (
            d if d.is_closed else replace(d, axes=tuple(takewhile(lambda a: a.sub_axis is None, d.axes)))
            for d in sharding.dimensions
        )
        return replace(sharding, dimensions=tuple(dimensions))

    _change_boundary(main_function(module), whole)


def make_boundary_divisible(module: ir.Operation) -> None:
    """Shortens shardings that do not divide their dimension: of functions, calls and manual computations."""
    meshes = module_meshes(module)

    def divisible(sharding: TensorSharding, value: ir.Value) -> TensorSharding:
        return divisible_sharding(sharding, _shape(value), mesh_of(meshes, sharding))

    for function in functions(module).values():
        _change_boundary(function, divisible)
    for op in named(module, "func.call", "sdy.manual_computation"):
        if op.name != "func.call":
            _change_manual(op, meshes)
            continue
        known = zip(list_of(op, "sdy.sharding"), op.results, strict=True)
        set_list(op, "sdy.sharding", [s and divisible(s, v) for s, v in known])


def _shape(value: ir.Value) -> Sequence[int]:
    return tuple(value.type.shape) if isinstance(value.type, ir.RankedTensorType) else ()


def _change_boundary(function: ir.Operation, change: Callable[[TensorSharding, ir.Value], TensorSharding]) -> None:
    block = body_of(function)
    for name, values in (("arg_attrs", block.arguments), ("res_attrs", terminator_of(block).operands)):
        changed = {}
        for index, (old, value) in enumerate(zip(function_shardings(function, name), values, strict=True)):
            new = old and change(old, value)
            if new != old:
                changed[index] = new
        set_function_shardings(function, name, changed)


def _change_manual(op: ir.Operation, meshes: dict[str, Mesh]) -> None:
    manual = manual_axes(op)
    inner = list(body_of(op).arguments)
    free = [
        s and _divisible_inside(s, _shape(v), mesh_of(meshes, s), manual)
        for s, v in zip(list_of(op, "in_shardings"), inner, strict=True)
    ]
    set_list(op, "in_shardings", free)
    outer = [
        s and divisible_sharding(s, _shape(v), mesh_of(meshes, s))
        for s, v in zip(list_of(op, "out_shardings"), op.results, strict=True)
    ]
    set_list(op, "out_shardings", outer)


def _divisible_inside(
    sharding: TensorSharding, shape: Sequence[int], mesh: Mesh, manual: Sequence[str]
) -> TensorSharding:
    """Shortens the free axes against the shape inside; the manual axes in front of them stay."""
    prefixes = [manual_prefix(d.axes, manual) for d in sharding.dimensions]
    free = replace(
        sharding,
        dimensions=tuple(replace(d, axes=d.axes[len(p) :]) for d, p in zip(sharding.dimensions, prefixes, strict=True)),
    )
    shortened = divisible_sharding(free, shape, mesh)
    return replace(
        shortened,
        dimensions=tuple(replace(d, axes=p + d.axes) for d, p in zip(shortened.dimensions, prefixes, strict=True)),
    )


def divisible_sharding(sharding: TensorSharding, shape: Sequence[int], mesh: Mesh) -> TensorSharding:
    """Each dimension with the largest prefix of its axes that divides its size evenly."""
    dimensions = tuple(_divisible(d, n, mesh) for d, n in zip(sharding.dimensions, shape, strict=False))
    return replace(sharding, dimensions=dimensions) if dimensions != sharding.dimensions else sharding


def _divisible(dimension: DimensionSharding, size: int, mesh: Mesh) -> DimensionSharding:
    """6 split by `"c"` of size 4 becomes 6 split by `"c":(1)2`."""
    if size % math.prod(a.size(mesh) for a in dimension.axes) == 0:
        return dimension
    kept: list[AxisRef] = []
    for axis in dimension.axes:
        common = math.gcd(axis.size(mesh), size)
        if common == 1:
            break
        if common != axis.size(mesh):
            kept.append(AxisRef.sub(axis.name, axis.pre_size, common))
            break
        kept.append(axis)
        size //= common
    return DimensionSharding(tuple(kept), dimension.is_closed)
