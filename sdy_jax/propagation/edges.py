"""Data-flow edges during propagation, and the two views of a sharding at the border of a manual computation.

Outside, manual axes lead each dimension; inside there are only free axes. An edge at a body argument keeps the inner
view and is compared with the outer operand; an edge at a result keeps the outer view and is compared with the inner
returned value. So each is converted before an op propagation (`seen`) and back after it (`stored`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Op
from sdy_jax.representation.attributes import manual_axes_from_attribute, shardings_from_attribute
from sdy_jax.representation.mesh import AxisRef
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.representation.sharding import DimensionSharding, TensorSharding
from sdy_jax.rules.dataflow import DataFlowEdge, EdgeKind


def manual_prefix(axes: Sequence[AxisRef], manual: Sequence[str]) -> tuple[AxisRef, ...]:
    """The manual axes that lead a dimension.

    Found by bisection as in Shardy: where a free axis stands before a manual one, which is wrong and can only come from
    an edge written by hand, both count, and no manual axis gets into the body.
    """
    return tuple(axes[: bisect_left(axes, True, key=lambda axis: axis.name not in manual)])


def manual_axes(op: Op | ir.Operation) -> tuple[str, ...]:
    """The manual axes of a manual computation; none for other ops."""
    if op.name != "sdy.manual_computation" or "manual_axes" not in op.attributes:
        return ()
    return manual_axes_from_attribute(op.attributes["manual_axes"])


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


@dataclass(frozen=True, slots=True)
class View:
    """The border of a manual computation that an edge crosses: its manual axes and the outer sharding given there.

    `kept` are the axes that dimensions of this sharding wait for, which nothing else may take before that. (Shardy
    forgets them here, and may give an axis to two dimensions.)
    """

    outer: TensorSharding
    manual: tuple[str, ...]
    kind: EdgeKind
    kept: tuple[AxisRef, ...] = ()

    def keeping(self, axes: Sequence[AxisRef]) -> View:
        """The border while some dimensions wait for these axes."""
        kept = tuple(axis for axis in axes if axis.name not in self.manual)
        given = tuple(axis for axis in self.outer.replicated_axes if axis not in self.kept)
        return replace(self, outer=replace(self.outer, replicated_axes=given + kept), kept=kept)

    def seen(self, sharding: TensorSharding | None) -> TensorSharding | None:
        """The edge's sharding as its sources see it."""
        if sharding is None:
            return None
        if self.kind is EdgeKind.BODY_ARGUMENT:
            return add_free_axes(self.outer, sharding, self.manual)
        return erase_manual_axes(sharding, self.manual)

    def stored(self, sharding: TensorSharding) -> TensorSharding:
        """The edge's own sharding from what its sources see."""
        if self.kind is EdgeKind.BODY_ARGUMENT:
            return erase_manual_axes(sharding, self.manual)
        return add_free_axes(self.outer, sharding, self.manual)


def view_of(op: Op, edge: DataFlowEdge) -> View | None:
    """The conversion at an edge of a manual computation, if only of replicated axes; None where there is none."""
    name = "in_shardings" if edge.kind is EdgeKind.BODY_ARGUMENT else "out_shardings"
    outer = shardings_from_attribute(op.attributes[name]) if op.name == "sdy.manual_computation" else ()
    return View(outer[edge.owner.index], manual_axes(op), edge.kind) if outer else None


@cache
def identity_rule(shape: tuple[int, ...], num_operands: int) -> OpShardingRule:
    """One pass-through factor per dimension, shared by all operands and the one result."""
    mapping = tuple((dim,) for dim in range(len(shape)))
    return OpShardingRule(shape, (mapping,) * num_operands, (mapping,))
