"""How long the products of a partitioned program compute, by the cost model."""

from __future__ import annotations

import math

from sdy_jax.ir.graph import Graph, Op
from sdy_jax.lowering.analysis.local_bytes import LocalBytes
from sdy_jax.lowering.costs.cost_model import CostModel
from sdy_jax.op_rules.op_attributes import dot_dimension_numbers


class WorkTimes:
    """Times on one device. Only products are counted: what else there is mostly fuses with them.

    `bytes`: those of values on one device.
    """

    def __init__(self, graph: Graph, costs: CostModel):
        self._costs, self._local = costs, LocalBytes(graph)
        self.bytes = self._local.of

    def of(self, op: Op) -> float:
        """The time of one execution."""
        if op.name != "stablehlo.dot_general":
            return 0.0
        return self._costs.work_time(self.operations(op), sum(self.touched(op)))

    def operations(self, product: Op) -> float:
        """A product's operations on one device."""
        lhs, (result,) = self._local.shape(product.operands[0]), product.results
        contracted = dot_dimension_numbers(product).lhs_contracting
        return math.prod(self._local.shape(result)) * math.prod(lhs[dim] for dim in contracted)

    def touched(self, op: Op) -> list[float]:
        """The bytes of each operand and result on one device."""
        return [self.bytes(value) for value in (*op.operands, *op.results)]
