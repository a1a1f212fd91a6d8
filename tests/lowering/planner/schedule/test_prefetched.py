"""Layers that loops gather one trip ahead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE
from planned_steps import stacked

import sdy_jax as sdy
from sdy_jax.lowering.ops import control_flow
from sdy_jax.plan.profile import collectives_in_hlo, totals

ROWS = 512

TIMED = sdy.CostModel(latency=1e-7, flop=1e-11, bandwidth={"x": 1e9}, memory=1e-13)
"""A machine on which sending a layer takes about as long as computing with it."""


def step(costs=TIMED, memory=None):
    specs = [P(None, "x"), P(None, None, "x")]
    return sdy.partition(
        stacked,
        mesh=LINE,
        in_shardings=(specs, P("x"), P("x")),
        out_shardings=specs,
        costs=costs,
        memory=memory,
        recompute=False,  # else whole stacks are gathered, as activations are not held
    )


@pytest.fixture(scope="module")
def args():
    rng = np.random.default_rng(0)
    shapes = (8, 64, 256), (8, 256, 64), (ROWS, 64), (ROWS, 64)
    up, down, x, y = (jnp.asarray(rng.normal(size=shape) / 16, jnp.float32) for shape in shapes)
    return [up, down], x, y


@pytest.fixture(scope="module")
def least(args):
    """What the step holds if every layer is gathered for its trip."""
    return step(sdy.CostModel()).plan(*args).memory.peak


def ahead(plan):
    return [record for record in plan.collectives if record.is_ahead]


def test_a_layer_is_gathered_while_the_one_before_computes(args, least):
    f = step(memory=1.2 * least)
    plan = f.plan(*args)
    assert ahead(plan) and all(record.kind == "all_gather" and record.depth == 1 for record in ahead(plan))
    assert "one trip ahead" in str(plan)
    for found, wanted in zip(f(*args), stacked(*args), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    sent = totals(collectives_in_hlo(f.lower(*args).compile().as_text()))
    # XLA finds the last layer of the forward pass again where the backward pass begins with it.
    assert plan.wire_bytes - 2 * ahead(plan)[0].wire_bytes <= sent.wire_bytes <= plan.wire_bytes


def test_stacks_that_the_trips_fill_begin_as_anything(args, least, monkeypatch):
    """Those of activations, not those of gradients, which no gather is ahead of."""
    begun = []

    def unwritten(shape, dtype):
        begun.append(shape)
        return jnp.full(shape, jnp.nan, dtype)

    monkeypatch.setattr(control_flow.lax, "empty", unwritten)
    f = step(memory=1.2 * least)
    for found, wanted in zip(f(*args), stacked(*args), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert begun and all(shape[0] == 8 for shape in begun)


def test_what_is_held_twice_is_counted(args, least):
    more, less = (step(memory=limit).plan(*args) for limit in (1.2 * least, 1.0 * least))
    assert ahead(more) and not ahead(less)
    assert less.memory.peak < more.memory.peak <= 1.2 * least


def test_the_loop_is_counted_in_32_bits(args, least):
    """Compilers for TPUs make two numbers of one of 64 bits, and lose how many trips there are."""
    lowered = step(memory=1.2 * least).lower(*args)
    assert "stablehlo.while" in lowered.as_text() and "tensor<i64>" not in lowered.as_text()


def test_bytes_know_no_time(args, least):
    assert not ahead(step(sdy.CostModel(), memory=1.2 * least).plan(*args))


def test_what_a_trip_computes_cannot_be_fetched_before():
    """The layer that is taken depends on the trip before."""

    def walk(stack, x):
        def layer(state, _):
            x, which = state
            x = jnp.tanh(x @ stack[which])
            return (x, (which + jnp.sum(x > 0)).astype(jnp.int32) % len(stack)), None

        return jax.lax.scan(layer, (x, jnp.int32(0)), None, length=8)[0][0]

    stack, x = jnp.ones((8, 64, 64)), jnp.ones((16, 64))
    f = sdy.partition(walk, mesh=LINE, in_shardings=(P(None, "x"), P("x")), costs=TIMED)
    assert not ahead(f.plan(stack, x))
    np.testing.assert_allclose(f(stack, x), walk(stack, x), rtol=1e-5)
