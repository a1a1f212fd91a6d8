"""What makes meshes, shardings and op sharding rules valid, by the names of the dialect's rules, which errors quote."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import NoReturn

from sdy_jax.base.errors import ShardingError
from sdy_jax.ir.meshes import AxisRef, Mesh, braces, can_merge, mesh_order, natural_order, overlaps
from sdy_jax.ir.shardings import (
    REDUCTION_KINDS,
    DimensionSharding,
    OpShardingRule,
    PropagationEdges,
    TensorMapping,
    TensorSharding,
    factor_symbol,
)

# The rules that make a module of the SDY dialect valid, by the names under which errors quote them.
#
# Source: the constraints in the SDY dialect reference, and what the verifiers in jaxlib do where it is silent. M is
# about meshes, A about lists of axes, S about tensor shardings, C about collectives, O about other ops, R about op
# sharding rules, D about the records of propagation.

RULES: Mapping[str, str] = MappingProxyType({
    "M1": "an axis of a mesh has at least one device",
    "M2": "the axis names of a mesh are unique",
    "M3": "device ids are not negative",
    "M4": "a mesh without axes has one device id, or none",
    "M5": "a mesh has as many device ids as devices, or none",
    "M6": "device ids are a permutation of 0, 1, 2, ...",
    "A1": "axes are axes of the sharding's mesh",
    "A2": "an axis occurs once in a tensor's sharding",
    "A3": "a sharding has an axis whole or in parts, not both",
    "A4": "two neighbouring parts of an axis are written as one",
    "A5": "the pre-size of a sub-axis is at least 1",
    "A6": "a sub-axis has at least two devices",
    "A7": "pre-size times size of a sub-axis divides the size of its axis",
    "A8": "a sub-axis is smaller than its axis; the whole axis is written by its name",
    "A9": "the sub-axes in a tensor's sharding do not overlap",
    "A11": "replicated axes are in the order of the mesh",
    "A12": "unreduced axes are in the order of the mesh",
    "S1": "a sharding has one entry per dimension of its tensor",
    "S2": "a sharding names a mesh of its module",
    "S3": "a sharding on a single device is `[]`, without axes",
    "S4": "a value that is no tensor has the sharding `[]`, without axes; a tensor without rank has none",
    "S5": "a tuple with a sharding has one element",
    "S6": "an empty closed dimension has no priority, and no priority is negative",
    "S8": "axes that a computation is manual on occur nowhere inside it",
    "S9": "an argument or result of a function has one `#sdy.sharding`; another op a `#sdy.sharding_per_value` with one"
    " entry per result (without results: one for a single device, or of rank 0)",
    "C1": "the operand of a collective has a sharding; all_slice, all_reduce and reduce_scatter take one without for"
    " replicated",
    "C3": "a collective keeps the mesh; only collective_permute changes it, to one with the same axes in another device"
    " order",
    "C4": "a collective keeps the type, and what it lists per dimension it lists for each dimension",
    "C5": "axes to be reduced, or to be unreduced, are in the order of the mesh",
    "C8": "all_gather, all_to_all and sharded_to_unreduced take the minor end of what splits a dimension",
    "C9": "the result of a collective is split as the operand is after it",
    "C10": "an all_to_all has parameters, with axes each, from and to dimensions that are all different, the sources in"
    " ascending order",
    "C11": "a collective_permute keeps the number of shards of each dimension",
    "C12": "axes that are reduced split nothing, are not explicitly replicated, and are not unreduced in the result",
    "C13": "replicated_to_unreduced has axes that split nothing and are not unreduced yet",
    "C14": "the result of a conversion is unreduced along the operand's unreduced axes and those of the conversion",
    "O1": "a propagation barrier lets NONE, FORWARD or BACKWARD through",
    "O2a": "the values of a manual computation are split over a mesh; none lies on a single device",
    "O2b": "a manual computation has a sharding and an inner value per operand and per result",
    "O2c": "in each dimension of a manual computation's shardings, manual axes come before free ones",
    "O2d": "manual axes divide the dimensions that they split",
    "O2e": "inside a manual computation, a value has its outer shape divided by the manual axes",
    "O2f": "the shardings of a manual computation have one mesh in common",
    "O2g": "manual axes are axes of the mesh of the computation's shardings",
    "O2h": "an axis is manual once, not again in a computation inside",
    "O3": "a named computation's inner values have the types of its operands and results, and a sharding each, or none",
    "O4": "a data-flow edge has a static shape, and is the only use of a value that no sdy op but a manual or named"
    " computation makes",
    "O5": "a function's data-flow edge has a static shape, and is the only use of an argument or of a call's result",
    "R1": "a sharding rule is an `#sdy.op_sharding_rule` with a mapping per operand and result, at least one of each",
    "R2": "a mapping has one entry per dimension of its tensor, which has a static shape",
    "R3": "each dimension has a factor",
    "R4": "factors are those that the rule gives sizes for",
    "R5": "a factor occurs once in a tensor",
    "R6": "a factor of size 1 stands alone in its dimension",
    "R7": "each factor occurs in a tensor",
    "R8": "the factors of one kind are listed once each, in ascending order, and have sizes",
    "R9": "a factor is of one kind: reduction, need_replication or permutation",
    "R10": "a reduction factor occurs in operands only",
    "R12": "the sizes are those of the factors i, j, k, ... in that order",
    "D1": "records of propagation name each step and each target once, and tensors and axes that there are",
})  # fmt: skip
"""What each rule demands. Numbers left out are cases that are valid."""

DOCUMENTED_RULES: Mapping[str, str] = MappingProxyType({
    "M7": "device ids that are 0, 1, 2, ... in order are left out",
    "M8": "the meshes of a module have one number of devices, but for those of a single device and empty ones",
    "S10": "a dimension of size 0 is not split",
    "O2i": "the sharding of each operand and result of a manual computation names every manual axis, which splits a"
    " dimension there or is explicitly replicated",
    "O2j": "manual axes are in the order of the mesh",
    "O2k": "the shardings of a manual computation have manual axes whole, not in parts",
})  # fmt: skip
"""What the references demand besides, and jaxlib accepts: for checks that are to be strict."""


class RuleError(ShardingError):
    """A broken rule.

    `message` is `[RULE] what and why`; `location`, in `str` as well, is the op's as MLIR writes it, where known.
    `values` are the values that the message speaks of: what it calls each, the location of its op, or its own if it is
    an argument, and as which result it has it.
    """

    def __init__(
        self, message: str, location: str | None = None, values: Mapping[str, tuple[str, int | None]] | None = None
    ):
        self.message, self.location, self.values = message, location, values or {}
        super().__init__(message if location is None else f"{message} (at {location})")


def fail(rule: str, where: str, problem: str, remedy: str | None = None) -> NoReturn:
    """Says that `where` breaks a rule, and what would be right: the rule's own words unless there are better ones."""
    raise RuleError(f"[{rule}] {where}: {problem}; {remedy or RULES.get(rule) or DOCUMENTED_RULES[rule]}")


# The verification rules of the SDY dialect for meshes, tensor shardings and op sharding rules.
#
# Each function raises `ShardingError` on the first rule that is broken, named as in `dialect_rules`, and returns
# nothing otherwise. `where` names the thing for the message ("argument `x`", "result 0 of stablehlo.dot_general",
# ...).

# Meshes.


def verify_mesh(mesh: Mesh, where: str = "mesh") -> None:
    """Axis sizes are positive, names unique, and the device ids a permutation of all positions."""
    seen: set[str] = set()
    for axis in mesh.axes:
        if axis.size < 1:
            fail("M1", where, f"axis {axis} has size {axis.size}")
        if axis.name in seen:
            fail("M2", where, f'axis name "{axis.name}" occurs twice in {mesh}')
        seen.add(axis.name)
    _verify_device_ids(mesh, where)


def _verify_device_ids(mesh: Mesh, where: str) -> None:
    ids = mesh.device_ids
    negative = [i for i in ids if i < 0]
    if negative:
        fail("M3", where, f"device id {negative[0]} is negative", "device ids count from 0")
    if not mesh.axes and len(ids) > 1:
        fail("M4", where, f"{len(ids)} device ids but no axes")
    if not mesh.axes or not ids:
        return
    if len(ids) != mesh.size:
        fail("M5", where, f"{len(ids)} device ids for {mesh.size} devices in {mesh}", f"give {mesh.size} ids, or none")
    if sorted(ids) != list(range(mesh.size)):
        problem = f"the device ids of {mesh} are not a permutation of 0..{mesh.size - 1}"
        fail("M6", where, problem, "each position is named exactly once")


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
        _verify_without_axes("S3", sharding, "a sharding on a single device", where)
        return
    if shape is None:
        _verify_without_axes("S4", sharding, "the sharding of a value that is no tensor", where)
        return
    rank = shape if isinstance(shape, int) else len(shape)
    if sharding.rank != rank:
        fail("S1", where, f"{sharding.rank} dimension shardings for a tensor of rank {rank}")
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
        fail("S2", where, f"unknown mesh @{sharding.mesh}", f"the meshes are: {known}")
    return meshes[sharding.mesh]


def _verify_without_axes(rule: str, sharding: TensorSharding, what: str, where: str) -> None:
    if sharding.dimensions or sharding.replicated_axes or sharding.unreduced_axes:
        fail(rule, where, f"{what} has dimensions or axes: <{sharding}>", "write it with `[]` and nothing else")


def _verify_priority(dimension: DimensionSharding, where: str) -> None:
    if dimension.priority is None:
        return
    if dimension.priority < 0:
        fail("S6", where, f"priority {dimension.priority} is negative", "0 is the most important, larger less so")
    if dimension.is_closed and not dimension.axes:
        problem = f"a priority on the empty closed dimension {dimension}"
        fail("S6", where, problem, "drop the priority, or open the dimension")


def _verify_reduction(sharding: TensorSharding, where: str) -> None:
    if sharding.reduction not in REDUCTION_KINDS:
        kinds = ", ".join(REDUCTION_KINDS)
        raise ShardingError(f'{where}: unknown reduction "{sharding.reduction}"; it is one of {kinds}')


def _verify_axes(sharding: TensorSharding, mesh: Mesh, where: str) -> None:
    lists = [(f"{where}, dimension {i}", axes) for i, axes in enumerate(sharding.axes)]
    lists.append((f"{where}, replicated axes", sharding.replicated_axes))
    lists.append((f"{where}, unreduced axes", sharding.unreduced_axes))
    for place, axes in lists:
        verify_axis_list(axes, mesh, place)
    _verify_sorted("A11", sharding.replicated_axes, mesh, f"{where}, replicated axes")
    _verify_sorted("A12", sharding.unreduced_axes, mesh, f"{where}, unreduced axes")
    verify_disjoint([axis for _, axes in lists for axis in axes], where)


def verify_axis_list(axes: Sequence[AxisRef], mesh: Mesh, where: str = "axis list") -> None:
    """Every reference denotes digits of an axis of `mesh`, and no two neighbours can be written as one."""
    for axis in axes:
        _verify_axis(axis, mesh, where)
    for a, b in pairwise(axes):
        if can_merge(a, b):
            merged = AxisRef.canonical(a.name, a.pre_size, a.size(mesh) * b.size(mesh), mesh)
            fail("A4", where, f"neighbouring sub-axes {a} and {b} can be merged", f"write {merged}")


def _verify_axis(axis: AxisRef, mesh: Mesh, where: str) -> None:
    if axis.name not in mesh.sizes:
        known = ", ".join(map(str, mesh.axes)) or "none"
        fail("A1", where, f"unknown axis {axis}", f"the axes of the mesh are: {known}")
    if axis.sub_axis is None:
        return
    pre, size, full = axis.pre_size, axis.sub_axis.size, mesh.sizes[axis.name]
    if pre < 1:
        fail("A5", where, f"sub-axis {axis} has pre-size {pre}")
    if size <= 1:
        fail("A6", where, f"sub-axis {axis} has size {size}")
    if full % axis.sub_axis.next_pre_size:
        fail("A7", where, f"sub-axis {axis} does not fit its axis of size {full}")
    if size == full:
        fail("A8", where, f"sub-axis {axis} is the whole axis", f"write {AxisRef(axis.name)}")


def _verify_sorted(rule: str, axes: Sequence[AxisRef], mesh: Mesh, where: str) -> None:
    ordered = sorted(axes, key=lambda axis: mesh_order(mesh, axis))
    if list(axes) != ordered:
        fail(rule, where, f"{braces(axes)} is not in mesh order", f"write {braces(ordered)}")


def verify_disjoint(axes: Iterable[AxisRef], where: str = "axis list") -> None:
    """No two references share a digit."""
    for a, b in pairwise(sorted(axes, key=natural_order)):
        if a == b:
            fail("A2", where, f"axis {a} is used twice", "an axis splits, replicates or is unreduced once per tensor")
        if overlaps(a, b):
            fail("A9" if a.sub_axis and b.sub_axis else "A3", where, f"axes {a} and {b} overlap")


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
            fail("R1", where, f"{len(mappings)} {side} mappings for {len(shapes)} {side}s")
        for i, (mapping, shape) in enumerate(zip(mappings, shapes, strict=True)):
            _verify_mapping(mapping, shape, rule.factor_sizes, f"{where}, {side} {i}")
    _verify_all_used(rule, where)
    _verify_factor_types(rule, where)


def _verify_mapping(mapping: TensorMapping, shape: Sequence[int] | None, sizes: Sequence[int], where: str) -> None:
    if shape is None or any(n < 0 for n in shape):
        fail("R2", where, "its shape is not static", "an op with dynamic shapes has no sharding rule")
    if len(mapping) != len(shape):
        fail("R2", where, f"{len(mapping)} dimension mappings for a tensor of rank {len(shape)}")
    for number, factors in enumerate(mapping):
        _verify_dimension_mapping(factors, sizes, f"{where}, dimension {number}")
    used = [f for factors in mapping for f in factors]
    twice = [f for f in used if used.count(f) > 1]
    if twice:
        fail("R5", where, f"factor {factor_symbol(twice[0])} occurs twice")


def _verify_dimension_mapping(factors: Sequence[int], sizes: Sequence[int], where: str) -> None:
    if not factors:
        fail("R3", where, "no factor")
    for factor in factors:
        _verify_known("R4", factor, sizes, where)
        if len(factors) > 1 and sizes[factor] == 1:
            fail("R6", where, f"factor {factor_symbol(factor)} of size 1 beside other factors", "leave it out")


def _verify_known(rule: str, factor: int, sizes: Sequence[int], where: str) -> None:
    if not 0 <= factor < len(sizes):
        sized = ", ".join(map(factor_symbol, range(len(sizes)))) or "no factors"
        fail(rule, where, f"unknown factor {_named(factor)}", f"the rule gives sizes for {sized}")


def _named(factor: int) -> str:
    return factor_symbol(factor) if factor >= 0 else str(factor)


def _verify_all_used(rule: OpShardingRule, where: str) -> None:
    used = frozenset[int]().union(*rule.factors_of)
    unused = [f for f in range(len(rule.factor_sizes)) if f not in used]
    if unused:
        fail("R7", where, f"factor {factor_symbol(unused[0])} occurs in no tensor")


def _verify_factor_types(rule: OpShardingRule, where: str) -> None:
    types = (
        ("reduction", rule.reduction),
        ("need-replication", rule.need_replication),
        ("permutation", rule.permutation),
    )
    for name, factors in (*types, ("blocked", rule.blocked)):
        for factor in sorted(factors):
            _verify_known("R8", factor, rule.factor_sizes, f"{where}, {name} factors")
    type_of: dict[int, str] = {}
    for name, factors in types:
        for factor in sorted(factors):
            if factor in type_of:
                both = f"both a {type_of[factor]} and a {name} factor"
                fail("R9", where, f"factor {factor_symbol(factor)} is {both}")
            type_of[factor] = name
    for number, mapping in enumerate(rule.result_mappings):
        reduced = sorted(rule.reduction & {f for factors in mapping for f in factors})
        if reduced:
            fail("R10", where, f"reduction factor {factor_symbol(reduced[0])} occurs in result {number}")


# Records of propagation.


def verify_propagation_edges(edges: PropagationEdges, where: str = "propagation edges") -> None:
    """Each step is recorded once, and what spreads goes elsewhere, to each place once."""
    steps = [step.index for step in edges.steps]
    for number in steps:
        if number < 0 or steps.count(number) > 1:
            fail("D1", where, f"step {number} {'is negative' if number < 0 else 'occurs twice'}")
    for spread in edges.spreads():
        if spread.source in spread.targets or len(set(spread.targets)) < len(spread.targets):
            fail("D1", where, f"{spread} names a tensor twice")
