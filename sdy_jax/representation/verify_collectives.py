"""The verification rules of the sdy collectives: between what an op says, its operand's and its result's sharding.

`verify_collective` has the dialect's rules, `verify_strictly` those that make a program right which says all of its
unreduced axes, as ours do. Both expect the two shardings to be legal themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from sdy_jax.representation.axes import braces, overlaps, set_difference, sort_axes
from sdy_jax.representation.dialect_rules import fail
from sdy_jax.representation.mesh import Axes, Mesh, axes_size
from sdy_jax.representation.sdy_collectives import (
    FLAT,
    PER_DIMENSION,
    REDUCING,
    UNREDUCING,
    SdyCollective,
    sharding_after,
)
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.representation.verify import verify_axis_list, verify_disjoint

STRICT_RULES: Mapping[str, str] = MappingProxyType({
    "V1": "only reducing collectives and conversions change the unreduced axes, and only along their own axes",
    "V2": "a value that is unreduced along an axis is scattered along it, not sliced",
    "V3": "a value is reduced along axes that it is unreduced along, and stays unreduced along its others",
    "V4": "a collective changes how its operand lies",
    "V5": "blocks of a dimension that does not divide are joined to blocks, or cut into blocks",
    "V6": "what terms flow into, or is computed of them, is unreduced along the same axes and by the same reduction",
    "V7": "a result is unreduced along the axes along which its op combines, by the op's reduction, and no others",
    "V8": "terms pass through ops that are linear in them: all operands that are added up are terms, others whole",
    "V9": "all results of an op are unreduced alike, but along factors that they have",
    "V10": "terms are combined by the reduction that they are terms of",
})  # fmt: skip
"""What our own partitioned modules keep beyond the dialect's rules. A broken one is a mistake of the partitioner."""


def verify_collective(
    collective: SdyCollective,
    operand: TensorSharding,
    operand_mesh: Mesh,
    result: TensorSharding,
    result_mesh: Mesh,
    where: str,
) -> None:
    """The dialect's rules.

    Raises:
        RuleError: a rule from C3 on, or one about lists of axes.
    """
    if collective.kind == "collective_permute":
        _verify_permute(operand, operand_mesh, result, result_mesh, where)
        return
    if operand_mesh != result_mesh:
        fail("C3", where, f"the operand is on the mesh {operand_mesh}, the result on {result_mesh}")
    verify_own_attributes(collective, result.rank, result_mesh, where)
    expected = sharding_after(collective, operand, result_mesh, where)
    for dim, (wanted, given) in enumerate(zip(expected.axes, result.axes, strict=True)):
        if wanted != given:
            fail("C9", f"{where}, dimension {dim}", f"the result is {braces(given)}", f"it would be {braces(wanted)}")
    if collective.kind == "all_reduce":
        _verify_reduced(collective.axes, operand, result, where)
    if collective.kind == "replicated_to_unreduced":
        _verify_converted(collective.axes, operand, result, where)
    if collective.kind in UNREDUCING and expected.unreduced_axes != result.unreduced_axes:
        fail("C14", where, f"the result is unreduced along {braces(result.unreduced_axes)}")


def _verify_permute(
    operand: TensorSharding, operand_mesh: Mesh, result: TensorSharding, result_mesh: Mesh, where: str
) -> None:
    if operand_mesh.axes != result_mesh.axes or operand.rank != result.rank:
        fail("C3", where, f"the axes of {operand_mesh} become those of {result_mesh}")
    if operand.mesh != result.mesh and operand_mesh.device_ids == result_mesh.device_ids:
        fail("C3", where, f"{operand.mesh} and {result.mesh} have their devices in the same order")
    for dim, axes in enumerate(zip(operand.axes, result.axes, strict=True)):
        before, after = (axes_size(a, result_mesh) for a in axes)
        if before != after:
            fail("C11", f"{where}, dimension {dim}", f"{before} shards become {after}")


def verify_own_attributes(collective: SdyCollective, rank: int, mesh: Mesh, where: str) -> None:
    """The rules of what the op says itself, whatever its operand: its axes and parameters, for a tensor of `rank`.

    Raises:
        RuleError: C4, C5, C10, or one about lists of axes.
    """
    if collective.kind in PER_DIMENSION and len(collective.axes) != rank:
        fail("C4", where, f"{len(collective.axes)} lists of axes for a tensor of rank {rank}", "give one per dimension")
    for axes in collective.lists:
        verify_axis_list(axes, mesh, f"{where}, its axes")
    verify_disjoint(collective.all_axes, f"{where}, its axes")
    if collective.kind in FLAT and collective.axes != sort_axes(collective.axes, mesh):
        fail("C5", where, f"the axes are {braces(collective.axes)}")
    if collective.kind == "all_to_all":
        _verify_params(collective, rank, where)


def _verify_params(collective: SdyCollective, rank: int, where: str) -> None:
    params = collective.params
    if not params or not all(axes for axes, _, _ in params):
        fail("C10", where, "a parameter is empty" if params else "the parameter list is empty")
    sources, targets = [s for _, s, _ in params], [t for _, _, t in params]
    for dim in (*sources, *targets):
        if not 0 <= dim < rank:
            fail("C10", where, f"dimension {dim} is out of range", f"the tensor has dimensions 0 to {rank - 1}")
    if len({*sources, *targets}) < 2 * len(params):
        fail("C10", where, f"dimensions {sources} to {targets} are not all different")
    if sources != sorted(sources):
        fail("C10", where, f"the source dimensions are {sources}")


def _verify_reduced(axes: Axes, operand: TensorSharding, result: TensorSharding, where: str) -> None:
    taken = {"splits a dimension": _flat(operand.axes), "is explicitly replicated": operand.replicated_axes}
    _verify_apart("C12", axes, {**taken, "is unreduced in the result": result.unreduced_axes}, where)


def _verify_converted(axes: Axes, operand: TensorSharding, result: TensorSharding, where: str) -> None:
    if operand.dimensions != result.dimensions:  # open dimensions and priorities count here
        fail("C9", where, f"<{operand}> becomes <{result}>", "the dimensions of both are written alike")
    if not axes:
        fail("C13", where, "there are no axes")
    taken = {"splits a dimension": _flat(operand.axes), "is unreduced already": operand.unreduced_axes}
    _verify_apart("C13", axes, taken, where)


def _verify_apart(rule: str, axes: Axes, taken: Mapping[str, Axes], where: str) -> None:
    for role, others in taken.items():
        for axis in axes:
            if any(overlaps(axis, other) for other in others):
                fail(rule, where, f"axis {axis} {role}")


def verify_counted_once(collective: SdyCollective, operand: TensorSharding, mesh: Mesh, where: str) -> None:
    """Reductions take unreduced values, and unreduced values reach reductions only: V2 and the first half of V3.

    Raises:
        RuleError: which rule, and the axes.
    """
    axes, unreduced = collective.all_axes, operand.unreduced_axes
    partial = [axis for axis in axes if any(overlaps(axis, other) for other in unreduced)]
    if collective.kind == "all_slice" and partial:
        _fail("V2", where, f"the operand is unreduced along {braces(partial)}")
    whole = set_difference(axes, unreduced, mesh)
    if collective.kind in REDUCING and whole:
        _fail("V3", where, f"the operand is not unreduced along {braces(whole)}, it would be counted repeatedly")


def verify_strictly(
    collective: SdyCollective, operand: TensorSharding, result: TensorSharding, mesh: Mesh, where: str
) -> None:
    """No unreduced axis is lost, made up or counted twice: V1 to V3. The dialect's rules hold already.

    Raises:
        RuleError: which rule, and the axes.
    """
    verify_counted_once(collective, operand, mesh, where)
    expected = operand if collective.kind == "collective_permute" else sharding_after(collective, operand, mesh, where)
    if result.unreduced_axes != expected.unreduced_axes:
        rule = "V3" if collective.kind in REDUCING else "V1"
        problem = f"the result is unreduced along {braces(result.unreduced_axes)}"
        _fail(rule, where, f"{problem} instead of {braces(expected.unreduced_axes)}")
    if result.unreduced_axes and operand.unreduced_axes and result.reduction != operand.reduction:
        _fail("V1", where, f"what was to be combined by {operand.reduction} is by {result.reduction}")


def verify_reduction(collective: SdyCollective, reduction: str, operand: TensorSharding, where: str) -> None:
    """What is reduced is unreduced by that very reduction: V10.

    Raises:
        RuleError: V10, with both.
    """
    if collective.kind in REDUCING and operand.unreduced_axes and operand.reduction != reduction:
        _fail("V10", where, f"the operand is unreduced by {operand.reduction}, it is reduced by {reduction}")


def verify_useful(
    collective: SdyCollective, operand: TensorSharding, result: TensorSharding, same_mesh: bool, where: str
) -> None:
    """The collective does something: V4."""
    if collective.kind == "collective_permute":
        if same_mesh and operand.axes == result.axes:
            _fail("V4", where, f"operand and result are both <{operand}>")
    elif not collective.all_axes:
        _fail("V4", where, "it names no axes")


def verify_blocks(
    operand: TensorSharding, result: TensorSharding, shape: Sequence[int], mesh: Mesh, where: str
) -> None:
    """Blocks of each dimension are joined, or cut, into blocks: V5.

    It holds where the shards divide the dimension, and where it is whole before or after, padding aside. Nothing is
    said of an operand in more shards than it has elements.
    """
    counts = zip(shape, operand.shard_counts(mesh), result.shard_counts(mesh), strict=True)
    for dim, (size, before, after) in enumerate(counts):
        if before <= size and not leads_to_blocks(size, before, after):
            _fail("V5", f"{where}, dimension {dim}", f"{size} elements in {before} shards become {after}")


def leads_to_blocks(size: int, before: int, after: int) -> bool:
    """Whether joining blocks of a dimension, or cutting them, makes blocks of so many shards."""
    few, many = sorted((before, after))
    return few == 1 or -(-size // many) * (many // few) == -(-size // few)


def _fail(rule: str, where: str, problem: str) -> None:
    fail(rule, where, problem, STRICT_RULES[rule])


def _flat(lists: Iterable[Axes]) -> Axes:
    return tuple(axis for axes in lists for axis in axes)
