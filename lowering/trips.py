"""How often loops run, as far as their text tells, and so how much more often an op runs than a value is made.

Source: spec of the partitioner, section 2.5.
"""

from __future__ import annotations

import math

from sdy_jax.graph import Block, Op, Value
from sdy_jax.lowering.strategies.monoids import known_scalar

UNKNOWN = 10
"""Taken where nothing tells the number of iterations."""


def times_as_often(op: Op, value: Value) -> int:
    """How often an op runs for each time that its operand is made: 1, unless loops lie between."""
    home = value.owner if isinstance(value.owner, Block) else value.owner.block
    times, block = 1, op.block
    while block is not None and block is not home:
        if block.parent.name == "stablehlo.while":
            times *= trips(block.parent)
        block = block.parent.block
    return times


def trips(loop: Op) -> int:
    """The number of iterations of a `stablehlo.while` that counts up to a constant in constant steps."""
    condition, body = loop.blocks
    test = condition.terminator.operands[0].defining_op
    if test is None or test.name != "stablehlo.compare" or test.text("comparison_direction") != "LT":
        return UNKNOWN
    counter, end = test.operands[0], _integer(test.operands[1])
    if counter.owner is not condition or end is None:
        return UNKNOWN
    start, step = _integer(loop.operands[counter.index]), _step(body, counter.index)
    return max(1, math.ceil((end - start) / step)) if start is not None and step else UNKNOWN


def _step(body: Block, index: int) -> int | None:
    """The constant that a loop's body adds to what the loop carries at a place."""
    added = body.terminator.operands[index].defining_op
    if added is None or added.name != "stablehlo.add":
        return None
    terms = [value for value in added.operands if value is not body.arguments[index]]
    return _integer(terms[0]) if len(terms) == 1 else None


def _integer(value: Value) -> int | None:
    known = known_scalar(value)
    return int(known) if known is not None and known.dtype.kind in "iu" else None
