"""Arguments whose memory results may take over: those that are donated.

Jax says so of an argument by `jax.buffer_donor`, or by `tf.aliasing_output` where it knows the result.
"""

from __future__ import annotations

from collections import defaultdict

from sdy_jax.ir.graph import Graph, Value
from sdy_jax.ir.stored_shardings import entries_of
from sdy_jax.representation.sharding import TensorSharding

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
