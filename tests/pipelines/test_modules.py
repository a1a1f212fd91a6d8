"""Stacks of modules of flax nnx and of Equinox as the layers of a pipeline."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

pytestmark = pytest.mark.public

LAYERS, WIDTH = 4, 8
X = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)
MESH = jax.make_mesh((2, 2, 2), ("stage", "data", "model"), axis_types=(AxisType.Auto,) * 3)


def compare(layer: Any, weights: Any, schedule: str) -> None:
    """A pipeline of a layer with a scan over its weights, in values and gradients."""

    def piped(w: Any, x: Any) -> Any:
        return sdy.pipeline(layer, w, x, loss=lambda y: jnp.mean(y**2), microbatches=4, schedule=schedule)

    def scanned(w: Any, x: Any) -> Any:
        return jnp.mean(lax.scan(lambda x, w: (layer(w, x), None), x, w)[0] ** 2)

    step = sdy.partition(jax.value_and_grad(piped), mesh=MESH, in_shardings=(P("stage"), P("data")))
    agree = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(agree, step(weights, X), jax.value_and_grad(scanned)(weights, X))
    (pipeline,) = step.plan(weights, X).record().pipelines
    assert (pipeline.layers, pipeline.groups) == (LAYERS, ("0-1", "2-3"))


@pytest.mark.more("another library's modules")
def test_modules_of_flax_nnx() -> None:
    """`vmap` of the constructor makes the stack; `split` leaves its arrays, `merge` makes a module of a layer's."""
    nnx = pytest.importorskip("flax.nnx")

    class Block(nnx.Module):  # type: ignore[misc, name-defined]
        def __init__(self, rngs: Any):
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.up, self.down = nnx.Linear(WIDTH, 16, rngs=rngs), nnx.Linear(16, WIDTH, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return x + self.down(nnx.gelu(self.up(self.norm(x))))

    graph, weights = nnx.split(nnx.vmap(Block)(nnx.Rngs(0).fork(split=LAYERS)), nnx.Param)
    compare(lambda w, x: nnx.merge(graph, w)(x), weights, "1f1b")


def test_modules_of_equinox() -> None:
    """`filter_vmap` of the constructor makes the stack; `partition` leaves its arrays, `combine` makes a module."""
    eqx = pytest.importorskip("equinox")

    class Block(eqx.Module):  # type: ignore[misc, name-defined]
        up: Any
        down: Any

        def __init__(self, key: Any):
            first, second = jax.random.split(key)
            self.up, self.down = eqx.nn.Linear(WIDTH, 16, key=first), eqx.nn.Linear(16, WIDTH, key=second)

        def __call__(self, x: Any) -> Any:
            return x + self.down(jax.nn.gelu(self.up(x)))

    stack = eqx.filter_vmap(Block)(jax.random.split(jax.random.key(0), LAYERS))
    weights, rest = eqx.partition(stack, eqx.is_array)
    compare(lambda w, x: jax.vmap(eqx.combine(w, rest))(x), weights, "zero_bubble")
