"""Libraries around partitioned functions, next to jit, where they are installed: MJX, Haiku, Orbax and jaxtyping."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

pytestmark = pytest.mark.public
JITS = (sdy.partition, jax.jit)
PENDULUM = """
<mujoco><option timestep="0.01"/><worldbody>
  <body pos="0 0 1"><joint name="hip" type="hinge" axis="0 1 0"/><geom type="capsule" size=".05" fromto="0 0 0 .3 0 0"/>
    <body pos=".3 0 0"><joint type="hinge" axis="0 1 0"/><geom type="capsule" size=".05" fromto="0 0 0 .3 0 0"/></body>
  </body></worldbody>
  <actuator><motor joint="hip"/></actuator>
</mujoco>"""


@pytest.fixture
def mesh():
    return jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))


def alike(ours: Any, theirs: Any) -> None:
    """Asserts that numbers and shardings are the same, leaf by leaf."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, b.ndim), (a.shape, a.sharding, b.sharding)
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_a_batch_of_simulations(mesh, monkeypatch):
    """Models and their empty fields, whole on each device; `put_model` puts them on the first one."""
    monkeypatch.setenv("MUJOCO_GL", "disable")
    mujoco, mjx = pytest.importorskip("mujoco"), pytest.importorskip("mujoco.mjx")
    model = mjx.put_model(mujoco.MjModel.from_xml_string(PENDULUM))
    one = mjx.make_data(model)
    many = jax.tree.map(lambda x: jnp.stack([x] * 16), one)
    many = many.replace(qvel=many.qvel + jnp.arange(16.0)[:, None] / 5, ctrl=many.ctrl + jnp.arange(16.0)[:, None] / 9)
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("batch"))
    found = []
    for jit in JITS:
        step = jit(jax.vmap(mjx.step, (None, 0)), in_shardings=(whole, split), out_shardings=split)
        data = jax.device_put(many, split)
        for _ in range(3):
            data = step(model, data)
        found.append(data)
    alike(*found)


def test_haiku_trains(mesh):
    hk = pytest.importorskip("haiku")
    network = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([32, 4])(x)))
    x = jax.device_put(np.random.default_rng(0).standard_normal((16, 8), np.float32), NamedSharding(mesh, P("batch")))
    optimizer, params = optax.adam(1e-2), network.init(jax.random.key(0), x)

    def step(params, state, x):
        slopes = jax.grad(lambda p: ((network.apply(p, x) - x[:, :4]) ** 2).mean())(params)
        updates, state = optimizer.update(slopes, state)
        return optax.apply_updates(params, updates), state

    found = []
    for jit in JITS:
        run, state = jit(step, out_shardings=NamedSharding(mesh, P())), (params, optimizer.init(params))
        for _ in range(3):
            state = run(*state, x)
        found.append(state)
    alike(*found)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_results_are_saved_and_restored(tmp_path, kind):
    ocp = pytest.importorskip("orbax.checkpoint")
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2)
    split = NamedSharding(mesh, P("a", "b"))
    init = sdy.partition(lambda key: {"w": jax.random.normal(key, (8, 16)), "step": jnp.int32(3)}, mesh=mesh)
    state = sdy.partition(lambda s: {**s, "w": jax.device_put(s["w"], split)}, mesh=mesh)(init(jax.random.key(0)))
    described = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", state)
        saver.wait_until_finished()
        again = saver.restore(tmp_path / "state", described)
    alike(again, state)
    double = sdy.partition(lambda s: jax.tree.map(lambda x: x * 2, s), mesh=mesh)
    alike(double(again), double(state))


def test_annotated_functions(mesh):
    jaxtyping = pytest.importorskip("jaxtyping")
    rows, keys = (jaxtyping.Float[jax.Array, dims] for dims in ("b d", "n d"))

    def attend(q, k):
        assert isinstance(q, rows) and isinstance(k, keys) and not isinstance(q, jaxtyping.Int[jax.Array, "..."])
        return jax.nn.softmax(q @ k.T) @ k

    attend.__annotations__ = {"q": rows, "k": keys}
    q = jax.device_put(np.random.default_rng(0).standard_normal((16, 8), np.float32), NamedSharding(mesh, P("batch")))
    wrapped = jaxtyping.jaxtyped(attend, typechecker=None)
    alike(*(jit(wrapped)(q, q) for jit in JITS))
