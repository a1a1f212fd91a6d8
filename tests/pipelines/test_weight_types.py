"""Weights that layers read in a narrower type: which these are, and that stages cast them once."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import sdy_jax as sdy
from sdy_jax.pipelines import user_functions
from sdy_jax.pipelines.user_functions import type_read

HALF = jnp.bfloat16
X = np.linspace(-1, 1, 48).reshape(8, 6).astype(HALF)
MESH = jax.make_mesh((2,), ("stage",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])


def cast(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w.astype(x.dtype))


READ = {
    "a cast": (cast, HALF),
    "a cast in calls": (jax.jit(jax.checkpoint(cast)), HALF),
    "several casts": (lambda w, x: cast(w, x) + jax.checkpoint(cast)(w, x), HALF),
    "a part of a cast": (lambda w, x: x * w.astype(HALF)[0], HALF),
    "the type itself": (lambda w, x: (x @ w).astype(HALF), jnp.float32),
    "a cast and itself": (lambda w, x: cast(w, x) * w.sum().astype(HALF), jnp.float32),
    "two types": (lambda w, x: cast(w, x) + x @ w.astype(jnp.float16).astype(HALF), jnp.float32),
    "a cast of a part": (lambda w, x: x * w[0].astype(HALF), jnp.float32),
    "integers": (lambda w, x: x * w.astype(jnp.int8)[0], jnp.float32),
    "a branch": (lambda w, x: jax.lax.cond(x[0, 0] > 0, cast, lambda w, x: x, w, x), jnp.float32),
    "nothing": (lambda w, x: x, jnp.float32),
    "a result": (lambda w, x: (cast(w, x), w), jnp.float32),
}


@pytest.mark.parametrize("name", READ)
def test_the_type_that_all_casts_are_to(name: str) -> None:
    function, wanted = READ[name]
    jaxpr = jax.make_jaxpr(function)(jnp.ones((6, 6)), X).jaxpr
    assert type_read(jaxpr, jaxpr.invars[0]) == wanted


def test_types_that_are_wider_or_summed_in_another_are_their_own() -> None:
    for own, read in ((HALF, jnp.float32), (jnp.float16, jnp.float8_e5m2), (jnp.int32, jnp.int8)):
        jaxpr = jax.make_jaxpr(lambda w, x, read=read: x * w.astype(read).astype(HALF)[0])(
            jnp.ones((6, 6), own), X
        ).jaxpr
        assert type_read(jaxpr, jaxpr.invars[0]) == own


@pytest.mark.parametrize("layer", [cast, jax.checkpoint(cast)], ids=["layer", "checkpoint"])
def test_stages_cast_their_stack_once(layer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients are those of casts in each pass, to the last bit."""
    weights = np.random.default_rng(0).normal(size=(4, 6, 6)).astype(np.float32)

    def step() -> Any:
        loss = lambda y: jnp.mean(y.astype(jnp.float32) ** 2)  # noqa: E731
        run = lambda w, x: sdy.pipeline(layer, w, x, microbatches=4, loss=loss, mesh=MESH)  # noqa: E731
        return jax.jit(jax.value_and_grad(run, (0, 1)))

    once = step()
    casts = re.findall(r"convert .*<([\dx]*x6x6)xf32>\) -> tensor<\1xbf16>", once.lower(weights, X).as_text())
    assert casts == ["1x2x6x6"]
    monkeypatch.setattr(user_functions, "type_read", lambda _, variable: variable.aval.dtype)
    jax.tree.map(np.testing.assert_array_equal, once(weights, X), step()(weights, X))
