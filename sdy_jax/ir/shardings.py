"""Shardings of tensors, and their two views at the border of a manual computation."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from sdy_jax.ir.meshes import AxisRef, Mesh, axes_size, braces, hash_once, symbol

# Shardings of one dimension and of one tensor.
#
# Source: the SDY dialect reference, attributes `dimension_sharding` and `sharding`.

REDUCTION_KINDS = ("sum", "max", "min", "and", "or", "xor", "product")
"""How shards along an unreduced axis combine; `and`, `or` and `xor` work on the bits of integers."""


@dataclass(frozen=True, slots=True)
class DimensionSharding:
    """The axes that split one dimension, major to minor; open (`?`) lets propagation append to them.

    `priority` 0 is the most important; None prints nothing and counts as 0.

    Attributes:
        axes: the axes, major to minor.
        is_closed: whether propagation leaves it as it is.
        priority: when it is propagated.

    Example:
        >>> str(DimensionSharding((AxisRef("data"),), is_closed=False))
        '{"data", ?}'

    See also:
        `TensorSharding`: what holds one per dimension.
    """

    axes: tuple[AxisRef, ...] = ()
    is_closed: bool = True
    priority: int | None = None

    def __str__(self) -> str:
        items: list[object] = [*self.axes, *([] if self.is_closed else ["?"])]
        return braces(items) + ("" if self.priority is None else f"p{self.priority}")


OPEN = DimensionSharding((), is_closed=False)
CLOSED = DimensionSharding((), is_closed=True)


@hash_once
@dataclass(frozen=True)
class TensorSharding:
    """The layout of one tensor on a mesh.

    `mesh` is the symbol of a mesh in the module (without `@`) or, before lifting, a `Mesh` written inline.
    Axes in no list are implicitly replicated. Along `unreduced_axes` the shards still have to be combined with
    `reduction` ("sum", "max", ... ; only "sum" can be written in the text of dialect version 0.10).

    Attributes:
        mesh: the symbol of a mesh, or a mesh.
        dimensions: what splits each dimension.
        replicated_axes: along which it is replicated, and stays so.
        unreduced_axes: along which devices hold terms.
        reduction: how terms combine.

    Example:
        >>> mesh = Mesh.of(data=2, model=4)
        >>> str(TensorSharding("mesh", (DimensionSharding((AxisRef("data"),)), DimensionSharding())))
        '@mesh, [{"data"}, {}]'

    See also:
        `jax.sharding.PartitionSpec`: the same in jax's words, without open dimensions, priorities and parts of axes.
    """

    mesh: str | Mesh
    dimensions: tuple[DimensionSharding, ...]
    replicated_axes: tuple[AxisRef, ...] = ()
    unreduced_axes: tuple[AxisRef, ...] = ()
    reduction: str = "sum"

    @classmethod
    def replicated(cls, mesh: str | Mesh, rank: int) -> TensorSharding:
        """Closed and empty in every dimension."""
        return cls(mesh, (CLOSED,) * rank)

    @classmethod
    def fully_open(cls, mesh: str | Mesh, rank: int) -> TensorSharding:
        """The sharding that leaves every dimension to propagation."""
        return cls(mesh, (OPEN,) * rank)

    @classmethod
    def closed(
        cls,
        mesh: str | Mesh,
        axes: Sequence[Sequence[AxisRef]],
        unreduced: Sequence[AxisRef] = (),
        reduction: str = "sum",
    ) -> TensorSharding:
        """The closed sharding with these axes per dimension."""
        dimensions = tuple([DimensionSharding(tuple(a)) if a else CLOSED for a in axes])
        return cls(mesh, dimensions, (), tuple(unreduced), reduction)

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self.dimensions)

    @cached_property
    def axes(self) -> tuple[tuple[AxisRef, ...], ...]:
        """The axes of each dimension."""
        return tuple(d.axes for d in self.dimensions)

    @property
    def is_fully_closed(self) -> bool:
        """Whether propagation leaves every dimension as it is."""
        return all(d.is_closed for d in self.dimensions)

    @property
    def is_fully_replicated(self) -> bool:
        """No dimension is split; replicated and unreduced lists are ignored."""
        return not any(d.axes for d in self.dimensions)

    @property
    def is_fully_replicated_and_open(self) -> bool:
        """Whether nothing is split, and propagation may split every dimension."""
        return not any(d.axes or d.is_closed for d in self.dimensions)

    @property
    def has_no_axes(self) -> bool:
        """Whether it names no axis at all."""
        return self.is_fully_replicated and not self.replicated_axes and not self.unreduced_axes

    def closed_like(self) -> TensorSharding:
        """The same axes and priorities with every dimension closed; explicit replication is dropped, and so are the
        priorities of empty dimensions, which have none where they are closed."""
        dimensions = tuple(replace(d, is_closed=True) if d.axes else CLOSED for d in self.dimensions)
        return replace(self, dimensions=dimensions, replicated_axes=())

    @cached_property
    def layout(self) -> tuple[str | Mesh | None, tuple[tuple[AxisRef, ...], ...], tuple[AxisRef, ...], str]:
        """What says which data devices hold: the mesh of the axes, if there are any, the axes per dimension, the
        unreduced ones, and how those combine."""
        mesh = self.mesh if self.unreduced_axes or not self.is_fully_replicated else None
        return mesh, self.axes, self.unreduced_axes, self.reduction if self.unreduced_axes else "sum"

    def same_layout_as(self, other: TensorSharding) -> bool:
        """Devices hold the same data: the layouts are equal."""
        return self.layout == other.layout

    def shard_counts(self, mesh: Mesh) -> tuple[int, ...]:
        """Into how many blocks each dimension is split."""
        return tuple(axes_size(d.axes, mesh) for d in self.dimensions)

    def local_shape(self, shape: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
        """The shape of one shard of a tensor of global `shape`: one ceiling per dimension."""
        return tuple(-(-n // g) for n, g in zip(shape, self.shard_counts(mesh), strict=True))

    def __str__(self) -> str:
        """The text inside `#sdy.sharding<...>`."""
        mesh = symbol(self.mesh) if isinstance(self.mesh, str) else f"mesh{self.mesh}"
        text = f"{mesh}, [{', '.join(map(str, self.dimensions))}]"
        if self.replicated_axes:
            text += f", replicated={braces(self.replicated_axes)}"
        if self.unreduced_axes:
            kind = "" if self.reduction == "sum" else self.reduction
            text += f", unreduced={kind}{braces(self.unreduced_axes)}"
        return text


def per_value(shardings: Iterable[TensorSharding]) -> str:
    """The text inside `#sdy.sharding_per_value<...>`: `[<@mesh, [{"x"}]>, <@mesh, [{?}]>]`."""
    return f"[{', '.join(f'<{sharding}>' for sharding in shardings)}]"


# The two views of a sharding at the border of a manual computation.
#
# Outside, manual axes lead each dimension; inside there are only free axes.


def manual_prefix(axes: Sequence[AxisRef], manual: Sequence[str]) -> tuple[AxisRef, ...]:
    """The manual axes that lead a dimension.

    Found by bisection as in Shardy: where a free axis stands before a manual one, which is wrong and can only come from
    an edge written by hand, both count, and no manual axis gets into the body.
    """
    return tuple(axes[: bisect_left(axes, True, key=lambda axis: axis.name not in manual)])


def erase_manual_axes(sharding: TensorSharding, manual: Sequence[str]) -> TensorSharding:
    """The inner view of an outer sharding: its free axes."""
    if not manual:
        return sharding

    def free(axes: Sequence[AxisRef]) -> tuple[AxisRef, ...]:
        return tuple(axis for axis in axes if axis.name not in manual)

    dimensions = tuple(
        DimensionSharding(d.axes[len(manual_prefix(d.axes, manual)) :], d.is_closed, d.priority)
        for d in sharding.dimensions
    )
    return replace(
        sharding,
        dimensions=dimensions,
        replicated_axes=free(sharding.replicated_axes),
        unreduced_axes=free(sharding.unreduced_axes),
    )


def add_free_axes(outer: TensorSharding, inner: TensorSharding, manual: Sequence[str]) -> TensorSharding:
    """The outer view of an inner sharding: `outer` says where the manual axes are, and what is not split."""
    dimensions = tuple(
        DimensionSharding(manual_prefix(o.axes, manual) + i.axes, i.is_closed, i.priority)
        for o, i in zip(outer.dimensions, inner.dimensions, strict=False)  # on one device there are none
    )
    return replace(outer, mesh=inner.mesh, dimensions=dimensions)
