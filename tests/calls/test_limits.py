"""Programs at the edges of what one may write: each runs as the plain function does, or is refused clearly."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from partitioned_ops import CUBE, LINE, PLANE

import sdy_jax as sdy

RNG = np.random.default_rng(0)


def _numbers(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def _slowly(count: int) -> Any:
    """A case that takes long."""
    return pytest.param(count, marks=pytest.mark.slow)


def _planned(function: Callable[..., Any], mesh: Any, in_shardings: Any, *shapes: tuple[int, ...]) -> sdy.Plan:
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return sdy.partition(function, mesh=mesh, in_shardings=in_shardings).plan(*types)


def _layer(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w) @ w.T


def test_eight_dimensions() -> None:
    def function(x: Any) -> Any:
        return jnp.einsum("abcdefgh,abcdefgi->hi", x, x) + x.transpose(*reversed(range(8))).sum((1, 2, 3, 4, 5, 6))

    x = _numbers(2, 2, 2, 2, 2, 2, 2, 2)
    ours = sdy.partition(function, mesh=CUBE, in_shardings=P("x", None, "y", None, "z"))
    np.testing.assert_allclose(ours(x), function(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [(2,) * 6, (7, 13, 31), (3, 5, 7, 11, 13, 17)], ids=str)
def test_six_axes_and_axes_of_prime_size(sizes: tuple[int, ...]) -> None:
    names = "abcdef"[: len(sizes)]
    mesh = jax.sharding.AbstractMesh(sizes, tuple(names))
    plan = _planned(_layer, mesh, (P(tuple(names[:2]), names[2]), P(names[-1])), (256, 512), (512, 1024))
    assert 0 < plan.wire_bytes < 4 * 3 * (256 * 512 + 512 * 1024)


def test_seven_devices() -> None:
    mesh, x, w = jax.sharding.Mesh(np.array(jax.devices()[:7]), ("p",)), _numbers(22, 23), _numbers(23, 5)
    ours = sdy.partition(_layer, mesh=mesh)
    np.testing.assert_allclose(ours(x, w), _layer(x, w), rtol=1e-4, atol=1e-4)


def test_loops_ten_deep() -> None:
    def nested(depth: int, x: Any) -> Any:
        return lax.fori_loop(0, 2, lambda _, c: nested(depth - 1, c), x) if depth else jnp.tanh(x @ x.T @ x) / 9

    x = _numbers(8, 8)
    ours = sdy.partition(lambda x: nested(10, x), mesh=PLANE, in_shardings=P("x", "y"))
    np.testing.assert_allclose(ours(x), jax.jit(nested, static_argnums=0)(10, x), rtol=1e-4, atol=1e-7)


def test_no_arguments_no_results_and_scalars() -> None:
    ours = sdy.partition(lambda: jnp.arange(8.0) * 2, mesh=LINE, out_shardings=P("x"))
    np.testing.assert_array_equal(ours(), np.arange(8.0) * 2)
    assert sdy.partition(lambda x: (), mesh=LINE, in_shardings=P("x"))(jnp.ones(8)) == ()
    assert sdy.partition(lambda: None, mesh=LINE)() is None
    assert sdy.partition(lambda a, b: (a + b, a * b), mesh=LINE)(1.0, 2) == (3.0, 2.0)


def test_no_elements() -> None:
    def function(x: Any) -> Any:
        return x @ x.T, x.sum(), x.sum(0), jnp.concatenate([x, x]), jnp.sort(x, 0), x.reshape(8, 0), x + 1

    x = jnp.zeros((0, 8))
    for spec in (P("x"), P(None, "y"), P()):
        found = sdy.partition(function, mesh=PLANE, in_shardings=spec)(x)
        for ours, plain in zip(found, function(x), strict=True):
            np.testing.assert_array_equal(ours, plain)


@pytest.mark.parametrize("name", ["a" * 10_000, "é漢字🙂", 'a b\n"c\\', "\u202e", "", "0"], ids=ascii)
def test_any_name(name: str, tmp_path: Path) -> None:
    ours = sdy.partition(lambda d: {name: d[name] @ d[name]}, mesh=PLANE, in_shardings=({name: P("x", "y")},))
    x = _numbers(8, 8)
    np.testing.assert_allclose(ours({name: x})[name], x @ x, rtol=1e-4, atol=1e-5)
    plan = ours.plan({name: x})
    plan.save(tmp_path / "plan.json")
    assert str(sdy.load_plan(tmp_path / "plan.json")) == str(plan)
    plan.to_html(tmp_path / "plan.html")


def test_any_name_of_an_axis_is_planned_and_runs_where_xla_takes_it() -> None:
    for name in ("a" * 10_000, "a b", ""):
        mesh = jax.sharding.Mesh(PLANE.devices, (name, "y"))
        x = _numbers(8, 8)
        ours = sdy.partition(lambda x: x @ x, mesh=mesh, in_shardings=P(name, "y"))
        np.testing.assert_allclose(ours(x), x @ x, rtol=1e-4, atol=1e-5)


def test_a_name_of_an_axis_of_which_xla_dies_is_refused() -> None:
    mesh = jax.sharding.Mesh(PLANE.devices, ("a\\c", "y"))
    ours = sdy.partition(lambda x: x @ x, mesh=mesh, in_shardings=P("a\\c", "y"))
    assert ours.plan(_numbers(8, 8)).wire_bytes > 0
    with pytest.raises(sdy.SdyError, match=r"mesh axis 'a\\\\c' cannot be compiled: .*to fix: name the axis"):
        ours(_numbers(8, 8))


def test_sixteen_threads_call_one_function() -> None:
    ours = sdy.partition(lambda x, w: jnp.tanh(x @ w).sum(0), mesh=PLANE, in_shardings=(P("x"), P(None, "y")))
    x, w = _numbers(8, 16), _numbers(16, 8)
    wanted, wrong = np.tanh(x @ w).sum(0), list[BaseException]()

    def call(thread: int) -> None:
        try:
            for number in range(3):
                times = 1 + (thread + number) % 3
                np.testing.assert_allclose(ours(np.tile(x, (times, 1)), w), wanted * times, rtol=1e-3, atol=1e-4)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=call, args=(thread,)) for thread in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


@pytest.mark.more("hundreds of plans")
def test_plans_go_with_their_functions() -> None:
    held = []
    for size in range(8, 40, 8):
        ours = sdy.partition(lambda x, w, k=size: _layer(x, w) * k, mesh=PLANE, in_shardings=(P("x"), P("y")))
        plan = ours.plan(_numbers(size, 16), _numbers(16, 32))
        held.append(weakref.ref(plan))
        str(plan)
    del ours, plan
    jax.clear_caches()
    gc.collect()
    assert [plan() for plan in held] == [None] * len(held)


def _held() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads what a process holds")
def test_memory_returns_after_hundreds_of_plans() -> None:
    def plan(number: int) -> None:
        ours = sdy.partition(lambda x, w: _layer(x, w) * number, mesh=PLANE, in_shardings=(P("x"), P("y")))
        str(ours.plan(_numbers(8, 16), _numbers(16, 32)))

    held = []
    for number in range(500):
        plan(number)
        if number % 50 == 49:
            jax.clear_caches()
            gc.collect()
            held.append(_held())
    # Caches fill at first; some grow until they have as many entries as they keep.
    assert held[-1] - held[1] < 400 * 150_000, [f"{found / 2**20:.0f} MiB" for found in held]


@pytest.mark.parametrize("count", [pytest.param(50, marks=pytest.mark.more("takes 200 MB")), _slowly(256)])
def test_what_a_function_closes_over_may_be_large(count: int) -> None:
    large = np.ones((count, 1024, 1024), np.float32)
    ours = sdy.partition(lambda x: (x * large[0]).sum() + large[:, 0].sum(), mesh=LINE, in_shardings=P("x"))
    assert float(ours(jnp.ones((1024, 1024)))) == 2**20 + count * 2**10


@pytest.mark.parametrize("count", [pytest.param(3000, marks=pytest.mark.more("takes seconds")), _slowly(10_000)])
def test_thousands_of_arguments(count: int) -> None:
    plan = _planned(lambda *xs: [x * 2 for x in xs], LINE, P("x"), *[(8,)] * count)
    assert (len(plan.arguments), plan.wire_bytes) == (count, 0)


@pytest.mark.parametrize("count", [pytest.param(10_000, marks=pytest.mark.more("takes seconds")), _slowly(100_000)])
def test_thousands_of_ops(count: int) -> None:
    def function(x: Any, w: Any) -> Any:
        return reduce(lambda x, _: jnp.tanh(x) * 1.01 + w, range(count // 3), x).sum()

    assert 0 < _planned(function, PLANE, (P("x"), P(None, "y")), (8, 8), (8, 8)).wire_bytes < 2000
