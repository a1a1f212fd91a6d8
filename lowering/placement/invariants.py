"""Loop invariants: bodies of loops use a value that never changes from outside instead of carrying it.

jax lets a loop carry every value that its body closes over. One that the body returns unchanged is the same in all
iterations. Used from outside of the loop, it is resharded once, before the loop.
"""

from __future__ import annotations

from sdy_jax.ir.graph import Graph


def use_invariants_from_outside(graph: Graph) -> None:
    """Makes regions of loops use the initial values of what the loops carry unchanged, and so do the loops' users."""
    # Outer loops come first: what they carry may be carried on by inner ones.
    for loop in [op for op in graph.ops if op.name == "stablehlo.while"]:
        condition, body = loop.blocks
        unchanged = [i for i, argument in enumerate(body.arguments) if body.terminator.operands[i] is argument]
        for i in unchanged:
            for value in (body.arguments[i], condition.arguments[i], loop.results[i]):
                graph.replace_uses(value, loop.operands[i])
