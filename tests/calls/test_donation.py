"""Arrays that were donated cannot be passed again, and the error says which argument they are.

Where jaxlib 0.10 is handed such an array on several devices, it ends the process.
"""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.calls.argument_placement import deleting_donated
from sdy_jax.calls.options import Options

X = np.arange(64, dtype=np.float32).reshape(8, 8)
TEXT = re.escape("Array has been deleted with shape=float32[8,8]. It is `state['w']` of update()")


def update(state, x):
    return {"w": state["w"] + x}


def evaluate(state, x, power=1):
    return (state["w"] * x**power).sum()


@pytest.fixture
def state(mesh):
    return {"w": jax.device_put(X, NamedSharding(mesh, P("data")))}


@pytest.mark.parametrize("options", [{"donate_argnums": 0}, {"donate_argnames": "state"}], ids=str)
@pytest.mark.parametrize("is_warm", [False, True])
def test_a_donated_argument_is_refused_by_its_path(mesh, state, options, is_warm):
    f = sdy.partition(update, mesh=mesh, in_shardings=P("data"), **options)
    if is_warm:
        f(f(jax.tree.map(jax.numpy.copy, state), X), X)
    new = f(state, X)
    for _ in range(2):
        with pytest.raises(sdy.DeletedArrayError, match=TEXT) as caught:
            f(state, X)
        assert isinstance(caught.value, RuntimeError)
    np.testing.assert_array_equal(f(new, X)["w"], 3 * X)


def test_it_is_refused_by_name(mesh, state):
    f = sdy.partition(update, mesh=mesh, in_shardings=P("data"), donate_argnames="state")
    f(state=state, x=X)
    with pytest.raises(sdy.DeletedArrayError, match=TEXT):
        f(state=state, x=X)


def test_with_static_arguments(mesh, state):
    options = {"static_argnums": 0, "donate_argnums": 1, "in_shardings": P("data")}
    f = sdy.partition(lambda n, state, x: {"w": state["w"] + n * x}, mesh=mesh, **options)
    new = f(2, state, X)
    np.testing.assert_array_equal(new["w"], 3 * X)
    f(2, new, X)
    with pytest.raises(sdy.DeletedArrayError, match=re.escape("`state['w']`")):
        f(2, new, X)


def test_other_functions_refuse_it_as_well(mesh, state):
    other = sdy.partition(evaluate, mesh=mesh, in_shardings=P("data"))
    other(state, X), other(state, X)
    sdy.partition(update, mesh=mesh, in_shardings=P("data"), donate_argnums=0)(state, X)
    with pytest.raises(sdy.DeletedArrayError, match=re.escape("`state['w']` of evaluate()")):
        other(state, X)
    with pytest.raises(RuntimeError, match="deleted"):
        jax.jit(evaluate)(state, X)


def test_what_jit_has_donated_is_refused_by_a_new_function(mesh, state):
    jax.jit(update, donate_argnums=0)(state, X)
    with pytest.raises(sdy.DeletedArrayError, match=re.escape("`state['w']` of evaluate()")):
        sdy.partition(evaluate, mesh=mesh)(state, X)


def test_a_deleted_argument_may_be_planned_and_left_unused(mesh, state):
    f = sdy.partition(update, mesh=mesh, in_shardings=P("data"), donate_argnums=0)
    f(state, X)
    assert f.plan(state, X).arguments[0].path == "state['w']"
    assert f.eval_shape(state, X)["w"].shape == (8, 8)
    f.lower(state, X).compile()
    np.testing.assert_array_equal(sdy.partition(lambda state, x: x + 1, mesh=mesh)(state, X), X + 1)


def test_functions_that_donate_nothing_are_called_as_by_jit():
    assert deleting_donated(update, update, Options()) is update


@pytest.mark.parametrize("is_array", [False, True])
def test_what_lies_by_a_part_of_an_axis_is_lowered_with_results_stated_whole(mesh, is_array):
    """The cache of two heads on four devices: jit would give its memory to a result that is twice as large."""
    spec, cache = P(None, "model"), jax.ShapeDtypeStruct((4, 2, 8), np.float32)

    def extended(cache, x):
        return cache.at[0].set(x)

    f = sdy.partition(extended, mesh=mesh, in_shardings=(spec, P()), out_shardings=spec, donate_argnums=0)
    with pytest.warns(UserWarning, match="cannot be split|donated|arrives"):
        f.lower(np.zeros(cache.shape, cache.dtype) if is_array else cache, np.ones((2, 8), np.float32)).compile()
