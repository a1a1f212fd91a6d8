"""How often a function is traced, and what says so: jit's numbers, and jit's words where it has any."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

AUTO = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
EXPLICIT = jax.make_mesh((4, 2), ("x", "y"))
X = np.arange(512, dtype=np.float32).reshape(32, 16)
TENANT = jax.make_user_context()

CONTEXTS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "rank promotion": lambda: jax.numpy_rank_promotion("warn"),
    "type promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "64 bits": lambda: jax.enable_x64(True),
    "precision": lambda: jax.default_matmul_precision("float32"),
    "a default device": lambda: jax.default_device(jax.devices()[1]),
    "NaNs are looked for": lambda: jax.debug_nans(True),
    "transfers are guarded": lambda: jax.transfer_guard("allow"),
    "no jit": jax.disable_jit,
    "a scope": lambda: jax.named_scope("scope"),
    "at compile time": jax.ensure_compile_time_eval,
    "a user's context": lambda: TENANT("tenant"),
    "messages": lambda: jax.log_compiles(True),
    "nothing": contextlib.nullcontext,
}


class Counted:
    """A function, and how often it was traced."""

    def __init__(self, jit: Callable[..., Any]):
        self.count = 0
        self.run = jit(self._traced)

    def _traced(self, x: jax.Array) -> jax.Array:
        self.count += 1
        return x * 2


def placed(mesh: jax.sharding.Mesh, array: Any, *entries: Any) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh, P(*entries)))


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["Auto", "Explicit"])
@pytest.mark.parametrize("name", CONTEXTS)
def test_settings_and_contexts_trace_again_where_jits_do(name: str, mesh: jax.sharding.Mesh) -> None:
    found = []
    for jit in (jax.jit, sdy.partition):
        f, counts, x = Counted(jit), [], placed(mesh, X, "x")
        for _ in range(2):
            f.run(x)
            counts.append(f.count)
            with CONTEXTS[name]():
                f.run(x)
                counts.append(f.count)
            f.run(x)
            counts.append(f.count)
        found.append((counts, f.run._cache_size()))
    assert found[0] == found[1]


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["Auto", "Explicit"])
def test_the_mesh_in_context_is_traced_with_once_and_without_once(mesh: jax.sharding.Mesh) -> None:
    found = []
    for jit in (jax.jit, sdy.partition):
        f, counts, x = Counted(jit), [], placed(mesh, X, "x")
        for _ in range(2):
            f.run(x)
            counts.append(f.count)
            with jax.set_mesh(mesh):
                f.run(x)
                assert f.run.eval_shape(x).shape == X.shape
                counts.append(f.count)
                f.run.lower(x)
            counts.append(f.count)
        f.run(x)
        found.append((counts, f.count, f.run._cache_size()))
    assert found[0] == found[1]


@pytest.mark.parametrize("jit", [jax.jit, sdy.partition])
@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["Auto", "Explicit"])
def test_a_mesh_that_is_set_is_a_trace_that_can_be_forbidden(jit, mesh: jax.sharding.Mesh) -> None:
    f, x = Counted(jit), placed(mesh, X, "x")
    f.run(x)
    for _ in range(2):
        with jax.no_tracing(), jax.set_mesh(mesh), pytest.raises(RuntimeError, match="re-tracing function"):
            f.run(x)
    f = Counted(jit)  # jit does not remember calls after those that failed
    with jax.set_mesh(mesh):
        f.run(x)
    with jax.no_tracing(), jax.set_mesh(mesh):
        np.testing.assert_array_equal(f.run(x), X * 2)


def test_a_mesh_that_is_set_is_not_planned_for_again() -> None:
    f, x = sdy.partition(lambda x: x @ x.T), placed(AUTO, X, "x")
    outside = f.plan(x)
    with jax.set_mesh(AUTO):
        assert f.plan(x).stages is outside.stages
        np.testing.assert_allclose(jax.grad(lambda x: f(x).sum())(x), 2 * np.tile(X.sum(0), (32, 1)), rtol=1e-5)


def test_what_a_function_reads_anew_is_planned_anew() -> None:
    """A mesh that is set is a new trace, which reads what the function closes over, as under jit."""
    for jit in (jax.jit, sdy.partition):
        scale = {"value": 2.0}
        f, x = jit(lambda x, scale=scale: x * scale["value"]), placed(AUTO, X, "x")
        f(x)
        scale["value"] = 3.0
        np.testing.assert_array_equal(f(x), X * 2)
        with jax.set_mesh(AUTO):
            np.testing.assert_array_equal(f(x), X * 3)


@pytest.mark.parametrize("jit", [jax.jit, sdy.partition])
def test_layouts_on_auto_axes_share_a_trace(jit) -> None:
    f, layouts = Counted(jit), ((), ("x",), (None, "y"), ("y", "x"))
    first = f.run(placed(AUTO, X))
    for entries in layouts:
        x = placed(AUTO, X, *entries)
        with jax.no_tracing():
            f.run.lower(x), f.run.trace(x)
            if entries:  # a call asks for a new program, which jit takes for a trace
                with pytest.raises(RuntimeError, match="re-tracing function"):
                    f.run(x)
        y = f.run(x)
        assert y.sharding.is_equivalent_to(x.sharding, 2)
        np.testing.assert_array_equal(y, first)
    assert f.count == 1
    jax.jit(lambda x: f.run(x) + 1)(placed(AUTO, X, "x"))
    assert f.count == 1 and f.run._cache_size() == len(layouts)


def closing_over(jit, keep):
    """A function with all that a trace may hold: constants, loops, calls, custom rules, callbacks."""

    @jax.custom_jvp
    def tripled_slope(x):
        return jnp.sin(x)

    tripled_slope.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), tangents[0] * 3))

    def fun(x, scale=X / 7):
        y, _ = jax.lax.scan(lambda c, row: (c + row, None), jnp.zeros(16), x * scale)
        jax.debug.callback(lambda y: keep.append(np.asarray(y)), y)
        called = jax.jit(lambda x: jnp.where(x > 1, x, -x))(tripled_slope(x))
        return {"y": y, "z": [called @ called.T, jax.lax.with_sharding_constraint(x, P("y"))]}

    return jit(fun)


@pytest.mark.more("traces that are shared")
def test_what_a_shared_trace_gives() -> None:
    found = []
    for jit in (jax.jit, sdy.partition):
        seen: list[Any] = []
        f, results = closing_over(jit, seen), []
        with jax.set_mesh(AUTO):
            for entries in (("x",), (None, "x"), ("y", "x")):
                x = placed(AUTO, X / 50, *entries)
                results.append(f(x))
                results.append(jax.grad(lambda x, f=f: f(x)["z"][0].sum())(x))
        jax.effects_barrier()
        found.append((results, seen[:1], len(seen)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), *found)


def test_a_warm_function_heeds_settings_that_are_new() -> None:
    f = sdy.partition(lambda x, y: x + y, mesh=AUTO)
    f(X, X[0])
    for _ in range(2):
        with jax.numpy_rank_promotion("raise"), pytest.raises(ValueError, match="rank_promotion"):
            f(X, X[0])
        np.testing.assert_array_equal(f(X, X[0]), X + X[0])


def test_each_set_of_types_is_traced_once() -> None:
    f, arrays = Counted(sdy.partition), [placed(EXPLICIT, X, *entries) for entries in ((), ("x",), (None, "y"))]
    for _ in range(2):
        for x in arrays:
            f.run(x)
            f.run.lower(x).compile()
            assert f.run.trace(x).out_info.shape == f.run.eval_shape(x).shape == X.shape
    assert f.count == len(arrays) == f.run._cache_size()
    with jax.no_tracing():
        for x in arrays:
            f.run(x)
    f.run.clear_cache()
    assert f.run._cache_size() == 0


def test_forbidden_traces_are_jits_error() -> None:
    said = []
    for jit in (jax.jit, sdy.partition):

        def doubled(x):
            return x * 2

        with (
            jax.no_tracing(),
            pytest.raises(RuntimeError, match=r"function doubled at .*test_counting") as e,
        ):
            jit(doubled)(placed(AUTO, X, "x"))
        said.append(re.sub(r":\d+", "", str(e.value)))
    assert said[0] == said[1]


def in_mesh(f: Callable[..., Any], x: Any) -> Any:
    with jax.set_mesh(AUTO):
        return f(x)


def explanations(jit: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is said of calls of a function that calls a jitted one, a text per call."""
    inner = jax.jit(lambda x: jnp.sin(x))
    f, said = jit(lambda x, times=2: inner(x) * times), []
    rows, columns, fewer = (placed(AUTO, *each) for each in ((X, "x"), (X, None, "x"), (X[:16], "x")))
    calls: list[Callable[[], Any]] = [
        lambda: f(rows),
        lambda: f(rows),
        lambda: f(fewer),
        lambda: f(rows, times=3),
        lambda: f(columns),
        lambda: jax.jit(lambda x: f(x) + 1)(rows),
        lambda: jax.vmap(f)(rows),
        lambda: f.eval_shape(fewer[:2]),
        lambda: f(placed(EXPLICIT, X, "x")),
        lambda: f(x=rows),
        lambda: in_mesh(f, rows),
        lambda: in_mesh(f, rows),
    ]
    with jax.explain_cache_misses(True):
        for call in calls:
            caplog.clear()
            call()
            said.append("\n".join(m for m in caplog.messages if "TRACING CACHE MISS" in m))
    return said


def test_misses_are_explained_once_each(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        jits, ours = (explanations(jit, caplog) for jit in (jax.jit, sdy.partition))
    counts, wanted = ([text.count("MISS") for text in said] for said in (ours, jits))
    assert counts == wanted
    for text in (jits, ours):
        assert text[0].count("never seen function") == 2, "the function and the one that it calls"
        assert not text[1]
    assert "x, now f32[16,16] and before f32[32,16]" in jits[2]
    assert "x: f32[16,16]" in ours[2] and "f32[32,16]" in ours[2]
    assert "re-defined" not in "".join(ours[2:5])
    assert not jits[4] and not ours[4], "types say nothing of layouts on Auto axes"
