"""Products whose results are only turned around make them so: in partitioned programs, with the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE, PLANE

import sdy_jax as sdy

X = np.random.default_rng(0).normal(size=(8, 16, 24)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(8, 16, 40)).astype(np.float32)


def product(x, y, contracting, batching=((), ()), turn=(), precision=None):
    return lax.transpose(lax.dot_general(x, y, (contracting, batching), precision=precision), turn)


PRODUCTS = {
    "gradient": lambda x, y: product(x, y, ((0, 1), (0, 1)), turn=(1, 0)),
    "batched": lambda x, y: product(x, y, ((1,), (1,)), ((0,), (0,)), (0, 2, 1)),
    "two free dimensions": lambda x, y: product(x, y[0], ((1,), (0,)), turn=(2, 0, 1)),
    "gradient of einsum": lambda x, y: jax.grad(lambda w: (jnp.einsum("egd,edf->egf", x, w) * y).sum())(
        jnp.zeros((8, 24, 40), jnp.float32)
    ),
}
SPECS = [(P("x"), P("x")), (P(None, "x"), P(None, "x")), (P(), P(None, None, "x")), (P(None, None, "x"), P())]


@pytest.mark.parametrize("specs", SPECS, ids=str)
@pytest.mark.parametrize("layouts", ["local", "global"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_numbers_are_the_same(name, layouts, specs):
    step = sdy.partition(PRODUCTS[name], mesh=LINE, in_shardings=specs, out_shardings=P(), layouts=layouts)
    np.testing.assert_allclose(step(X, Y), PRODUCTS[name](X, Y), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", PRODUCTS)
def test_nothing_is_transposed(name):
    step = sdy.partition(PRODUCTS[name], mesh=LINE, in_shardings=(P(None, None, "x"), P()), layouts="local")
    assert "stablehlo.transpose" not in step.plan(X, Y).mlir()


def test_a_gathered_gradient_is_made_as_it_is_gathered():
    step = sdy.partition(
        PRODUCTS["gradient of einsum"], mesh=PLANE, in_shardings=(P("y"), P("y")), out_shardings=P(), layouts="local"
    )
    assert [record.kind for record in step.plan(X, Y).collectives] == ["all_gather"]
    assert "stablehlo.transpose" not in step.plan(X, Y).mlir()
    np.testing.assert_allclose(step(X, Y), PRODUCTS["gradient of einsum"](X, Y), rtol=1e-5, atol=1e-4)


def test_the_precision_of_each_operand_goes_with_it():
    precision = (lax.Precision.HIGHEST, lax.Precision.DEFAULT)
    text = str(
        sdy.partition(
            lambda x, y: product(x, y, ((0, 1), (0, 1)), turn=(1, 0), precision=precision),
            mesh=LINE,
            in_shardings=(P(None, None, "x"), P()),
        )
        .plan(X, Y)
        .mlir()
    )
    assert "precision = [DEFAULT, HIGHEST]" in text and "transpose" not in text


def also_used(x, y):
    made = lax.dot_general(x, y, (((0, 1), (0, 1)), ((), ())))
    return made.T, made


@pytest.mark.parametrize(
    "function",
    [also_used, lambda x, y: product(x, y[0], ((1,), (0,)), turn=(1, 0, 2)), lambda x, y: (2 * x).T],
    ids=["also used", "other order", "no product"],
)
def test_other_transposes_stay(function):
    step = sdy.partition(function, mesh=LINE, in_shardings=(P("x"), P()))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4), step(X, Y), function(X, Y))
    assert "stablehlo.transpose" in step.plan(X, Y).mlir()
