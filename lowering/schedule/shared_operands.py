"""Operands that several products read: written once, where each would compute them of more than that.

Compilers of some devices let products compute their operands as they read them (`Fusion.into_products`). What several
products take is then computed in each, once more for every block of the result, of all that it is computed of:

    %g = f(%y, %a, %b)                 the gradient of a gated activation: three arrays are read ...
    %w = dot %x, %g                    ... by the gradient of a weight,
    %d = dot %g, %u                    ... and by that of what the weight is multiplied with

Behind `sdy_jax.after` it is an array, which the product that makes `%y` may write. That holds one array more, so it is
done only where that is small beside a device's memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.lowering.analysis.fusion import DEAR, can_fuse, fuses, moves
from sdy_jax.lowering.analysis.local_bytes import LocalBytes
from sdy_jax.lowering.schedule.after_ops import create_after
from sdy_jax.lowering.targets.compiler import Fusion
from sdy_jax.op_rules.elementwise_table import ELEMENTWISE
from sdy_jax.op_rules.op_attributes import dot_dimension_numbers

_SMALL = 1 / 64
"""The share of a device's memory that one such array may take. Guessed: what saves time must not cost memory that one
sees; activations between two products of a layer are a hundredth of it."""

_LEAST = 2.0**20
"""The bytes from which on it matters. Guessed: smaller arrays stay in fast memory while products read them."""

_WIDE = 512
"""The columns of a product's other operand from which on its result has several blocks. Guessed: heads of attention
have fewer, and what is computed of scores is read once."""

_PRODUCT = "stablehlo.dot_general"


def write_shared(graph: Graph, fusion: Fusion, memory: float) -> Graph:
    """Lets what several products would compute as they read it be an array.

    Args:
        graph: a program whose collectives are all there.
        fusion: what the compiler fuses.
        memory: the bytes that a device may hold.

    Returns:
        The program as it is then.
    """
    shared = _Shared(graph, fusion, _SMALL * memory)
    found = [op.results[0] for op in graph.ops if shared.is_written(op)]
    for value in found:
        op = value.defining_op
        assert op is not None and value.sharding is not None
        uses = [(user.mlir, index) for user, index in value.uses]
        made = create_after([value.mlir], value.sharding, op.mlir.location, ir.InsertionPoint.after(op.mlir))
        for user, index in uses:
            user.operands[index] = made
    if not found:
        return graph
    module = graph.module
    graph.take_apart()
    return Graph(module)


class _Shared:
    def __init__(self, graph: Graph, fusion: Fusion, most: float):
        self._fusion, self._most, self._sizes = fusion, most, LocalBytes(graph)

    def is_written(self, op: Op) -> bool:
        """Whether an op computes what several products take, of more than one array of its size."""
        if op.name not in ELEMENTWISE or not can_fuse(op, self._fusion):
            return False
        value = op.results[0]
        if value.sharding is None or value.sharding.unreduced_axes or not _LEAST <= self._sizes.of(value) <= self._most:
            return False
        products = list(self._products(value))
        return len(products) > 1 and all(map(self._has_blocks, products)) and self._is_dear(op)

    def _products(self, value: Value) -> Iterator[tuple[Op, int]]:
        """The products that take a value, or its elements in another order, and the index of the operand."""
        for user, index in value.uses:
            if user.name == _PRODUCT:
                yield user, index
            elif moves(user) and len(user.operands) == 1 and can_fuse(user, self._fusion):
                yield from self._products(user.results[0])

    def _has_blocks(self, use: tuple[Op, int]) -> bool:
        """Whether the other operand of a product is so wide that it reads this one several times."""
        product, index = use
        numbers = dot_dimension_numbers(product)
        batch, contracting = (
            (numbers.rhs_batching, numbers.rhs_contracting)
            if index == 0
            else (numbers.lhs_batching, numbers.lhs_contracting)
        )
        shape = self._sizes.shape(product.operands[1 - index])
        return math.prod(n for d, n in enumerate(shape) if d not in batch and d not in contracting) >= _WIDE

    def _is_dear(self, op: Op) -> bool:
        """Whether what an op makes takes something that is dear to compute, and is computed of several arrays."""
        count, dear, arrays = math.prod(op.results[0].shape or ()), False, set[Value]()
        waiting, seen = [op], {op}
        while waiting:
            made = waiting.pop()
            dear |= made.name in DEAR
            for value in made.operands:
                before = value.defining_op
                if math.prod(value.shape or ()) != count:
                    continue
                if before is None or before.block is not op.block or not (fuses(before) and before.operands):
                    arrays.add(value)
                elif before not in seen:
                    seen.add(before)
                    waiting.append(before)
        return dear and len(arrays) > 1
