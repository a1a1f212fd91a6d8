"""The program's order, where compilers put off what only results need.

Some compilers run an op no sooner than its result is needed (`Order.runs_late`). The gradient of a weight is needed
last of all, so what it is computed of would live until the end: activations, and their gradients, of every layer. In
the program it is computed at once, and that is what estimates of memory count on. So where a gradient is smaller than
what it is computed of, a product that runs after it waits for it, with its weight where that is an argument: then what
is computed for it need not be written. Operands count as these compilers keep them, rounded to bfloat16. Where a
gradient is larger, and only element-wise ops lie between it and a result of the program, such as an optimizer's moment,
that is computed with it and waited for (`optimizer_updates.py`): then the gradient need not be kept.

    %g = dot %x, %dy                   the gradient of a weight
    %d = multiply %dy, %s
    %u = sdy_jax.after %v, %g
    %f = dot %d, %u

To wait for a gradient takes time: it is written before a loop updates its weight, and an element of it is taken by an
op of its own. So nothing waits for one where a device can hold all values at once, in whatever order ops run:
transformers in Megatron's layout took 0.02 to 0.05 less so (libtpu 0.0.52, 2026-11). An update is written anyway.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.lowering.analysis.critical_path import CriticalPath
from sdy_jax.lowering.analysis.fusion import computes, is_kernel, is_product, moves
from sdy_jax.lowering.analysis.local_bytes import LocalBytes
from sdy_jax.lowering.schedule.after_ops import create_after
from sdy_jax.lowering.schedule.optimizer_updates import Updates
from sdy_jax.lowering.strategies.after import IN_ORDER
from sdy_jax.lowering.targets.family import Arrays
from sdy_jax.op_rules.dataflow import is_data_flow

_MUCH = 0.25
"""The share of the largest array that products read, from which on it matters how long arrays are kept. Guessed: with
less, products wait for gradients that free next to nothing."""

_LEAST = 2.0**17
"""The bytes from which on it matters at all. To take an element of a gradient is an op of its own, about a microsecond.
Measured (2026-11, libtpu 0.0.52): in a transformer with activations of 32 KiB ten of these were a twentieth of the
time."""


def order_gradients(module: ir.Operation, memory: float = 0.0, arrays: Arrays = Arrays()) -> Graph:  # noqa: B008 - immutable
    """Lets products of the main function's own block wait for what is to be computed before them.

    Args:
        module: a `builtin.module` whose collectives are all there.
        memory: the bytes that a device may hold; 0 where that is not known.
        arrays: how arrays lie there.

    Returns:
        The program as it is then.
    """
    graph = Graph(module)
    order = _Order(graph, memory, arrays)
    if not (order.matters and _let_products_wait(graph, order)):
        return graph
    graph.take_apart()
    return Graph(module)


def _let_products_wait(graph: Graph, order: _Order) -> bool:
    """Whether anything was moved, or waits."""
    updates, pending, is_ordered = Updates(graph.main.blocks[0]), list[tuple[Value, int]](), False
    for position, op in enumerate(graph.main.blocks[0].ops):
        if order.is_last(op):
            pending += order.awaited(op, updates)
            is_ordered |= bool(pending)
            continue
        ready = [value for value, last in pending if last < position]
        index = order.waiting_operand(op) if ready else None
        if index is not None:
            operand = op.operands[index]
            assert operand.sharding is not None
            awaited = [operand.mlir, *(value.mlir for value in ready)]
            op.mlir.operands[index] = create_after(
                awaited, operand.sharding, op.mlir.location, ir.InsertionPoint(op.mlir), mark=IN_ORDER
            )
            pending = [(value, last) for value, last in pending if last >= position]
    return is_ordered


class _Order:
    """What the ops of a program's main block are computed for."""

    def __init__(self, graph: Graph, memory: float, arrays: Arrays):
        self._graph, self._memory = graph, memory
        self._sizes, self._ops = LocalBytes(graph, replace(arrays, tiles=None)), graph.main.blocks[0].ops
        read = [v for op in self._ops if computes(op) for v in op.operands if v.defining_op is not None]
        self._least = max(_LEAST, _MUCH * max(map(self._sizes.of, read), default=0.0))

    @property
    def matters(self) -> bool:
        """Whether a product reads so much that anything may wait for it."""
        return any(self._read(op.operands) >= self._least for op in self._ops if is_product(op))

    @cached_property
    def _critical(self) -> CriticalPath:
        ops = (op for op in self._ops if is_product(op) or is_kernel(op) or is_data_flow(op))
        return CriticalPath(self._graph, ops)

    @cached_property
    def _has_room(self) -> bool:
        return _bytes_of_all(self._graph) <= self._memory

    def _read(self, values: Iterable[Value]) -> float:
        """The bytes of some values, each once."""
        return sum(map(self._sizes.of, dict.fromkeys(values)))

    def is_last(self, op: Op) -> bool:
        """Whether an op is a product, and only results of the program are computed of what it makes. A sum, as the
        gradient of a bias, is computed with what it adds up, or with what reads that."""
        return is_product(op) and self._critical.before.isdisjoint(op.results)

    def awaited(self, op: Op, updates: Updates) -> list[tuple[Value, int]]:
        """What has to be there so that what an op is computed of can be freed, and the position of the last op that is
        to run before: the op's results, if they are smaller and there is no room for all, else a result of the program
        in which they are used up."""
        kept = self._read(v for v in op.operands if v in self._critical.after)
        if kept < self._least:
            return []
        if kept > sum(map(self._sizes.of, op.results)):
            return [] if self._has_room else [(value, -1) for value in op.results]
        update = updates.run_after(op)
        return [] if update is None else [update]

    def waiting_operand(self, op: Op) -> int | None:
        """The operand of a product that others have to be computed before, of one that takes what was computed: an
        argument of the program, so that what is computed need not be written, else that. Not a copy of an argument,
        whose gathering would be held up, and nothing that was just gathered."""
        if not is_product(op):
            return None
        computed = [i for i, value in enumerate(op.operands) if value in self._critical.after and _can_wait(value)]
        given = [i for i, value in enumerate(op.operands) if _is_given(value)]
        return [*given, *computed][0] if computed else None


def _bytes_of_all(graph: Graph) -> float:
    """The bytes of all values of a program on one device."""
    sizes = LocalBytes(graph)
    return sum([sizes.of(v) for v in (*graph.arguments, *(result for op in graph.ops for result in op.results))])


def _is_given(value: Value) -> bool:
    """Whether a value is an argument of the program, or its elements in another order."""
    op, sharding = value.defining_op, value.sharding
    while op is not None and len(op.operands) == 1 and moves(op) and not op.name.startswith("sdy."):
        op = op.operands[0].defining_op
    return op is None and sharding is not None


def _can_wait(value: Value) -> bool:
    op, sharding = value.defining_op, value.sharding
    return op is not None and not op.name.startswith("sdy.") and sharding is not None and not sharding.unreduced_axes
