"""What comes in and what goes out: arguments keep their layouts where nothing is said of them, or are moved and that is
said; results lie on the user's mesh, whether sizes divide or not."""

import copy
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.calls import planned_function as api
from sdy_jax.plan.profile import collectives_in_hlo, totals

X = np.arange(64, dtype=np.float32).reshape(8, 8) / 16
W = np.arange(64, dtype=np.float32)[::-1].reshape(8, 8) / 16
KINDS = [AxisType.Auto, AxisType.Explicit]


def mesh_of(kind=AxisType.Auto, shape=(2, 4), names=("x", "y")):
    kinds = kind if isinstance(kind, tuple) else (kind,) * len(shape)
    return jax.make_mesh(shape, names, axis_types=kinds)


def on(mesh, spec, array=X):
    return jax.device_put(array, NamedSharding(mesh, spec))


def types(plan):
    return [value.type for value in plan.arguments]


def double(a):
    return a * 2


def wire_bytes(function, *args):
    return totals(collectives_in_hlo(function.lower(*args).compile().as_text())).wire_bytes


@pytest.fixture
def built(monkeypatch):
    """The names of the functions that were planned."""
    names = []
    build = api.build_plan
    monkeypatch.setattr(api, "build_plan", lambda name, *rest, **how: names.append(name) or build(name, *rest, **how))
    return names


# Arguments that nothing is said of.


@pytest.mark.parametrize("kind", [*KINDS, (AxisType.Explicit, AxisType.Auto)])
@pytest.mark.parametrize("spec", [P("x", "y"), P(("x", "y")), P(None, "y"), P()])
def test_a_committed_argument_keeps_its_sharding(kind, spec):
    mesh = mesh_of(kind)
    x, f = on(mesh, spec), sdy.partition(double, mesh=mesh)
    result = f(x)
    assert result.sharding.is_equivalent_to(x.sharding, 2) and result.sharding.mesh == mesh
    assert types(f.plan(x)) == [value.type for value in f.plan(x).results] and not f.plan(x).moves
    assert wire_bytes(f, x) == 0
    np.testing.assert_array_equal(result, X * 2)


def test_its_sharding_is_closed_as_under_jit():
    mesh = mesh_of()
    f = sdy.partition(jnp.matmul, mesh=mesh, in_shardings=(None, P(None, "y")))
    assert types(f.plan(on(mesh, P()), W)) == ["f32[8,8]", "f32[8,8@y]"]
    assert types(f.plan(on(mesh, P("x")), W)) == ["f32[8@x,8]", "f32[8,8@y]"]
    np.testing.assert_allclose(f(on(mesh, P("x")), W), X @ W, rtol=1e-5)


def test_every_signature_has_a_plan_of_its_own(built):
    mesh = mesh_of()
    f = sdy.partition(double, mesh=mesh)
    arrays = [on(mesh, P("x")), on(mesh, P("y")), X, on(mesh, P("x", None))]
    for _ in range(2):
        for x in arrays:
            np.testing.assert_array_equal(f(x), X * 2)
    assert len(built) == 3  # P("x") and P("x", None) say the same
    assert f(arrays[0]).sharding.spec == P("x") and f(arrays[1]).sharding.spec == P("y")
    f.clear_cache()
    assert f(arrays[0]).sharding.spec == P("x") and len(built) == 4


def test_arrays_that_are_not_committed_are_laid_out_by_propagation():
    mesh = mesh_of()
    f = sdy.partition(jnp.add, mesh=mesh, in_shardings=(None, P("x")))
    for x in (X, jnp.asarray(X), 1.0):
        assert types(f.plan(x, X))[0] == ("f32[8@x,8]" if jnp.ndim(x) else "f32[]")
        assert f(x, X).sharding.spec == P("x")


@pytest.mark.parametrize("kind", KINDS)
def test_types_with_shardings_are_as_arrays_with_them(kind):
    mesh = mesh_of(kind)
    f = sdy.partition(double, mesh=mesh)
    like = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, P("x", "y")))
    assert f.plan(like) is f.plan(on(mesh, P("x", "y")))
    for make in (lambda: f.lower(like).compile(), lambda: f.trace(like).lower().compile()):
        result = make()(on(mesh, P("x", "y")))
        assert result.sharding.is_equivalent_to(like.sharding, 2)


def test_a_type_that_no_array_has_is_as_a_stated_sharding():
    mesh = mesh_of()
    like = jax.ShapeDtypeStruct((7, 8), np.float32, sharding=NamedSharding(mesh, P("y", "x")))
    plan = sdy.partition(double, mesh=mesh, on_unknown="ignore").plan(like)
    assert types(plan) == ["f32[7,8@x]"] and not plan.moves


def test_static_arguments_trees_and_keywords():
    mesh = mesh_of()

    def f(config, params, *, batch, absent=None):
        return {name: batch @ w * config for name, w in params.items()}

    run = sdy.partition(f, mesh=mesh, static_argnums=0)
    params = {"a": on(mesh, P(None, "y")), "b": X}
    for config in (2, 3):
        result = run(config, params, batch=on(mesh, P("x"), W))
        assert result["a"].sharding.spec == P("x", "y")
        np.testing.assert_allclose(result["b"], W @ X * config, rtol=1e-5)
    swapped = run(2, {"a": X, "b": params["a"]}, batch=on(mesh, P("x"), W))
    assert swapped["b"].sharding.spec == P("x", "y")


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_a_committed_argument_lie_as_it_does(kind):
    mesh = mesh_of(kind)
    out = P("x") if kind is AxisType.Explicit else None
    f = sdy.partition(lambda a, w: jnp.sin(jnp.dot(a, w, out_sharding=out)), mesh=mesh)
    a, w = on(mesh, P("x", "y")), on(mesh, P("y"), W)
    with jax.set_mesh(mesh):
        _, found = jax.value_and_grad(lambda a, w: (f(a, w) ** 2).sum(), (0, 1))(a, w)
        jitted = jax.jit(jax.grad(lambda a, w: (f(a, w) ** 2).sum(), (0, 1)))(a, w)
    wanted = jax.grad(lambda a, w: (jnp.sin(a @ w) ** 2).sum(), (0, 1))(X, W)
    for x, own, under_jit, right in zip((a, w), found, jitted, wanted, strict=True):
        assert own.sharding.is_equivalent_to(x.sharding, 2)
        np.testing.assert_allclose(own, right, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(under_jit, right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", [*KINDS, (AxisType.Explicit, AxisType.Auto)])
def test_under_an_outer_jit_the_types_say_what_they_can(kind, built):
    mesh = mesh_of(kind)
    f = sdy.partition(double, mesh=mesh)
    found = []

    def outer(a):
        found.extend(types(f.plan(a)))
        return f(a) + 1

    np.testing.assert_array_equal(jax.jit(outer)(on(mesh, P("x", "y"))), X * 2 + 1)
    known = {AxisType.Explicit: "f32[8@x,8@y]", AxisType.Auto: "f32[8,8]"}
    assert found == [known.get(kind, "f32[8@x,8]")] and len(built) == 1


def test_donation_methods_and_keys():
    mesh = mesh_of()

    class Model:
        scale = 3.0

        @functools.partial(sdy.partition, mesh=mesh, static_argnums=0)
        def scaled(self, x):
            return x * self.scale

    assert Model().scaled(on(mesh, P("y"))).sharding.spec == P("y")
    f = sdy.partition(double, mesh=mesh, donate_argnums=0)
    for spec in (P("x"), P("x"), P("y")):
        x = on(mesh, spec)
        assert f(x).sharding.spec == spec and x.is_deleted()
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(mesh, P("x")))
    split = sdy.partition(jax.vmap(lambda k: jax.random.normal(k, (2,))), mesh=mesh)
    assert types(split.plan(keys)) == ["u32[8@x,2]"]
    np.testing.assert_allclose(split(keys), jax.vmap(lambda k: jax.random.normal(k, (2,)))(keys), rtol=1e-5)


def test_meshes_of_set_mesh_have_choices_of_their_own():
    f = sdy.partition(double)
    for shape in ((2, 4), (4, 2)):
        mesh = mesh_of(shape=shape)
        x = on(mesh_of(shape=(2, 4)), P("x"))
        with jax.set_mesh(mesh):
            result = f(x)
            assert result.sharding.mesh == mesh and result.sharding.is_equivalent_to(x.sharding, 2) == (shape == (2, 4))
            np.testing.assert_array_equal(result, X * 2)


@pytest.mark.parametrize("spec", [P("z"), P(None, "z"), P()])
def test_arrays_on_another_mesh_of_the_devices_keep_their_layout_too(spec):
    mesh, other = mesh_of(), mesh_of(shape=(8,), names=("z",))
    x, f = on(other, spec), sdy.partition(double, mesh=mesh)
    result = f(x)
    assert result.sharding.mesh == mesh and result.sharding.is_equivalent_to(x.sharding, 2)
    np.testing.assert_array_equal(result, X * 2)


def test_an_array_committed_to_one_device_is_an_error_as_under_jit():
    mesh = mesh_of()
    x = jax.device_put(X, SingleDeviceSharding(jax.devices()[0]))
    with pytest.raises(sdy.ShardingError, match=r"`a` lies on a single device.*jax\.device_put"):
        sdy.partition(double, mesh=mesh)(x)


def test_inlined_into_another_and_loaded(tmp_path):
    mesh = mesh_of()
    inner = sdy.partition(double, mesh=mesh)
    outer = sdy.partition(lambda a: inner(a) + 1, mesh=mesh)
    assert outer(on(mesh, P("x", "y"))).sharding.spec == P("x", "y")
    text = "func.func @main(%a: tensor<8x8xf32>) -> tensor<8x8xf32> { return %a : tensor<8x8xf32> }"
    assert sdy.partition(sdy.loads(text), mesh=mesh)(on(mesh, P("y", "x"))).sharding.spec == P("y", "x")


# Arguments that lie otherwise than stated.


def test_what_lies_otherwise_than_stated_is_moved_and_said():
    mesh = mesh_of()
    f = sdy.partition(lambda a, b: a + b, mesh=mesh, in_shardings=P("x"))
    good, rows, cols = on(mesh, P("x")), on(mesh, P()), on(mesh, P(None, "y"))
    plan = f.plan(cols, rows)
    assert [(m.path, m.before, m.after, m.bytes) for m in plan.moves] == [
        ("a", "f32[8,8@y]", "f32[8@x,8]", 4 * 6 * 4),
        ("b", "f32[8,8]", "f32[8@x,8]", 0),
    ]
    assert "moves at the border (bytes that a device receives, at least)\n  a  f32[8,8@y] -> f32[8@x,8]  96 B\n" in str(
        plan
    )
    assert not f.plan(good, good).moves and "moves at the border" not in str(f.plan(good, X))
    assert f.plan(good, good) is f.plan(X, X) and plan.wire_bytes == 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for args in ((good, good), (cols, good), (good, good), (cols, rows)):
                np.testing.assert_array_equal(f(*args), X + X)
    said = [str(w.message) for w in caught if w.category is sdy.PartitionWarning]
    assert len(said) == 2 and {w.filename for w in caught} == {__file__}
    assert "`a` lies as f32[8,8@y], <lambda> takes it as f32[8@x,8]" in said[0] and "96 B" in said[0]
    assert "`b` lies as f32[8,8]" in said[1]


def test_a_layout_on_other_axes_is_moved_and_said_in_ours():
    mesh, grid = mesh_of(), mesh_of(shape=(4, 2), names=("p", "q"))
    f = sdy.partition(double, mesh=mesh, in_shardings=P("x"))
    (move,) = f.plan(on(grid, P("q"))).moves
    assert (move.before, move.after, move.bytes) == ("f32[8@y:(2)2,8]", "f32[8@x,8]", 128)
    with pytest.warns(sdy.PartitionWarning, match="`a` lies as"):
        np.testing.assert_array_equal(f(on(grid, P("q"))), X * 2)


@pytest.mark.parametrize(
    ("before", "after"),
    [(P("x"), P()), (P("x"), P("y")), (P("x"), P(None, "x")), (P("y"), P("x", "y")), (P(("x", "y")), P(None, "x"))],
)
def test_at_least_what_a_move_says_is_sent(before, after):
    mesh = mesh_of()
    x, f = on(mesh, before), sdy.partition(double, mesh=mesh, in_shardings=after)
    (move,) = f.plan(x).moves
    with pytest.warns(sdy.PartitionWarning, match="at least"):
        sent = wire_bytes(f, x)
    assert 0 < move.bytes <= sent and (move.bytes == sent or len(after) == 2)


def test_why_names_the_array_that_was_passed():
    mesh = mesh_of()
    f = sdy.partition(jnp.matmul, mesh=mesh, in_shardings=(None, P(None, "y")))
    said = str(f.plan(on(mesh, P("x")), W).why("result"))
    assert "<- the layout of the array passed as x1: P('x')" in said or "array passed as a: P('x'" in said, said
    assert said.count("in_shardings of") == 1 and "P(None, 'y'), given at" in said


# Results whose sizes no axis divides.

UNEVEN = {
    "over two axes": ((20,), P(("x", "y")), P("x"), "f32[20@(x,y)]"),
    "in two dimensions": ((4, 6), P("x", "y"), P("x"), "f32[4@x,6@y]"),
    "by half an axis": ((18,), P("y"), P(), "f32[18@y]"),
    "not at all": ((7,), P("y"), P(), "f32[7@y]"),
    "to nothing": ((0,), P("y"), P("y"), "f32[0@y]"),  # as under jit: every number divides none
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_results_lie_on_the_axes_that_divide_them(kind, name):
    shape, stated, found, said = UNEVEN[name]
    mesh, x = mesh_of(kind), np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    f = sdy.partition(double, mesh=mesh, out_shardings=stated, on_unknown="ignore")
    for y in (f(jnp.asarray(x)), f(on(mesh, P(), x)), f.lower(x).compile()(x)):
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, found), y.ndim) and y.sharding.mesh == mesh
        np.testing.assert_array_equal(y, x * 2)
    if x.size:
        notes = [str(note) for note in f.plan(x).notes if note.op == "result"]
        assert len(notes) == 1 and f"instead of {said}" in notes[0] and "test_border.py:" in notes[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_gradients_under_jit(kind, name):
    shape, stated, _, _ = UNEVEN[name]
    mesh, x = mesh_of(kind), np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    f = sdy.partition(jnp.sin, mesh=mesh, in_shardings=stated, on_unknown="ignore")
    with jax.set_mesh(mesh):
        for argument in (jnp.asarray(x), on(mesh, P(), x)):
            for transform in (lambda g: g, jax.jit):
                found = transform(jax.grad(lambda a: (f(a) * a).sum()))(argument)
                assert isinstance(found.sharding, NamedSharding) and found.sharding.mesh == mesh
                np.testing.assert_allclose(found, np.sin(x) + np.cos(x) * x, rtol=1e-4, atol=1e-4)


SPECS = [P("x"), P("y"), P(("x", "y")), P(("y", "x")), P("x", "y"), P("y", "x"), P(None, ("x", "y")), None]


@pytest.mark.parametrize("seed", range(8))
def test_random_uneven_programs(seed):
    rng = np.random.default_rng(seed)
    mesh = mesh_of(KINDS[seed % 2])
    n, k, m = (int(size) for size in rng.integers(1, 22, 3))
    a, b = (rng.standard_normal(shape, np.float32) for shape in ((n, k), (k, m)))
    first, second, out = (SPECS[i] for i in rng.integers(0, len(SPECS), 3))
    fun = [jnp.matmul, lambda a, b: jnp.tanh(a @ b).T, lambda a, b: jnp.concatenate([a @ b, a @ b])][seed % 3]
    f = sdy.partition(fun, mesh=mesh, in_shardings=(first, second), out_shardings=out, on_unknown="ignore")
    for args in ((a, b), (on(mesh, P(), a), b)):
        result = f(*args)
        assert isinstance(result.sharding, NamedSharding) and result.sharding.mesh == mesh
        np.testing.assert_allclose(result, fun(a, b), rtol=1e-4, atol=1e-4)


def test_results_that_are_stated_in_parts_of_axes_keep_them_where_they_divide():
    mesh = mesh_of()
    f = sdy.partition(double, mesh=mesh, out_shardings='[{"y":(1)2}]', on_unknown="ignore")
    for size, blocks in ((18, 2), (7, 1), (8, 2)):
        result = f(jnp.arange(float(size)))
        assert isinstance(result.sharding, NamedSharding)
        assert len({str(shard.index) for shard in result.addressable_shards}) == blocks
        np.testing.assert_array_equal(result, np.arange(size) * 2)


# Copies.


class Trainer:
    def __init__(self, mesh):
        self.scale = 2.0
        self.step = sdy.partition(self._step, mesh=mesh, in_shardings=P("x"), donate_argnums=0)

    def _step(self, x):
        return x * self.scale


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_a_copy_is_a_function_of_its_own(how, built):
    mesh = mesh_of()
    f = sdy.partition(double, mesh=mesh, in_shardings=P("x"), out_shardings=P("x"), donate_argnums=0)
    f(X)
    g = how(f)
    x = on(mesh, P("x"))
    np.testing.assert_array_equal(g(x), X * 2)
    assert x.is_deleted() and len(built) == 2 and g.__name__ == "double" and g is not f
    f.clear_cache()
    g(on(mesh, P("x")))
    assert len(built) == 2


def test_a_copy_of_an_object_has_methods_of_its_own():
    trainer = Trainer(mesh_of())
    np.testing.assert_array_equal(trainer.step(X), X * 2)
    other = copy.deepcopy(trainer)
    other.scale = 5.0
    np.testing.assert_array_equal(other.step(X), X * 5)
    np.testing.assert_array_equal(trainer.step(X), X * 2)
    assert copy.deepcopy(trainer.step)(X).shape == X.shape
    text = "func.func @main(%a: tensor<8xf32>) -> tensor<8xf32> { return %a : tensor<8xf32> }"
    np.testing.assert_array_equal(copy.deepcopy(sdy.partition(sdy.loads(text), mesh=mesh_of()))(X[0]), X[0])
