"""What tests of pinned plans and of the cache have in common."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdy_jax.plan import build


def same(found: Any, wanted: Any) -> None:
    """Asserts that two trees hold the same numbers, up to rounding."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * max(1.0, float(jnp.abs(b).max())))


def noted_searches(patch: pytest.MonkeyPatch) -> list[str]:
    """The names of functions for which a plan is searched from now on."""
    made: list[str] = []
    search = build._Making.made

    def noting(making: Any, program: Any) -> Any:
        made.append(making.name)
        return search(making, program)

    patch.setattr(build._Making, "made", noting)
    return made
