"""The copies of a planned program's values that could be freed between their uses and made again.

See docs/explanation/memory.md#when-the-cheapest-program-does-not-fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sdy_jax.ir.graph import Value
from sdy_jax.lowering.placement.copies import HeldCopy, UseOfCopy
from sdy_jax.lowering.placement.modelled import FREE, ModelledProgram
from sdy_jax.lowering.planning.program_model import Chosen, CopyInLayout, ModelValue


def held_copies(program: ModelledProgram, chosen: Chosen) -> list[HeldCopy]:
    """The copies of values in other layouts that several ops use, and that could be made again for each."""
    anew = dict[Value, list[int]]()
    for (op, index), number in program.made_anew.items():
        anew.setdefault(op.operands[index], []).append(number)
    found = list[HeldCopy]()
    for value, number in program.values.items():
        if value in anew:
            found += _copies_made_anew(program, value, anew[value], chosen)
        elif number != FREE and (value.defining_op is not None or value.owner is program.graph.main.blocks[0]):
            copies = program.model.copies(program.model.values[number], chosen)
            found += [_held_copy(program, value, copy) for copy in copies if len(copy.uses) > 1]
    return found


def _held_copy(program: ModelledProgram, value: Value, copy: CopyInLayout) -> HeldCopy:
    maker, uses, parts = value.defining_op, list[UseOfCopy](), program.parts
    for port in copy.uses:
        user = program.numbers[parts[port.node].users[port.slot]]
        known = program.model.values[program.model.nodes[port.node].values[port.slot]]
        begin, end = known.needed[known.uses.index(port)]
        planned = program.numbers[maker] if maker is not None else None, value.index, user
        uses.append(UseOfCopy(planned, parts[begin].until, parts[end].until))
    return HeldCopy(uses, copy.bytes, copy.cost)


def _copies_made_anew(
    program: ModelledProgram, value: Value, numbers: Sequence[int], chosen: Chosen
) -> Iterator[HeldCopy]:
    """The copies of what is made anew for each use; those that are made and taken alike are one."""
    model, found = program.model, dict[tuple[int, int], list[ModelValue]]()
    used = [known for known in (model.values[number] for number in numbers) if known.uses]
    for known in sorted(used, key=lambda known: known.needed[0]):
        assert known.maker is not None
        found.setdefault((model.layout(chosen, known.maker), model.layout(chosen, known.uses[0])), []).append(known)
    for (made, taken), each in found.items():
        maker = each[0].maker
        assert maker is not None
        own = model.nodes[maker.node].ways[chosen[maker.node]].cost
        cost = each[0].times * (own + model.prices.cost(each[0].shape, made, taken))
        uses = [known.uses[0] for known in each]
        if len(uses) > 1:
            yield _held_copy(program, value, CopyInLayout(uses, model.bytes_of(each[0], taken), cost))
