"""Buffers on a device: the bytes of values, when they are live, and which take over the memory of others."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from sdy_jax.ir.custom_ops import Share, Uneven
from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.meshes import axes_size
from sdy_jax.ir.rules import OpShardingRule
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.stored_shardings import entries_of
from sdy_jax.lowering.ops.emission.emit import value_shardings
from sdy_jax.lowering.planner.facts.factors import split_factors
from sdy_jax.lowering.planner.facts.fusion import values_kept_rounded
from sdy_jax.lowering.targets.family import Arrays

# The bytes of a partitioned program's values on one device.


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


# Buffers on a device: from when to when they are live, which take over the memory of others, and the most of them.


class HeldBuffer(NamedTuple):
    """A temporary on one device: its value, its bytes, and the first and last op while which it is live, by their place
    in `Peak.at`, or in a group of ops."""

    value: Value
    bytes: float
    first: int
    last: int


def live_at(count: int, held: Iterable[HeldBuffer]) -> list[float]:
    """The bytes that are live while each of so many ops runs."""
    changes = [0.0] * (count + 1)
    for _, size, first, last in held:
        changes[first] += size
        changes[last + 1] -= size
    return list(accumulate(changes[:-1]))


@dataclass(slots=True)
class Buffer:
    """The memory of a value, from when to when it is live, both included; `counts`: it is a temporary."""

    value: Value
    bytes: float
    start: float
    end: float
    counts: bool
    takes_over: bool
    is_taken: bool = False


def most_live(buffers: Sequence[Buffer]) -> tuple[list[Buffer], float]:
    """The buffers that are live when most bytes are, and these bytes."""
    _take_over(buffers)
    live, now, most, at = list[tuple[float, bool, int]](), 0.0, 0.0, -math.inf
    counted = [b for b in sorted(buffers, key=lambda b: b.start) if b.counts]
    for number, buffer in enumerate(counted):
        while live and (live[0][0] < buffer.start or (live[0][0] == buffer.start and not live[0][1])):
            now -= counted[heapq.heappop(live)[2]].bytes
        now += buffer.bytes
        heapq.heappush(live, (buffer.end, not buffer.is_taken, number))
        if now > most:
            most, at = now, buffer.start
    return [b for b in counted if b.start <= at and (b.end > at or (b.end == at and not b.is_taken))], most


def _take_over(buffers: Sequence[Buffer]) -> None:
    """Marks the buffers that another value takes over at their end."""
    dying: dict[tuple[float, float], list[Buffer]] = {}
    for buffer in buffers:
        if buffer.counts:
            dying.setdefault((buffer.end, buffer.bytes), []).append(buffer)
    for buffer in buffers:
        given = dying.get((buffer.start, buffer.bytes), []) if buffer.takes_over else []
        old = next((b for b in given if b.start < buffer.start and not b.is_taken), None)
        if old is not None:
            old.is_taken = True


# Arguments whose memory results may take over: those that are donated.
#
# Jax says so of an argument by `jax.buffer_donor`, or by `tf.aliasing_output` where it knows the result.

DONATED = "jax.buffer_donor"
_ALIASED = "tf.aliasing_output"


def in_donated_memory(graph: Graph) -> list[tuple[Value, Value]]:
    """The results that lie in the memory of donated arguments, with these: as many of each type and layout as there are
    of both."""
    entries = entries_of(graph.main.mlir, "arg_attrs")
    given = [v for v, entry in zip(graph.arguments, entries, strict=True) if DONATED in entry or _ALIASED in entry]
    if not given:
        return []
    left, found = defaultdict[object, list[Value]](list), list[tuple[Value, Value]]()
    for value in reversed(given):
        left[_key(value, value.sharding)].append(value)
    for value, sharding in zip(graph.outputs, graph.result_shardings(graph.main), strict=True):
        if same := left[_key(value, sharding)]:
            found.append((value, same.pop()))
    return found


def _key(value: Value, sharding: TensorSharding | None) -> tuple[object, ...]:
    return value.type, None if sharding is None or sharding.is_fully_replicated else sharding.layout
