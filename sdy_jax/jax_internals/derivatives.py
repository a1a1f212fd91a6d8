"""Derivatives and rematerialization: what a primitive becomes where some operands are known or linear.

* `JVPTracer.primal` and its like: the layout of an array that is differentiated eagerly; a tracer hides it.
* The rules of partial evaluation, and the call into which one may split an equation: `jax.jvp` computes results and
  tangents by one program, and `jax.grad` by two. jax runs again what is rematerialized, but for what has effects.
* `backward_pass`: `jax.linear_transpose` evaluates partially before it transposes, which runs the callbacks of what is
  rematerialized once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax._src.core import closed_call_p
from jax._src.interpreters import partial_eval
from jax._src.interpreters.ad import backward_pass
from jax.extend.core import Primitive, Var, new_jaxpr_eqn, set_current_trace
from jax.interpreters import ad

from sdy_jax.jax_internals.callbacks import debug_effect


def pulled_back(linear: Any, cotangents: Sequence[Any]) -> list[Any]:
    """The cotangents of the arguments of a closed jaxpr that is linear in all of them."""
    unknown = [ad.UndefinedPrimal(aval.to_ct_aval()) for aval in linear.in_avals]
    found = backward_pass(linear.jaxpr, True, linear.consts, unknown, list(cotangents))
    return list(map(ad.instantiate_zeros, found))


def on_partial_evaluation(primitive: Primitive, apart: Callable[..., Sequence[Any]], count: Callable[..., int]) -> None:
    """Registers what a primitive with several results becomes where its first operands are known and others are not.

    Args:
        primitive: the primitive.
        apart: computes the same by ops of which some take known values only, given `(*values, **parameters)`.
        count: how many of its operands are to be known, given the parameters.
    """

    def traced(trace: Any, *tracers: Any, **parameters: Any) -> Sequence[Any]:
        known = [tracer.is_known() for tracer in tracers]
        if all(known) or not all(known[: count(**parameters)]):
            return trace.default_process_primitive(primitive, tracers, parameters)  # type: ignore[no-any-return]
        values = [x.pval.get_known() if is_known else x for x, is_known in zip(tracers, known, strict=True)]
        with set_current_trace(trace):
            return apart(*values, **parameters)

    def staged(saveable: Any, unknown: Sequence[bool], held: Sequence[bool], eqn: Any) -> tuple[Any, ...]:
        if not any(unknown) or any(unknown[: count(**eqn.params)]):
            return _known_or_staged(saveable, unknown, held, eqn)
        region = jax.make_jaxpr(partial(apart, **eqn.params))(*(x.aval for x in eqn.invars))
        call = {"call_jaxpr": region}
        eqn = new_jaxpr_eqn(eqn.invars, eqn.outvars, closed_call_p, call, region.effects, eqn.source_info, eqn.ctx)
        rule = partial_eval.partial_eval_jaxpr_custom_rules[closed_call_p]
        return rule(saveable, unknown, held, eqn)  # type: ignore[no-any-return]

    partial_eval.custom_partial_eval_rules[primitive] = traced
    partial_eval.partial_eval_jaxpr_custom_rules[primitive] = staged


def runs_again(primitive: Primitive) -> None:
    """Lets what is rematerialized run a primitive again, also where it has callbacks of `jax.debug` inside: their
    effect alone would keep its results, and these run again under jit."""
    partial_eval.partial_eval_jaxpr_custom_rules[primitive] = _known_or_staged


def _known_or_staged(saveable: Any, unknown: Sequence[bool], held: Sequence[bool], eqn: Any) -> tuple[Any, ...]:
    """As jax splits equations without effects into what is known and what is staged."""
    every = len(eqn.outvars)
    missing = [x for x, is_held in zip(eqn.invars, held, strict=True) if isinstance(x, Var) and not is_held]
    if any(unknown):
        return None, eqn, [True] * every, [True] * every, missing
    policy = partial_eval.ensure_enum(saveable(eqn.primitive, *(x.aval for x in eqn.invars), **eqn.params))
    if policy is not partial_eval.Recompute or not eqn.effects <= {debug_effect}:
        return eqn, None, [False] * every, [False] * every, []
    return eqn, eqn, [False] * every, [True] * every, missing


def primal_of(x: Any) -> Any:
    """The array inside of tracers that differentiate it; everything else as it is."""
    while isinstance(x, jax.core.Tracer) and (primal := getattr(x, "primal", None)) is not None:
        x = primal
    return x
