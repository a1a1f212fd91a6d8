"""Data-flow edges during propagation, and the two views of a sharding at the border of a manual computation.

Outside, manual axes lead each dimension; inside there are only free axes. An edge at a body argument keeps the inner
view and is compared with the outer operand; an edge at a result keeps the outer view and is compared with the inner
returned value. So each is converted before an op propagation (`seen`) and back after it (`stored`).
See docs/explanation/propagation.md#data-flow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from sdy_jax.ir.graph import Op
from sdy_jax.ir.operations import manual_axes
from sdy_jax.op_rules.dataflow import DataFlowEdge, EdgeKind
from sdy_jax.representation.attributes import shardings_from_attribute
from sdy_jax.representation.manual_axes import add_free_axes, erase_manual_axes
from sdy_jax.representation.mesh import AxisRef
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.representation.sharding import TensorSharding


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
