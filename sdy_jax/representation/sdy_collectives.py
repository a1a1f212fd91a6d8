"""The sdy collectives: what each op says, in its attributes, and what it makes of its operand's sharding.

| op | says | dimension d of the result | unreduced axes of the result |
|---|---|---|---|
| all_gather | a list per dimension | the operand's without the list, which is its minor end | the operand's |
| all_slice | a list per dimension | the operand's, the list appended | the operand's |
| all_to_all | (list, source, target) ... | source as for all_gather, target as for all_slice | the operand's |
| collective_permute | nothing | any with as many shards | the operand's |
| all_reduce | a list | the operand's | the operand's without the list |
| reduce_scatter | a list per dimension | the operand's, the list appended | the operand's without all lists |
| replicated_to_unreduced | a list | the operand's | the operand's and the list |
| sharded_to_unreduced | a list per dimension | as for all_gather | the operand's and all lists |

A step of a plan may also be a `reshard`, the dialect's op from any sharding to any other: it is sent in strips. Its
axes are a list, those that split the dimension before or after it, and it does not say them.

The dialect's bindings do not expose these attributes, so they are parsed from their text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sdy_jax.representation.axes import add_or_merge, braces, set_difference, sort_and_merge, suffix_of
from sdy_jax.representation.axis_text import parse_axes, parse_axis_lists, parse_moves
from sdy_jax.representation.dialect_rules import fail
from sdy_jax.representation.mesh import Axes, AxisRef, Mesh
from sdy_jax.representation.sharding import DimensionSharding, TensorSharding

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

    @property
    def of_stacks(self) -> SdyCollective:
        """The same of values with a further dimension 0, which stays as it is.

        >>> print(SdyCollective("all_gather", ((AxisRef("x"),), ())).of_stacks)
        [{}, {"x"}, {}]
        """
        params = tuple((axes, source + 1, target + 1) for axes, source, target in self.params)
        return replace(self, axes=((), *self.axes) if self.kind in PER_DIMENSION else self.axes, params=params)

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
