"""Callbacks to the host and their effects.

* The primitives of `jax.debug`, `pure_callback` and `io_callback`, whose parameters hold the Python functions, and
  their effects: whether the order of some matters is in jax's own list only.
* `inspect_sharding_p`: what `jax.debug.inspect_array_sharding` becomes, which is answered from the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from jax._src import callback, debugging, effects
from jax.extend.core import Primitive

CALLBACKS: dict[Primitive, str] = {
    getattr(module, primitive): name
    for module, primitive, name in (
        (debugging, "debug_callback_p", "jax.debug.callback"),
        (debugging, "debug_print_p", "jax.debug.print"),
        (callback, "pure_callback_p", "jax.pure_callback"),
        (callback, "io_callback_p", "jax.experimental.io_callback"),
    )
}
"""The primitives that call back to the host, by what users call."""

inspect_sharding_p: Primitive = debugging.inspect_sharding_p
debug_callback_p: Primitive = debugging.debug_callback_p
debug_effect: Any = debugging.debug_effect


def effects_of(primitive: Primitive, avals: Sequence[Any], parameters: Mapping[str, Any]) -> Set[Any]:
    """The effects of a primitive on arguments of these types."""
    _, found = primitive.abstract_eval(*avals, **parameters)
    return found


def has_ordered(found: Set[Any]) -> bool:
    """Whether there are effects of callbacks among these whose order matters."""
    return bool(effects.ordered_effects.filter_in(found))
