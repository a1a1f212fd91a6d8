"""Arrays that lie elsewhere than on the mesh, and shardings that name no axes of it, next to jit's."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.sharding_impls import GSPMDSharding  # no public name since jax 0.10
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

X = np.arange(128, dtype=np.float32).reshape(8, 16) / 16
JITS = (sdy.partition, jax.jit)


def mesh_of(count=8, kind=AxisType.Auto):
    shape = (count // 4, 4)
    return Mesh(np.array(jax.devices()[:count]).reshape(shape), ("a", "b"), axis_types=(kind,) * 2)


def named(*entries, **mesh):
    return NamedSharding(mesh_of(**mesh), P(*entries))


def single(number):
    return SingleDeviceSharding(jax.devices()[number])


def gspmd(*entries):
    sharding = named(*entries)
    return GSPMDSharding(tuple(sharding.mesh.devices.flat), sharding._to_xla_hlo_sharding(2))


def alike(ours, theirs):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
        assert jax.typeof(a).str_short() == jax.typeof(b).str_short()
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim), (a.sharding, b.sharding)


def of_model(jit, **options):
    return jit(lambda model, x: x @ model["m"].T + model["b"], **options)


def model_on(device):
    return {"m": jax.device_put(X, device), "b": jax.device_put(X[:, 0], device)}


CALLS = {
    "one of the mesh's devices": lambda jit: of_model(jit, in_shardings=(named(), named("a")))(model_on(single(3)), X),
    "a device that is not in the mesh": lambda jit: jit(jnp.sin, in_shardings=named(count=4))(
        jax.device_put(X, single(7))
    ),
    "fewer devices": lambda jit: jit(jnp.sin, in_shardings=named())(jax.device_put(X, named(count=4))),
    "more devices": lambda jit: jit(jnp.sin, in_shardings=named(count=4))(jax.device_put(X, named())),
    "on Explicit axes": lambda jit: jit(jnp.sin, in_shardings=named(kind=AxisType.Explicit))(
        jax.device_put(X, single(1))
    ),
    "keys": lambda jit: jit(lambda k: jax.random.normal(k, (8,)), in_shardings=named())(
        jax.device_put(jax.random.key(3), single(1))
    ),
    "static arguments": lambda jit: jit(lambda x, n: x * n, in_shardings=(named(),), static_argnums=1)(
        jax.device_put(X, single(1)), 3
    ),
    "stated devices of arguments": lambda jit: jit(jnp.sin, in_shardings=single(2))(X),
    "stated devices of results": lambda jit: jit(jnp.sin, out_shardings=single(2))(X),
    "stated devices of both": lambda jit: jit(jnp.add, in_shardings=(None, single(2)), out_shardings=single(2))(X, X),
    "a committed array moved to a stated device": lambda jit: jit(jnp.sin, in_shardings=single(2))(
        jax.device_put(X, single(5))
    ),
    "closed over on one device": lambda jit: closed_over(jit, jax.device_put(X, single(3))),
    "closed over on several devices": lambda jit: closed_over(
        jit, jax.device_put(X, single(3)), jax.device_put(X, single(5)), jax.device_put(X, named("b"))
    ),
    "a GSPMD sharding stated": lambda jit: in_context(jit, jnp.sin, in_shardings=gspmd("a", "b"))(X),
    "a GSPMD sharding of results": lambda jit: in_context(jit, jnp.sin, out_shardings=gspmd(None, "a"))(X),
    "an array with a GSPMD sharding": lambda jit: in_context(jit, jnp.sin)(jax.device_put(X, gspmd("b"))),
    # without any mesh
    "a GSPMD sharding stated alone": lambda jit: jit(jnp.sin, in_shardings=gspmd("a", "b"), out_shardings=gspmd())(X),
    "a GSPMD sharding of columns": lambda jit: jit(jnp.sin, in_shardings=gspmd("b"), out_shardings=gspmd("b"))(
        jax.device_put(X, gspmd("b"))
    ),
    "a GSPMD sharding of results alone": lambda jit: jit(jnp.sin, out_shardings=gspmd(None, "a"))(X),
    "GSPMD shardings in other orders": lambda jit: jit(
        lambda tree: tree["a"] @ tree["b"].T, in_shardings=({"a": gspmd(("b", "a")), "b": None},), out_shardings=gspmd()
    )({"a": X, "b": jax.device_put(X, gspmd("a"))}),
    "a GSPMD sharding ahead of time": lambda jit: (
        jit(jnp.sin, in_shardings=gspmd("a"), out_shardings=gspmd("a"))
        .lower(X)
        .compile()(jax.device_put(X, gspmd("a")))
    ),
    "a gradient with respect to a GSPMD sharding": lambda jit: jax.grad(
        lambda x: jit(lambda x: jnp.sin(x).sum(), in_shardings=gspmd("a", "b"))(x)
    )(X),
}


def closed_over(jit, *arrays):
    return in_context(jit, lambda x: sum(arrays, x), in_shardings=P("a"), out_shardings=P("a"))(X)


def in_context(jit, fun, **options):
    def call(*args):
        with jax.set_mesh(mesh_of()):
            return jit(fun, **options)(*args)

    return call


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore::sdy_jax.PartitionWarning")
def test_as_jit(name):
    alike(*map(CALLS[name], JITS))


def doubled(x):
    return x * 2


def on_host(*entries):
    return named(*entries).with_memory_kind("pinned_host")


def device_of(array, kind):
    return jax.device_put(array, SingleDeviceSharding(jax.devices()[3], memory_kind=kind))


REVERSED = NamedSharding(Mesh(np.array(jax.devices()[::-1]).reshape(2, 4), ("a", "b")), P())
REFUSED = {
    "nothing is stated": lambda jit: in_context(jit, jnp.sin)(jax.device_put(X, single(0))),
    "nothing is stated of one": lambda jit: jit(jnp.add, in_shardings=(named("a"), None))(
        X, jax.device_put(X, single(0))
    ),
    "split over other devices": lambda jit: jit(jnp.sin, in_shardings=named("b", count=4))(
        jax.device_put(X, named("b"))
    ),
    "a device beside a mesh": lambda jit: jit(jnp.add, in_shardings=(named("a"), single(0)))(X, X),
    "a device under a mesh": lambda jit: in_context(jit, jnp.sin, in_shardings=single(0))(X),
    # Committed to one device, or whole on some, and stated to be split.
    "a device's, to be split": lambda jit: jit(doubled, in_shardings=named("a"))(jax.device_put(X, single(3))),
    "another device's, to be split": lambda jit: jit(doubled, in_shardings=named("b", count=4))(
        jax.device_put(X, single(7))
    ),
    "one of two, to be split": lambda jit: jit(jnp.add, in_shardings=named("a"))(
        jax.device_put(X, single(3)), jax.device_put(X, named("a"))
    ),
    "by a spec": lambda jit: in_context(jit, doubled, in_shardings=P("a"))(jax.device_put(X, single(3))),
    "whole on fewer devices": lambda jit: jit(doubled, in_shardings=named("a"))(jax.device_put(X, named(count=4))),
    "whole in another order": lambda jit: jit(doubled, in_shardings=named("a"))(jax.device_put(X, REVERSED)),
    "keys": lambda jit: jit(jax.random.key_data, in_shardings=named("a"))(
        jax.device_put(jax.random.split(jax.random.key(0), 8), single(2))
    ),
    "on Explicit axes": lambda jit: jit(doubled, in_shardings=named("a", kind=AxisType.Explicit))(
        jax.device_put(X, single(3))
    ),
    "ahead of time": lambda jit: jit(doubled, in_shardings=named("a")).lower(jax.device_put(X, single(3))),
    "after one that may be moved": lambda jit: [
        g(x) for g in [jit(doubled, in_shardings=named("a"))] for x in (jnp.asarray(X), jax.device_put(X, single(0)))
    ],
    # From one memory to another.
    "the host's": lambda jit: jit(doubled, in_shardings=named("a"))(jax.device_put(X, on_host("a"))),
    "the host's, to be split otherwise": lambda jit: jit(doubled, in_shardings=named("b"))(
        jax.device_put(X, on_host("a"))
    ),
    "a device's in the host": lambda jit: jit(doubled, in_shardings=named())(device_of(X, "pinned_host")),
    "to the host": lambda jit: jit(doubled, in_shardings=on_host("a"))(jax.device_put(X, named("a"))),
    "uncommitted, to the host": lambda jit: jit(doubled, in_shardings=on_host("a"))(jnp.asarray(X)),
    "the host's ahead of time": lambda jit: jit(doubled, in_shardings=named("a")).lower(
        jax.device_put(X, on_host("a"))
    ),
}


@pytest.mark.parametrize("jit", JITS)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_as_by_jit(name, jit):
    with pytest.raises(ValueError, match=r"device|does not match") as error:
        REFUSED[name](jit)
    if jit is sdy.partition:
        assert "to fix:" in str(error.value) or name.startswith("a device ")


def test_jit_traces_what_it_refuses_to_lower():
    x = jax.device_put(X, single(3))
    for jit in JITS:
        g = jit(doubled, in_shardings=named("a"))
        assert g.trace(x).out_info.shape == g.eval_shape(x).shape == X.shape


@pytest.mark.parametrize("jit", JITS)
@pytest.mark.filterwarnings("ignore::sdy_jax.PartitionWarning")
def test_of_one_device_uncommitted_or_not(jit):
    """jit's C++ tells these apart; so does what is remembered of calls."""
    g = jit(doubled, in_shardings=named())
    for x in (jnp.asarray(X), jax.device_put(X, single(0)), X, jax.device_put(X, single(0)), jnp.asarray(X)):
        np.testing.assert_array_equal(g(x), X * 2)


@pytest.mark.parametrize("jit", JITS)
@pytest.mark.filterwarnings("ignore::sdy_jax.PartitionWarning")
def test_what_is_moved_is_donated(jit):
    x = jax.device_put(X, single(0))
    y = jit(lambda x: x + 1, in_shardings=named(), donate_argnums=0)(x)
    assert x.is_deleted()
    np.testing.assert_array_equal(y, X + 1)


def test_moves_from_other_devices_are_reported_once():
    model = {name: jax.device_put(X, single(0)) for name in "abcdefg"}
    f = sdy.partition(lambda model: sum(model.values()), mesh=mesh_of(), in_shardings=P())
    with pytest.warns(sdy.PartitionWarning) as caught:
        y = f(model)
    texts = [str(w.message) for w in caught]
    assert len(texts) == 5
    assert "`model['a']` lies as f32[8,16] on a single device, <lambda> takes it as f32[8,16]" in texts[0]
    assert texts[0].endswith("(512 B to a device, at least); to fix: pass it as it is taken, by jax.device_put")
    assert texts[-1].endswith("3 more arguments are moved, 1.5 KiB to a device (`plan.moves`)")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = f(model)
    assert y.sharding == again.sharding and len(f.plan(model).moves) == 7
    np.testing.assert_allclose(again, X * 7, rtol=1e-6)


def test_what_lies_elsewhere_may_be_lowered():
    f = sdy.partition(jnp.sin, mesh=mesh_of(), in_shardings=P(), on_unknown="ignore")
    compiled = f.lower(jax.device_put(X, single(0))).compile()
    assert compiled.input_shardings == ((named(),), {})
    np.testing.assert_allclose(compiled(jax.device_put(X, named())), np.sin(X), rtol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_mesh_of_an_outer_jit(kind):
    """Where types show it, nobody has to say it."""
    x = jax.device_put(X, named("a", kind=kind))
    f = sdy.partition(lambda x: jnp.sin(x) * 2)
    for y in (jax.jit(lambda x: f(x) + 1)(x), jax.vmap(lambda row: f(row) + 1)(x)):
        np.testing.assert_allclose(y, np.sin(X) * 2 + 1, rtol=1e-6)
        assert y.sharding.mesh == x.sharding.mesh
    types = [jax.jit(lambda x, jit=jit: jit(jnp.sin)(x)).trace(x).out_info for jit in JITS]
    assert types[0] == types[1]


def test_shardings_on_an_abstract_mesh_state_it():
    on_axes = NamedSharding(mesh_of().abstract_mesh, P("a"))
    traced = [jit(jnp.sin, in_shardings=on_axes).trace(jax.ShapeDtypeStruct((8, 16), np.float32)) for jit in JITS]
    assert traced[0].out_info == traced[1].out_info
    typed = jax.ShapeDtypeStruct((8, 16), np.float32, sharding=on_axes)
    assert sdy.partition(jnp.sin).plan(typed).arguments[0].type == "f32[8@a,16]"
