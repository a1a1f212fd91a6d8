"""Partial results are reduced once, where it is cheapest: after linear ops, after sums of them, after loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sdy_jax import CostModel
from sdy_jax.lowering.planner.placement import program_placement
from sdy_jax.testing import assert_same

MESH = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def kinds(plan):
    return sorted(c.kind for c in plan.collectives)


def check(function, specs, out, arguments, expected=None):
    """The plan op by op, whose kinds of collectives are expected; that of the whole program sends no more.

    The costs are those of accelerators: work is cheap.
    """
    options = {"mesh": MESH, "in_shardings": specs, "out_shardings": out, "costs": CostModel()}
    plan, chosen = (assert_same(function, *arguments, **options, layouts=how) for how in ("local", "global"))
    assert plan.stages["partitioned"].verify() and chosen.stages["partitioned"].verify()
    assert expected is None or kinds(plan) == expected, plan
    assert chosen.wire_bytes <= plan.wire_bytes, chosen
    return plan


A, B = normal(16, 32), normal(32, 8, seed=1)
C, D = normal(16, 32, seed=2), normal(32, 8, seed=3)
CONTRACTED = (P(None, "y"), P("y"))

CASES = [
    # what is done with two products that are contracted over y (or one), result spec, collectives
    (lambda a, b, c, d: a @ b + c @ d, P(), ["all_reduce"]),
    (lambda a, b, c, d: a @ b - (c @ d) * 2.0, P(), ["all_reduce"]),
    (lambda a, b, c, d: (a @ b + c @ d).T, P("y"), ["reduce_scatter"]),
    (lambda a, b, c, d: -(a @ b).T, P("y"), ["reduce_scatter"]),
    (lambda a, b, c, d: jnp.sum(a @ b, axis=0), P(), ["all_reduce"]),
    (lambda a, b, c, d: jnp.concatenate([a @ b, c @ d]), P(), ["all_reduce"]),
    (lambda a, b, c, d: (a @ b).reshape(4, 4, 8)[1:3], P(), ["all_reduce"]),
    (lambda a, b, c, d: jnp.where(jnp.arange(8) > 3, a @ b, c @ d), P(), ["all_reduce"]),
    (lambda a, b, c, d: jnp.where(jnp.arange(8) > 3, a @ b, 0.0), P(), ["all_reduce"]),
    (lambda a, b, c, d: jnp.pad(a @ b, 1), P(), ["all_reduce"]),
    # not linear in the partial results, or in both
    (lambda a, b, c, d: jnp.tanh(a @ b) + c @ d, P(), ["all_reduce", "all_reduce"]),
    (lambda a, b, c, d: (a @ b) * (c @ d), P(), ["all_reduce", "all_reduce"]),
    (lambda a, b, c, d: jnp.pad(a @ b, 1, constant_values=3.0), P(), ["all_reduce"]),
]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_sums_of_partial_results_are_reduced_once(case):
    function, out, expected = case
    check(function, CONTRACTED * 2, out, (A, B, C, D), expected)


def test_a_reduction_is_cheaper_before_a_broadcast_and_after_a_sum():
    plan = check(lambda a, b: jnp.broadcast_to(a @ b, (10, 16, 8)), CONTRACTED, P(), (A, B), ["all_reduce"])
    assert plan.collectives[0].shape == (16, 8)
    plan = check(lambda a, b: jnp.sum(a @ b, 0), CONTRACTED, P(), (A, B), ["all_reduce"])
    assert plan.collectives[0].shape == (8,)


def test_a_value_that_is_not_partial_counts_once_in_the_sum():
    check(
        lambda a, b, c, d, e: a @ b + e + c @ d,
        (*CONTRACTED * 2, P()),
        P(),
        (A, B, C, D, normal(16, 8)),
        ["all_reduce", "replicated_to_unreduced"],
    )


def test_a_partial_maximum_passes_only_what_moves_elements():
    function = lambda x, y: jnp.maximum(jnp.max(x, 1).reshape(4, 4).T, jnp.max(y, 1).reshape(4, 4).T)  # noqa: E731
    check(function, (P(None, "y"), P(None, "y")), P(), (A, C), ["all_reduce"])
    check(lambda x: -jnp.max(x, 1), (P(None, "y"),), P(), (A,), ["all_reduce"])


def test_partial_results_with_two_users_are_reduced_once_for_both():
    def function(a, b):
        h = a @ b
        return h + 1.0, h.T

    check(function, CONTRACTED, P(), (A, B), ["all_reduce"])


def test_integer_sums_wrap_as_in_the_plain_program():
    a = jnp.full((16, 32), 100, jnp.int8)
    b = jnp.ones((32, 8), jnp.int8)
    check(lambda a, b: -(a @ b) + (a @ b).T.T, CONTRACTED, P(), (a, b), ["all_reduce"])


def test_a_loop_that_adds_gradients_up_reduces_them_after_the_loop():
    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    def step(w, batches):
        def body(total, x):
            return total + jax.grad(loss)(w, x), None

        total, _ = jax.lax.scan(body, jnp.full_like(w, 0.5), batches)
        return w - 0.1 * total

    w, batches = normal(32, 8), normal(5, 16, 32)
    plan = check(step, (P(), P(None, "y")), P(), (w, batches), ["all_reduce", "replicated_to_unreduced"])
    assert all(c.depth == 0 for c in plan.collectives)


def test_a_sum_that_the_loop_looks_at_is_reduced_in_it():
    def step(w, batches):
        def body(total, x):
            return total + x.T @ jnp.tanh(x @ w + jnp.sum(total)), None

        return jax.lax.scan(body, jnp.zeros_like(w), batches)[0]

    w, batches = normal(32, 8), normal(5, 16, 32)
    plan = check(step, (P(), P(None, "y")), P(), (w, batches))
    assert any(c.depth for c in plan.collectives)


def test_what_compilers_fuse_waits_for_the_sum_where_memory_has_a_price(monkeypatch):
    """Terms would be multiplied, and written, before they are sent; the sum is multiplied where it is used. That is
    what placement decides, before reductions are moved."""
    monkeypatch.setattr(program_placement, "reduce_early", lambda inserted: None)

    def descend(w, a, b):
        return w - (a @ b) * 0.1

    def sends_before_multiplying(costs):
        options = {"in_shardings": (P(), *CONTRACTED), "out_shardings": P(), "costs": costs, "layouts": "local"}
        text = assert_same(descend, normal(16, 8), A, B, mesh=MESH, **options).mlir()
        return text.index("sdy.all_reduce") < text.index("stablehlo.multiply")

    assert not sends_before_multiplying(CostModel())
    assert sends_before_multiplying(CostModel(memory=1e-3, launch=1.0))
