"""Arguments and results in the memory of the host, and values that are moved there in between, next to jit's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharding_dump import parse

import sdy_jax as sdy
from sdy_jax.calls.planned_call import moves_by_itself
from sdy_jax.ir.graph import Graph

X = np.arange(128, dtype=np.float32).reshape(8, 16) / 16
JITS = (sdy.partition, jax.jit)
OFFLOAD = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=["h"], offload_src="device", offload_dst="pinned_host"
)


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=str)
def mesh(request):
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=(request.param,) * 2)


def placed(mesh, kind="device", spec=P("a")):
    return jax.device_put(X, NamedSharding(mesh, spec, memory_kind=kind))


def hidden(x):
    return jnp.sin(checkpoint_name(jnp.sin(x), "h")).sum()


def there_and_back(x):
    return jax.device_put(jax.device_put(x * 2, jax.memory.Space.Host), jax.memory.Space.Device) + 1


FUNCTIONS = {
    "an argument": (lambda x: jax.device_put(x, jax.memory.Space.Device) * 2, "pinned_host"),
    "a result": (lambda x: jax.device_put(x * 2, jax.memory.Space.Host), "device"),
    "both": (
        lambda x: jax.device_put(jax.device_put(x, jax.memory.Space.Device) * 2, jax.memory.Space.Host),
        "pinned_host",
    ),
    "in between": (there_and_back, "device"),
    "what a policy offloads": (jax.grad(jax.checkpoint(hidden, policy=OFFLOAD)), "device"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_memory_is_that_of_jit(mesh, name):
    function, kind = FUNCTIONS[name]
    x = placed(mesh, kind)
    with jax.set_mesh(mesh):
        ours, theirs = (jit(function)(x) for jit in JITS)
    assert ours.sharding.memory_kind == theirs.sharding.memory_kind
    assert ours.sharding.is_equivalent_to(theirs.sharding, 2) and str(jax.typeof(ours)) == str(jax.typeof(theirs))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
put = jax.device_put


def seen(jit, h):
    types = []
    jit(lambda x: types.append(str(jax.typeof(x))) or x * 2)(h)
    return types


TYPED = {
    "what ops show": lambda jit, h, d: seen(jit, h),
    "computed there": lambda jit, h, d: jit(lambda x: (x * 2, x.sum()))(h),
    "returned": lambda jit, h, d: jit(lambda x: x)(h),
    "beside one on devices": lambda jit, h, d: jit(lambda x, y: (x + 1, y + 1, put(x, DEVICE) * y, put(y, HOST)))(h, d),
    "with one on devices": lambda jit, h, d: jit(lambda x, y: x + y)(h, d),
    "with one that was put there": lambda jit, h, d: jit(lambda x: put(put(x, DEVICE) * 2, HOST) + x)(h),
    "a gradient": lambda jit, h, d: jax.grad(jit(lambda x: (put(x, DEVICE) ** 2).sum()))(h),
    "a gradient inside": lambda jit, h, d: jit(jax.grad(lambda x: (put(x, DEVICE) ** 2).sum()))(h),
    "a gradient of what is there": lambda jit, h, d: jax.grad(lambda x: put(jit(lambda x: (x**2).sum())(x), DEVICE))(h),
    "a tangent": lambda jit, h, d: jax.jvp(jit(lambda x: jnp.sin(put(x, DEVICE))), (h,), (h,)),
    "in a loop": lambda jit, h, d: jit(lambda x, y: jax.lax.fori_loop(0, 3, lambda i, y: y + put(x, DEVICE), y))(h, d),
    "in a scan": lambda jit, h, d: jit(
        lambda x: jax.lax.scan(lambda c, r: (c + put(r, DEVICE), None), jnp.zeros(16), x)[0]
    )(h),
    "stated": lambda jit, h, d: jit(lambda x: x * 2, in_shardings=h.sharding)(h),
    "donated": lambda jit, h, d: jit(lambda x: x + 1, donate_argnums=0)(put(X, h.sharding)),
    "compiled": lambda jit, h, d: jit(lambda x: x * 2).lower(h).compile()(h),
    "its shapes": lambda jit, h, d: str(jit(lambda x: x * 2).eval_shape(h)),
    "another memory is another trace": lambda jit, h, d: [f(x) for f in [jit(lambda x: x * 2)] for x in (h, d, h)],
}


def outcome(row, jit, mesh):
    try:
        return row(jit, placed(mesh, "pinned_host"), placed(mesh))
    except ValueError as error:
        return str(error).split(".")[0]


@pytest.mark.parametrize("name", TYPED)
def test_types_say_that_arrays_are_on_the_host(mesh, name):
    ours, theirs = (outcome(TYPED[name], jit, mesh) for jit in JITS)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        if not isinstance(b, jax.Array):
            assert a == b
            continue
        assert str(jax.typeof(a)) == str(jax.typeof(b)) and a.sharding.memory_kind == b.sharding.memory_kind
        assert a.sharding.is_equivalent_to(b.sharding, b.ndim)
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize("jit", JITS)
def test_a_result_that_is_stated_to_be_on_the_host(mesh, jit):
    stated = NamedSharding(mesh, P("a"), memory_kind="pinned_host")
    y = jit(lambda x: (x * 2, x + 1), out_shardings=(stated, None))(placed(mesh))
    assert [r.sharding.memory_kind for r in y] == ["pinned_host", "device"]
    np.testing.assert_array_equal(y[0], X * 2)


def test_gradients_of_functions_that_offload(mesh):
    with jax.set_mesh(mesh):
        f = sdy.partition(jax.checkpoint(hidden, policy=OFFLOAD))
        np.testing.assert_allclose(jax.grad(f)(placed(mesh)), np.cos(np.sin(X)) * np.cos(X), rtol=1e-5, atol=1e-6)


def test_kinds_of_memory_that_types_do_not_know(mesh):
    stated = NamedSharding(mesh, P("a"), memory_kind="unpinned_host")
    ours, theirs = (jit(lambda x: x * 2, out_shardings=stated)(placed(mesh)) for jit in JITS)
    assert ours.sharding == theirs.sharding == stated
    np.testing.assert_array_equal(ours, X * 2)


def test_plans_say_what_lies_on_the_host_and_what_moves_when():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def loss(x, w):
        layer = lambda x, w: (jnp.sin(checkpoint_name(jnp.sin(x @ w), "h")), None)  # noqa: E731
        return jax.lax.scan(jax.checkpoint(layer, policy=OFFLOAD), x, w)[0].sum()

    def step(x, w, m):
        m = put(m, DEVICE) * 0.9 + jax.grad(loss, 1)(x, w)
        return w - m, put(m, HOST)

    w = jax.device_put(jnp.ones((3, 16, 16)), NamedSharding(mesh, P(None, None, "b")))
    m = jax.device_put(w, w.sharding.with_memory_kind("pinned_host"))
    plan = sdy.partition(step, mesh=mesh).plan(placed(mesh), w, m)
    found = [
        (each.what, each.path or each.type.split("[")[0], each.times, each.backward) for each in plan.record().host
    ]
    assert sorted(found) == [
        ("argument", "m", 0, False),
        ("result", "result[1]", 0, False),
        ("to devices", "f32", 1, False),
        ("to devices", "f32", 3, True),
        ("to the host", "f32", 1, False),
        ("to the host", "f32", 3, False),
    ]
    assert all(
        each.line.startswith("tests/runtime/test_host_memory.py:") for each in plan.record().host if not each.path
    )
    held = plan.arguments[2]
    assert plan.record().host[0].bytes == m.nbytes / 4 and f"  m            {held.type}  768 B" in str(plan)
    lines = str(plan).partition("host memory (bytes of a device's block)\n")[2].partition("\n\n")[0].splitlines()
    assert len(lines) == 6 and any("3 trips" in line and "(backward)" in line for line in lines)
    assert "host memory" not in str(sdy.partition(lambda x: x * 2, mesh=mesh).plan(placed(mesh)))


BROUGHT_BY_LAYERS = """
func.func @main(%w: tensor<3x8x8xf32>, %v: tensor<3x8x8xf32>, %x: tensor<8x8xf32>) -> tensor<8x8xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %n = stablehlo.constant dense<3> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %c = %x) : tensor<i32>, tensor<8x8xf32>
    cond {
      %p = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %p : tensor<i1>
    } do {
      %a = stablehlo.dynamic_slice %w, %i, %zero, %zero, sizes = [1, 8, 8]
        : (tensor<3x8x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x8x8xf32>
      %b = stablehlo.reshape %a : (tensor<1x8x8xf32>) -> tensor<8x8xf32>
      %d = stablehlo.custom_call @annotate_device_placement(%b) : (tensor<8x8xf32>) -> tensor<8x8xf32>
      %e = stablehlo.dynamic_slice %v, %i, %zero, %zero, sizes = [1, 8, 8]
        : (tensor<3x8x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x8x8xf32>
      %f = stablehlo.reshape %e : (tensor<1x8x8xf32>) -> tensor<8x8xf32>
      %g = stablehlo.custom_call @annotate_device_placement(%f) : (tensor<8x8xf32>) -> tensor<8x8xf32>
      %h = stablehlo.add %g, %f : tensor<8x8xf32>
      %k = stablehlo.add %c, %d : tensor<8x8xf32>
      %l = stablehlo.add %k, %h : tensor<8x8xf32>
      %j = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %j, %l : tensor<i32>, tensor<8x8xf32>
    }
  return %r#1 : tensor<8x8xf32>
}
"""


def test_arrays_that_the_program_moves_by_parts_stay_on_the_host():
    """`w` is read by what moves alone, `v` by an addition as well, and `x` never moves."""
    graph = Graph(parse(BROUGHT_BY_LAYERS).operation)
    assert [moves_by_itself(value) for value in graph.arguments] == [True, False, False]


TRANSFORMED = {
    "called": lambda f, ws, x: f(ws, x),
    "gradient": lambda f, ws, x: jax.grad(f)(ws, x),
    "mapped": lambda f, ws, x: jax.vmap(f, (None, 0))(ws, jnp.stack([x, x])),
}


@pytest.mark.parametrize("use", TRANSFORMED.values(), ids=TRANSFORMED)
def test_they_are_those_of_jit_under_transformations(use):
    """For CPUs jax lowers no moves; what brings arrays to devices at the border is the same."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def run(ws, x):
        return jax.lax.scan(lambda x, w: (jnp.sin(x @ put(w, DEVICE)), None), x, ws)[0].sum()

    ws = jax.device_put(jnp.ones((3, 16, 16)) / 9, NamedSharding(mesh, P(None, None, "b"), memory_kind="pinned_host"))
    ours, theirs = (use(jit(run), ws, placed(mesh)) for jit in JITS)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert ours.sharding.memory_kind == theirs.sharding.memory_kind
