"""A primitive that returns its operands, and has all processes compare a plan where the program around it is lowered.

So a jitted function that calls a partitioned one compares too, and tracing alone (`jax.eval_shape`) waits for nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.interpreters import mlir

from sdy_jax.runtime.identity_ops import identity_op

Check = Callable[[], None]
"""Raises where the processes do not agree. It may be called any number of times."""


def compared(values: Sequence[Any], check: Check) -> list[Any]:
    """The values, of a program that does not run unless `check` lets it."""
    return list(compared_p.bind(*values, check=check)) if values else []


def _lower(ctx: mlir.LoweringRuleContext, *values: Any, check: Check) -> Sequence[Any]:
    if not ctx.module_context.lowering_parameters.for_export:  # an exported program runs elsewhere
        check()
    return values


compared_p = identity_op("sdy_compared", evaluated=lambda check: check(), lowered=_lower)
