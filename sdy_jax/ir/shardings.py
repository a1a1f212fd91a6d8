"""Shardings of tensors, op sharding rules, and records of which axis spread from tensor to tensor of an op."""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

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


# Op sharding rules: which dimensions of an op's operands and results correspond.
#
# Source: the SDY dialect reference, attribute `op_sharding_rule`. For a matrix product `([i, k], [k, j])->([i, j])
# {i=8, j=4, k=16} reduction={k}`.

LETTERS = 18
"""Factors that have a letter, `i` to `z`. Given by the text of SDY."""

TensorMapping = tuple[tuple[int, ...], ...]
"""Per dimension of one tensor, the factors it is made of, major to minor."""


class FactorType(enum.Enum):
    """What it means to shard a factor."""

    PASS_THROUGH = "pass_through"
    REDUCTION = "reduction"
    NEED_REPLICATION = "need_replication"
    PERMUTATION = "permutation"


@hash_once
@dataclass(frozen=True)
class OpShardingRule:
    """Factor sizes, one mapping per operand and result, and the sets of factors that are not pass-through.

    Blocked factors take no part in propagation, whatever their type.

    Attributes:
        factor_sizes: the size of each factor: `i`, `j`, `k`, ... in the text.
        operand_mappings, result_mappings: per tensor and dimension, the factors that it is made of, major to minor.
        reduction, need_replication, permutation: the factors that are such.
        blocked: the factors that take no part in propagation.
        is_custom: whether a user wrote it.

    Example:
        >>> x, w, y = ((0,), (2,)), ((2,), (1,)), ((0,), (1,))
        >>> product = OpShardingRule((8, 4, 16), (x, w), (y,), reduction=frozenset({2}))
        >>> str(product)
        '([i, k], [k, j])->([i, j]) {i=8, j=4, k=16} reduction={k}'

    See also:
        `with_sharding_rule`, `custom_op`: take one, or its text.
    """

    factor_sizes: tuple[int, ...]
    operand_mappings: tuple[TensorMapping, ...]
    result_mappings: tuple[TensorMapping, ...]
    reduction: frozenset[int] = frozenset()
    need_replication: frozenset[int] = frozenset()
    permutation: frozenset[int] = frozenset()
    blocked: frozenset[int] = frozenset()
    is_custom: bool = False

    @cached_property
    def mappings(self) -> tuple[TensorMapping, ...]:
        """Operands, then results."""
        return self.operand_mappings + self.result_mappings

    def type_of(self, factor: int) -> FactorType:
        """What it means to shard a factor."""
        if factor in self.reduction:
            return FactorType.REDUCTION
        if factor in self.need_replication:
            return FactorType.NEED_REPLICATION
        return FactorType.PERMUTATION if factor in self.permutation else FactorType.PASS_THROUGH

    @cached_property
    def factors_of(self) -> tuple[frozenset[int], ...]:
        """Per tensor (operands, then results), the factors that occur in it."""
        return tuple(frozenset(f for dim in mapping for f in dim) for mapping in self.mappings)

    @cached_property
    def joint_factors(self) -> tuple[tuple[int, ...], ...]:
        """The factors of each dimension that is made of several."""
        return tuple([factors for mapping in self.mappings for factors in mapping if len(factors) != 1])

    def __str__(self) -> str:
        """The text inside `#sdy.op_sharding_rule<...>`."""
        tensors = [
            ", ".join(f"[{', '.join(''.join(factor_symbol(f) for f in dim) for dim in m)}]" for m in ms)
            for ms in (self.operand_mappings, self.result_mappings)
        ]
        text = f"({tensors[0]})->({tensors[1]})"
        if self.factor_sizes:
            text += " {" + ", ".join(f"{factor_symbol(f)}={n}" for f, n in enumerate(self.factor_sizes)) + "}"
        for name, factors in (
            ("reduction", self.reduction),
            ("need_replication", self.need_replication),
            ("permutation", self.permutation),
            ("blocked_propagation", self.blocked),
        ):
            if factors:
                text += f" {name}={{{', '.join(map(factor_symbol, sorted(factors)))}}}"
        return text + (", custom" if self.is_custom else "")


def factor_symbol(factor: int) -> str:
    """`i` to `z` for the first eighteen factors, then `z_1`, `z_2`, ..."""
    return chr(ord("i") + factor) if factor < LETTERS else f"z_{factor - LETTERS + 1}"


# The dialect's records of propagation: which axis spread from which tensor of an op to which others, step by step.
#
# Source: the SDY dialect reference, attributes `propagation_edges`, `propagation_one_step`,
# `axis_to_propagation_details` and `edge_value_ref`. Text: `[{step-0 = [{"a" = operand-0 -> [operand-1,
# result-0]}]}]`.


@dataclass(frozen=True, slots=True)
class EdgeValue:
    """An operand or a result of the op, by number."""

    side: Literal["operand", "result"]
    index: int

    def __str__(self) -> str:
        return f"{self.side}-{self.index}"


@dataclass(frozen=True, slots=True)
class AxisSpread:
    """An axis that came from `source` to all of `targets`."""

    axis: AxisRef
    source: EdgeValue
    targets: tuple[EdgeValue, ...]

    def __str__(self) -> str:
        return f"{self.axis} = {self.source} -> [{', '.join(map(str, self.targets))}]"


@dataclass(frozen=True, slots=True)
class PropagationStep:
    """What spread in one step of propagation; steps are numbered through the whole module."""

    index: int
    spreads: tuple[AxisSpread, ...]

    def __str__(self) -> str:
        return f"step-{self.index} = [{', '.join(f'{{{spread}}}' for spread in self.spreads)}]"


@dataclass(frozen=True, slots=True)
class PropagationEdges:
    """What spread through one op."""

    steps: tuple[PropagationStep, ...]

    def spreads(self) -> Iterator[AxisSpread]:
        """What spread, over all steps."""
        for step in self.steps:
            yield from step.spreads

    def __str__(self) -> str:
        """The text inside `#sdy.propagation_edges<...>`."""
        return f"[{', '.join(f'{{{step}}}' for step in self.steps)}]"
