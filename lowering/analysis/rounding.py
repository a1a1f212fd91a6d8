"""Values that compilers round before they are moved.

Where arrays are rounded (`Arrays.rounded`), products of open precision take float32 rounded. What is moved for them
alone a compiler rounds before, so that fewer of its bytes are sent. What else reads such a value element by element
runs in the layout in which it is. Sums take the value as it is made, or a copy of their own, of which all bytes are
sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.lowering.analysis.fusion import fuses, is_product, is_sum, moves, readers
from sdy_jax.lowering.costs.cost_model import CostModel
from sdy_jax.lowering.strategies.registry import OPEN_PRECISION
from sdy_jax.representation.sdy_collectives import MOVING, ops_of

Known = Mapping[Value, bool]
"""Which values are rounded, of those that come later."""

_COLLECTIVES = ops_of((*MOVING, "all_slice"))


def rounded_values(graph: Graph, costs: CostModel) -> frozenset[Value]:
    """The float32 values that products of open precision read, and else only sums and ops that run in any layout; none
    where compilers round nothing before they move it."""
    if costs.rounds == 1.0:
        return frozenset()
    return frozenset(value for value in _found_backwards(graph, _is_moved_rounded) if value.dtype == "f32")


def values_kept_rounded(graph: Graph) -> frozenset[Value]:
    """The float32 values of a partitioned program that products of open precision alone read, some after they have been
    moved: compilers that round keep them so."""
    return _found_backwards(graph, _is_kept_rounded)


def held_rounded(graph: Graph, moved: frozenset[Value]) -> frozenset[Value]:
    """The float32 values of a program that is not partitioned yet which devices hold rounded, moved or not: those that
    products of open precision alone read, and copies of the program's arguments that are moved rounded."""
    return values_kept_rounded(graph) | moved.intersection(graph.arguments)


def sums_of(value: Value) -> list[Op]:
    """The sums that take a value."""
    return [user for user, _ in value.uses if is_sum(user)]


def _found_backwards(graph: Graph, is_rounded: Callable[[Value, Known], bool]) -> frozenset[Value]:
    known: dict[Value, bool] = {}
    for value in reversed([*_values(graph)]):  # the last first, so that what users make of a value is known
        known[value] = is_rounded(value, known)
    return frozenset(value for value, found in known.items() if found)


def _values(graph: Graph) -> Iterator[Value]:
    yield from graph.arguments
    for op in graph.ops:
        yield from op.results
        for block in op.blocks:
            yield from block.arguments


def _is_moved_rounded(value: Value, known: Known) -> bool:
    """Where an op moves a value on to sums, too, these would take what was moved before."""
    users, summing = [user for user, _ in readers(value)], sums_of(value)
    if not all(is_product(op) or fuses(op) or op in summing for op in users):
        return False
    return any(
        _rounds(op, lambda op: moves(op) and known[op.results[0]] and not sums_of(op.results[0])) for op in users
    )


def _is_kept_rounded(value: Value, known: Known) -> bool:
    if value.dtype != "f32" or value.defining_op is None:
        return False
    users = [user for user, _ in readers(value)]
    return len(users) > 0 and all(
        _rounds(op, lambda op: (op.name in _COLLECTIVES or moves(op)) and known[op.results[0]]) for op in users
    )


def _rounds(op: Op, moves_on: Callable[[Op], bool]) -> bool:
    """Whether an op rounds its operands, or only moves them to ops that do."""
    return OPEN_PRECISION[op.name](op) if op.name in OPEN_PRECISION else moves_on(op)
