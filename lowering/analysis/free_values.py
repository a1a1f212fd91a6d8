"""Values that depend on no input, so that a device can compute any part of them: constants, iotas, masks."""

from __future__ import annotations

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.lowering.strategies.registry import REMATERIALIZABLE
from sdy_jax.op_rules.predicates import is_elementwise

MAX_CHAIN = 6
"""The longest chain of ops that is rematerialized: a mask made of two iotas is four ops deep. Measured (2026-11,
sixteen small programs on eight devices): with 3 five of them move what they could make, with 12 none changes; a longer
one takes longer to follow."""


def depends_on_no_input(value: Value, depth: int = MAX_CHAIN) -> bool:
    """Whether a value depends on no input, so that a device can compute any part of it: constants, iotas, masks."""
    op = value.defining_op
    if not depth or op is None or op.blocks or len(op.results) != 1 or not can_rematerialize(op):
        return False
    return all(depends_on_no_input(operand, depth - 1) for operand in op.operands)


def free_values(graph: Graph) -> set[Value]:
    """The values of a program of which `depends_on_no_input` is true, found in one pass."""
    chains: dict[Value, int] = {}
    for op in graph.ops:
        if op.blocks or len(op.results) != 1 or not can_rematerialize(op):
            continue
        chain = 1 + max([chains.get(operand, MAX_CHAIN) for operand in op.operands], default=0)
        if chain <= MAX_CHAIN:
            chains[op.results[0]] = chain
    return set(chains)


def can_rematerialize(op: Op) -> bool:
    return op.name in REMATERIALIZABLE or (is_elementwise(op) and op.name.startswith(("stablehlo", "chlo")))
