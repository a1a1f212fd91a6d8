"""How long the products and kernels of a partitioned program compute, by the cost model."""

from __future__ import annotations

import math

from sdy_jax.ir.graph import Graph, Op
from sdy_jax.ir.stated_work import Uneven, stated_work
from sdy_jax.lowering.analysis.fusion import takes_long
from sdy_jax.lowering.analysis.local_bytes import LocalBytes
from sdy_jax.lowering.costs.cost_model import CostModel
from sdy_jax.op_rules import RuleBook
from sdy_jax.op_rules.flops import operations_of
from sdy_jax.op_rules.op_attributes import dot_dimension_numbers


class WorkTimes:
    """Times on one device. Only products and kernels are counted: what else there is mostly fuses with them.

    `bytes`: those of values on one device.
    """

    def __init__(self, graph: Graph, costs: CostModel):
        self._costs, self._local, self._rules = costs, LocalBytes(graph), RuleBook()
        self.bytes = self._local.of

    def of(self, op: Op) -> float:
        """The time of one execution."""
        if not takes_long(op):
            return 0.0
        work = stated_work(op) if op.name == "stablehlo.custom_call" else None
        if work is not None:
            operations, moved = (self._share(op, whole, work.uneven) for whole in (work.operations, work.bytes))
            return self._costs.work_time(operations, moved)
        return self._costs.work_time(self.operations(op), sum(self.touched(op)))

    def operations(self, product: Op) -> float:
        """A product's operations on one device."""
        if product.name != "stablehlo.dot_general":
            return self._share(product, operations_of(product) / 2)
        lhs, (result,) = self._local.shape(product.operands[0]), product.results
        contracted = dot_dimension_numbers(product).lhs_contracting
        return math.prod(self._local.shape(result)) * math.prod(lhs[dim] for dim in contracted)

    def touched(self, op: Op) -> list[float]:
        """The bytes of each operand and result on one device."""
        return [self.bytes(value) for value in (*op.operands, *op.results)]

    def _share(self, op: Op, whole: float, uneven: Uneven = ()) -> float:
        """What one device has of what all perform for an op."""
        rule = self._rules.rule_of(op)
        return whole if rule is None else self._local.share_of(op, rule, whole, uneven)
