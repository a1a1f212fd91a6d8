"""How long the ops of a partitioned program compute, by the cost model."""

from __future__ import annotations

import math
from collections.abc import Mapping

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.lowering.reshard.cost import CostModel
from sdy_jax.op_rules.op_attributes import dot_dimension_numbers
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.sharding import TensorSharding


class WorkTimes:
    """Times on one device. Only products are counted: what else there is mostly fuses with them."""

    def __init__(self, graph: Graph, shardings: Mapping[Value, TensorSharding], mesh: Mesh, costs: CostModel):
        self._graph, self._shardings, self._mesh, self._costs = graph, shardings, mesh, costs

    def of(self, op: Op) -> float:
        """The time of one execution."""
        if op.name != "stablehlo.dot_general":
            return 0.0
        return self._costs.work_time(self.operations(op), sum(self.touched(op)))

    def operations(self, product: Op) -> float:
        """A product's operations on one device."""
        contracted = dot_dimension_numbers(product).lhs_contracting
        lhs = self._local(product.operands[0])
        return math.prod(self._local(product.results[0])) * math.prod(lhs[dim] for dim in contracted)

    def touched(self, op: Op) -> list[float]:
        """The bytes of each operand and result on one device."""
        return [self.bytes(value) for value in (*op.operands, *op.results)]

    def bytes(self, value: Value) -> float:
        """The bytes of a value on one device."""
        return math.prod(self._local(value)) * value.itemsize

    def _local(self, value: Value) -> tuple[int, ...]:
        sharding, shape = self._shardings.get(value), value.shape or ()
        return sharding.local_shape(shape, self._mesh) if sharding is not None else shape
