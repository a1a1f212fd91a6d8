"""Regions that compute on single elements, such as the body of a reduction: shardings stated in them mean nothing.

jax states them for every value of a program with manual axes, also there. They are removed before anything asks what a
region computes, and before it is run.
"""

from __future__ import annotations

from sdy_jax.ir.graph import Op, Value
from sdy_jax.lowering.strategies.registry import is_forwarding


def forget_shardings_inside(op: Op) -> list[Op]:
    """Removes shardings, and the ops that only state one, from the regions of `op`: in its module and in the graph.

    Returns:
        The ops that were erased.
    """
    inside = [inner for block in op.blocks for child in block.ops for inner in child.walk()]
    for inner in inside:
        for index, value in enumerate(inner.operands):
            origin = _origin(value)
            if origin is not value:
                inner.operands[index] = origin
                inner.mlir.operands[index] = origin.mlir
        if "sdy.sharding" in inner.mlir.attributes:
            del inner.mlir.attributes["sdy.sharding"]
    erased = [inner for inner in reversed(inside) if is_forwarding(inner)]
    for inner in erased:
        assert inner.block is not None
        inner.block.ops.remove(inner)
        inner.mlir.erase()
    return erased


def _origin(value: Value) -> Value:
    while value.defining_op is not None and is_forwarding(value.defining_op):
        value = value.defining_op.operands[0]
    return value
