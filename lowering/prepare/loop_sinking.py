"""What loops make of little in every trip, instead of holding it for all of them: masks, and constants as arrays.

    %m = broadcast %mask            of 16 MiB, to 512 MiB
    while { %s = select %m, ... }   holds %m as long as it runs; a broadcast inside is a part of the select

jax moves what no trip changes in front of a loop, whatever its size.
"""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Block, Graph, Op
from sdy_jax.lowering.analysis.fusion import fuses
from sdy_jax.lowering.strategies.registry import REMATERIALIZABLE

_WIDENING = 4
"""How many times as large a value has to be as what it is made of. Guessed: a mask of positions is thousands of times
as large; with 1, loops would compute again what they could read as fast, and ops that compute much would run again in
each part of a group of ops; with more, broadcasts are held."""


def sink_into_loops(graph: Graph) -> Graph:
    """Makes what is much larger than what it is made of where a loop computes with it, element by element. Returns the
    graph of what there is then."""
    sunk = [_sink(op) for op in graph.ops if widens(op)]
    return Graph(graph.module) if any(sunk) else graph


def widens(op: Op) -> bool:
    """Whether an op makes much of little, as a mask for all heads."""
    if op.name not in REMATERIALIZABLE or len(op.results) != 1:
        return False
    return op.results[0].bytes >= _WIDENING * sum(value.bytes for value in op.operands)


def _sink(op: Op) -> bool:
    """Makes an op's result once more in each block of a loop that uses it. Returns whether there is any."""
    found = dict[Block, list[tuple[Op, int]]]()
    for user, index in op.results[0].uses:
        if user.block is not None and user.block is not op.block and _is_in_loop(user.block, op):
            found.setdefault(user.block, []).append((user, index))
    inside = {block: uses for block, uses in found.items() if all(fuses(user) for user, _ in uses)}
    for uses in inside.values():
        made = op.mlir.clone(ir.InsertionPoint(uses[0][0].mlir)).operation.results[0]
        for user, index in uses:
            user.mlir.operands[index] = made
    return bool(inside)


def _is_in_loop(block: Block, outside: Op) -> bool:
    """Whether a loop lies between an op and a block in which its result is used."""
    while block is not outside.block:
        around = block.parent
        if around.name == "stablehlo.while" or around.block is None:
            return around.block is not None
        block = around.block
    return False
