"""Lookups of what is computed element by element, against the plain function, in all layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from partitioned_ops import PLANE

import sdy_jax as sdy

ROWS, LENGTH, WORDS = 4, 8, 32


@pytest.fixture(scope="module")
def logits():
    return jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, LENGTH, WORDS)), jnp.bfloat16)


@pytest.fixture(scope="module")
def labels():
    return jnp.asarray(np.random.default_rng(1).integers(0, WORDS, (ROWS, LENGTH)), jnp.int32)


def looked_up(x, labels):
    return jnp.take_along_axis(x, labels[..., None], -1)[..., 0]


def converted(x, labels):
    wide = x.astype(jnp.float32)
    return looked_up(wide, labels), jnp.exp(wide).sum(-1)


def scaled(x, labels):
    return looked_up(jnp.tanh(x.astype(jnp.float32) * 0.5) + 1, labels)


def of_rows(x, labels):
    wide = x.astype(jnp.float32)
    wide = wide - jax.lax.stop_gradient(wide.max(-1, keepdims=True)) + jnp.arange(LENGTH)[:, None]
    return looked_up(wide, labels), jnp.log(jnp.exp(wide).sum(-1))


def of_several(x, labels):
    return looked_up(x.astype(jnp.float32) * jnp.arange(WORDS, dtype=jnp.float32), labels)


def of_two(x, labels):
    return looked_up(x.astype(jnp.float32) * jnp.roll(x, 1, -1).astype(jnp.float32), labels)


LAYOUTS = [P("x"), P("x", None, "y"), P(None, "y"), P(None, None, ("x", "y")), P()]


def gathers(plan):
    return [line for line in plan.mlir("partitioned").splitlines() if '"stablehlo.gather"' in line]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("function", [converted, scaled, of_rows])
def test_they_are_looked_up_before(function, layout, logits, labels):
    of_labels = P(*layout[:2])
    f = sdy.partition(function, mesh=PLANE, in_shardings=(layout, of_labels))
    assert all("bf16>, " in line for line in gathers(f.plan(logits, labels)))
    for found, wanted in zip(*map(jax.tree.leaves, (f(logits, labels), function(logits, labels))), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
def test_their_gradients_are_the_same(layout, logits, labels):
    def loss(x, labels):
        label, words = of_rows(x, labels)
        return jnp.mean(words - label)

    f = sdy.partition(jax.value_and_grad(loss), mesh=PLANE, in_shardings=(layout, P(*layout[:2])))
    for found, wanted in zip(f(logits, labels), jax.value_and_grad(loss)(logits, labels), strict=True):
        np.testing.assert_allclose(np.float32(found), np.float32(wanted), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("function", [of_several, of_two])
def test_several_arrays_are_looked_up_together(function, logits, labels):
    f = sdy.partition(function, mesh=PLANE, in_shardings=(P("x"), P("x")))
    assert all("f32>, " in line for line in gathers(f.plan(logits, labels)))
    np.testing.assert_allclose(f(logits, labels), function(logits, labels), rtol=1e-6)


def test_indices_out_of_bounds_are_clamped_as_before(logits):
    labels = jnp.full((ROWS, LENGTH), WORDS + 3, jnp.int32)

    def clipped(x, labels):
        return jnp.take_along_axis(x.astype(jnp.float32), labels[..., None], -1, mode="clip")

    f = sdy.partition(clipped, mesh=PLANE, in_shardings=(P("x", None, "y"), P("x")))
    np.testing.assert_array_equal(f(logits, labels), clipped(logits, labels))
