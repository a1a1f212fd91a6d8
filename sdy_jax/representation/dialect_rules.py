"""The rules that make a module of the SDY dialect valid, by the names under which errors quote them.

Source: the constraints in the SDY dialect reference, and what the verifiers in jaxlib do where it is silent. M is about
meshes, A about lists of axes, S about tensor shardings, C about collectives, O about other ops, R about op sharding
rules, D about the records of propagation.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NoReturn

from sdy_jax.errors import ShardingError

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
