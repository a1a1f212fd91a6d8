"""What may be computed again: the ops of a stretch of a program, and what later ops need of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from sdy_jax.ir.custom_ops import CALLBACK, CALLBACK_ON_BLOCKS, INSPECTED
from sdy_jax.ir.graph import OWN_TARGETS, Op, Value
from sdy_jax.lowering.prepare.dead_code import has_effect

_NEVER_AGAIN = frozenset({"stablehlo.rng", "stablehlo.optimization_barrier", CALLBACK, CALLBACK_ON_BLOCKS, INSPECTED})
"""Ops that may not run again: what makes other numbers each time, what the host does, and what keeps ops apart."""


@dataclass(frozen=True, eq=False)
class Segment:
    """A stretch of a program.

    `ops`: those that could run again, in order. `needed`: the values that are read later, each with the bytes that it
    is held in. `is_at_hand`: whether a value that they take can be read later for nothing. `part`: of some ops, the
    number of the part that they are in, else 0: what an op takes of another part is held, if the op runs again. Else
    all that is needed could be recomputed at once.
    """

    ops: tuple[Op, ...]
    needed: Mapping[Value, float]
    is_at_hand: Callable[[Value], bool]
    part: Mapping[Op, int] = field(default_factory=dict)

    def taken(self, op: Op) -> list[Value]:
        """What an op takes, and what is in its regions, that is not at hand."""
        return [value for value in outside_values(op) if not self.is_at_hand(value)]

    def is_near(self, value: Value, op: Op) -> bool:
        """Whether a value that an op takes is of the op's part."""
        return not isinstance(value.owner, Op) or self.part.get(value.owner, 0) == self.part.get(op, 0)

    def is_made_again(self, value: Value, op: Op, again: Collection[Op]) -> bool:
        """Whether an op that runs again takes a value that is recomputed, if some ops run again."""
        return value.owner in again and self.is_near(value, op)

    def held(self, again: Collection[Op]) -> list[Value]:
        """The values that stay where some ops run again."""
        kept = dict.fromkeys(value for value in self.needed if value.owner not in again)
        for op in self.ops:
            taken = self.taken(op) if op in again else ()
            kept.update(dict.fromkeys(value for value in taken if not self.is_made_again(value, op, again)))
        return list(kept)


def can_run_again(op: Op) -> bool:
    """Whether an op does the same once more, and nothing else."""
    return all(_is_pure(inner) and inner.key not in _NEVER_AGAIN for inner in op.walk())


def _is_pure(op: Op) -> bool:
    if op.name == "stablehlo.custom_call" and not op.key.startswith(OWN_TARGETS):
        return False
    return not has_effect(op) and all(value.shape is not None for value in op.results)


def outside_values(op: Op) -> Iterator[Value]:
    """The values from outside of an op that it takes, or that something in its regions takes."""
    if not op.blocks:
        yield from op.operands
        return
    inside = dict.fromkeys(op.walk())
    for inner in inside:
        for value in inner.operands:
            owner = value.owner if isinstance(value.owner, Op) else value.owner.parent
            if owner not in inside or (owner is op and isinstance(value.owner, Op)):
                yield value
