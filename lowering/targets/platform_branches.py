"""Code in the form that the compiler for which a program is lowered takes best: it may be for other devices than those
for which it was traced, by an abstract mesh or `lower(lowering_platforms=...)`."""

from __future__ import annotations

from collections.abc import Callable

import jax

from sdy_jax.lowering.targets.registry import platforms_whose
from sdy_jax.runtime.forms import Forms

Branch = Callable[..., jax.Array]


def where_forms(has: Callable[[Forms], bool], *operands: jax.Array, then: Branch, otherwise: Branch) -> jax.Array:
    """What one of two functions makes of operands: `then` on the platforms whose forms have something."""
    branches = dict.fromkeys(platforms_whose(has), then)
    return jax.lax.platform_dependent(*operands, default=otherwise, **branches)
