"""Stacks whose layers loops read rounded: gathered whole they are rounded before, else in the loop as written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE

import sdy_jax as sdy
from sdy_jax.testing import assert_same

RNG = np.random.default_rng(0)
WEIGHTS = jnp.asarray(RNG.standard_normal((4, 16, 16)) / 4, jnp.float32)
X = jnp.asarray(RNG.standard_normal((256, 16)), jnp.float32)


def layer(x, w):
    return jnp.tanh(x @ w.astype(jnp.bfloat16)), None


def twice(x, w):
    """Reads the layer in float32, too."""
    return (layer(x, w)[0] * w.sum().astype(jnp.bfloat16)), None


def loss(weights, x, layer=layer):
    return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x.astype(jnp.bfloat16), weights)[0].astype(jnp.float32) ** 2)


def gathers(plan):
    return [(c.dtype, c.shape, c.times) for c in plan.collectives if c.kind == "all_gather"]


GATHERED_AT_ONCE = sdy.CostModel(latency=(("x", 1.0),), bandwidth=(("x", 1e12),), origin="slow to start")
"""One collective is far better than four."""

AS_THEY_COME = sdy.CostModel(latency=(("x", 1e-12),), bandwidth=(("x", 1e6),), origin="by bytes")


def plan_of(fun, costs, **options):
    return assert_same(
        fun, WEIGHTS, X, mesh=LINE, in_shardings=(P(None, "x"), P("x")), rtol=2e-2, costs=costs, **options
    )


def test_a_stack_that_is_gathered_before_a_loop_is_sent_rounded():
    plan = plan_of(jax.grad(loss), GATHERED_AT_ONCE, out_shardings=P(None, "x"), memory="1MiB")
    assert gathers(plan) == [("bf16", (4, 16, 16), 1)]


def test_a_stack_whose_layers_are_gathered_in_loops_stays_as_it_is():
    """No second one is held beside it."""
    plan = plan_of(jax.grad(loss), AS_THEY_COME, out_shardings=P(None, "x"), memory=16 * 2**10)
    assert {(dtype, times) for dtype, _, times in gathers(plan)} == {("bf16", 4)}
    converts = [op for op in plan.graph.ops if op.name == "stablehlo.convert" and op.operands[0].shape == WEIGHTS.shape]
    assert not converts and "narrowed" not in plan.mlir("partitioned")


@pytest.mark.parametrize("fun", [lambda w, x: loss(w, x, twice), lambda w, x: loss(w[:2], x)], ids=["wide", "slice"])
def test_numbers_stay(fun):
    plan_of(jax.grad(fun), GATHERED_AT_ONCE)


def test_a_layer_that_is_read_in_its_own_type_too_is_not_rounded_before():
    plan = plan_of(lambda w, x: loss(w, x, twice), GATHERED_AT_ONCE, memory="1MiB")
    assert "tensor<4x16x16xbf16>" not in plan.mlir("partitioned")
