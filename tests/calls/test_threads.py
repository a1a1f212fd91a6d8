"""Threads that plan, differentiate and call at once; calls inside of callbacks; no tracer outlives its trace."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE, PLANE

import sdy_jax as sdy

W, X = jnp.full((2, 8, 8), 0.1), jnp.arange(64.0).reshape(8, 8) / 64


def net(w, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x.sum()), x, w)


def loss(w, x):
    return net(w, x)[0].sum()


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads take turns as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What threads that start together return; the first error of one is raised."""
    results: list[Any] = [None] * count
    start = threading.Barrier(count)

    def run(number: int) -> None:
        start.wait()
        try:
            results[number] = work(number)
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in results:
        if isinstance(error, Exception):
            raise error
    return results


@pytest.mark.more("sixteen threads")
@pytest.mark.usefixtures("quick_switches")
def test_sixteen_threads_plan_and_call_at_once():
    """One function for all, and one for each, on two meshes; the plans are those that one thread makes."""
    meshes, specs = (LINE, PLANE), (P(None, "x"), P("x"))
    shared = sdy.partition(net, mesh=PLANE, in_shardings=specs, on_unknown="ignore")
    expected = [sdy.partition(net, mesh=m, in_shardings=specs, on_unknown="ignore").plan(W, X) for m in meshes]

    def work(number: int) -> Any:
        own = sdy.partition(net, mesh=meshes[number % 2], in_shardings=specs, on_unknown="ignore")
        plan = own.plan(W, X)
        return plan.fingerprint(), shared(W, X), own(W, X)

    for number, (fingerprint, *results) in enumerate(at_once(16, work)):
        assert fingerprint == expected[number % 2].fingerprint()
        for result in results:
            jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), result, net(W, X))
    assert len(shared.plans) == 1


@pytest.mark.dear
@pytest.mark.usefixtures("quick_switches")
@pytest.mark.parametrize("attempt", range(3))
def test_threads_differentiate_one_function_at_once(attempt):
    """All of them trace it, and find the same residuals."""
    function = sdy.partition(loss, mesh=PLANE, in_shardings=(P(None, "y"), P("x")), on_unknown="ignore")
    found = at_once(8, lambda _: jax.grad(function, argnums=(0, 1))(W, X))
    for gradients in found:
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), gradients, jax.grad(loss, argnums=(0, 1))(W, X))
    (call,) = function.plans
    assert len(call.derivatives) == 2


@pytest.mark.usefixtures("quick_switches")
def test_threads_call_back_at_once():
    """Each callback gets what its own thread computes."""

    def doubled(x):
        return jax.pure_callback(lambda x: np.asarray(x) * 2, jax.typeof(x), x)

    function = sdy.partition(doubled, mesh=LINE, in_shardings=P("x"), on_unknown="ignore")
    function(X)
    lock = threading.Lock()

    def work(number: int) -> Any:
        with lock:  # programs with collectives are started in one order on all virtual devices
            return jax.block_until_ready(function(X + number))

    for number, result in enumerate(at_once(4, work)):
        np.testing.assert_array_equal(result, 2 * (X + number))


def inner(x):
    return jnp.sin(x) + x.sum()


def called_in_callback(function, mesh):
    """`function` of the argument, called by a callback of a partitioned function on a mesh."""

    def host(x):
        return np.asarray(function(np.asarray(x)))

    return sdy.partition(
        lambda x: jax.pure_callback(host, jax.typeof(x), x) * 2, mesh=mesh, in_shardings=P("x"), on_unknown="ignore"
    )


def test_callbacks_plan_and_call_partitioned_functions_on_one_device():
    one = jax.sharding.Mesh(np.array(jax.devices()[-1:]), ("x",))
    plans = []

    def planned(x):
        plans.append(sdy.partition(net, mesh=LINE, in_shardings=(None, P("x")), on_unknown="ignore").plan(W, X))
        return sdy.partition(inner, mesh=one, in_shardings=P("x"))(x)

    x = jnp.arange(8.0)
    np.testing.assert_allclose(called_in_callback(planned, LINE)(x), 2 * inner(x), rtol=1e-6)
    assert len(plans) == 1


NESTED = """
import os
import jax, jax.numpy as jnp, numpy as np, sdy_jax as sdy
mesh, x = jax.make_mesh((8,), ("x",)), jnp.arange(8.0)
inner = sdy.partition(lambda x: x + x.sum(), mesh=mesh, in_shardings=jax.P("x"))
inner(x)
outer = sdy.partition(
    lambda x: jax.pure_callback(lambda x: np.asarray(inner(np.asarray(x))), jax.typeof(x), x), mesh=mesh,
    in_shardings=jax.P("x"), on_unknown="ignore",
)
try:
    outer(x).block_until_ready()
except Exception as error:
    print(str(error).splitlines()[-1], flush=True)
os._exit(0)
"""


def test_a_call_for_which_the_devices_of_a_callback_would_wait_forever_is_refused():
    """jit never ends there."""
    ended = subprocess.run([sys.executable, "-c", NESTED], capture_output=True, text=True, timeout=100)
    assert "<lambda> is called inside a jax.pure_callback, for which 8 devices wait" in ended.stdout


def test_a_plan_does_not_depend_on_plans_on_other_meshes_before():
    function = sdy.partition(net, mesh=LINE, in_shardings=(None, P("x")), on_unknown="ignore")
    before = str(function.plan(W, X))
    for mesh in (PLANE, LINE, PLANE):
        sdy.partition(net, mesh=mesh, in_shardings=(P(None, "x"), P("x")), on_unknown="ignore").plan(W, X)
    function.clear_cache()
    assert str(function.plan(W, X)) == before


def branching(w, x):
    x = jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)
    return jax.lax.while_loop(lambda x: x.sum() < 50, lambda x: x + 1, net(w, x)[0])


def calling_back(w, x):
    jax.debug.print("{}", x.sum())
    return jax.pure_callback(np.asarray, jax.typeof(x), x, vmap_method="expand_dims") @ w[0]


LEAKS = {
    "call": lambda f: f(W, X),
    "plan": lambda f: f.plan(W, X),
    "lower": lambda f: f.lower(W, X),
    "under jit": lambda f: jax.jit(lambda *args: f(*args))(W, X),
    "vmap": lambda f: jax.vmap(f, (None, 0))(W, X[:, None]),
}


@pytest.mark.parametrize("function", [net, jax.grad(loss), branching, calling_back])
@pytest.mark.parametrize("use", LEAKS)
def test_no_tracer_outlives_its_trace(function, use):
    with jax.checking_leaks():
        LEAKS[use](sdy.partition(function, mesh=PLANE, in_shardings=(P(None, "y"), P("x")), on_unknown="ignore"))


def test_no_tracer_of_a_derivative_outlives_its_trace():
    with jax.checking_leaks():
        jax.grad(sdy.partition(loss, mesh=PLANE, in_shardings=(P(None, "y"), P("x")), on_unknown="ignore"))(W, X)
