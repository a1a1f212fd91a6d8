"""Ordered callbacks of a traced function made unordered, and marked.

jax would lower ordered effects to tokens, which take part in calls, loops and branches, and refuses some of them on
several devices. What we emit for callbacks stays in the order of the program without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr  # type: ignore[attr-defined, unused-ignore]  # one class in jax 0.12

from sdy_jax.jax_internals import CALLBACKS, debug_callback_p, debug_effect, has_ordered


@dataclass(frozen=True)
class Ordered:
    """The Python function of an ordered callback; `title` is what users call the latter."""

    title: str
    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def unordered(traced: Any) -> Any:
    """A closed jaxpr without ordered callbacks; it is the same one where there are none."""
    return _without(traced, {}) if has_ordered(traced.effects) else traced


def _without(x: Any, known: dict[int, Any]) -> Any:
    """A jaxpr, or a parameter that may hold some, in which each jaxpr becomes one other."""
    if isinstance(x, (tuple, list)):
        return rebuilt([_without(each, known) for each in x], x)
    if not isinstance(x, (Jaxpr, ClosedJaxpr)) or not has_ordered(x.effects):
        return x
    if id(x) not in known:
        known[id(x)] = _jaxpr(x, known) if isinstance(x, Jaxpr) else x.replace(jaxpr=_without(x.jaxpr, known))
    return known[id(x)]


def rebuilt(changed: list[Any], before: Sequence[Any]) -> Any:
    """A parameter that is a sequence with other items; the same one where nothing has changed."""
    if all(new is old for new, old in zip(changed, before, strict=True)):
        return before
    kind: Any = type(before)
    return kind(*changed) if hasattr(before, "_fields") else kind(changed)


def _jaxpr(jaxpr: Any, known: dict[int, Any]) -> Any:
    eqns = [_eqn(eqn, known) if has_ordered(eqn.effects) else eqn for eqn in jaxpr.eqns]
    return jaxpr.replace(eqns=eqns, effects=_effects(jaxpr.effects))


def _eqn(eqn: Any, known: dict[int, Any]) -> Any:
    effects, title = _effects(eqn.effects), CALLBACKS.get(eqn.primitive)
    if title is None:
        parameters = {name: _without(value, known) for name, value in eqn.params.items()}
        return eqn.replace(params=parameters, effects=effects)
    if "result_avals" in eqn.params:
        function = Ordered(title, eqn.params["callback"])
        return eqn.replace(params={**eqn.params, "callback": function, "ordered": False}, effects=effects)
    function = Ordered(title, partial(eqn.primitive.impl, **eqn.params))
    partitioned = bool(eqn.params.get("partitioned"))
    parameters = {"callback": function, "effect": debug_effect, "partitioned": partitioned}
    return eqn.replace(primitive=debug_callback_p, params=parameters, effects=effects)


def _effects(found: Any) -> Any:
    return {debug_effect if has_ordered({effect}) else effect for effect in found}
