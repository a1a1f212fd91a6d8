"""`jax_debug_nans` and `jax_debug_infs`: the error names the op that makes such a number, and its line."""

from __future__ import annotations

import inspect
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

BAD, GOOD = -jnp.ones((8, 8)), jnp.ones((8, 8))


def logarithm(x):
    y = x * 2
    return jnp.log(y) + 1  # here


def constrained(x):
    y = jax.lax.with_sharding_constraint(x, P(None, "data"))
    return jnp.log(y)  # here


def looped(x):
    return jax.lax.scan(lambda c, _: (jnp.log(c), None), x, None, length=3)[0]  # here


def summed(x):
    return jnp.log(x).sum()  # here


def at(fun, name="", op="log"):
    lines, first = inspect.getsourcelines(fun)
    line = first + next(i for i, line in enumerate(lines) if "# here" in line)
    text = f"invalid value (nan) encountered in {op} at tests/calls/test_nan_checks.py:{line} in {name}()"
    return rf"^{re.escape(text)}(\n|$)"


@pytest.fixture
def partitioned(mesh):
    return lambda f: sdy.partition(f, mesh=mesh, in_shardings=P("data"))


@pytest.mark.parametrize("fun, op", [(logarithm, "log"), (constrained, "log"), (looped, "scan"), (summed, "log")])
def test_the_op_and_its_line_are_named(partitioned, fun, op):
    f = partitioned(fun)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=at(fun, fun.__name__, op)):
        f(BAD)


def test_of_a_warm_call(partitioned):
    f = partitioned(logarithm)
    with jax.debug_nans(True):
        f(GOOD), f(GOOD)
        with pytest.raises(FloatingPointError, match=at(logarithm, "logarithm")):
            f(BAD)
        f(GOOD)


def test_of_static_and_named_arguments(mesh):
    f = sdy.partition(lambda n, *, x: logarithm(x) * n, mesh=mesh, static_argnums=0)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=at(logarithm, "<lambda>")):
        f(3, x=BAD)


def test_of_functions_in_functions_it_is_named_once(partitioned):
    outer = partitioned(lambda x: partitioned(logarithm)(x) + 1)
    error = pytest.raises(FloatingPointError, match=at(logarithm, "logarithm"))
    with jax.debug_nans(True), pytest.warns(sdy.PartitionWarning), error:
        outer(BAD)


@pytest.mark.parametrize(
    "transformed",
    [jax.vmap, jax.jit, lambda f: jax.grad(lambda x: f(x).sum()), lambda f: lambda x: jax.jvp(f, (x,), (x,))],
    ids=["vmap", "jit", "grad", "jvp"],
)
def test_of_transformed_functions(partitioned, transformed):
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=at(logarithm, "logarithm")):
        transformed(partitioned(logarithm))(BAD)


def test_infinity(partitioned):
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match=r"\(inf\) encountered in log at .*\.py:\d+ in"):
        partitioned(logarithm)(0 * GOOD)


def test_what_no_op_makes_is_left_to_verify(partitioned):
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as caught:
        partitioned(lambda x: (x, jnp.nan))(GOOD)
    assert "op by op the plain function gives none" in str(caught.value) and "sdy_jax.verify" in str(caught.value)


def test_what_does_not_run_op_by_op(partitioned):
    def needs_types(x):
        assert isinstance(x, jax.core.Tracer), "arrays are of no use here"
        return jnp.log(x)

    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="does not run op by op: arrays are of no use"):
        partitioned(needs_types)(BAD)


def test_where_jit_is_disabled_errors_are_the_functions_own(partitioned):
    with jax.debug_nans(True), jax.disable_jit(), pytest.raises(FloatingPointError, match=r"encountered in log(\n|$)"):
        partitioned(logarithm)(BAD)
