"""Loop invariants: bodies of loops use a value that never changes from outside instead of carrying it.

jax lets a loop carry every value that its body closes over. One that the body returns unchanged is the same in all
iterations. Used from outside of the loop, it is resharded once, before the loop. What a body returns from outside, as
masks that the forward pass of a scan keeps for the backward pass, is that value after the first trip.
"""

from __future__ import annotations

from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.lowering.analysis.trip_counts import trip_count


def use_invariants_from_outside(graph: Graph) -> None:
    """Makes regions of loops use the initial values of what the loops carry unchanged, and so do the loops' users."""
    # Outer loops come first: what they carry may be carried on by inner ones.
    for loop in [op for op in graph.ops if op.name == "stablehlo.while"]:
        condition, body = loop.blocks
        for i, returned in enumerate(body.terminator.operands):
            arguments = body.arguments[i], condition.arguments[i]
            if returned is arguments[0]:
                for value in (*arguments, loop.results[i]):
                    graph.replace_uses(value, loop.operands[i])
            elif not any(value.uses for value in arguments) and is_outside(returned, loop) and trip_count(loop):
                graph.replace_uses(loop.results[i], returned)


def is_outside(value: Value, loop: Op) -> bool:
    """Whether a value that a loop's body takes, or returns, is made before the loop."""
    block = value.owner if isinstance(value.owner, Block) else value.owner.block
    while block is not None and block.parent is not loop:
        block = block.parent.block
    return block is None
