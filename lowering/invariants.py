"""Loops that carry values which never change: their bodies use what went in.

jax carries everything that a loop's body closes over. What the body returns as it got it is the same in all iterations;
once it is used from outside, it is resharded once, before the loop.
"""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.graph import pre_order


def use_invariants_from_outside(module: ir.Operation) -> None:
    """Makes regions of loops use the initial values of what the loops carry unchanged, and so do the loops' users."""
    # Outer loops come first: what they carry may be carried on by inner ones.
    for loop in [op for op in pre_order(module) if op.name == "stablehlo.while"]:
        condition, body = (region.blocks[0] for region in loop.regions)
        returned = body.operations[len(body.operations) - 1].operands
        unchanged = [i for i, argument in enumerate(body.arguments) if returned[i] == argument]
        for i in unchanged:
            for value in (body.arguments[i], condition.arguments[i], loop.results[i]):
                value.replace_all_uses_with(loop.operands[i])
