"""What tests of pinned plans and of the cache have in common."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.plan import build

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
_RNG = np.random.default_rng(0)


def _array(*shape: int) -> jax.Array:
    return jnp.array(_RNG.normal(size=shape), jnp.float32)


W = {"up": _array(32, 64), "down": _array(64, 32)}
X = _array(16, 32)
SPECS = ({"up": P("data", "model"), "down": P("model", "data")}, P("data"))
"""Of these weights and rows."""


def partitioned(fun: Any, **options: Any) -> Any:
    """A function of these weights and rows, partitioned on the mesh unless options say otherwise."""
    return sdy.partition(fun, **{"mesh": MESH, "in_shardings": SPECS, "on_unknown": "ignore", **options})


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
