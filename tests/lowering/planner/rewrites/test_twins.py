"""What is computed twice in one layout is computed, and sent for, once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from machine_models import planned_for, small_costs
from partitioned_ops import LINE, op

import sdy_jax as sdy
from sdy_jax.plan.profile import collectives_in_hlo, totals
from sdy_jax.testing import assert_same

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
DRAW = """"stablehlo.rng"(%a, %b, %c) <{rng_distribution = #stablehlo<rng_distribution UNIFORM>}>
    : (tensor<f32>, tensor<f32>, tensor<2xi32>) -> tensor<16x8xf32>"""


def twice(x):
    return x.sum(0) + jnp.exp(x.sum(0))


def constrained(x):
    same = jax.lax.with_sharding_constraint(x, NamedSharding(LINE, P("x")))
    return jnp.sin(x.max(0)) * jnp.cos(same.max(0))


def chains(x):
    return (x @ x.T).sum() + jnp.tanh((x @ x.T).sum())


def one_is_returned_and_one_reduced(x):
    return x.sum(0), x.sum(0).sum()


def in_loops(x):
    return jax.lax.fori_loop(0, 3, lambda _, c: c + c.sum(0) * jnp.tanh(c.sum(0)), x)


@pytest.mark.parametrize("layouts", ["local", "global"])
@pytest.mark.parametrize("function", [twice, constrained, chains, one_is_returned_and_one_reduced, in_loops])
def test_plans_count_what_the_compiled_program_sends(function, layouts):
    """XLA merges equal collectives."""
    plan = assert_same(function, X, mesh=LINE, in_shardings=P("x"), layouts=layouts, rtol=1e-5)
    assert plan.stages["partitioned"].verify()
    compiled = sdy.partition(function, mesh=LINE, in_shardings=P("x"), layouts=layouts).lower(X).compile()
    assert plan.wire_bytes == totals(collectives_in_hlo(compiled.as_text())).wire_bytes, plan


def slices(x):
    """A product computes the first one as it reads it, by a model of memory; to sort the second one it is written."""
    return x[:12] @ x[:12].T, jnp.sort(x[:12], 0)


@pytest.mark.parametrize("machine", ["tpu v5e", "h100"])
def test_an_op_that_another_one_stands_in_for_is_planned_as_it_was(machine):
    costs = small_costs(machine, ["x"])
    with planned_for(machine):
        assert_same(slices, X, mesh=LINE, in_shardings=P(None, "x"), costs=costs, rtol=1e-5)


def test_one_of_two_equal_sums_is_left():
    plan = sdy.partition(twice, mesh=LINE, in_shardings=P("x"), layouts="local").plan(X)
    assert plan.mlir().count("stablehlo.reduce(") == 1 and len(plan.collectives) == 1


def test_draws_differ():
    def draws(x):
        limits = jnp.float32(0), jnp.float32(1), jnp.array(X.shape)
        return op(DRAW, "16x8xf32")(*limits), op(DRAW, "16x8xf32")(*limits), x

    assert sdy.partition(draws, mesh=LINE, in_shardings=P("x")).plan(X).mlir().count("stablehlo.rng ") == 2
