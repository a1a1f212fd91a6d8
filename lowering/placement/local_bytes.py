"""The bytes of a partitioned program's values on one device."""

from __future__ import annotations

import math

from sdy_jax.ir.graph import Graph, Value
from sdy_jax.lowering.emission.emit import value_shardings
from sdy_jax.lowering.placement.rounded import values_kept_rounded
from sdy_jax.lowering.reshard.tiles import elements_in_tiles

_ROUNDED = 2
"""Bytes of a bfloat16."""


class LocalBytes:
    """Bytes of values on one device.

    `products_round`: products and convolutions whose precision is open round their operands to bfloat16, as on TPUs.
    What nothing else reads is kept, and sent, so. `in_tiles`: arrays lie in whole tiles, as on TPUs.
    """

    def __init__(self, graph: Graph, products_round: bool = False, in_tiles: bool = False):
        self._meshes, self._shardings = graph.meshes, value_shardings(graph)
        self._known: dict[object, float] = {}
        self._elements = elements_in_tiles if in_tiles else math.prod
        self._rounded = values_kept_rounded(graph) if products_round else frozenset()

    def of(self, value: Value) -> float:
        sharding, rounded = self._shardings.get(value), value in self._rounded
        key = value.type, sharding, rounded
        if key not in self._known:
            itemsize = _ROUNDED if rounded else value.itemsize
            self._known[key] = self._elements(self.shape(value)) * itemsize
        return self._known[key]

    def shape(self, value: Value) -> tuple[int, ...]:
        """A value's shape on one device."""
        sharding = self._shardings.get(value)
        if value.shape is None:
            return (0,)
        mesh = self._meshes.get(str(sharding.mesh)) if sharding is not None else None
        return value.shape if sharding is None or mesh is None else sharding.local_shape(value.shape, mesh)
