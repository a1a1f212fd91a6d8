"""Ordered callbacks of a traced function made unordered, and marked.

jax would lower ordered effects to tokens, which take part in calls, loops and branches, and refuses some of them on
several devices. What we emit for callbacks stays in the order of the program without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from sdy_jax.annotate.rewriting import Rewriting
from sdy_jax.jax_internals.callbacks import CALLBACKS, debug_callback_p, debug_effect, has_ordered


@dataclass(frozen=True)
class Ordered:
    """The Python function of an ordered callback; `title` is what users call the latter."""

    title: str
    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def unordered(traced: Any) -> Any:
    """A closed jaxpr without ordered callbacks; it is the same one where there are none."""
    return Rewriting(_without, _effects, has_ordered).of(traced)


def _without(eqn: Any) -> list[Any]:
    if not has_ordered(eqn.effects):
        return [eqn]
    effects, title = _effects(eqn.effects), CALLBACKS.get(eqn.primitive)
    if title is None:
        return [eqn.replace(effects=effects)]
    if "result_avals" in eqn.params:
        function = Ordered(title, eqn.params["callback"])
        return [eqn.replace(params={**eqn.params, "callback": function, "ordered": False}, effects=effects)]
    function = Ordered(title, partial(eqn.primitive.impl, **eqn.params))
    partitioned = bool(eqn.params.get("partitioned"))
    parameters = {"callback": function, "effect": debug_effect, "partitioned": partitioned}
    return [eqn.replace(primitive=debug_callback_p, params=parameters, effects=effects)]


def _effects(found: Any) -> Any:
    return {debug_effect if has_ordered({effect}) else effect for effect in found}
