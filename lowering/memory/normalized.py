"""Normalized values: computed element by element of values and of sums or maxima of these along the last dimension.

    s = dot(q, k)
    m = reduce max(s)
    p = exponential(s - broadcast(m))       one kernel has a row of s, its maximum, and that row of p

A kernel that has read a whole row before it writes that of the result does not write it over what it reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from sdy_jax.ir.graph import Op, Value
from sdy_jax.lowering.analysis.fusion import is_sum

Shape = Callable[[Value], tuple[int, ...]]


def is_normalized(op: Op, is_fused: Callable[[Op], bool], shape: Shape, longest: int) -> bool:
    """Whether an op's result, which is written to memory, is computed of rows in memory and of their sums.

    Args:
        op: an element-wise op.
        is_fused: whether an op is computed as its result is read.
        shape: the shapes on one device.
        longest: the elements of a row that a kernel has at once, at most.
    """
    count = math.prod(shape(op.results[0]))
    waiting, seen = [(value, False) for value in op.operands], set[tuple[Value, bool]]()
    read = set[tuple[Value, bool]]()
    while waiting:
        value, is_summed = waiting.pop()
        if (value, is_summed) in seen:
            continue
        seen.add((value, is_summed))
        made = value.defining_op
        if made is not None and is_fused(made):
            waiting += [(operand, is_summed) for operand in made.operands]
        elif made is not None and _is_of_rows(made, shape, longest):
            waiting.append((made.operands[0], True))
        elif math.prod(shape(value)) == count:
            read.add((value, is_summed))
    return any((value, not is_summed) in read for value, is_summed in read)


def _is_of_rows(op: Op, shape: Shape, longest: int) -> bool:
    """Whether an op sums rows that are not too long, or takes their maxima."""
    if not is_sum(op):
        return False
    rows = shape(op.operands[0])
    return op.ints("dimensions") == (len(rows) - 1,) and rows[-1] <= longest
