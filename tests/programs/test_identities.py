"""What a good partitioner keeps: the collectives that people count when they lay out a transformer by hand."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from workloads import RATE, attention, feed_forward, i32, norm, train, transformer_weights

import sdy_jax as sdy

LAYERS = 3
MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
BATCH = NamedSharding(MESH, P("data"))
WEIGHTS = transformer_weights(LAYERS, 32, 4, 64)
TOKENS = i32(8, 16)
COUNT = len(jax.tree.leaves(WEIGHTS))


def loss(weights, tokens, targets):
    keep = partial(jax.lax.with_sharding_constraint, shardings=BATCH)
    x = keep(weights["embedding"][tokens])
    for layer in weights["layers"]:
        x = keep(x + attention(norm(x, layer["norm1"]), layer))
        x = keep(x + feed_forward(norm(x, layer["norm2"]), layer))
    logits = norm(x, weights["norm"]) @ weights["unembedding"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1))


def specs(layer):
    """The same layout of every layer; all else replicated."""
    tree = jax.tree.map(lambda _: P(), WEIGHTS)
    return {**tree, "layers": [{**tree["layers"][0], **layer}] * LAYERS}


def plan_of(step, weights, batch=P("data"), tokens=TOKENS, **options):
    """The plan op by op, which keeps to the layout by hand."""
    options = {"layouts": "local", "in_shardings": (weights, batch, batch), "out_shardings": (weights, P()), **options}
    return sdy.partition(step, mesh=MESH, **options).plan(WEIGHTS, tokens, tokens)


def kinds(plan):
    return Counter(c.kind for c in plan.collectives if c.wire_bytes)


MEGATRON = {
    "q": P(None, "model"),
    "k": P(None, "model"),
    "v": P(None, "model"),
    "out": P("model"),
    "up": P(None, "model"),
    "down": P("model"),
}


def test_batch_parallel_reduces_each_gradient_and_the_loss():
    assert kinds(plan_of(train(loss), specs({}))) == {"all_reduce": COUNT + 1}


def test_megatron_adds_four_reductions_per_layer():
    plan = plan_of(train(loss), specs(MEGATRON))
    assert kinds(plan) == {"all_reduce": COUNT + 1 + 4 * LAYERS}
    on_model = [c for c in plan.collectives if any(a.name == "model" for a in c.axes)]
    assert len(on_model) == 4 * LAYERS
    assert {c.shape for c in on_model} == {(8, 16, 32)}


ZERO = {
    "q": P("data"),
    "k": P("data"),
    "v": P("data"),
    "out": P(None, None, "data"),
    "up": P("data"),
    "down": P(None, "data"),
}


def test_zero_gathers_each_weight_once_per_direction_and_scatters_its_gradient():
    plan = plan_of(train(loss), specs(ZERO))
    sharded = len(ZERO) * LAYERS
    found = kinds(plan)
    assert found["all_gather"] <= 2 * sharded
    assert found["reduce_scatter"] == sharded
    assert found["all_reduce"] == COUNT - sharded + 1
    assert set(found) == {"all_gather", "reduce_scatter", "all_reduce"}
    for c in plan.collectives:
        assert c.kind != "all_reduce" or c.shape not in {WEIGHTS["layers"][0][name].shape for name in ZERO}


@pytest.mark.dear
@pytest.mark.parametrize("weights", [{}, MEGATRON, ZERO], ids=["batch", "megatron", "zero"])
def test_the_whole_program_sends_less_where_work_is_cheap_and_shares_it_out_where_it_is_dear(weights):
    local = plan_of(train(loss), specs(weights))
    cheap = plan_of(train(loss), specs(weights), layouts="global", costs=sdy.CostModel())
    assert cheap.wire_bytes <= 1.0001 * local.wire_bytes and sum(kinds(cheap).values()) <= 1.3 * sum(
        kinds(local).values()
    )
    chosen = plan_of(train(loss), specs(weights), layouts="global")
    assert chosen.layouts.cost < 0.95 * chosen.layouts.baseline_cost
    assert chosen.repeated_flops < 0.25 * local.repeated_flops  # along `model`; of the rest no collective is worth it


def test_microbatches_accumulated_in_a_scan_reduce_their_gradients_once():
    def step(weights, tokens, targets):
        def body(total, batch):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(weights, *batch)), None

        zero = jax.tree.map(jnp.zeros_like, weights)
        total, _ = jax.lax.scan(body, zero, (tokens, targets))
        return jax.tree.map(lambda w, g: w - RATE * g, weights, total), jnp.float32(0)

    plan = plan_of(step, specs({}), P(None, "data"), i32(4, 8, 16))
    reductions = [c for c in plan.collectives if c.kind in ("all_reduce", "reduce_scatter")]
    assert len(reductions) == COUNT
    assert not [c for c in reductions if c.depth]
