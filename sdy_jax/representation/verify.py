"""The verification rules of the SDY dialect for meshes, tensor shardings and op sharding rules.

Each function raises `ShardingError` on the first rule that is broken and returns nothing otherwise. `where` names the
thing for the message ("argument `x`", "result 0 of stablehlo.dot_general", ...).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NoReturn

from sdy_jax.errors import ShardingError
from sdy_jax.representation.axes import can_merge, mesh_order, natural_order, overlaps
from sdy_jax.representation.mesh import AxisRef, Mesh
from sdy_jax.representation.rule import OpShardingRule, TensorMapping, factor_symbol
from sdy_jax.representation.sharding import REDUCTION_KINDS, DimensionSharding, TensorSharding


def _fail(where: str, problem: str, remedy: str) -> NoReturn:
    raise ShardingError(f"{where}: {problem}; {remedy}")


# Meshes.


def verify_mesh(mesh: Mesh, where: str = "mesh") -> None:
    """Axis sizes are positive, names unique, and the device ids a permutation of all positions."""
    seen: set[str] = set()
    for axis in mesh.axes:
        if axis.size < 1:
            _fail(where, f"axis {axis} has size {axis.size}", "an axis has at least one device")
        if axis.name in seen:
            _fail(where, f'axis name "{axis.name}" occurs twice in {mesh}', "axis names are unique")
        seen.add(axis.name)
    _verify_device_ids(mesh, where)


def _verify_device_ids(mesh: Mesh, where: str) -> None:
    ids = mesh.device_ids
    negative = [i for i in ids if i < 0]
    if negative:
        _fail(where, f"device id {negative[0]} is negative", "device ids count from 0")
    if not mesh.axes and len(ids) > 1:
        _fail(where, f"{len(ids)} device ids but no axes", "a mesh without axes has one device id, or none")
    if not mesh.axes or not ids:
        return
    if len(ids) != mesh.size:
        _fail(where, f"{len(ids)} device ids for {mesh.size} devices in {mesh}", f"give {mesh.size} ids, or none")
    if sorted(ids) != list(range(mesh.size)):
        _fail(where, f"device ids are not a permutation of 0..{mesh.size - 1}", "each position is named exactly once")


# Tensor shardings.


def verify_sharding(
    sharding: TensorSharding,
    meshes: Mapping[str, Mesh],
    shape: Sequence[int] | int | None,
    where: str = "sharding",
) -> None:
    """A sharding is well-formed and fits its tensor.

    Args:
      sharding: what is verified.
      meshes: the meshes of the module by symbol.
      shape: the tensor's shape, or its rank alone (the sizes do not matter: any dimension may be split unevenly); None
        for a value that is no tensor, such as a token.
      where: names the value in the message.
    """
    mesh = _mesh_of(sharding, meshes, where)
    if mesh.is_maximal:
        _verify_without_axes(sharding, "a sharding on a single device", where)
        return
    if shape is None:
        _verify_without_axes(sharding, "the sharding of a value that is no tensor", where)
        return
    rank = shape if isinstance(shape, int) else len(shape)
    if sharding.rank != rank:
        _fail(where, f"{sharding.rank} dimension shardings for a tensor of rank {rank}", "give one per dimension")
    for number, dimension in enumerate(sharding.dimensions):
        _verify_priority(dimension, f"{where}, dimension {number}")
    _verify_reduction(sharding, where)
    _verify_axes(sharding, mesh, where)


def _mesh_of(sharding: TensorSharding, meshes: Mapping[str, Mesh], where: str) -> Mesh:
    if isinstance(sharding.mesh, Mesh):
        verify_mesh(sharding.mesh, f"{where}, inline mesh")
        return sharding.mesh
    if sharding.mesh not in meshes:
        known = ", ".join(f"@{name}" for name in meshes) or "none"
        _fail(where, f"unknown mesh @{sharding.mesh}", f"the meshes are: {known}")
    return meshes[sharding.mesh]


def _verify_without_axes(sharding: TensorSharding, what: str, where: str) -> None:
    if sharding.dimensions or sharding.replicated_axes or sharding.unreduced_axes:
        _fail(where, f"{what} has dimensions or axes: <{sharding}>", "write it with `[]` and nothing else")


def _verify_priority(dimension: DimensionSharding, where: str) -> None:
    if dimension.priority is None:
        return
    if dimension.priority < 0:
        _fail(where, f"priority {dimension.priority} is negative", "0 is the most important, larger numbers less so")
    if dimension.is_closed and not dimension.axes:
        _fail(
            where, f"a priority on the empty closed dimension {dimension}", "drop the priority, or open the dimension"
        )


def _verify_reduction(sharding: TensorSharding, where: str) -> None:
    if sharding.reduction not in REDUCTION_KINDS:
        _fail(where, f'unknown reduction "{sharding.reduction}"', f"it is one of {', '.join(REDUCTION_KINDS)}")


def _verify_axes(sharding: TensorSharding, mesh: Mesh, where: str) -> None:
    lists = [(f"{where}, dimension {i}", axes) for i, axes in enumerate(sharding.axes)]
    sets = [
        (f"{where}, replicated axes", sharding.replicated_axes),
        (f"{where}, unreduced axes", sharding.unreduced_axes),
    ]
    for place, axes in lists + sets:
        verify_axis_list(axes, mesh, place)
    for place, axes in sets:
        _verify_sorted(axes, mesh, place)
    _verify_disjoint([axis for _, axes in lists + sets for axis in axes], where)


def verify_axis_list(axes: Sequence[AxisRef], mesh: Mesh, where: str = "axis list") -> None:
    """Every reference denotes digits of an axis of `mesh`, and no two neighbours can be written as one."""
    for axis in axes:
        _verify_axis(axis, mesh, where)
    for a, b in pairwise(axes):
        if can_merge(a, b):
            merged = AxisRef.canonical(a.name, a.pre_size, a.size(mesh) * b.size(mesh), mesh)
            _fail(where, f"neighbouring sub-axes {a} and {b} can be merged", f"write {merged}")


def _verify_axis(axis: AxisRef, mesh: Mesh, where: str) -> None:
    if axis.name not in mesh.sizes:
        known = ", ".join(map(str, mesh.axes)) or "none"
        _fail(where, f"unknown axis {axis}", f"the axes of the mesh are: {known}")
    if axis.sub_axis is None:
        return
    pre, size, full = axis.pre_size, axis.sub_axis.size, mesh.sizes[axis.name]
    if pre < 1:
        _fail(where, f"sub-axis {axis} has pre-size {pre}", "a pre-size is at least 1")
    if size <= 1:
        _fail(where, f"sub-axis {axis} has size {size}", "a sub-axis has at least two devices")
    if full % axis.sub_axis.next_pre_size:
        _fail(where, f"sub-axis {axis} does not fit its axis of size {full}", "pre-size times size must divide that")
    if size == full:
        _fail(where, f"sub-axis {axis} is the whole axis", f"write {AxisRef(axis.name)}")


def _verify_sorted(axes: Sequence[AxisRef], mesh: Mesh, where: str) -> None:
    ordered = sorted(axes, key=lambda axis: mesh_order(mesh, axis))
    if list(axes) != ordered:
        _fail(where, f"{_listed(axes)} is not in mesh order", f"write {_listed(ordered)}")


def _verify_disjoint(axes: Iterable[AxisRef], where: str) -> None:
    for a, b in pairwise(sorted(axes, key=natural_order)):
        if a == b:
            _fail(where, f"axis {a} is used twice", "an axis splits, replicates or is unreduced once per tensor")
        if overlaps(a, b):
            _fail(where, f"axes {a} and {b} overlap", "the axes of one sharding are disjoint")


def _listed(axes: Iterable[AxisRef]) -> str:
    return "{" + ", ".join(map(str, axes)) + "}"


# Op sharding rules.


def verify_rule(
    rule: OpShardingRule,
    operand_shapes: Sequence[Sequence[int] | None],
    result_shapes: Sequence[Sequence[int] | None],
    where: str = "sharding rule",
) -> None:
    """A rule is well-formed and fits its op.

    Args:
      rule: what is verified. The product of a dimension's factors need not equal the dimension's size.
      operand_shapes: one shape per operand; a negative size, or None for a shape, means "not static".
      result_shapes: the same for the results.
      where: names the op in the message.
    """
    sides = (("operand", rule.operand_mappings, operand_shapes), ("result", rule.result_mappings, result_shapes))
    for side, mappings, shapes in sides:
        if not mappings or len(mappings) != len(shapes):
            _fail(where, f"{len(mappings)} {side} mappings for {len(shapes)} {side}s", "give one each, at least one")
        for i, (mapping, shape) in enumerate(zip(mappings, shapes, strict=True)):
            _verify_mapping(mapping, shape, rule.factor_sizes, f"{where}, {side} {i}")
    _verify_all_used(rule, where)
    _verify_factor_types(rule, where)


def _verify_mapping(mapping: TensorMapping, shape: Sequence[int] | None, sizes: Sequence[int], where: str) -> None:
    if shape is None or any(n < 0 for n in shape):
        _fail(where, f"the tensor's shape {shape} is not static", "an op with dynamic shapes has no sharding rule")
    if len(mapping) != len(shape):
        _fail(where, f"{len(mapping)} dimension mappings for a tensor of rank {len(shape)}", "give one per dimension")
    for number, factors in enumerate(mapping):
        _verify_dimension_mapping(factors, sizes, f"{where}, dimension {number}")
    used = [f for factors in mapping for f in factors]
    twice = [f for f in used if used.count(f) > 1]
    if twice:
        _fail(where, f"factor {factor_symbol(twice[0])} occurs twice", "a factor occurs once per tensor")


def _verify_dimension_mapping(factors: Sequence[int], sizes: Sequence[int], where: str) -> None:
    if not factors:
        _fail(where, "no factor", "a dimension has at least one factor")
    for factor in factors:
        _verify_known(factor, sizes, where)
        if len(factors) > 1 and sizes[factor] == 1:
            _fail(where, f"factor {factor_symbol(factor)} of size 1 beside other factors", "leave it out")


def _verify_known(factor: int, sizes: Sequence[int], where: str) -> None:
    if not 0 <= factor < len(sizes):
        _fail(where, f"unknown factor {factor}", f"the rule gives sizes for {len(sizes)} factors, counted from 0")


def _verify_all_used(rule: OpShardingRule, where: str) -> None:
    used = frozenset[int]().union(*rule.factors_of)
    unused = [f for f in range(len(rule.factor_sizes)) if f not in used]
    if unused:
        _fail(where, f"factor {factor_symbol(unused[0])} occurs in no tensor", "every factor belongs to a dimension")


def _verify_factor_types(rule: OpShardingRule, where: str) -> None:
    types = (
        ("reduction", rule.reduction),
        ("need-replication", rule.need_replication),
        ("permutation", rule.permutation),
    )
    for name, factors in (*types, ("blocked", rule.blocked)):
        for factor in sorted(factors):
            _verify_known(factor, rule.factor_sizes, f"{where}, {name} factors")
    type_of: dict[int, str] = {}
    for name, factors in types:
        for factor in sorted(factors):
            if factor in type_of:
                both = f"both a {type_of[factor]} and a {name} factor"
                _fail(where, f"factor {factor_symbol(factor)} is {both}", "a factor has one type")
            type_of[factor] = name
    for number, mapping in enumerate(rule.result_mappings):
        reduced = sorted(rule.reduction & {f for factors in mapping for f in factors})
        if reduced:
            problem = f"reduction factor {factor_symbol(reduced[0])} occurs in result {number}"
            _fail(where, problem, "a reduction factor belongs to operands only")
