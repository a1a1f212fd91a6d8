"""When values are needed: from which node of the model to which, so that holding them can have a price.

See docs/explanation/memory.md#when-the-cheapest-program-does-not-fit.
"""

from __future__ import annotations

from sdy_jax.ir.graph import Block, Op, Value
from sdy_jax.lowering.analysis.fusion import can_fuse, is_constant
from sdy_jax.lowering.model.nodes import ModelValue
from sdy_jax.lowering.model.planning_problem import FREE, PlanningProblem
from sdy_jax.lowering.targets.compiler import Fusion


def place_uses(program: PlanningProblem, fusion: Fusion) -> None:
    """Says of each use from which node to which the value is needed for it: all of a loop, if the use is inside; what
    is fused reads its operands when its users run. `fusion`: what users compute."""
    main, returned = program.graph.main.blocks[0], frozenset(program.graph.outputs)
    found = [
        *program.values.items(),
        *program.unrounded.items(),
        *((op.operands[i], n) for (op, i), n in program.recomputed.items()),
    ]
    values = {number: value for value, number in reversed(found) if number != FREE}
    anew, runs = set(program.recomputed.values()), [(node, node) for node in range(len(program.model.nodes))]
    given = {number for number, value in values.items() if value.owner is main}
    second = set(program.unrounded.values())  # in the memory of the first, in the layout in which both are made
    for number in sorted(values, key=lambda n: -1 if n in given else program.maker(n), reverse=True):
        value, known = values[number], program.model.values[number]
        op, home = value.defining_op, value.owner if isinstance(value.owner, Block) else value.owner.block
        known.born = _born(program, value, known)
        known.needed = [_needed(program, use.node, runs[use.node], home, known.born) for use in known.uses]
        fused = op is not None and value not in returned and _is_fused(op, fusion)
        is_given = home is main and op is None
        known.is_at_hand = fused or is_given or number in second or (op is not None and is_constant(op))
        if not known.uses:
            continue
        begins, ends = zip(*known.needed, strict=True)
        if fused:
            maker = program.maker(number)
            before = runs[maker] if runs[maker] != (maker, maker) else known.needed[0]
            runs[maker] = min(*begins, before[0]), max(*ends, before[1])
        elif number in anew:  # runs just before its user
            known.born, runs[program.maker(number)] = min(begins), (min(begins), min(begins))


def _is_fused(op: Op, fusion: Fusion) -> bool:
    """Whether the users of an op compute its result."""
    return can_fuse(op, fusion) and all(user.block is op.block for user, _ in op.results[0].uses)


def _born(program: PlanningProblem, value: Value, known: ModelValue) -> int:
    """The node from which on a value is there: what a loop carries, from the first node inside."""
    block = value.owner
    if block is program.graph.main.blocks[0]:
        return 0
    if isinstance(block, Block) and block.parent in program.extents:
        return program.extents[block.parent][0]
    return known.maker.node if known.maker is not None else 0


def _needed(
    program: PlanningProblem, node: int, extent: tuple[int, int], home: Block | None, born: int
) -> tuple[int, int]:
    """From when to when what a node takes is needed, which it reads between two nodes of its own block; a loop reads
    what it carries on after its body has made it."""
    block = program.parts[node].block
    while block is not home and block.parent.block is not None:
        extent, block = program.extents.get(block.parent, extent), block.parent.block
    return max(extent[0], born), max(extent[1], born)
