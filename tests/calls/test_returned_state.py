"""Steps whose results are their next state, of which nothing is stated: what the second call finds."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

AUTO = (AxisType.Auto,) * 2
MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=AUTO)
SPECS = {"embed": P("model", "data"), "out": P("data", "model"), "scale": P(), "bias": P()}
TOKENS = (np.arange(8 * 32, dtype=np.int32) * 7 % 256).reshape(8, 32)
BATCH = np.linspace(-1, 1, 16 * 64, dtype=np.float32).reshape(16, 64)


def on(x: Any, *entries: Any) -> jax.Array:
    return jax.device_put(x, NamedSharding(MESH, P(*entries)))


def state() -> dict[str, Any]:
    shapes = {"embed": (256, 64), "out": (64, 256), "scale": (64,), "bias": (64,)}
    keys = zip(shapes.items(), jax.random.split(jax.random.key(0), 4), strict=True)
    weights = {name: on(jax.random.normal(key, shape) / 8, *SPECS[name]) for (name, shape), key in keys}
    return {"params": weights, "mean": jax.tree.map(jnp.zeros_like, weights), "steps": on(jnp.int32(0))}


def loss(weights: dict[str, Any], tokens: Any) -> Any:
    """Of the axis that splits the batch and, under FSDP, the columns propagation gives the scale the latter."""
    x = weights["embed"][tokens]
    x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    return (((x * weights["scale"] + weights["bias"]) @ weights["out"]) ** 2).mean()


def step(state: dict[str, Any], x: Any) -> tuple[dict[str, Any], Any]:
    value, slopes = jax.value_and_grad(loss)(state["params"], x)
    mean = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, state["mean"], slopes)
    params = jax.tree.map(lambda a, b: a - 0.1 * b, state["params"], mean)
    return {"params": params, "mean": mean, "steps": state["steps"] + 1}, value


@contextmanager
def compilations() -> Iterator[list[str]]:
    found: list[str] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        found.extend([event] if "backend_compile" in event else [])

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def test_a_second_step_compiles_nothing():
    f, x = sdy.partition(step, donate_argnums=0), on(TOKENS, "data")
    plain, now = jax.jit(step), state()
    wanted, _ = plain(*jax.device_get((state(), TOKENS)))
    given = jax.tree.map(lambda leaf: leaf.sharding, now)
    first, _ = f(now, x)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(now))  # the memory of each is taken over
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), first, wanted)
    assert jax.tree.all(jax.tree.map(lambda leaf, s: leaf.sharding.is_equivalent_to(s, leaf.ndim), first, given))
    with compilations() as found:
        second, _ = f(first, x)
    assert not found and len(f.plans) == 1
    wanted, _ = plain(wanted, TOKENS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), second, wanted)


def layouts(f: Any, *args: Any) -> dict[str, str]:
    return {value.path: value.type for value in f.plan(*args).results}


def test_only_what_is_small_is_brought_back():
    """Moments that each device has whole come back as propagation says: to gather them would cost each step."""
    now, x = state(), on(TOKENS, "data")
    now["mean"] = jax.device_put(jax.tree.map(jnp.zeros_like, now["mean"]), NamedSharding(MESH, P()))
    found = layouts(sdy.partition(step), now, x)
    assert found["result[0]['mean']['out']"] == "f32[64@data,256@model]"
    assert found["result[0]['params']['scale']"] == "f32[64]"


@pytest.mark.parametrize("stated", [P("data"), P("model")], ids=str)
def test_what_is_stated_of_results_stays(stated):
    specs = {"params": {"embed": None, "out": None, "scale": stated, "bias": None}, "mean": None, "steps": None}
    found = layouts(sdy.partition(step, mesh=MESH, out_shardings=(specs, None)), state(), on(TOKENS, "data"))
    assert found["result[0]['params']['scale']"] == f"f32[64@{stated[0]}]"
    assert found["result[0]['mean']['scale']"] == "f32[64]"


def test_it_costs_little(monkeypatch):
    from sdy_jax.calls import traced_function

    args = state(), on(TOKENS, "data")
    kept = sdy.partition(step).plan(*args)
    monkeypatch.setattr(traced_function, "bring_back", lambda program: None)
    left = sdy.partition(step).plan(*args)
    assert layouts(sdy.partition(step), *args)["result[0]['params']['scale']"] != "f32[64]"  # what there is to keep
    assert kept.wire_bytes <= 1.02 * left.wire_bytes and kept.memory.peak <= 1.02 * left.memory.peak


def test_plans_say_why_it_is_so():
    now = state()
    now["params"]["bias"] = on(now["params"]["bias"], "model")
    plan = sdy.partition(step).plan(now, on(TOKENS, "data"))
    assert "the layout of the argument that" in str(plan.why("result[0]['params']['bias']"))


def test_functions_that_keep_no_state_are_as_they_were():
    x = on(BATCH, "data")
    assert layouts(sdy.partition(lambda x: x.T @ x), x) == {"result": "f32[64,64]"}
    assert layouts(sdy.partition(jnp.sin), x) == {"result": "f32[16@data,64]"}


REPORTED = {
    "open": None,
    "the loss is stated": (None, P()),
    "weights are stated": ({"w": P(None, "model"), "m": None}, P()),
    "all but the loss": ({"w": P(None, "model"), "m": P("model")}, None),
    "all as they are": ({"w": P(None, "model"), "m": P("data")}, P()),
}


@pytest.mark.parametrize("name", REPORTED)
@pytest.mark.parametrize("moments", [P(None, "model"), P(), P("data")], ids=str)
def test_donated_buffers_are_used_and_reported_as_by_jit(name, moments):
    def update(state, x):
        slope = x.T @ (x @ state["w"])
        return {"w": state["w"] - 0.1 * slope, "m": 0.9 * state["m"] + slope}, (x @ state["w"]).sum()

    def run(jit):
        now = {"w": on(jnp.ones((64, 64)), None, "model"), "m": on(jnp.ones((64, 64)), *moments)}
        stated = jax.tree.map(lambda s: NamedSharding(MESH, s), REPORTED[name], is_leaf=lambda s: isinstance(s, P))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            jit(update, donate_argnums=0, out_shardings=stated)(now, on(BATCH, "data"))
        reported = ["donated buffers" in str(w.message) for w in caught]
        return any(reported), [leaf.is_deleted() for leaf in jax.tree.leaves(now)]

    assert run(sdy.partition) == run(jax.jit)
