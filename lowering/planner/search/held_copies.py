"""Copies of values that could be freed between their uses and recomputed, and when values are needed.

See docs/explanation/memory.md#when-the-cheapest-program-does-not-fit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from sdy_jax.ir.graph import Block, Op, Value
from sdy_jax.lowering.planner.facts.fusion import can_fuse, is_constant
from sdy_jax.lowering.planner.problem.layout_plan import PlannedUse
from sdy_jax.lowering.planner.problem.planning_problem import FREE, PlanningProblem
from sdy_jax.lowering.planner.problem.program_model import Chosen, CopyInLayout, ModelValue
from sdy_jax.lowering.planner.search.partitioned_program import PerOp
from sdy_jax.lowering.targets.family import Fusion

# The copies of a planned program's values that could be freed between their uses and recomputed.
#
# See docs/explanation/memory.md#when-the-cheapest-program-does-not-fit.


class UseOfCopy(NamedTuple):
    """A use of a copy, and the numbers of the first and the last op for which it needs it."""

    planned: PlannedUse
    begin: int
    end: int


class HeldCopy(NamedTuple):
    """A copy of a value that could be freed between its uses, which are in order of time: its bytes on a device, and
    what it costs to recompute it."""

    uses: list[UseOfCopy]
    bytes: float
    cost: float

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Between every use and the next: the first op for which the copy is not needed, and the first for which it is
        again."""
        end = -1
        for use, following in pairwise(self.uses):
            end = max(end, use.end)
            yield end + 1, following.begin


def held_copies(program: PlanningProblem, chosen: Chosen) -> list[HeldCopy]:
    """The copies of values in other layouts that several ops use, and that could be recomputed for each."""
    anew = dict[Value, list[int]]()
    for (op, index), number in program.recomputed.items():
        anew.setdefault(op.operands[index], []).append(number)
    found = list[HeldCopy]()
    for value, number in program.values.items():
        if value in anew:
            found += _recomputed_copies(program, value, anew[value], chosen)
        elif number != FREE and (value.defining_op is not None or value.owner is program.graph.main.blocks[0]):
            copies = program.model.copies(program.model.values[number], chosen)
            found += [_held_copy(program, value, copy) for copy in copies if len(copy.uses) > 1]
    return found


def _held_copy(program: PlanningProblem, value: Value, copy: CopyInLayout) -> HeldCopy:
    maker, uses, parts = value.defining_op, list[UseOfCopy](), program.parts
    for port in copy.uses:
        user = program.numbers[parts[port.node].users[port.slot]]
        known = program.model.values[program.model.nodes[port.node].values[port.slot]]
        begin, end = known.needed[known.uses.index(port)]
        planned = program.numbers[maker] if maker is not None else None, value.index, user
        uses.append(UseOfCopy(planned, parts[begin].until, parts[end].until))
    return HeldCopy(uses, copy.bytes, copy.cost)


def _recomputed_copies(
    program: PlanningProblem, value: Value, numbers: Sequence[int], chosen: Chosen
) -> Iterator[HeldCopy]:
    """The copies of what is recomputed for each use; those that are made and taken alike are one."""
    model, found = program.model, dict[tuple[int, int], list[ModelValue]]()
    used = [known for known in (model.values[number] for number in numbers) if known.uses]
    for known in sorted(used, key=lambda known: known.needed[0]):
        assert known.maker is not None
        found.setdefault((model.layout(chosen, known.maker), model.layout(chosen, known.uses[0])), []).append(known)
    for (made, taken), each in found.items():
        maker = each[0].maker
        assert maker is not None
        own = model.nodes[maker.node].candidates[chosen[maker.node]].cost
        cost = each[0].times * (own + model.prices.cost(each[0].shape, made, taken))
        uses = [known.uses[0] for known in each]
        if len(uses) > 1:
            yield _held_copy(program, value, CopyInLayout(uses, model.bytes_of(each[0], taken), cost))


def freed_gaps(held: Sequence[HeldCopy], over: PerOp, freed: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """The gaps of copies, by copy and use, in which they are freed, and more of them, so that nowhere more is live than
    may be, if possible: at the worst moment first, what costs least per byte, and is not needed for longest."""
    found, over = set(freed), over.copy()
    gaps = {
        (n, i): (begin, end)
        for n, copy in enumerate(held)
        for i, (begin, end) in enumerate(copy.gaps())
        if begin < end and copy.bytes and copy.cost < math.inf and (n, i) not in freed
    }
    order = sorted(gaps, key=lambda gap: (held[gap[0]].cost / held[gap[0]].bytes, gaps[gap][0] - gaps[gap][1], gap))
    while over.max(initial=0.0) > 0:
        worst = over.argmax().item()
        gap = next((gap for gap in order if gap not in found and gaps[gap][0] <= worst < gaps[gap][1]), None)
        if gap is None:
            over[worst] = 0.0
            continue
        found.add(gap)
        over[slice(*gaps[gap])] -= held[gap[0]].bytes
    return found


def live_without(held: Sequence[HeldCopy], freed: Collection[tuple[int, int]], live: PerOp) -> PerOp:
    """What is live at each op where copies are freed in some of their gaps, about."""
    left = live.copy()
    for copy, gap in freed:
        left[slice(*[*held[copy].gaps()][gap])] -= held[copy].bytes
    return left


def numbered_uses(held: Sequence[HeldCopy], freed: set[tuple[int, int]]) -> Iterator[tuple[PlannedUse, int]]:
    """Which copy serves each use, counted from 1, of the values of which some are recomputed."""
    for n, copy in enumerate(held):
        if any((n, i) in freed for i in range(len(copy.uses))):
            number = 1
            for i, use in enumerate(copy.uses):
                yield use.planned, number
                number += (n, i) in freed


# When values are needed: from which node of the model to which, so that memory can have a multiplier.
#
# See docs/explanation/memory.md#when-the-cheapest-program-does-not-fit.


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
