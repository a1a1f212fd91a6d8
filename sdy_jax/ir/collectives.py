"""The sdy collectives: how each changes a sharding, and which rules each keeps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from sdy_jax.ir.meshes import (
    Axes,
    AxisRef,
    Mesh,
    add_or_merge,
    axes_size,
    braces,
    overlaps,
    set_difference,
    sort_and_merge,
    sort_axes,
    suffix_of,
)
from sdy_jax.ir.parsers import parse_axes, parse_axis_lists, parse_moves
from sdy_jax.ir.shardings import DimensionSharding, TensorSharding
from sdy_jax.ir.validity import fail, verify_axis_list, verify_disjoint

# The sdy collectives: what each op says, in its attributes, and what it makes of its operand's sharding.
#
# | op | says | dimension d of the result | unreduced axes of the result |
# |---|---|---|---|
# | all_gather | a list per dimension | the operand's without the list, which is its minor end | the operand's |
# | all_slice | a list per dimension | the operand's, the list appended | the operand's |
# | all_to_all | (list, source, target) ... | source as for all_gather, target as for all_slice | the operand's |
# | collective_permute | nothing | any with as many shards | the operand's |
# | all_reduce | a list | the operand's | the operand's without the list |
# | reduce_scatter | a list per dimension | the operand's, the list appended | the operand's without all lists |
# | replicated_to_unreduced | a list | the operand's | the operand's and the list |
# | sharded_to_unreduced | a list per dimension | as for all_gather | the operand's and all lists |
#
# A step of a plan may also be a `reshard`, the dialect's op from any sharding to any other: it is sent in strips. Its
# axes are a list, those that split the dimension before or after it, and it does not say them.
#
# The dialect's bindings do not expose these attributes, so they are parsed from their text.

Params = tuple[tuple[Axes, int, int], ...]

AXES_ATTRIBUTE = {
    "all_gather": "gathering_axes",
    "all_slice": "slicing_axes",
    "all_reduce": "reduction_axes",
    "reduce_scatter": "reduce_scatter_axes",
    "replicated_to_unreduced": "axes",
    "sharded_to_unreduced": "axes",
}
"""Kind of collective -> the attribute that holds its axes."""

BY_STRIPS = "reshard"
"""The kind of a step of which no collective is capable; what runs is permutes."""

RING = "sdy_jax.ring"
"""An attribute of a collective, and of a product: they run as one, block after block."""

PREFETCHED = "sdy_jax.prefetched"
"""An attribute of a collective inside of a loop, which runs one trip ahead: the number of trips."""

FILLED = "sdy_jax.filled"
"""An attribute of a loop of which collectives run one trip ahead: the numbers of what it carries whose every entry its
trips write, and none reads."""

KINDS = (*AXES_ATTRIBUTE, "all_to_all", "collective_permute")

FLAT = frozenset({"all_reduce", "replicated_to_unreduced"})
"""The kinds whose axes are one list, not one per dimension."""

APPENDING = frozenset({"all_slice", "reduce_scatter"})
REMOVING = frozenset({"all_gather", "sharded_to_unreduced"})
"""What the lists per dimension mean: axes that split the result further, and axes that split the operand alone."""

PER_DIMENSION = frozenset(AXES_ATTRIBUTE) - FLAT

REDUCING = frozenset({"all_reduce", "reduce_scatter"})
UNREDUCING = frozenset({"replicated_to_unreduced", "sharded_to_unreduced"})
"""The kinds that combine what devices hold along their axes, and those that leave that to be done."""

MOVING = frozenset({"all_gather", "all_to_all", "collective_permute"})
"""The kinds that send elements as they are, terms of a sum like any other data."""


def ops_of(kinds: Iterable[str]) -> frozenset[str]:
    """The names of the ops of some kinds."""
    return frozenset(f"sdy.{kind}" for kind in kinds)


COLLECTIVE_OPS, REDUCING_OPS, UNREDUCING_OPS = map(ops_of, (KINDS, REDUCING, UNREDUCING))

BUCKET = "sdy_jax.bucket"
"""An attribute of collectives that follow each other and run as one: the number of their bucket."""

PACKED = "sdy_jax.packed"
"""An attribute of the collectives of a bucket whose operands are copied side by side. XLA makes one of others."""


class CollectiveSummary(NamedTuple):
    """A collective in short: its kind, all axes that it runs over, and in `detail` what it moves, as the
    dialect writes it (`{"model"}`, `[{"x"}: 0->1]`).
    """

    kind: str
    axes: Axes = ()
    detail: str = ""


@dataclass(frozen=True, slots=True)
class SdyCollective:
    """What a collective op says, but for its out_sharding and how it reduces.

    `axes` is a tuple of lists, one per dimension; of the kinds in `FLAT` a list; empty for the other two. `params` are
    the (axes, source, target) of an all_to_all.
    """

    kind: str
    axes: tuple[Any, ...] = ()
    params: Params = ()

    @property
    def lists(self) -> tuple[Axes, ...]:
        """Its lists of axes, whatever they mean."""
        if self.kind in FLAT or self.kind == BY_STRIPS:
            return (self.axes,)
        return tuple(axes for axes, _, _ in self.params) if self.kind == "all_to_all" else self.axes

    @property
    def all_axes(self) -> Axes:
        return tuple(axis for axes in self.lists for axis in axes)

    def of_stacks(self, at: int = 0) -> SdyCollective:
        """The same of values with a further dimension at this place, which stays as it is.

        >>> print(SdyCollective("all_gather", ((AxisRef("x"),), ())).of_stacks())
        [{}, {"x"}, {}]
        """
        params = tuple((axes, source + (source >= at), target + (target >= at)) for axes, source, target in self.params)
        lists = (*self.axes[:at], (), *self.axes[at:]) if self.kind in PER_DIMENSION else self.axes
        return replace(self, axes=lists, params=params)

    @property
    def summary(self) -> CollectiveSummary:
        """In short, as what runs."""
        kind = "collective_permute" if self.kind == BY_STRIPS else self.kind
        return CollectiveSummary(kind, self.all_axes, str(self))

    def __str__(self) -> str:
        """What it says as the dialect prints it: `[{"x"}, {}]`, `{"x"}`, `[{"x"}: 0->1]`; nothing for a permute."""
        if self.kind == "collective_permute":
            return ""
        if self.kind in FLAT or self.kind == BY_STRIPS:
            return braces(self.axes)
        moves = (f"{braces(axes)}: {source}->{target}" for axes, source, target in self.params)
        return f"[{', '.join(moves if self.kind == 'all_to_all' else map(braces, self.axes))}]"

    @property
    def attributes(self) -> dict[str, str]:
        """The op's attributes as MLIR text."""
        if self.kind in ("collective_permute", BY_STRIPS):
            return {}
        if self.kind == "all_to_all":
            return {"params": f"#sdy<all_to_all_param_list{self}>"}
        kind = "axis_ref_list" if self.kind in FLAT else "list_of_axis_ref_lists"
        return {AXES_ATTRIBUTE[self.kind]: f"#sdy<{kind}{self}>"}


def collective_from_attributes(name: str, attributes: Mapping[str, object]) -> SdyCollective:
    """What an op says, from its name, or its kind, and its attributes or their text."""
    kind = name.removeprefix("sdy.")
    if kind == "collective_permute":
        return SdyCollective(kind)
    if kind == "all_to_all":
        return SdyCollective(kind, params=parse_moves(str(attributes["params"])))
    text = str(attributes[AXES_ATTRIBUTE[kind]])
    return SdyCollective(kind, parse_axes(text) if kind in FLAT else parse_axis_lists(text))


# Arithmetic.


def sharding_after(
    collective: SdyCollective, operand: TensorSharding, mesh: Mesh, where: str = "collective"
) -> TensorSharding:
    """What a collective makes of its operand's sharding; not for collective_permute, whose result is not determined.

    The result is closed. Whether it is legal (an axis may now be used twice) is for `verify_sharding` to say.

    Raises:
        RuleError: C8, axes are taken from a dimension that does not end with them.

    Example:
        >>> x, mesh = AxisRef("x"), Mesh.of(x=2)
        >>> split = TensorSharding.closed("mesh", [[x], []])
        >>> print(sharding_after(SdyCollective("all_to_all", params=(((x,), 0, 1),)), split, mesh))
        @mesh, [{}, {"x"}]
    """
    dims = [d.axes for d in operand.dimensions]
    for dim, taken in _taken(collective):
        dims[dim] = _without_end(dims[dim], taken, mesh, f"{where}, dimension {dim}")
    for dim, added in _added(collective):
        for axis in added:
            dims[dim] = add_or_merge(dims[dim], axis, mesh)
    return replace(
        operand,
        dimensions=tuple(map(DimensionSharding, dims)),
        replicated_axes=(),
        unreduced_axes=_unreduced_after(collective, operand.unreduced_axes, mesh),
    )


def _taken(collective: SdyCollective) -> list[tuple[int, Axes]]:
    """The axes that stop splitting each dimension."""
    if collective.kind in REMOVING:
        return list(enumerate(collective.axes))
    return [(source, axes) for axes, source, _ in collective.params]


def _added(collective: SdyCollective) -> list[tuple[int, Axes]]:
    """The axes that begin to split each dimension."""
    if collective.kind in APPENDING:
        return list(enumerate(collective.axes))
    return [(target, axes) for axes, _, target in collective.params]


def _without_end(axes: Axes, end: Axes, mesh: Mesh, where: str) -> Axes:
    left = axes
    for axis in reversed(end):
        if not left or not suffix_of(axis, left[-1], mesh):
            fail("C8", where, f"{braces(axes)} does not end with {braces(end)}")
        last, rest = left[-1], axis.pre_size // left[-1].pre_size
        left = left[:-1] if rest == 1 else (*left[:-1], AxisRef.sub(last.name, last.pre_size, rest))
    return left


def _unreduced_after(collective: SdyCollective, unreduced: Axes, mesh: Mesh) -> Axes:
    if collective.kind in REDUCING:
        return sort_and_merge(set_difference(unreduced, collective.all_axes, mesh), mesh)
    if collective.kind in UNREDUCING:
        return sort_and_merge((*unreduced, *collective.all_axes), mesh)
    return unreduced


# The verification rules of the sdy collectives: between what an op says, its operand's and its result's sharding.
#
# `verify_collective` has the dialect's rules, `verify_strictly` those that make a program right which says all of its
# unreduced axes, as ours do. Both expect the two shardings to be legal themselves.

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
