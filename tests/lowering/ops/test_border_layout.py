"""Gradients are laid out like the weights and moments that are updated with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE
from sharding_dump import parse

import sdy_jax as sdy
from sdy_jax.ir.graph import Graph
from sdy_jax.lowering.ops.emit import combined_with_arguments
from sdy_jax.testing import assert_same

X, S = "tensor<16x16xf32>", "tensor<f32>"


def combined(body, arguments=f"%w: {X}, %x: {X}", results=X):
    """The names of the ops whose results are laid out."""
    module = parse(f"func.func @main({arguments}) -> ({results}) {{\n{body}\n}}")
    return sorted(v.defining_op.name.partition(".")[2] for v in combined_with_arguments(Graph(module.operation)))


PRODUCT = f"%g = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0] : ({X}, {X}) -> {X}\n"


def test_a_product_that_an_argument_is_updated_with():
    body = f"%n = stablehlo.negate %g : {X}\n %r = stablehlo.add %w, %n : {X}\n return %r : {X}"
    assert combined(PRODUCT + body) == ["dot_general"]


def test_what_is_moved_after_a_product_is_laid_out_in_its_place():
    body = f"""
    %t = stablehlo.transpose %g, dims = [1, 0] : ({X}) -> {X}
    %r = stablehlo.add %w, %t : {X}
    return %r : {X}"""
    assert combined(PRODUCT + body) == ["transpose"]


def test_what_no_argument_is_combined_with_may_lie_as_it_likes():
    assert combined(f"{PRODUCT} %r = stablehlo.negate %g : {X}\n return %r : {X}") == []


def test_what_is_no_part_of_a_result_may_lie_as_it_likes():
    body = f"""
    %h = stablehlo.add %w, %g : {X}
    %r = stablehlo.dot_general %h, %x, contracting_dims = [1] x [0] : ({X}, {X}) -> {X}
    return %r : {X}"""
    assert combined(PRODUCT + body) == []


def test_a_second_result_of_the_same_gradient_is_combined_too():
    """The first moment is not computed with an argument, but of a gradient that the weight is updated with."""
    body = f"%r = stablehlo.add %w, %g : {X}\n %m = stablehlo.negate %g : {X}\n return %r, %m : {X}, {X}"
    assert combined(PRODUCT + body, results=f"{X}, {X}") == ["dot_general"]


def test_broadcasts_lie_as_is_needed():
    body = f"""
    %b = stablehlo.broadcast_in_dim %s, dims = [] : ({S}) -> {X}
    %r = stablehlo.multiply %w, %b : {X}
    return %r : {X}"""
    assert combined(body, f"%w: {X}, %s: {S}") == []


def update(state, x, y):
    """A step of an optimizer with a moment, whose gradient of shape [16, 24] is gathered along its columns."""
    weight, moment = state
    gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) * y))(weight)
    moment = 0.9 * moment + 0.1 * gradient
    return (weight - 0.1 * moment, moment)


def shapes(rng):
    return tuple(jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((16, 24), (16, 24), (32, 16), (32, 24)))


@pytest.mark.parametrize("layouts", ("local", "global"))
def test_the_numbers_are_the_plain_functions(layouts):
    weight, moment, x, y = shapes(np.random.default_rng(0))
    specs = (P(), P()), P(), P(None, "x")
    f = sdy.partition(update, mesh=LINE, in_shardings=specs, out_shardings=(P(), P()), layouts=layouts)
    assert "layout_constraint" in str(jax.make_jaxpr(f)((weight, moment), x, y))
    assert_same(
        update,
        (weight, moment),
        x,
        y,
        mesh=LINE,
        in_shardings=specs,
        out_shardings=(P(), P()),
        layouts=layouts,
        atol=1e-5,
    )


@pytest.mark.more("transformations")
def test_constraints_do_not_hinder_transformations():
    weight, moment, x, y = shapes(np.random.default_rng(1))
    specs = (P(), P()), P(), P(None, "x")
    f = sdy.partition(update, mesh=LINE, in_shardings=specs, out_shardings=(P(), P()))

    def loss(fun):
        return lambda w: sum(jnp.sum(v**2) for v in fun((w, moment), x, y))

    np.testing.assert_allclose(jax.grad(loss(f))(weight), jax.grad(loss(update))(weight), atol=1e-4)
    stacked = jnp.stack([weight, -weight])
    found, wanted = (jax.vmap(loss(fun))(stacked) for fun in (f, update))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
