"""The bytes of a partitioned program's values on one device."""

from __future__ import annotations

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.stated_work import Share, Uneven
from sdy_jax.lowering.analysis.factors import split_factors
from sdy_jax.lowering.analysis.rounding import values_kept_rounded
from sdy_jax.lowering.emission.emit import value_shardings
from sdy_jax.lowering.targets.family import Arrays
from sdy_jax.representation.mesh import axes_size
from sdy_jax.representation.rule import OpShardingRule


class LocalBytes:
    """Bytes of values on one device. `arrays`: how they lie there; what products alone read is kept, and sent, as these
    round it."""

    def __init__(self, graph: Graph, arrays: Arrays = Arrays()):  # noqa: B008 - immutable
        self._meshes, self._shardings = graph.meshes, value_shardings(graph)
        self._known: dict[object, float] = {}
        self._arrays = arrays
        self._rounded = values_kept_rounded(graph) if arrays.rounds else frozenset()

    def share_of(self, op: Op, rule: OpShardingRule, whole: float, uneven: Uneven = ()) -> float:
        """What one device has of a whole that the factors of an op's rule share out, some of them unevenly."""
        shardings = [self._shardings.get(value) for value in (*op.operands, *op.results)]
        mesh = next((self._meshes.get(str(s.mesh)) for s in shardings if s is not None), None)
        if mesh is None:
            return whole
        split = split_factors(rule, shardings, mesh)
        shards = [axes_size(split.get(factor, ()), mesh) for factor in range(len(rule.factor_sizes))]
        return Share(whole, rule.factor_sizes, uneven)(shards)

    def of(self, value: Value) -> float:
        sharding, rounded = self._shardings.get(value), value in self._rounded
        key = value.type, sharding, rounded
        if key not in self._known:
            self._known[key] = self._arrays.bytes(self.shape(value), value.itemsize, rounded)
        return self._known[key]

    def shape(self, value: Value) -> tuple[int, ...]:
        """A value's shape on one device."""
        sharding = self._shardings.get(value)
        if value.shape is None:
            return (0,)
        mesh = self._meshes.get(str(sharding.mesh)) if sharding is not None else None
        return value.shape if sharding is None or mesh is None else sharding.local_shape(value.shape, mesh)
