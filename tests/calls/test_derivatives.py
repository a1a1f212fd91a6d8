"""Derivatives of partitioned functions, from outside, are those of the plain functions, in all modes and orders."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

RNG = np.random.default_rng(5)
X = RNG.standard_normal((8, 8)).astype(np.float32)
X[0] = 0.0  # where relu and max have ties
W = RNG.standard_normal((8, 16)).astype(np.float32)
IDS = np.array([1, 5, 1, 3], np.int32)


@jax.custom_vjp
def clipped(x):
    return x * 3


clipped.defvjp(lambda x: (x * 3, x > 0), lambda positive, ct: (jnp.where(positive, ct * 7, 0.5),))


@jax.custom_jvp
def stepped(x):
    return jnp.round(x)


stepped.defjvp(lambda primals, tangents: (jnp.round(primals[0]), 5 * tangents[0]))


def smooth(x):
    return (jnp.tanh(x) @ x).sum()


def looped(x):
    total = lax.scan(lambda c, row: (jnp.sin(c @ x), c.sum() * row.sum()), x, x)[1].sum()
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1]), (0, 1.0))[1] * total


FUNCTIONS = {
    "stop_gradient": lambda x: (lax.stop_gradient(x) * x).sum(),
    "ties of relu": lambda x: jax.nn.relu(x @ x.T).sum() + jax.nn.relu(x).sum(),
    "ties of max": lambda x: x.max() + jax.nn.logsumexp(x) + jnp.abs(x).sum(),
    "custom_vjp": lambda x: (clipped(x) * x).sum(),
    "custom_jvp": lambda x: (stepped(x) * x).sum(),
    "sort": lambda x: (jnp.sort(x, axis=0)[2:5] ** 2).sum() + lax.top_k(x, 3)[0].sum(),
    "lookup": lambda x: (x[IDS] ** 2).sum() + jnp.sin(x.at[IDS].add(x[:4])).sum(),
    "loops": looped,
    "branches": lambda x: lax.cond(x.sum() > 0, jnp.sin, lambda y: y * y, x).sum() + jnp.where(x > 0, x, x * x).sum(),
    "remat": lambda x: jax.checkpoint(smooth)(x) + jax.checkpoint(lambda y: jnp.sin(y @ y))(x).sum(),
    "convolution": lambda x: (lax.conv(x[None, None], x[None, None, :3, :3], (1, 1), "SAME") ** 2).sum(),
    "cumsum": lambda x: (jnp.cumsum(x, 0) * x).sum() + jnp.linalg.norm(x[1]),
    "annotations": lambda x: smooth(sdy.sharding_constraint(jnp.sin(x), P(None, "model"))),
}

WAYS = {
    "grad": jax.grad,
    "value_and_grad under jit": lambda f: jax.jit(jax.value_and_grad(f)),
    "vmap of grad": lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, 2 * x, x - 1])),
    "grad of vmap": lambda f: jax.grad(lambda x: (jax.vmap(f)(jnp.stack([x, 2 * x])) ** 2).sum()),
    "grad of grad": lambda f: jax.grad(lambda x: (jax.grad(f)(x) ** 2).sum()),
    "grad of remat": lambda f: jax.grad(jax.checkpoint(f)),
    "grad of scan": lambda f: jax.grad(lambda x: lax.scan(lambda s, _: (s + f(s) * s / 99, f(s)), x, None, 2)[1].sum()),
}
FORWARDS = {
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x + 1,)),
    "jvp under jit": lambda f: jax.jit(lambda x: jax.jvp(f, (x,), (x + 1,))[1]),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](x),
    "forward over reverse": lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (x + 1,))[1],
    "reverse over forward": lambda f: jax.grad(lambda x: jax.jvp(f, (x,), (x + 1,))[1]),
    "hessian": lambda f: lambda x: jax.hessian(lambda row: f(jnp.asarray(x).at[1].set(row)))(x[1]),
}


def assert_close(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        if a.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5 * (1 + np.abs(b).max()))


def partitioned(fun, mesh, **options):
    return sdy.partition(fun, mesh=mesh, **{"in_shardings": P("data", "model"), "on_unknown": "ignore", **options})


@pytest.mark.dear
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_the_function(mesh, name):
    fun = FUNCTIONS[name]
    assert_close(jax.grad(partitioned(fun, mesh))(X), jax.jit(jax.grad(fun))(X))


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n not in ("custom_vjp", "loops")])
def test_tangents_are_those_of_the_function(mesh, name):
    fun = FUNCTIONS[name]
    wanted = jax.jit(lambda x, t: jax.jvp(fun, (x,), (t,)))(X, X + 1)
    assert_close(jax.jvp(partitioned(fun, mesh), (X,), (X + 1,)), wanted)


@pytest.mark.dear
@pytest.mark.parametrize("way", {**WAYS, **FORWARDS})
def test_modes_and_orders_mix(mesh, way):
    def fun(x):
        return smooth(x) + (lax.stop_gradient(x) * x * x).sum()

    how = {**WAYS, **FORWARDS}[way]
    assert_close(how(partitioned(fun, mesh))(X), jax.jit(how(fun))(X))


def test_a_function_with_a_custom_vjp_has_no_tangents_as_in_jax(mesh):
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(partitioned(FUNCTIONS["custom_vjp"], mesh), (X,), (X,))


@pytest.mark.parametrize("way", ["grad", "value_and_grad under jit", "jvp", "grad of scan"])
def test_what_a_function_closes_over_has_gradients_too(mesh, way):
    how = {**WAYS, **FORWARDS}[way]

    def both(part):
        return lambda x: part(lambda z: (jnp.sin(x) @ z * lax.stop_gradient(x)).sum())(x * x)

    assert_close(how(both(partial(partitioned, mesh=mesh)))(X), jax.jit(how(both(lambda f: f)))(X))


def test_integers_keys_static_arguments_and_trees(mesh):
    def loss(params, ids, key, *, scale, mode):
        rows = params["table"][ids] * scale
        noise = jax.random.normal(key, rows.shape)
        out = rows @ params["w"] + (noise @ params["w"] if mode == "noisy" else 0)
        return jnp.sum(out**2), {"rows": rows, "ids": ids + 1}

    params = {"table": X, "w": W}
    ours = sdy.partition(
        loss,
        mesh=mesh,
        in_shardings=({"table": P("data"), "w": P(None, "model")}, None, None),
        static_argnames="mode",
    )
    arguments = params, IDS, jax.random.key(3)
    for mode in ("noisy", "plain"):
        wanted = jax.jit(jax.value_and_grad(partial(loss, mode=mode), has_aux=True))(*arguments, scale=2.0)
        assert_close(jax.value_and_grad(ours, has_aux=True)(*arguments, scale=2.0, mode=mode), wanted)
    tangents = jax.tree.map(jnp.ones_like, params), np.zeros(4, jax.dtypes.float0), np.zeros((), jax.dtypes.float0)
    wanted = jax.jvp(partial(loss, scale=2.0, mode="noisy"), arguments, tangents)
    assert_close(jax.jvp(partial(ours, scale=2.0, mode="noisy"), arguments, tangents), wanted)


def test_gradients_for_some_arguments_only(mesh):
    def fun(x, w):
        return jnp.sin(x @ w).sum(axis=1)

    ours = partitioned(fun, mesh, in_shardings=(P("data"), P(None, "model")))
    for numbers in (0, 1, (1, 0)):
        wanted = jax.jit(jax.jacrev(fun, numbers))(X, W)
        assert_close(jax.jacrev(ours, numbers)(X, W), wanted)


def test_sizes_that_no_axis_divides_and_double_precision(mesh):
    with jax.enable_x64(True):
        x = RNG.standard_normal((7, 5))

        def fun(x):
            return jnp.cumsum(x @ x.T, 0).max() + smooth(x.T @ x)

        found = jax.grad(partitioned(fun, mesh))(x)
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, jax.jit(jax.grad(fun))(x), rtol=1e-10)
        assert_close(jax.jvp(partitioned(fun, mesh), (x,), (x,)), jax.jit(lambda x: jax.jvp(fun, (x,), (x,)))(x))


def test_arguments_that_lie_by_a_part_of_an_axis_have_derivatives_outside_of_jit_too(mesh):
    """Twelve rows over eight devices are split over four; jax has no name for that."""
    x, w = (RNG.standard_normal(shape).astype(np.float32) for shape in ((12, 6), (6, 8)))

    def fun(x, w):
        return jnp.sin(x @ w)

    ours = partitioned(fun, mesh, in_shardings=(P(("data", "model")), P()))
    results, pullback = jax.vjp(ours, x, w)
    wanted, pulled = jax.vjp(fun, x, w)
    assert_close(results, wanted)
    assert_close(pullback(results), pulled(wanted))
    assert_close(jax.linearize(ours, x, w)[1](x, w), jax.linearize(fun, x, w)[1](x, w))
    assert_close(jax.grad(lambda w: ours(x, w).sum())(w), jax.grad(lambda w: fun(x, w).sum())(w))


def test_gradients_lie_as_their_arguments_do(mesh):
    ours = partitioned(smooth, mesh)
    gradient = jax.jit(jax.grad(ours))(jax.device_put(X, NamedSharding(mesh, P("data", "model"))))
    assert gradient.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2)


def test_explicit_axes():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, P("data", "model"))
        for name in ("stop_gradient", "ties of relu", "lookup"):
            function = jax.sharding.auto_axes(FUNCTIONS[name], out_sharding=P())
            wanted = jax.jit(jax.grad(function))(x)
            found = jax.grad(partitioned(function, mesh))(x)
            assert_close(found, wanted)
            assert jax.typeof(found) == jax.typeof(x)
        function = jax.sharding.auto_axes(smooth, out_sharding=P())
        assert_close(jax.jvp(partitioned(function, mesh), (x,), (x,))[1], jax.jvp(smooth, (X,), (X,))[1])


def test_the_forward_pass_is_computed_once(mesh):
    """Its values are passed on: of each of two products there is one forwards, and there are two backwards."""

    def loss(weights, x):
        return (jnp.tanh(x @ weights["a"]) @ weights["b"]).sum()

    weights = {"a": W, "b": W.T}
    ours = partitioned(loss, mesh, in_shardings=(None, P("data")))
    text = jax.jit(jax.value_and_grad(ours)).lower(weights, X).as_text()
    assert len(re.findall("stablehlo.dot_general", text)) == 2 + 3  # no gradient for x
    assert len(re.findall("stablehlo.tanh", text)) == 1


def test_data_parallel_gradients_are_reduced_once_each(mesh):
    def loss(weights, x):
        return (jnp.tanh(x @ weights["a"]) @ weights["b"]).mean()

    x = RNG.standard_normal((16, 8)).astype(np.float32)
    ours = partitioned(loss, mesh, in_shardings=(None, P(("data", "model"))), layouts="local")
    step = jax.jit(jax.value_and_grad(ours))
    text = step.lower({"a": W, "b": W.T}, x).as_text()
    assert len(re.findall('"stablehlo.all_reduce"', text)) == 3
    assert not re.findall("all_gather|all_to_all|collective_permute|reduce_scatter", text)
    assert_close(step({"a": W, "b": W.T}, x), jax.jit(jax.value_and_grad(loss))({"a": W, "b": W.T}, x))


def test_ahead_of_time(mesh):
    step = jax.jit(jax.grad(partitioned(smooth, mesh)))
    compiled = step.lower(jax.ShapeDtypeStruct(X.shape, X.dtype)).compile()
    assert_close(compiled(X), jax.grad(smooth)(X))


def test_a_donated_argument_that_the_gradient_needs_is_gone_as_under_jit(mesh):
    def fun(x):
        return jnp.sin(x) * x

    ours = partitioned(fun, mesh, donate_argnums=0)
    found = jax.jit(jax.grad(lambda x: ours(x).sum()))(X)
    np.testing.assert_allclose(found, jax.grad(lambda x: fun(x).sum())(X), rtol=1e-5)


def test_training_with_gradients_from_outside(mesh):
    target = RNG.standard_normal((8, 16)).astype(np.float32)

    def loss(w, x):
        return jnp.mean((jax.nn.relu(x @ w) - target) ** 2)

    ours = partitioned(loss, mesh, in_shardings=(P(None, "model"), P("data")))
    step, plain = (jax.jit(lambda w, f=f: w - 0.3 * jax.grad(f)(w, X)) for f in (ours, loss))
    w = wanted = W
    for _ in range(10):
        w, wanted = step(w), plain(wanted)
    np.testing.assert_allclose(w, wanted, rtol=1e-4, atol=1e-5)


def test_programs_with_and_without_derivatives_of_their_own(mesh, tmp_path):
    pytest.importorskip("flatbuffers")
    fun = FUNCTIONS["stop_gradient"]
    exported = jax.export.export(jax.jit(fun))(X)
    path = tmp_path / "fun.bin"
    path.write_bytes(exported.serialize(vjp_order=1))
    ours = sdy.partition(sdy.load(path), mesh=mesh, in_shardings=P("data"))
    assert_close(jax.grad(ours)(X), jax.grad(fun)(X))
    text = """func.func @main(%x: tensor<8x8xf32>) -> tensor<8x8xf32> {
      %0 = stablehlo.tanh %x : tensor<8x8xf32>
      return %0 : tensor<8x8xf32>
    }"""
    ours = sdy.partition(sdy.loads(text), mesh=mesh, in_shardings=P("data"))
    assert_close(jax.grad(lambda x: ours(x).sum())(X), jax.grad(lambda x: jnp.tanh(x).sum())(X))


def test_an_error_of_the_derivative_is_said_in_jaxs_words(mesh):
    with pytest.raises(TypeError, match="grad requires real"):
        jax.grad(partitioned(lambda x: x.sum(), mesh))(IDS.reshape(2, 2))
    endless = partitioned(lambda x: lax.while_loop(lambda s: s.sum() < 9, lambda s: s + 1, x).sum(), mesh)
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work for"):
        jax.grad(endless)(X)


# The plans of what derivatives run.


def product(x, w):
    return jnp.tanh(x @ w).sum()


def test_the_plans_of_forward_and_backward_pass_are_reachable_from_the_function(mesh):
    f = sdy.partition(product, mesh=mesh, in_shardings=(P("data"), P(None, "model")))
    x, w = jnp.ones((8, 16)), jnp.ones((16, 16))
    assert f.plans == ()
    jax.grad(f, (0, 1))(x, w)
    (call,) = f.plans
    assert call.plan is f.plan(x, w) and call.signature == "x: f32[8@data,16], w: f32[16,16@model]"
    names = ["product", "product (forward of the derivative)", "product (backward)"]
    assert [plan.name for plan in call] == names
    backward = call.derivatives[1].plan
    assert [c.kind for c in backward.collectives if c.wire_bytes] == ["all_reduce", "all_reduce"], backward
    assert [line.split(" on mesh")[0].strip() for line in str(call).splitlines()] == [f"plan of {n}" for n in names]


def test_there_is_a_plan_per_signature_and_per_mode_of_differentiation(mesh):
    f = sdy.partition(product, mesh=mesh, in_shardings=(P("data"), P(None, "model")))
    for rows in (8, 16):
        jax.jvp(lambda x: f(x, jnp.ones((16, 16))), (jnp.ones((rows, 16)),), (jnp.ones((rows, 16)),))
    assert [[plan.name.removeprefix("product") for plan in call] for call in f.plans] == [["", " (with tangents)"]] * 2
    f.clear_cache()
    assert f.plans == ()


def test_derivatives_of_derivatives_have_plans_below_theirs(mesh):
    f = sdy.partition(product, mesh=mesh, in_shardings=(P("data"), P(None, "model")))
    jax.grad(lambda x: jax.grad(f)(x, jnp.ones((16, 16))).sum())(jnp.ones((8, 16)))
    names = [plan.name for call in f.plans for plan in call]
    assert "product (backward) (backward)" in names and len(set(names)) == len(names)


def test_vmapped_derivatives_run_the_same_plans(mesh):
    f = sdy.partition(product, mesh=mesh, in_shardings=(P("data"), P(None, "model")))
    jax.vmap(jax.grad(f), (0, None))(jnp.ones((3, 8, 16)), jnp.ones((16, 16)))
    assert [plan.name for call in f.plans for plan in call][2:] == ["product (backward)"]


LINEAR = {
    "alone": lambda push: push,
    "under jit": jax.jit,
    "in a loop": lambda push: lambda t: lax.scan(lambda c, _: (c + push(t), None), t, None, length=2)[0],
    "in a branch": lambda push: lambda t: lax.cond(jnp.bool_(True), push, lambda t: t, t),
    "mapped": lambda push: lambda t: jax.vmap(push)(jnp.stack([t, 2 * t])).sum(0),
    "rematerialized": jax.checkpoint,
}


@pytest.mark.parametrize("name", LINEAR)
def test_what_pushes_tangents_forward_is_taken_apart_where_it_is_transposed(mesh, name):
    """One program of results and tangents has no transpose."""
    x, t = jnp.arange(8.0) / 3, jnp.arange(8.0)[::-1] / 5

    def found(f):
        push = LINEAR[name](lambda t: jax.jvp(f, (x,), (t,))[1])
        return jax.linear_transpose(push, t)(t)[0], jax.grad(lambda t: (push(t) ** 2).sum())(t), push(t)

    def plain(x):
        return jnp.sin(x) * x.sum()

    ours = found(sdy.partition(plain, mesh=mesh, in_shardings=P("data")))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), ours, found(plain))


def test_results_and_tangents_that_are_pushed_forward_lie_as_results_are_stated(mesh):
    x = jnp.arange(64.0).reshape(8, 8)
    for spec in (P(), P("data"), P(None, "model")):
        f = sdy.partition(jnp.sin, mesh=mesh, in_shardings=P("data", "model"), out_shardings=spec)
        for found in (jax.jvp(f, (x,), (x,)), jax.jit(lambda x, f=f: jax.jvp(f, (x,), (x,)))(x)):
            assert all(y.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2) for y in found)
            np.testing.assert_allclose(found[1], jnp.cos(x) * x, rtol=1e-4, atol=1e-5)
