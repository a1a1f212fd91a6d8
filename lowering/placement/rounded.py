"""Values that compilers round before they are moved.

Products of open precision take float32 rounded to bfloat16 on TPUs. What is moved for them alone XLA rounds before, so
that half of its bytes are sent. What else reads such a value element by element runs in the layout in which it is. Sums
take the value as it is made, or a copy of their own, of which all bytes are sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.lowering.placement.fusion import fuses, is_product, is_sum, moves, readers
from sdy_jax.lowering.strategies.registry import OPEN_PRECISION


def rounded_values(graph: Graph) -> frozenset[Value]:
    """The float32 values that products of open precision read, and else only sums and ops that run in any layout."""
    known: dict[Value, bool] = {}
    for value in reversed([*_values(graph)]):  # the last first, so that what users make of a value is known
        users, summing = [user for user, _ in readers(value)], _sums(value)
        runs = all(is_product(op) or fuses(op) or op in summing for op in users)
        known[value] = runs and any(_rounds(op, known) for op in users)
    return frozenset(value for value, is_rounded in known.items() if is_rounded and value.dtype == "f32")


def _sums(value: Value) -> list[Op]:
    """The sums that take a value."""
    return [user for user, _ in value.uses if is_sum(user)]


def _values(graph: Graph) -> Iterator[Value]:
    yield from graph.arguments
    for op in graph.ops:
        yield from op.results
        for block in op.blocks:
            yield from block.arguments


def _rounds(op: Op, known: Mapping[Value, bool]) -> bool:
    """Whether an op rounds its operands, or only moves them to ops that do, and not to sums, too: these would take what
    was moved before."""
    if op.name in OPEN_PRECISION:
        return OPEN_PRECISION[op.name](op)
    return moves(op) and known[op.results[0]] and not _sums(op.results[0])
