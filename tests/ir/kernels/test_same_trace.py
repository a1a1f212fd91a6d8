"""Traces of one function are equal but for names, source lines and numbers that are left open; others are not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from sdy_jax.ir.kernels.recognition import open_numbers

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)


def scaled(x, scale=2.0, steps=3, shift=0.5):
    def body(i, y):
        return jnp.where(y > shift, y * scale, y - i % steps)

    return lax.fori_loop(0, 5, body, jnp.tanh(x / scale))


def between(function, other, unknown=()):
    """The numbers of another function where a function has those that are unknown."""
    traced, found = jax.make_jaxpr(functools.partial(function, **dict(unknown)))(X), jax.make_jaxpr(other)(X)
    return open_numbers(traced, found, dict(unknown), [0])


def test_the_same_function_written_twice_is_one():
    def again(values):
        def other_name(count, previous):
            return jnp.where(previous > 0.5, previous * 2.0, previous - count % 3)

        return lax.fori_loop(0, 5, other_name, jnp.tanh(values / 2.0))

    assert between(scaled, again) == {}


def test_open_numbers_are_found():
    unknown = {"scale": 1.2578125, "steps": 10007, "shift": 1.3828125}
    numbers = {"scale": 4.0, "steps": 7, "shift": -1.0}
    assert between(scaled, functools.partial(scaled, **numbers), unknown) == numbers


def test_one_number_does_not_stand_for_two():
    def other(x):
        return lax.fori_loop(0, 5, lambda i, y: jnp.where(y > 0.5, y * 2.0, y - i % 3), jnp.tanh(x / 4.0))

    assert between(scaled, other, {"scale": 1.2578125}) is None


def looped(body, trips=5):
    return lambda x: lax.fori_loop(0, trips, body, jnp.tanh(x / 2.0))


OTHERS = {
    "a number": functools.partial(scaled, scale=3.0),
    "an op": lambda x: jnp.sinh(scaled(x)),
    "an op of an inner function": looped(lambda i, y: jnp.where(y >= 0.5, y * 2.0, y - i % 3)),
    "an operand": looped(lambda i, y: jnp.where(y > 0.5, y * 2.0, i % 3 - y)),
    "trips": looped(lambda i, y: jnp.where(y > 0.5, y * 2.0, y - i % 3), 6),
    "results": lambda x: (scaled(x), x),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_differs_is_another_function(name):
    assert between(scaled, OTHERS[name]) is None


def test_arrays_that_are_constants_are_compared():
    def plus(values):
        return lambda x: x + jnp.asarray(values)

    row = np.arange(8.0, dtype=np.float32)
    assert between(plus(row), plus(row.copy())) == {}
    assert between(plus(row), plus(-row)) is None


def test_types_are_compared_and_where_values_lie_is_not():
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    spread = jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("x")))
    assert open_numbers(jax.make_jaxpr(jnp.tanh)(X), jax.make_jaxpr(jnp.tanh)(spread), {}, [0]) == {}
    narrow = jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)
    assert open_numbers(jax.make_jaxpr(jnp.tanh)(X), jax.make_jaxpr(jnp.tanh)(narrow), {}, [0]) is None


def test_moves_are_no_computation():
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)

    def moved(x):
        return jax.sharding.reshard(jnp.tanh(jax.sharding.reshard(x, jax.P("x"))), jax.P()) * 2.0

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        other = jax.make_jaxpr(moved)(X)
        assert [e.primitive.name for e in other.eqns].count("reshard") == 2
        assert open_numbers(jax.make_jaxpr(lambda x: jnp.tanh(x) * 2.0)(X), other, {}, [0]) == {}
        assert open_numbers(jax.make_jaxpr(lambda x: x * 2.0)(X), other, {}, [0]) is None


def test_arguments_may_come_in_another_order():
    first, second = jax.make_jaxpr(lambda a, b: a - b)(X, X), jax.make_jaxpr(lambda b, a: a - b)(X, X)
    assert open_numbers(first, second, {}, [1, 0]) == {}
    assert open_numbers(first, second, {}, [0, 1]) is None
    assert open_numbers(first, second, {}, [0, 0]) is None
    assert open_numbers(first, second, {}, [0]) is None
