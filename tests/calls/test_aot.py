"""What is done with a partitioned function besides calling it: compiled ahead of time, kept in a cache, pickled."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

X = np.arange(64, dtype=np.float32).reshape(8, 8)


def projected(params, x, times, *, key):
    return {"y": (x @ params["w"]) * times + jax.random.uniform(key, (8, 8)), "n": x.sum()}


SPECS = {"params": {"w": P(None, "model")}, "x": P("data")}


@pytest.mark.parametrize("values", [False, True])
def test_a_compiled_program_says_how_it_takes_and_returns_arrays(mesh, values):
    f = sdy.partition(projected, mesh=mesh, in_shardings=SPECS, static_argnums=2)
    key, x = jax.random.key(0), X if values else jax.ShapeDtypeStruct(X.shape, X.dtype)
    compiled = f.lower({"w": x}, x, 2, key=key).compile()
    (params, rows), named = compiled.input_shardings
    for found, spec, rank in ((params["w"], P(None, "model"), 2), (rows, P("data"), 2), (named["key"], P(), 0)):
        assert isinstance(found, NamedSharding) and found.is_equivalent_to(NamedSharding(mesh, spec), rank)
    assert compiled.output_shardings["y"].is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2)
    found = compiled({"w": X}, X, key=key)
    np.testing.assert_allclose(found["y"], projected({"w": X}, X, 2, key=key)["y"], rtol=1e-5)
    f({"w": X}, X, 2, key=key)
    assert len(f.plans) == 1


COMPILED = {
    "numpy": lambda jit, x: (jit, (x,)),
    "by name": lambda jit, x: (jit, (), {"x": x}),
    "uncommitted": lambda jit, x: (jit, (jnp.asarray(x),)),
    "committed": lambda jit, x: (jit, (jax.device_put(x, jit.rows),)),
    "a number": lambda jit, x: (jit, (x, 2.0)),
    "results stated": lambda jit, x: (jit, (x,), {}, {"out_shardings": jit.rows}),
    "results stated, committed": lambda jit, x: (jit, (jax.device_put(x, jit.rows),), {}, {"out_shardings": jit.rows}),
}


class _Stated:
    def __init__(self, mesh):
        self.rows = NamedSharding(mesh, P("data"))


@pytest.mark.parametrize("name", COMPILED)
def test_a_call_runs_what_was_compiled_ahead_of_it(mesh, name):
    times = []
    stated = _Stated(mesh)
    _, args, *rest = COMPILED[name](stated, X)
    kwargs, options = (*rest, {}, {})[:2]
    f = sdy.partition(lambda x, y=1.0: jnp.tanh(x) * y, mesh=mesh, in_shardings={"x": P("data")}, **options)
    compiled = f.lower(*args, **kwargs).compile()
    jax.block_until_ready(jax.jit(jnp.abs, in_shardings=stated.rows)(jnp.asarray(X)))  # what moves an array

    def listen(event, duration, **_):
        times.append(event) if "backend_compile" in event else None

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        found = f(*args, **kwargs)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not times
    np.testing.assert_array_equal(found, compiled(*args, **kwargs))
    assert all(isinstance(s, NamedSharding) for s in jax.tree.leaves(compiled.input_shardings))


def test_lowering_for_another_platform(mesh):
    f = sdy.partition(jnp.sin, mesh=mesh, in_shardings=P("data"))
    assert "num_partitions = 8" in f.trace(X).lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_layouts_in_memory_are_as_stated(mesh, order):
    rows = NamedSharding(mesh, P("data"))
    stated = Format(Layout(order), rows)
    f = sdy.partition(lambda x, y: (x + y, y), mesh=mesh, in_shardings=(stated, None), out_shardings=(stated, None))
    g = jax.jit(lambda x, y: (x + y, y), in_shardings=(stated, None), out_shardings=(stated, None))
    x = jax.device_put(X, rows)
    (first, second), (wanted, _) = f(X, x), g(X, x)
    assert first.format.layout == wanted.format.layout and first.sharding.is_equivalent_to(wanted.sharding, 2)
    assert second.sharding.is_equivalent_to(rows, 2)
    np.testing.assert_array_equal(first, 2 * X)
    compiled = f.lower(X, x).compile()
    assert compiled.input_formats[0][0].layout.major_to_minor == order


def test_a_layout_that_the_compiler_chooses(mesh):
    f = sdy.partition(lambda x: x.T @ x, mesh=mesh, in_shardings=Format(Layout.AUTO, NamedSharding(mesh, P("data"))))
    compiled = f.lower(jax.ShapeDtypeStruct(X.shape, X.dtype)).compile()
    ((found,), _) = compiled.input_formats
    np.testing.assert_array_equal(compiled(jax.device_put(X, found)), X.T @ X)


def test_layouts_that_jit_does_not_take_either(mesh):
    with pytest.raises(sdy.errors.ArgumentError, match=r"to fix: give Format\(layout"):
        sdy.partition(jnp.sin, mesh=mesh, in_shardings=Layout((1, 0)))(X)
    stated = Format(Layout((1, 0)), NamedSharding(mesh, P("data")))
    with pytest.raises(sdy.UnsupportedError, match="to fix: pass all arguments by position"):
        sdy.partition(lambda x: x, mesh=mesh, in_shardings=stated)(x=X)


@sdy.partition(mesh=jax.make_mesh((8,), ("x",)), in_shardings=P("x"))
def of_this_module(x):
    return x + 1


def plus_one(x):
    return x + 1


def test_pickled_functions(mesh):
    assert pickle.loads(pickle.dumps(of_this_module)) is of_this_module
    for options in (
        {"mesh": mesh, "in_shardings": P("data")},
        {"in_shardings": (NamedSharding(mesh, P("data")),), "out_shardings": NamedSharding(mesh, P("data"))},
        {"mesh": mesh, "in_shardings": sdy.AUTO, "costs": sdy.CostModel()},
    ):
        f = sdy.partition(plus_one, **options)
        again = pickle.loads(pickle.dumps(f))
        assert again(X).sharding == f(X).sharding
        np.testing.assert_array_equal(again(X), X + 1)


def test_a_pickle_of_more_devices_than_there_are(mesh):
    record = pickle.dumps(sdy.partition(plus_one, mesh=mesh))
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(sdy.ShardingError, match="also on number 2"),
    ):
        patch.setattr(jax, "devices", lambda: jax.local_devices()[:2])
        pickle.loads(record)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_copies_and_names(mesh, how):
    f = sdy.partition(plus_one, mesh=mesh)
    np.testing.assert_array_equal(how(f)(X), X + 1)
    assert repr(how(f)) == f"<PartitionedFunction of {plus_one!r}>"


def test_jits_deprecated_options(mesh):
    device = jax.devices()[3]
    with pytest.warns(DeprecationWarning, match="the mesh says where"):
        assert sdy.partition(plus_one, device=device)(X).devices() == {device}
    with pytest.warns(DeprecationWarning, match="the mesh says where"):
        assert len(sdy.partition(plus_one, mesh=mesh, backend="cpu")(X).devices()) == 8
    with pytest.warns(DeprecationWarning), pytest.raises(sdy.ShardingError, match="has others"):
        sdy.partition(plus_one, mesh=mesh, device=device)
    with pytest.raises(TypeError, match="abstracted_axes"):
        sdy.partition(plus_one, mesh=mesh, abstracted_axes=("n",))


def test_mutable_arrays_may_be_made_inside_closed_over_and_lowered(mesh):
    ref = jax.new_ref(jax.device_put(jnp.zeros((8, 8)), NamedSharding(mesh, P())))

    def accumulate(x):
        ref[...] += x
        return x

    def inside(x):
        own = jax.new_ref(x)
        own[...] += 1
        return own[...]

    sdy.partition(accumulate, mesh=mesh).lower(X).compile()(X)
    np.testing.assert_array_equal(sdy.partition(lambda r: r[...], mesh=mesh).lower(ref).compile()(ref), X)
    np.testing.assert_array_equal(sdy.partition(inside, mesh=mesh)(X), X + 1)


STEP = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
import sdy_jax as sdy

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

def loss(params, x):
    def layer(h, w):
        return jax.nn.relu(h @ w["up"]) @ w["down"], None
    return (jax.lax.scan(layer, x, params)[0] ** 2).mean()

params = {name: np.full((3, 32, 32), 0.01, np.float32) for name in ("up", "down")}
x = np.ones((16, 32), np.float32)
specs = {"up": P(None, None, "b"), "down": P(None, "b")}
step = sdy.partition(jax.value_and_grad(loss), mesh=jax.make_mesh((2, 4), ("a", "b")), in_shardings=(specs, P("a")))
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
value, _ = step(params, x)
value = float(value)
found = [name.rpartition("/")[2] for name in events if "cache_hits" in name or "cache_misses" in name]
print(json.dumps([found, value]))
"""


@pytest.mark.more("two processes")
def test_the_second_process_finds_what_the_first_has_compiled(tmp_path):
    found = []
    for seed in "12":
        command = [sys.executable, "-c", STEP, str(tmp_path)]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
        found.append(json.loads(ran.stdout.splitlines()[-1]))
    (first, a), (second, b) = found
    assert set(first) == {"cache_misses"} and set(second) == {"cache_hits"} and a == b


def test_stated_kinds_of_axes_are_kept_when_pickled():
    mesh = jax.make_mesh((2, 4), ("a", "b"), (AxisType.Explicit, AxisType.Auto))
    again = pickle.loads(pickle.dumps(sdy.partition(plus_one, mesh=mesh, in_shardings=P("a"))))
    assert jax.typeof(again(X)).sharding.mesh.axis_types == mesh.axis_types
