"""Op priorities: at each level more ops may propagate, and in more directions.

Level 0: element-wise ops, reshapes, transposes whose operands have one use; 1: the same with any uses; 2: all ops along
pass-through factors; 3: along all factors; 4: broadcasts forward as well. A level includes those before it.
See docs/explanation/propagation.md#priorities-of-ops.
"""

from __future__ import annotations

from functools import cache

from sdy_jax.ir.graph import Op
from sdy_jax.op_rules.predicates import is_elementwise
from sdy_jax.propagation.basic import Direction

LEVELS = 5
"""The levels of ops' priorities. Published (Shardy: pass-through, single use first; pass-through; by factor; broadcasts
backward; all)."""
WITHOUT_LEVELS = LEVELS
"""Stands for a level where all ops take part at once."""

Directions = tuple[Direction, Direction]
"""The directions of pass-through factors, and of the other factors."""

NEITHER_WAY: Directions = (Direction.NONE, Direction.NONE)

_BOTH_EARLY = frozenset({"stablehlo.reshape", "stablehlo.transpose"})
_FORWARD_EARLY = frozenset({"stablehlo.dynamic_slice", "stablehlo.dynamic_update_slice"})
_MOVES = frozenset({"MoveToDevice", "MoveToHost"})


def early_direction(op: Op) -> Direction:
    """In which direction the op may propagate at level 1, and at level 0 if its operands have one use each."""
    if is_elementwise(op) or op.name in _BOTH_EARLY:
        return Direction.BOTH
    if op.name == "stablehlo.custom_call" and op.text("call_target_name") in _MOVES:
        return Direction.BOTH
    return Direction.FORWARD if op.name in _FORWARD_EARLY else Direction.NONE


def _at_level(level: int, early: Direction, is_broadcast: bool) -> Directions:
    if level < 2:
        return early, early
    late = Direction.BOTH if level == 4 or not is_broadcast else Direction.BACKWARD
    union = Direction(early | late)  # FORWARD and BACKWARD together are BOTH
    return union, union if level > 2 else early


@cache
def by_level(early: Direction, is_broadcast: bool) -> tuple[Directions, ...]:
    """The directions at each level, then those of propagation without levels.

    At level 0 they are those of an op whose operands have one use each.
    """
    levels = (_at_level(level, early, is_broadcast) for level in range(LEVELS))
    return (*levels, (Direction.BOTH, Direction.BOTH))


@cache
def at_every_level(direction: Direction) -> tuple[Directions, ...]:
    """Directions that are equal at every level."""
    return ((direction, direction),) * (WITHOUT_LEVELS + 1)
