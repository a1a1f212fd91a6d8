"""All_reduces stand right behind what makes partial sums, unless these meet others or are read twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE

from sdy_jax.ir.operations import named
from sdy_jax.testing import assert_same

RNG = np.random.default_rng(0)
X, Y, W = (RNG.normal(size=size).astype(np.float32) for size in ((64, 16), (64, 24), (16, 24)))


def descended(x, y, w):
    return w - 0.1 * -(x.T @ y)


def met(x, y, w):
    return w - (0.1 * (x.T @ y) + 0.2 * (jnp.sin(x).T @ y))


def read_twice(x, y, w):
    product = x.T @ y
    return 0.1 * product, jnp.sin(product) + w


def looped(x, y, w):
    return jax.lax.fori_loop(0, 3, lambda _, w: w - 0.1 * (x.T @ y) / 2, w)


def reduced(function):
    """The names of the ops before the all_reduces of a function whose products are partial sums."""
    specs = (P("x"), P("x"), P())
    plan = assert_same(function, X, Y, W, mesh=LINE, in_shardings=specs, layouts="local")
    return [op.operands[0].owner.name for op in named(plan.stages["partitioned"], "sdy.all_reduce")]


@pytest.mark.parametrize("function", [descended, looped])
def test_sums_are_reduced_before_they_are_scaled(function):
    assert reduced(function) == ["stablehlo.dot_general"]


def test_sums_that_meet_are_reduced_together():
    assert reduced(met) == ["stablehlo.add"]


def test_sums_that_are_read_twice_stay_where_they_are_reduced():
    assert reduced(read_twice) == ["stablehlo.dot_general"]


def late(x, y, w):
    """The gradient of a weight, which is used last."""
    gradient = x.T @ y
    return jnp.sin(y) @ jnp.cos(w).T, w - gradient


def test_sums_are_scattered_where_they_are_made_though_they_are_used_later():
    specs = (P("x"), P("x"), P("x"))
    plan = assert_same(late, X, Y, W, mesh=LINE, in_shardings=specs, out_shardings=(P("x"), P("x")))
    [scatter] = named(plan.stages["partitioned"], "sdy.reduce_scatter")
    ops = list(scatter.operation.block.operations)
    place = ops.index(scatter.operands[0].owner.opview)
    assert ops[place + 1].name == "sdy.reduce_scatter"
