"""Loops that add to parts of what they carry, under conditions, in wider types: reduced once, behind the loop."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.ir.graph import Graph
from sdy_jax.shardy.propagation.data_flow import edges_of, is_carried_sum

MESH = jax.make_mesh((2, 4), ("model", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
TRIPS, ROWS, WIDTH = 12, 64, 16


def product(x: Any, y: Any) -> Any:
    return x.T @ y


def selected(s: Any, x: Any, y: Any, i: Any) -> Any:
    return s + jnp.where(i > 3, product(x, y), jnp.zeros_like(s[0]))


def in_parts(s: Any, x: Any, y: Any, i: Any) -> Any:
    part = lax.dynamic_index_in_dim(s, i % 2, keepdims=False)
    return lax.dynamic_update_index_in_dim(s, part + product(x, y), i % 2, 0)


def in_a_loop_within(s: Any, x: Any, y: Any, i: Any) -> Any:
    return lax.fori_loop(0, 2, lambda k, s: in_parts(s, x * k.astype(x.dtype), y, k), s)


def widened(s: Any, x: Any, y: Any, i: Any) -> Any:
    part = lax.dynamic_index_in_dim(s, i % 2, keepdims=False)
    return lax.dynamic_update_index_in_dim(s, part + product(x, y).astype(jnp.float32), i % 2, 0)


BODIES = {body.__name__: body for body in (selected, in_parts, in_a_loop_within, widened)}


def summed(body: Any) -> Any:
    def run(xs: Any, ys: Any) -> Any:
        def step(s: Any, each: Any) -> Any:
            return body(s, *each), None

        return lax.scan(step, jnp.zeros((2, WIDTH, WIDTH)), (xs, ys, jnp.arange(TRIPS, dtype=jnp.int32)))[0]

    return run


@pytest.mark.parametrize("name", BODIES)
def test_partial_sums_are_reduced_once(name: str) -> None:
    """Equal to the plain function; that adds products whose terms are on all devices of `data`."""
    dtype = jnp.bfloat16 if name == "widened" else jnp.float32
    xs, ys = np.random.default_rng(0).normal(size=(2, TRIPS, ROWS, WIDTH)).astype(dtype)
    run = summed(BODIES[name])
    given = P(None, "data")
    step = sdy.partition(run, mesh=MESH, in_shardings=(given, given), out_shardings=P())
    error = 0.2 if name == "widened" else 1e-4  # of terms in bfloat16, of some tens
    np.testing.assert_allclose(step(xs, ys), jax.jit(run)(xs, ys), rtol=1e-5, atol=error)
    sent = [each for each in step.plan(xs, ys).collectives if each.wire_bytes]
    assert not [each for each in sent if each.depth], sent
    assert {each.kind for each in sent} <= {"all_reduce", "reduce_scatter", "all_gather"}


def is_sum(body: Any, shape: tuple[int, ...] = (2, 4, 4), stacks: bool = False) -> bool:
    """Of what a loop of this body carries."""
    program = sdy.partition(lambda s: lax.fori_loop(0, 3, body, s), mesh=MESH).plan(jnp.ones(shape))
    loop = next(op for op in Graph(program.stages["imported"]).ops if op.name == "stablehlo.while")
    return next(is_carried_sum(edge, stacks) for edge in edges_of(loop) if edge.owner.shape == shape)


@pytest.mark.parametrize("is_weak", [False, True])
def test_gradients_of_microbatches_are_reduced_once(is_weak: bool) -> None:
    """Whatever type weights have: a carry of a weak one is converted to the type that it has, in each trip."""

    def gradients(weights: Any, batches: Any) -> Any:
        def step(total: Any, batch: Any) -> Any:
            slopes = jax.grad(lambda w: jnp.sum(jnp.tanh(batch @ w[0]) @ w[1]))(weights)
            return jax.tree.map(jnp.add, total, slopes), None

        return lax.scan(step, jax.tree.map(jnp.zeros_like, weights), batches)[0]

    dtype = {} if is_weak else {"dtype": jnp.float32}
    weights = jnp.full((WIDTH, 4 * WIDTH), 0.01, **dtype), jnp.full((4 * WIDTH, WIDTH), 0.01, **dtype)
    assert weights[0].aval.weak_type == is_weak
    f = sdy.partition(gradients, mesh=MESH, in_shardings=(P(), P(None, "data")))
    batches = jnp.asarray(np.random.default_rng(0).normal(size=(TRIPS, 64 * ROWS, WIDTH)), jnp.float32)
    sent = [each for each in f.plan(weights, batches).collectives if each.wire_bytes]
    assert {(each.kind, each.times) for each in sent} == {("all_reduce", 1)}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4), f(weights, batches), gradients(weights, batches))


def test_only_what_is_added_to_is_a_sum() -> None:
    assert is_sum(lambda i, s: s + 1.0)
    assert is_sum(lambda i, s: lax.dynamic_update_index_in_dim(s, s[0] + 1.0, 0, 0))
    assert not is_sum(lambda i, s: lax.dynamic_update_index_in_dim(s, jnp.ones((4, 4)) + i, i % 2, 0))
    assert not is_sum(lambda i, s: lax.dynamic_update_index_in_dim(s, jnp.where(i > 1, 1.0, s[0]), 0, 0))
    assert not is_sum(lambda i, s: jnp.tanh(s) + 1.0)
    assert not is_sum(lambda i, s: s + s.max())
    assert not is_sum(lambda i, s: s * 2.0)
    assert not is_sum(lambda i, s: lax.cond(s[0, 0, 0] > 0, lambda: s + 1.0, lambda: s))
    assert not is_sum(lambda i, s: s.astype(jnp.bfloat16).astype(jnp.float32) + 1.0)


def decayed(xs: Any, a: Any) -> Any:
    """A recurrence whose states are split by heads, and summed over these in each step."""

    def step(h: Any, x: Any) -> Any:
        h = h * a[:, None] + x
        return h, h.sum(0)

    return lax.scan(step, jnp.zeros(xs.shape[1:]), xs)[1]


def loss(xs: Any, a: Any) -> Any:
    return jnp.sum(jnp.tanh(decayed(xs, a)) ** 2)


@pytest.mark.parametrize("function", [decayed, jax.grad(loss, argnums=(0, 1))], ids=["forward", "gradient"])
@pytest.mark.parametrize("splits", [P(), P(None, "model")], ids=["whole", "split"])
def test_sums_that_a_recurrence_stacks_are_reduced_once(function: Any, splits: P) -> None:
    """Where waiting takes time: in bytes there is nothing to save."""
    rng, costs = np.random.default_rng(0), sdy.CostModel.of_machine("h100", MESH)
    xs, a = rng.normal(size=(TRIPS, 8, 32)).astype("float32"), rng.uniform(0.5, 1, 8).astype("float32")
    given, made = (P(None, "data"), P("data")), splits if function is decayed else (P(None, "data"), P("data"))
    run = sdy.partition(function, mesh=MESH, in_shardings=given, out_shardings=made, costs=costs)
    found, plain = run(xs, a), jax.jit(function)(xs, a)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    sent = [each for each in run.plan(xs, a).collectives if each.wire_bytes]
    assert sent and not [each for each in sent if each.depth]


def test_what_is_stacked_is_a_sum_where_that_is_asked() -> None:
    assert is_sum(lambda i, s: lax.dynamic_update_index_in_dim(s, jnp.ones((4, 4)) + i, i % 2, 0), stacks=True)
    assert not is_sum(lambda i, s: jnp.tanh(s) + 1.0, stacks=True)
    assert not is_sum(lambda i, s: s * 2.0, stacks=True)
