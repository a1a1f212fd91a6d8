"""`partition` behaves as `jax.jit` does: arguments, statics, donation, meshes, tracing, keys, caching, warnings."""

import dataclasses
import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.calls import planned_function as api
from sdy_jax.testing import assert_same

X = np.arange(128, dtype=np.float32).reshape(8, 16) / 64
W = np.arange(128, dtype=np.float32).reshape(16, 8) / 64
BIG = jnp.arange(16 * 256, dtype=jnp.float32).reshape(16, 256) / 4096


@pytest.fixture(scope="module")
def explicit():
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


@pytest.fixture
def built(monkeypatch):
    """The names of the functions that were planned."""
    names = []
    build = api.build_plan
    monkeypatch.setattr(api, "build_plan", lambda name, *rest, **how: names.append(name) or build(name, *rest, **how))
    return names


def square(a):
    return a @ a.T


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: object
    b: object


@pytest.mark.parametrize(
    "spec",
    [
        P("data"),
        "[{'data'}, {?}]".replace("'", '"'),
        sdy.TensorSharding("mesh", (sdy.DimensionSharding((sdy.AxisRef("data"),)), sdy.DimensionSharding())),
    ],
    ids=["PartitionSpec", "text", "TensorSharding"],
)
def test_every_way_to_say_a_sharding(mesh, spec):
    result = sdy.partition(lambda x: x * 2, mesh=mesh, in_shardings=spec, out_shardings=spec)(X)
    assert result.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)


def test_named_sharding_says_where_results_lie(mesh):
    sharding = NamedSharding(mesh, P("data", "model"))
    assert sdy.partition(lambda x: x + 1, mesh=mesh, out_shardings=sharding)(X).sharding == sharding


def test_prefix_trees_of_dicts_lists_and_dataclasses(mesh):
    def f(params, x):
        return {"h": [x @ params["layer"].w + params["layer"].b, x], "n": params["list"][1]}

    params = {"layer": Layer(W, np.ones(8, np.float32)), "list": [X, X]}
    specs = ({"layer": Layer(P(None, "model"), None), "list": P("data")}, None)
    run = sdy.partition(f, mesh=mesh, in_shardings=specs, out_shardings={"h": P("data"), "n": None})
    shardings = {a.path: str(a.sharding.dimensions[0].axes) for a in run.plan(params, X).arguments}
    assert list(shardings) == ["params['layer'].w", "params['layer'].b", "params['list'][0]", "params['list'][1]", "x"]
    result = run(params, X)
    assert {leaf.sharding.spec for leaf in result["h"]} == {P("data")}
    np.testing.assert_allclose(result["h"][0], X @ W + 1, rtol=1e-5)


def test_keyword_arguments_take_the_entry_of_their_parameter(mesh):
    f = sdy.partition(lambda x, w: x @ w, mesh=mesh, in_shardings=(P("data"), P(None, "model")))
    assert f(w=W, x=X).sharding.spec == P("data", "model")
    np.testing.assert_allclose(f(X, w=W), X @ W, rtol=1e-5)


def test_static_arguments_however_they_are_passed(mesh):
    f = sdy.partition(lambda x, n: x * n if n > 2 else x, mesh=mesh, static_argnums=1)
    for result in (f(X, 3), f(X, n=3)):
        np.testing.assert_allclose(result, X * 3)
    assert f.plan(X, 3) is not f.plan(X, 1)
    named = sdy.partition(lambda x, n: x * n if n > 2 else x, mesh=mesh, static_argnames="n")
    for result in (named(X, 3), named(X, n=3), sdy.partition(f._function.fun, mesh=mesh, static_argnums=-1)(X, n=3)):
        np.testing.assert_allclose(result, X * 3)


def test_equal_statics_of_other_types_have_plans_of_their_own(mesh):
    f = sdy.partition(lambda x, n: x * n, mesh=mesh, static_argnums=1)
    ints = np.arange(8)
    assert [f(ints, n).dtype for n in (1, 1.0)] == [np.int32, np.float32]
    assert f.plan(ints, 1).results[0].type == "i32[8]" and f.plan(ints, 1.0).results[0].type == "f32[8]"


def test_statics_by_both_numbers_and_names(mesh):
    f = sdy.partition(lambda x, n, k=2: x * n + k, mesh=mesh, static_argnums=(1,), static_argnames=("k",))
    np.testing.assert_allclose(f(X, 3, k=5), X * 3 + 5)
    np.testing.assert_allclose(f(X, n=np.float32(3), k=5), X * 3 + 5)


@pytest.mark.parametrize("how", [{"donate_argnums": 0}, {"donate_argnames": "x"}])
def test_donated_buffers_are_gone(mesh, how):
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    y = jax.device_put(X, NamedSharding(mesh, P("data")))
    f = sdy.partition(lambda x, y: x + y, mesh=mesh, in_shardings=P("data"), out_shardings=P("data"), **how)
    f(x, y)
    assert x.is_deleted() and not y.is_deleted()


@pytest.mark.parametrize("size", [14, 16])
@pytest.mark.parametrize("specs", [(P("model"), P()), (P("model"), P("model")), (P(), P("model")), (P("model"), None)])
def test_a_donated_array_that_no_device_holds_yet_gets_its_result(explicit, size, specs):
    f = sdy.partition(lambda x: x + 1, mesh=explicit, in_shardings=specs[0], out_shardings=specs[1], donate_argnums=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where the two have different layouts, nothing can be donated
        np.testing.assert_array_equal(f(jnp.arange(float(size))), np.arange(size) + 1)


def test_under_an_outer_jit_scan_vmap_and_grad(mesh):
    f = sdy.partition(square, mesh=mesh, in_shardings=P("data"))
    np.testing.assert_allclose(jax.jit(lambda x: f(x) + 1)(X), X @ X.T + 1, rtol=1e-5)
    step = sdy.partition(lambda a: a * 2, mesh=mesh, in_shardings=P("data"))
    scanned = jax.jit(lambda x: jax.lax.scan(lambda c, _: (step(c), c.sum()), x, None, length=3))
    np.testing.assert_allclose(scanned(X)[0], X * 8)
    np.testing.assert_allclose(jax.vmap(f)(np.stack([X, -X])), np.stack([X @ X.T] * 2), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(lambda x: (f(x) ** 2).sum())(X), 4 * X @ X.T @ X, rtol=1e-4)


def test_ops_that_are_copied_as_text_are_mapped_too(mesh):
    spectrum = lambda x: jnp.abs(jnp.fft.fft(x)) + jnp.linalg.svd(x, compute_uv=False)  # noqa: E731
    f = sdy.partition(spectrum, mesh=mesh, in_shardings=P("data"), on_unknown="ignore")
    x = np.random.default_rng(2).standard_normal((3, 4, 4)).astype(np.float32)
    np.testing.assert_allclose(jax.vmap(f)(x), jax.vmap(spectrum)(x), rtol=1e-4)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["direct", "in jit"])
def test_a_partitioned_function_called_by_another_is_inlined(mesh, built, wrap):
    inner = sdy.partition(square, mesh=mesh, in_shardings='[{"data"}, {}]', out_shardings=P("data", "model"))
    outer = sdy.partition(lambda x: wrap(inner)(x * 2), mesh=mesh)
    result = outer(X)
    np.testing.assert_allclose(result, 4 * X @ X.T, rtol=1e-5)
    assert len(built) == 1
    assert outer.plan(X).mlir("traced").count("sdy.sharding_constraint") == 2
    assert result.sharding.spec == P("data", "model")


@pytest.mark.parametrize(
    ("spec", "out"), [(P("a", "b"), P(("c", "a"))), ('[{"b"}, {"a"}]', None), (sdy.AUTO, P("b")), (None, None)], ids=str
)
@pytest.mark.parametrize("is_abstract", [False, True])
def test_a_partitioned_function_on_another_mesh_of_the_devices_is_inlined(mesh, spec, out, is_abstract):
    cube = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    cube = cube.abstract_mesh if is_abstract else cube
    inner = sdy.partition(square, mesh=cube, in_shardings=spec, out_shardings=out)
    outer = sdy.partition(lambda x: inner(x * 2), mesh=mesh, in_shardings=P("data"))
    np.testing.assert_allclose(outer(X), 4 * X @ X.T, rtol=1e-5)
    slopes = (jax.grad(lambda x, f=f: (f(x) ** 2).sum())(X) for f in (outer, lambda x: square(x * 2)))
    np.testing.assert_allclose(*slopes, rtol=1e-4)


def test_a_partitioned_function_on_other_devices_is_refused_inside(mesh):
    inner = sdy.partition(square, mesh=jax.sharding.Mesh(np.array(jax.devices()[:4]), ("a",)))
    with pytest.raises(sdy.SdyError, match=r"square is partitioned on the mesh .*use one mesh"):
        sdy.partition(lambda x: inner(x), mesh=mesh)(X)


def test_explicit_meshes_type_arguments_and_results(explicit):
    f = sdy.partition(jnp.matmul, mesh=explicit)
    x, w = (jax.device_put(a, NamedSharding(explicit, s)) for a, s in ((X, P("data")), (W, P(None, "model"))))
    result = f(x, w)
    assert result.sharding.mesh == explicit and str(jax.typeof(result)) == "float32[8@data,8@model]"
    assert not f.plan(x, w).collectives
    np.testing.assert_allclose(result, X @ W, rtol=1e-5)


@pytest.mark.parametrize("kinds", [(AxisType.Explicit, AxisType.Auto), (AxisType.Auto, AxisType.Explicit)])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["direct", "in jit"])
def test_types_on_a_mesh_of_both_kinds_name_its_explicit_axes(kinds, wrap):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=kinds)
    f = sdy.partition(
        jnp.matmul, mesh=mesh, in_shardings=(P("data"), P(None, "model")), out_shardings=P("data", "model")
    )
    result = wrap(f)(X, W)
    np.testing.assert_allclose(result, X @ W, rtol=1e-5)
    assert result.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2)
    typed = jax.make_jaxpr(f)(X, W).out_avals[0].sharding.spec
    assert typed == (P("data", None) if kinds[0] == AxisType.Explicit else P(None, "model"))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["direct", "in jit"])
def test_the_mesh_of_set_mesh_is_the_default(kind, wrap):
    f = sdy.partition(lambda x: x * 2, in_shardings=P("a"), out_shardings=P("a"))
    for shape in ((2, 4), (4, 2)):
        mesh = jax.make_mesh(shape, ("a", "b"), axis_types=(kind,) * 2)
        with jax.set_mesh(mesh):
            result = wrap(f)(X)
        assert result.sharding.mesh == mesh and result.sharding.is_equivalent_to(NamedSharding(mesh, P("a")), 2)


CLOSED_OVER = {
    "directly": lambda x: x @ BIG,
    "in a nested jit": lambda x: jax.jit(lambda y: y @ BIG)(x),
    "in a scan": lambda x: jax.lax.scan(lambda c, _: (c @ BIG[:, :16], None), x, None, length=2)[0],
}


@pytest.mark.parametrize("name", CLOSED_OVER)
def test_closed_over_arrays_become_arguments(mesh, name):
    f = CLOSED_OVER[name]
    plan = sdy.partition(f, mesh=mesh, in_shardings=P("data")).plan(X)
    assert max(map(len, re.findall(r"dense<[^>]*>", plan.mlir("partitioned"))), default=0) < 1024
    assert [c.type.split("[")[0] for c in plan.constants] == ["f32"] and "closed-over arrays" in str(plan)
    np.testing.assert_allclose(sdy.partition(f, mesh=mesh, in_shardings=P("data"))(X), f(X), rtol=1e-4)


@pytest.mark.parametrize("use", [jnp.matmul, jax.jit(jnp.matmul)], ids=["direct", "in jit"])
def test_closed_over_tracers_of_an_outer_jit(mesh, use):
    def outer(x, w):
        inner = sdy.partition(lambda a: use(a, w) + use(a, BIG[:, :8]), mesh=mesh, in_shardings=P("data"))
        return inner(x) + inner(x)

    for scale in (1, 3):
        np.testing.assert_allclose(jax.jit(outer)(X, W * scale), 2 * X @ (W * scale + BIG[:, :8]), rtol=1e-5)


def test_random_keys_as_arguments_results_and_closed_over(mesh, explicit):
    key = jax.random.key(7)

    def f(k, x):
        return jax.random.split(k, 8), jax.random.normal(k, x.shape) + jax.random.uniform(key, x.shape)

    for m in (mesh, explicit):
        keys, values = sdy.partition(f, mesh=m, in_shardings=(None, P("data")), out_shardings=(P("data"), None))(key, X)
        assert keys.dtype == key.dtype and keys.sharding.spec == P("data")
        assert (jax.random.key_data(keys) == jax.random.key_data(jax.random.split(key, 8))).all()
        np.testing.assert_allclose(values, f(key, X)[1], rtol=1e-5, atol=1e-6)


def test_sharding_constraints_inside(mesh, explicit):
    for spec in (P("data"), NamedSharding(mesh, P("data"))):
        for m in (mesh, explicit):
            f = sdy.partition(lambda x, s=spec: jax.lax.with_sharding_constraint(x * 2, s) + 1, mesh=m)
            assert f(X).sharding.is_equivalent_to(NamedSharding(m, P("data")), 2)


def test_weak_types_are_kept(mesh):
    f = sdy.partition(lambda x: x * 2, mesh=mesh)
    assert jax.typeof(f(3)).weak_type and not jax.typeof(f(np.int32(3))).weak_type
    assert (f(1.5) * jnp.ones(4, jnp.bfloat16)).dtype == jnp.bfloat16


def test_no_arguments_and_no_results(mesh):
    assert sdy.partition(lambda: jnp.arange(8), mesh=mesh, out_shardings=P("data"))().sharding.spec == P("data")
    assert sdy.partition(lambda x: None, mesh=mesh)(X) is None
    assert sdy.partition(lambda: {"a": ()}, mesh=mesh)() == {"a": ()}
    assert sdy.partition(lambda x: (x, 1), mesh=mesh)(X)[1] == 1


@pytest.mark.parametrize("spec", [P(None, "model"), P(("model", "data")), P()])
def test_committed_arrays_with_another_sharding(mesh, spec):
    x = jax.device_put(X, NamedSharding(mesh, spec))
    result = sdy.partition(lambda x: x + 1, mesh=mesh, in_shardings=P("data"))(x)
    assert result.sharding.spec == P("data")
    np.testing.assert_array_equal(result, X + 1)


def test_trace_lower_and_eval_shape(mesh, built):
    f = sdy.partition(lambda x, n: x @ x.T * n, mesh=mesh, in_shardings=P("data"), static_argnums=1)
    abstract = jax.ShapeDtypeStruct((8, 16), np.float32)
    shape = f.eval_shape(abstract, 2)
    assert (shape.shape, shape.dtype) == ((8, 8), np.float32) and not built
    np.testing.assert_allclose(f.lower(abstract, 2).compile()(X), X @ X.T * 2, rtol=1e-5)
    np.testing.assert_allclose(f.trace(X, 2).lower().compile()(X), X @ X.T * 2, rtol=1e-5)


def test_plans_are_made_once_per_shape(mesh, built):
    f = sdy.partition(square, mesh=mesh, in_shardings=P("data"))
    assert f.plan(jax.ShapeDtypeStruct(X.shape, X.dtype)) is f.plan(X)
    f(X), f(X), f(jax.device_put(X, NamedSharding(mesh, P("model")))), f.lower(X)
    assert built == ["square"]
    assert f(X[:4]).shape == (4, 4) and len(built) == 2
    f.clear_cache()
    f(X)
    assert len(built) == 3


def test_settings_that_change_the_trace_have_plans_of_their_own(mesh):
    f = sdy.partition(lambda x: x @ x.T + jnp.arange(8).astype(float), mesh=mesh)
    assert "HIGHEST" not in f.plan(X).mlir() and f(X).dtype == np.float32
    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" in f.plan(X).mlir()
    with jax.enable_x64(True):
        assert f(X).dtype == np.float64


def test_methods_partials_and_lambdas(mesh):
    class Model:
        scale = 3.0

        @functools.partial(sdy.partition, mesh=mesh, static_argnums=0, in_shardings=P("data"))
        def scaled(self, x):
            return x * self.scale

        def plain(self, x):
            return x * self.scale

    model = Model()
    partial = functools.partial(lambda w, x, b: x @ w + b, W, b=1)
    np.testing.assert_allclose(model.scaled(X), X * 3)
    np.testing.assert_allclose(sdy.partition(model.plain, mesh=mesh, in_shardings=P("data"))(X), X * 3)
    np.testing.assert_allclose(sdy.partition(partial, mesh=mesh, in_shardings=P("data"))(X), X @ W + 1, rtol=1e-5)


def test_collectives_are_named_in_the_compiled_program(mesh):
    f = sdy.partition(lambda x: x @ x.T, mesh=mesh, in_shardings=P(None, "model"), out_shardings=P())
    text = f.lower(X).compile().as_text()
    assert re.search(r'op_name="[^"]*sdy\.all_reduce\[model\][^"]*test_api\.py:\d+', text)


def test_warnings_come_once_and_point_to_the_call(mesh):
    f = sdy.partition(lambda x: jnp.linalg.svd(x, compute_uv=False), mesh=mesh, in_shardings=P("data"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        f(X)
        f(X)
    ours = [w for w in caught if w.category is sdy.PartitionWarning]
    assert ours and len({str(w.message) for w in ours}) == len(ours)
    assert {w.filename for w in ours} == {__file__}


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("out", ['[{"x":(1)2}]', '[{"x":(2)2}]', '[{"x":(1)2, ?}]', None])
def test_results_split_by_parts_of_axes(axis_type, out):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    x = jnp.arange(4.0)
    double = sdy.partition(lambda x: x * 2, mesh=mesh, in_shardings='[{"x":(1)2}]', out_shardings=out)
    plan, result = double.plan(x), double(x)
    np.testing.assert_array_equal(result, x * 2)
    if out is not None and axis_type == AxisType.Auto and "?" not in out:
        assert len({str(shard.index) for shard in result.addressable_shards}) == 2
        assert plan.results[0].sharding.shard_counts(plan.program.mesh) == (2,)


def test_results_have_the_users_axes_though_arguments_are_split_by_parts_of_them():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    f = sdy.partition(lambda x, y: (x + 1, y * 2), mesh=mesh, in_shardings=P("model"), on_unknown="ignore")
    for x in (jnp.arange(14.0), jax.device_put(jnp.arange(14.0), NamedSharding(mesh, P()))):
        assert f.plan(x, x).arguments[0].type == "f32[14@model:(1)2]"
        assert [y.sharding.mesh for y in f(x, x)] == [mesh] * 2


def test_a_result_that_propagation_splits_by_a_part_of_an_axis_is_laid_out_on_whole_axes():
    a, b = jnp.ones((4, 4, 8)), jnp.arange(256.0).reshape(8, 4, 8)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    assert_same(
        lambda a, b: jnp.einsum("bik,cjk->bcij", a, b[:2]), a, b, mesh=mesh, in_shardings=(P(None, None, "x"), P("x"))
    )


def test_an_explicit_mesh_is_the_mesh_inside_the_function():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))

    @sdy.partition(mesh=mesh)
    def f(x):
        return jax.shard_map(lambda b: b * 2, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(x)

    x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("x")))
    np.testing.assert_array_equal(f(x), 2 * np.arange(8.0))


def test_unreduced_results_are_refused_by_path():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    f = sdy.partition(lambda x: x * 2, mesh=mesh, out_shardings='[{}], unreduced={"x"}')
    with pytest.raises(sdy.UnsupportedError, match=r"`result` is to be .*leave out unreduced="):
        f(jnp.ones(8))
