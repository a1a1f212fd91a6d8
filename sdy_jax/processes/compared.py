"""A primitive that returns its operands, and has all processes compare a plan where the program around it is lowered.

So a jitted function that calls a partitioned one compares too, and tracing alone (`jax.eval_shape`) waits for nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Check = Callable[[], None]
"""Raises where the processes do not agree. It may be called any number of times."""

compared_p = Primitive("sdy_compared")
compared_p.multiple_results = True


def compared(values: Sequence[Any], check: Check) -> list[Any]:
    """The values, of a program that does not run unless `check` lets it."""
    return list(compared_p.bind(*values, check=check)) if values else []


def _checked(*values: Any, check: Check) -> list[Any]:
    check()
    return list(values)


def _lower(ctx: mlir.LoweringRuleContext, *values: Any, check: Check) -> Sequence[Any]:
    if not ctx.module_context.lowering_parameters.for_export:  # an exported program runs elsewhere
        check()
    return values


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, check: Check) -> tuple[Any, Any]:
    return compared_p.bind(*primals, check=check), list(tangents)


def _batch(values: Sequence[Any], dims: Sequence[Any], *, check: Check) -> tuple[Any, Any]:
    return compared_p.bind(*values, check=check), dims


compared_p.def_impl(_checked)
compared_p.def_abstract_eval(lambda *types, check: types)
ad.primitive_jvps[compared_p] = _jvp
batching.primitive_batchers[compared_p] = _batch
mlir.register_lowering(compared_p, _lower)
