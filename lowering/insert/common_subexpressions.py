"""Ops that compute what an op before them in their block has computed: one of the two is enough.

The users of a value and of a constraint on it may come to take it in one layout. What each of them then computes from
it, and all that is sent for that, is the same.
"""

from __future__ import annotations

from collections.abc import Callable

from sdy_jax.ir.graph import Op, Value
from sdy_jax.lowering.candidates.op_problem import Decision
from sdy_jax.lowering.prepare.dead_code import has_effect

_DRAWS = "stablehlo.rng"
"""Gives other numbers each time."""


class CommonSubexpressions:
    """The ops of a program that were visited, by what they take. `origin`: the value that another is an alias of."""

    def __init__(self, origin: Callable[[Value], Value]):
        self._origin = origin
        self._seen: dict[object, list[tuple[Op, Decision]]] = {}

    def of(self, op: Op, decision: Decision) -> Op | None:
        """The op before that has the same results in the same layouts; the operands of both have been placed."""
        if not op.operands or op.name == _DRAWS or has_effect(op):
            return None
        seen = self._seen.setdefault((op.block, op.name, tuple(map(self._origin, op.operands))), [])
        for other, its in seen:
            if decision.shardings == its.shardings and _computes_the_same(op, other):
                return other
        seen.append((op, decision))
        return None


def _computes_the_same(op: Op, other: Op) -> bool:
    return op.signature == other.signature and list(op.mlir.operands) == list(other.mlir.operands)
