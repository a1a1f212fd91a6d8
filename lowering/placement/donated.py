"""Arguments whose memory results may take over: those that are donated.

Jax says so of an argument by `jax.buffer_donor`, or by `tf.aliasing_output` where it knows the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from sdy_jax.ir.graph import Graph, Value
from sdy_jax.ir.stored_shardings import entries_of
from sdy_jax.representation.sharding import TensorSharding

DONATED = "jax.buffer_donor"
_ALIASED = "tf.aliasing_output"


def shared_bytes(graph: Graph, size: Callable[[Value], float]) -> float:
    """The bytes of results on a device that lie in the memory of donated arguments: as many of each type and layout as
    there are of both."""
    entries = entries_of(graph.main.mlir, "arg_attrs")
    given = [v for v, entry in zip(graph.arguments, entries, strict=True) if DONATED in entry or _ALIASED in entry]
    if not given:
        return 0.0
    shardings = graph.result_shardings(graph.main)
    left, shared = Counter(_key(value, value.sharding) for value in given), 0.0
    for value, sharding in zip(graph.outputs, shardings, strict=True):
        key = _key(value, sharding)
        if left[key]:
            left[key] -= 1
            shared += size(value)
    return shared


def _key(value: Value, sharding: TensorSharding | None) -> tuple[object, ...]:
    return value.type, None if sharding is None or sharding.is_fully_replicated else sharding.layout
