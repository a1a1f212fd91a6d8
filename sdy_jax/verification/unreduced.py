"""Whether a partitioned module takes terms of a sum for the sum somewhere."""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.graph import function_shardings
from sdy_jax.representation.axes import set_difference
from sdy_jax.representation.dialect_rules import fail
from sdy_jax.representation.mesh import AxisRef
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.representation.verify_collectives import STRICT_RULES
from sdy_jax.verification.values import Scope, sharding_of

_PASSING_ON = frozenset(f"stablehlo.{name}" for name in ("while", "case", "if", "optimization_barrier", "return")) | {
    "func.call"
}
"""Ops whose results are not computed from all operands alike."""


def check_terms(op: ir.Operation, scope: Scope) -> None:
    """V6. Collectives and other sdy ops have their own rules."""
    if op.name in _PASSING_ON or op.name.startswith("sdy."):
        return
    partial = [(i, s) for i, x in enumerate(op.operands) if (s := sharding_of(x)) is not None and s.unreduced_axes]
    for number, sharding in partial:
        for kept in _kept(op, number):
            lost = set_difference(sharding.unreduced_axes, kept, scope.mesh(sharding))
            if lost:
                problem = f"operand {number} is unreduced along {', '.join(map(str, lost))}, what it makes is not"
                fail("V6", op.name, problem, STRICT_RULES["V6"])


def _kept(op: ir.Operation, number: int) -> list[tuple[AxisRef, ...]]:
    """The unreduced axes of each value that an operand becomes part of."""
    if op.name == "func.return":
        return [_unreduced(function_shardings(op.parent.operation, "res_attrs", number + 1)[number])]
    return [_unreduced(sharding_of(result)) for result in op.results] or [()]


def _unreduced(sharding: TensorSharding | None) -> tuple[AxisRef, ...]:
    return sharding.unreduced_axes if sharding is not None else ()
