"""One layer of a stack at a time, where the stack is split by layers; caches and queues that owners write."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE, PLANE
from wire_totals import agreed

import sdy_jax as sdy
from sdy_jax.lowering.planner.problem import candidate_prices
from sdy_jax.testing import assert_same

LAYER = 32 * 32 * 4
KEPT = 7 / 8
"""The fraction of a layer that a device lacks, and so sends to gather or to scatter it."""


def normal(*shape):
    return jax.random.normal(jax.random.key(sum(shape)), shape) / 8


X, W = normal(64, 32), normal(16, 32, 32)
SPLIT = {"mesh": LINE, "in_shardings": (P("x"), P("x"))}


def layers(x, w):
    return lax.scan(lambda c, layer: (jnp.tanh(c @ layer), None), x, w)[0]


def loss(x, w):
    return (layers(x, w) ** 2).sum()


@pytest.fixture
def large_stacks(monkeypatch):
    """Every stack counts as one that is too large to keep."""
    monkeypatch.setattr(candidate_prices, "_FEW", 0)


def gathered(plan):
    return [(c.kind, c.times, c.wire_bytes) for c in plan.collectives if c.wire_bytes]


@pytest.mark.usefixtures("large_stacks")
def test_a_scan_gathers_one_layer_per_trip_and_keeps_none():
    plan = agreed(layers, X, W, **SPLIT, out_shardings=P("x"))
    assert gathered(plan) == [("all_to_all", 1, 16 / 8 * KEPT * LAYER), ("all_gather", 16, KEPT * LAYER)]
    assert_same(layers, X, W, **SPLIT, out_shardings=P("x"), rtol=1e-5)


@pytest.mark.usefixtures("large_stacks")
def test_a_scan_scatters_one_layer_of_gradients_per_trip():
    gradient = jax.grad(loss, argnums=1)
    plan = agreed(gradient, X, W, **SPLIT, out_shardings=P("x"))
    per_trip = [c for c in gathered(plan) if c[1] == 16]
    assert sorted(c[0] for c in per_trip) == ["all_gather", "all_gather", "reduce_scatter"]
    assert {c[2] for c in per_trip} == {KEPT * LAYER}
    assert plan.wire_bytes == 3 * 16 * KEPT * LAYER + 2 * 2 * KEPT * LAYER
    assert_same(gradient, X, W, **SPLIT, out_shardings=P("x"), rtol=1e-4, atol=1e-5)


def test_a_small_stack_is_gathered_once_for_both_loops():
    """Kept from the first to the second loop, it is gathered once; with the layers of gradients, twice."""
    plan = agreed(layers, X, W, **SPLIT, out_shardings=P("x"))
    assert gathered(plan) == [("all_gather", 1, 16 * KEPT * LAYER)]
    gradient = jax.grad(loss, argnums=1)
    plan = agreed(gradient, X, W, **SPLIT, out_shardings=P("x"))
    assert plan.wire_bytes == 2 * 16 * KEPT * LAYER + 2 * KEPT * LAYER
    assert_same(gradient, X, W, **SPLIT, out_shardings=P("x"), rtol=1e-4, atol=1e-5)


def test_a_loop_reads_shards_of_layers_from_a_whole_stack():
    """Shards of the stack before the loop would be a copy of it."""

    def split(x, w):
        return lax.scan(lambda c, layer: (c @ sdy.sharding_constraint(layer, P(None, "x")), None), x, w)[0]

    whole = {"mesh": LINE, "in_shardings": (P(), P()), "out_shardings": P()}
    plan = agreed(split, X, W, **whole)
    assert [c.times for c in plan.collectives if c.kind == "all_slice" and len(c.shape) == 3] == [16], plan
    assert_same(split, X, W, **whole, rtol=1e-5)


def test_what_would_fill_memory_is_not_kept():
    large = jax.ShapeDtypeStruct((8, 1024, 1024), jnp.float32)
    x = jax.ShapeDtypeStruct((1 << 16, 1024), jnp.float32)
    plan = sdy.partition(layers, **SPLIT, out_shardings=P("x")).plan(x, large)
    assert [c[:2] for c in gathered(plan)] == [("all_to_all", 1), ("all_gather", 8)]


def test_a_stack_that_is_sent_alike_in_either_case_is_not_kept():
    specs = {"in_shardings": (P("x"), P(None, None, "x")), "out_shardings": P("x")}
    assert gathered(agreed(layers, X, W, mesh=LINE, **specs)) == [("all_gather", 16, KEPT * LAYER)]


@pytest.mark.parametrize("are_large", [False, True])
def test_a_stack_on_two_axes(are_large, request):
    if are_large:
        request.getfixturevalue("large_stacks")
    specs = {"in_shardings": (P("x", None), P(("y", "x"))), "out_shardings": (P("x"), P(("y", "x")))}
    assert_same(jax.grad(loss, argnums=(0, 1)), X, W, mesh=PLANE, **specs, rtol=1e-4, atol=1e-5)


def test_layers_without_another_dimension_are_gathered_at_once():
    def scaled(x, scales):
        return lax.scan(lambda c, s: (jnp.sin(c) * s, None), x, scales)[0]

    plan = agreed(scaled, X, normal(16), **SPLIT, out_shardings=P("x"))
    assert gathered(plan) == [("all_gather", 1, 7 * 2 * 4)]


def test_stacked_outputs_are_written_by_their_owners():
    def outputs(x):
        return lax.scan(lambda c, _: (c + 1, c.sum(0)), x, None, length=16)[1]

    assert not agreed(outputs, X, mesh=LINE, in_shardings=P(), out_shardings=P("x")).wire_bytes


def test_a_state_that_is_read_and_written_layer_by_layer():
    def run(states, x):
        def step(carry, i):
            x, states = carry
            state = lax.dynamic_index_in_dim(states, i, 0, keepdims=False)
            state = jnp.tanh(state + x)
            return (jnp.sin(x) + state, lax.dynamic_update_index_in_dim(states, state, i, 0)), None

        return lax.scan(step, (x, states), jnp.arange(16))[0]

    specs = {"mesh": LINE, "in_shardings": (P("x"), P()), "out_shardings": (P(), P("x"))}
    plan = agreed(run, normal(16, 8, 32), normal(8, 32), **specs)
    assert plan.wire_bytes < 16 * 2 * KEPT * 8 * 32 * 4
    assert_same(run, normal(16, 8, 32), normal(8, 32), **specs, rtol=1e-5, atol=1e-6)


def test_one_layer_is_a_sum_to_which_its_owner_contributes():
    static = agreed(lambda x, w: x @ w[5], X, W, **SPLIT, out_shardings=P("x"))
    dynamic = agreed(lambda x, w, i: x @ w[i], X, W, jnp.int32(5), mesh=LINE, in_shardings=(P("x"), P("x"), P()))
    assert static.wire_bytes == 2 * KEPT * LAYER
    assert sum(c.wire_bytes for c in dynamic.collectives[:1]) <= 2 * KEPT * LAYER


# Caches and queues.


def decode(cache, query, new, i):
    cache = lax.dynamic_update_slice(cache, new, (0, i, 0))
    scores = jnp.einsum("bd,btd->bt", query, cache)
    scores = jnp.where(jnp.arange(cache.shape[1]) <= i, scores, -jnp.inf)
    return cache, jnp.einsum("bt,btd->bd", jax.nn.softmax(scores), cache)


CACHE = P(None, "x")


@pytest.mark.parametrize(
    "update",
    [
        lambda cache, new, i: lax.dynamic_update_slice(cache, new, (0, i, 0)),
        lambda cache, new, i: cache.at[:, i].set(new[:, 0]),
        lambda cache, new, i: lax.dynamic_update_slice(cache, new, (0, i % cache.shape[1], 0)),
    ],
    ids=["dynamic_update_slice", "at", "ring buffer"],
)
def test_a_cache_is_written_by_its_owner(update):
    cache, new = normal(4, 1024, 8), normal(4, 1, 8)
    specs = {"mesh": LINE, "in_shardings": (CACHE, P(), P()), "out_shardings": CACHE}
    assert not agreed(update, cache, new, jnp.int32(77), **specs).wire_bytes
    for i in (0, 77, 127, 128, 1023):
        assert_same(update, cache, new, jnp.int32(i), **specs)


def test_decoding_sends_scores_and_results_only():
    args = (normal(4, 1024, 8), normal(4, 8), normal(4, 1, 8), jnp.int32(600))
    specs = {"mesh": LINE, "in_shardings": (CACHE, P(), P(), P()), "out_shardings": (CACHE, P())}
    assert agreed(decode, *args, **specs).wire_bytes <= 2 * KEPT * (4 + 4 + 4 * 8) * 4
    assert_same(decode, *args, **specs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("start", [-3, 0, 6, 12, 99])
def test_positions_are_clamped_as_a_whole(start):
    """13 rows in blocks of two, a slice and an update of five of them, which may hang over the end."""

    def both(x, i):
        x = lax.with_sharding_constraint(x, jax.sharding.NamedSharding(LINE, P("x")))
        return lax.dynamic_slice_in_dim(x, i, 5), lax.dynamic_update_slice_in_dim(x, x[:5] * 2, i, 0)

    x = normal(13, 4)
    wanted = lax.dynamic_slice_in_dim(x, start, 5), lax.dynamic_update_slice_in_dim(x, x[:5] * 2, start, 0)
    found = sdy.partition(both, mesh=LINE)(x, jnp.int32(start))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
