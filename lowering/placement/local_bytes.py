"""The bytes of a partitioned program's values on one device."""

from __future__ import annotations

import math

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.lowering.emission.emit import value_shardings
from sdy_jax.lowering.placement.fusion import moves, readers
from sdy_jax.lowering.planning.candidates import MOVING
from sdy_jax.lowering.strategies.registry import OPEN_PRECISION

_MOVING = frozenset(f"sdy.{kind}" for kind in (*MOVING, "all_slice"))
_ROUNDED = 2
"""Bytes of a bfloat16."""


class LocalBytes:
    """Bytes of values on one device.

    `products_round`: products and convolutions whose precision is open round their operands to bfloat16, as on TPUs.
    What nothing else reads is kept, and sent, so.
    """

    def __init__(self, graph: Graph, products_round: bool = False):
        self._meshes, self._shardings = graph.meshes, value_shardings(graph)
        self._known: dict[object, float] = {}
        self._rounded: dict[Value, bool] | None = {} if products_round else None

    def of(self, value: Value) -> float:
        sharding, rounded = self._shardings.get(value), self._is_rounded(value)
        key = value.type, sharding, rounded
        if key not in self._known:
            itemsize = _ROUNDED if rounded else value.itemsize
            self._known[key] = math.prod(self.shape(value)) * itemsize
        return self._known[key]

    def shape(self, value: Value) -> tuple[int, ...]:
        """A value's shape on one device."""
        sharding = self._shardings.get(value)
        if value.shape is None:
            return (0,)
        mesh = self._meshes.get(str(sharding.mesh)) if sharding is not None else None
        return value.shape if sharding is None or mesh is None else sharding.local_shape(value.shape, mesh)

    def _is_rounded(self, value: Value) -> bool:
        if self._rounded is None or value.dtype != "f32" or value.defining_op is None:
            return False
        if value not in self._rounded:
            users = [user for user, _ in readers(value)]
            self._rounded[value] = len(users) > 0 and all(map(self._rounds, users))
        return self._rounded[value]

    def _rounds(self, op: Op) -> bool:
        """Whether an op rounds its operands, or only moves them to ops that do."""
        if op.name in OPEN_PRECISION:
            return OPEN_PRECISION[op.name](op)
        return (op.name in _MOVING or moves(op)) and self._is_rounded(op.results[0])
