"""Which calls reach us, and what of their arguments reaches the devices."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.calls.partitioned_function import PartitionedFunction

X = np.arange(64, dtype=np.float32).reshape(8, 8)


@pytest.fixture
def missed(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """The calls of functions made from now on that jit's C++ passes on to us."""
    calls = []
    original = PartitionedFunction._missed

    def recorded(self, *args, **kwargs):
        calls.append((args, kwargs))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(PartitionedFunction, "_missed", recorded)
    return calls


def kept(compiled: jax.stages.Compiled) -> int:
    """The number of arrays that each call hands to the devices."""
    return len(compiled.runtime_executable().get_parameter_layouts())


def test_calls_that_were_seen_before_are_jits_own(mesh, missed):
    f = sdy.partition(lambda x, n: x * n, mesh=mesh, static_argnums=1)
    rows, columns = (jax.device_put(X, NamedSharding(mesh, spec)) for spec in (P("data"), P(None, "data")))
    for _ in range(3):
        for x, n in ((rows, 2), (columns, 2), (rows, 3)):
            y = f(x, n)
            assert y.sharding.is_equivalent_to(x.sharding, 2)
            np.testing.assert_array_equal(y, X * n)
    assert len(missed) == 3
    f.clear_cache()
    f(rows, 2)
    assert len(missed) == 4


def test_a_warm_call_knows_the_mesh_of_set_mesh(missed):
    meshes = [jax.make_mesh((size,), ("x",), (AxisType.Auto,), devices=jax.devices()[:size]) for size in (2, 4)]
    f = sdy.partition(lambda x: x + 1, in_shardings=P("x"))
    for mesh in meshes * 2:
        with jax.set_mesh(mesh):
            assert f(X).sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 2)
    assert len(missed) == 2


def test_a_warm_function_is_inlined_in_another(mesh, missed):
    inner = sdy.partition(lambda x: x + 1, mesh=mesh)
    inner(X)
    outer = sdy.partition(lambda y: inner(X) + y, mesh=mesh)
    np.testing.assert_array_equal(outer(X), X + 1 + X)
    assert len(inner.plans) == 1 and len(missed) == 3


def test_without_jit_the_function_itself_runs(mesh):
    seen = []
    f = sdy.partition(lambda x: seen.append(x) or x + 1, mesh=mesh, in_shardings=P("data"))
    with jax.disable_jit():
        np.testing.assert_array_equal(f(X), X + 1)
    assert isinstance(seen[0], np.ndarray)


@pytest.mark.parametrize("kind", list(AxisType)[:2])
@pytest.mark.parametrize("keep_unused", [False, True])
def test_arguments_that_nobody_uses_stay_where_they_are(kind, keep_unused):
    mesh = jax.make_mesh((2, 4), ("x", "y"), (kind, kind))
    arrays = [jax.device_put(X, NamedSharding(mesh, P("x"))) for _ in range(6)]

    def plain(first, rest, *, named):
        rest[2] * named  # nothing that is returned
        return first + rest[1]

    f = sdy.partition(plain, mesh=mesh, keep_unused=keep_unused)
    g = jax.jit(plain, keep_unused=keep_unused)
    args, named = (arrays[0], arrays[1:5]), {"named": arrays[5]}
    np.testing.assert_array_equal(f(*args, **named), g(*args, **named))
    ours, theirs = (kept(function.lower(*args, **named).compile()) for function in (f, g))
    assert ours == theirs == (6 if keep_unused else 2)


def test_no_argument_is_used(mesh):
    f = sdy.partition(lambda x, y: jnp.ones(8), mesh=mesh, in_shardings=P("data"), out_shardings=P("data"))
    assert f(X, X).sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 1)
    assert kept(f.lower(X, X).compile()) == 0


def test_what_nobody_uses_is_not_moved(mesh):
    f = sdy.partition(lambda x, y: x + 1, mesh=mesh, in_shardings=P("data"))
    elsewhere = jax.device_put(X, NamedSharding(mesh, P(None, "data")))
    assert not f.plan(X, elsewhere).moves
    assert [move.path for move in f.plan(elsewhere, X).moves] == ["x"]
    f(X, elsewhere)  # a warning would be an error


def test_derivatives_by_arguments_that_only_a_rule_uses(mesh):
    @jax.custom_jvp
    def ones_like(x):
        return jnp.ones(x.shape)

    ones_like.defjvp(lambda primals, tangents: (ones_like(*primals), 3 * tangents[0]))
    f = sdy.partition(lambda x, y: ones_like(x).sum() + 0 * y.sum(), mesh=mesh, in_shardings=P("data"))
    by_x, by_y = jax.grad(f, argnums=(0, 1))(X, X)
    np.testing.assert_array_equal(by_x, np.full_like(X, 3))
    np.testing.assert_array_equal(by_y, np.zeros_like(X))
    unused = sdy.partition(lambda x, y: (x**2).sum(), mesh=mesh, in_shardings=P("data"))
    np.testing.assert_array_equal(jax.grad(unused, argnums=(0, 1))(X, X)[1], np.zeros_like(X))


def test_a_function_that_nobody_has_any_more_is_gone(mesh):
    def used(calls):
        f = sdy.partition(lambda x: jnp.sin(x).sum(), mesh=mesh)
        for call in calls:
            call(f)
        return weakref.ref(f)

    calls = [lambda f: f(X), lambda f: f.lower(X).compile(), lambda f: f.plan(X), lambda f: jax.grad(f)(X)]
    alive = [used(calls[:count]) for count in range(len(calls) + 1)]
    gc.collect()
    assert not any(function() for function in alive)
