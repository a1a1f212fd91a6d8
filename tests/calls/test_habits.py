"""What is said to jit in many ways: parameters by name, meshes that shardings bring, callables of all kinds."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

X = np.arange(64, dtype=np.float32).reshape(8, 8)


def specs_of(plan: sdy.Plan) -> dict[str, str]:
    """The arguments' types by their paths."""
    return {value.path: value.type for value in plan.arguments}


def scaled(a, b=1.0, *, c, d=None):
    return (a + c) * b


@pytest.mark.parametrize(
    ("specs", "a", "c"),
    [
        ({"c": P("data")}, "f32[8@data,8]", "f32[8@data,8]"),
        ({"a": P(None, "model"), "c": P(None, "model")}, "f32[8,8@model]", "f32[8,8@model]"),
        ((P("data"), None, P("data"), None), "f32[8@data,8]", "f32[8@data,8]"),
        ({}, "f32[8,8]", "f32[8,8]"),
    ],
)
def test_keyword_only_parameters_have_entries_by_name_and_by_order(mesh, specs, a, c):
    f = sdy.partition(scaled, mesh=mesh, in_shardings=specs)
    np.testing.assert_array_equal(f(X, c=X), 2 * X)
    assert specs_of(f.plan(X, c=X)) == {"a": a, "c": c}
    assert specs_of(f.plan(a=X, c=X, b=X))["a"] == a


def test_an_entry_for_a_name_that_is_no_parameter(mesh):
    f = sdy.partition(scaled, mesh=mesh, in_shardings={"w": P()}, static_argnames="d")
    with pytest.raises(sdy.ShardingError, match=r"entry for 'w'.* no parameter of scaled .*\(a, b, c\)"):
        f(X, c=X)


def test_a_dict_of_entries_for_any_keywords(mesh):
    f = sdy.partition(lambda **arrays: arrays["x"] + arrays["y"], mesh=mesh, in_shardings={"y": P("data")})
    assert specs_of(f.plan(x=X, y=X)) == {"x": "f32[8@data,8]", "y": "f32[8@data,8]"}


def collected(x, *rest, **named):
    return x + sum(rest) - sum(named.values())


@pytest.mark.parametrize(
    ("specs", "types"),
    [
        ({"rest": P("data")}, ["8@data,8", "8@data,8", "8@data,8", "8@data,8"]),
        ({"rest": (P(), P("data")), "x": P()}, ["8,8", "8,8", "8@data,8", "8@data,8"]),
        ({"rest": [P(), P(None, "data")]}, ["8,8@data", "8,8", "8,8@data", "8,8@data"]),
        ({"named": P("data"), "x": P(), "rest": P()}, ["8,8", "8,8", "8,8", "8@data,8"]),
        ({"named": {"y": P("data")}, "x": P(), "rest": P()}, ["8,8", "8,8", "8,8", "8@data,8"]),
    ],
)
def test_entries_for_what_a_function_collects(mesh, specs, types):
    """One for each of them, or a tuple or a dict of as many."""
    f = sdy.partition(collected, mesh=mesh, in_shardings=specs)
    np.testing.assert_array_equal(f(X, X, X, y=X), 2 * X)
    plan = f.plan(X, X, X, y=X)
    assert specs_of(plan) == dict(zip(["x", "args[1]", "args[2]", "y"], [f"f32[{t}]" for t in types], strict=True))


@pytest.mark.parametrize(
    "specs", [{"rest": (P(),)}, {"rest": {"y": P()}}, {"named": (P(), P())}, {"named": {"z": P()}}]
)
def test_entries_for_other_than_what_a_function_collects(mesh, specs):
    f = sdy.partition(collected, mesh=mesh, in_shardings=specs)
    with pytest.raises(
        sdy.ShardingError, match=r"for `(rest`, which collects args\[1\], args\[2\]|named`, which collects y)"
    ):
        f(X, X, X, y=X)


@pytest.mark.parametrize("where", ["in_shardings", "out_shardings", "arguments", "both"])
def test_the_mesh_is_known_from_shardings(mesh, where):
    rows = NamedSharding(mesh, P("data"))
    stated = {"both": {"in_shardings": rows, "out_shardings": (rows, None)}}.get(where) or {}
    stated |= {where: (rows, None)} if "shardings" in where else {}
    f = sdy.partition(lambda x, y: (x + y, jnp.sum(y)), **stated)
    x = jax.device_put(X, rows) if where == "arguments" else X
    for _ in range(2):
        first, second = f(x, X)
        assert first.sharding.is_equivalent_to(rows, 2) and second.sharding.mesh == mesh
        np.testing.assert_array_equal(first, 2 * X)
    np.testing.assert_array_equal(jax.grad(lambda x: f(x, X)[0].sum())(x), np.ones_like(X))


def test_a_function_without_a_mesh_runs_where_its_arguments_are():
    f = sdy.partition(lambda x: x + 1)
    for size in (2, 4, 2):
        mesh = jax.make_mesh((size,), ("x",), (AxisType.Auto,), devices=jax.devices()[:size])
        x = jax.device_put(X, NamedSharding(mesh, P("x")))
        assert f(x).sharding == x.sharding
    with pytest.raises(sdy.ShardingError, match="partition needs a mesh"):
        f(X)


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor

    def plus(self, x, y=1.0):
        return x * self.factor + y

    @classmethod
    def twice(cls, x):
        return 2 * x


def callables():
    """Things that can be called with one array, and what they compute of it."""
    scale = Scale(jnp.float32(3))
    yield "object", scale, 3 * X
    yield "method", scale.plus, 3 * X + 1
    yield "class method", Scale.twice, 2 * X
    yield "partial", functools.partial(scale.plus, y=2.0), 3 * X + 2
    yield "partial of an array", functools.partial(jnp.add, X), 2 * X
    yield "partial of a partial", functools.partial(functools.partial(scale.plus), y=X), 4 * X
    yield "jitted", jax.jit(lambda x: x + 1), X + 1
    yield "vmapped", jax.vmap(lambda x: x + 1), X + 1
    yield "gradient", jax.grad(lambda x: (x**2).sum()), 2 * X
    yield "checkpointed", jax.checkpoint(lambda x: x + 1), X + 1
    yield "ufunc", jnp.negative, -X


@pytest.mark.parametrize(("function", "expected"), [c[1:] for c in callables()], ids=[c[0] for c in callables()])
def test_everything_that_can_be_called(mesh, function, expected):
    f = sdy.partition(function, mesh=mesh, in_shardings=P("data"))
    assert f(X).sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)
    np.testing.assert_array_equal(f(X), expected)
    again = sdy.partition(f, mesh=mesh)
    np.testing.assert_array_equal(again(X), expected)
    assert specs_of(again.plan(X)) == {again.plan(X).arguments[0].path: "f32[8@data,8]"}


def generator(x):
    yield x


async def coroutine(x):
    return x


@pytest.mark.parametrize("wrong", [3, generator, coroutine])
def test_what_is_no_function_of_arrays_is_refused_at_once(mesh, wrong):
    with pytest.raises(TypeError, match="partition got"):
        sdy.partition(wrong, mesh=mesh)


def test_trees_with_leaves_that_are_no_arrays():
    eqx = pytest.importorskip("equinox")
    mesh = jax.make_mesh((8,), ("x",))
    model = eqx.nn.MLP(8, 8, 8, 1, key=jax.random.key(0))
    f = sdy.partition(lambda model, x: model(x), mesh=mesh)
    with pytest.raises(TypeError, match=r"`model.activation` is .*eqx.partition\(model, eqx.is_array\).*eqx.filter"):
        f(model, X[0])
    arrays, rest = eqx.partition(model, eqx.is_array)
    split = sdy.partition(lambda arrays, x: eqx.combine(arrays, rest)(x), mesh=mesh)
    np.testing.assert_allclose(split(arrays, X[0]), model(X[0]), rtol=1e-5)
    with pytest.raises(TypeError, match=r"`result.activation` is .*eqx.filter"):
        sdy.partition(lambda x: model, mesh=mesh)(X)


BORDERS = {
    "call": lambda f, x: f(x),
    "op on a result": lambda f, x: f(x) + 1,
    "op with an argument": lambda f, x: f(x) + x,
    "contraction": lambda f, x: jnp.einsum("ij,jk->ik", f(x), X, out_sharding=P("a")),
    "gradient": lambda f, x: jax.grad(lambda x: (f(x) ** 2).sum())(x),
    "vmap": lambda f, x: jax.vmap(f)(x),
    "outer jit": lambda f, x: jax.jit(lambda x: f(x) + x)(x),
    "scan": lambda f, x: jax.lax.scan(lambda c, _: (f(c), None), x, length=2)[0],
    "eval_shape": lambda f, x: f.eval_shape(x),
    "out_info": lambda f, x: f.lower(x).out_info,
}


@pytest.mark.parametrize("kinds", ["Explicit, Explicit", "Explicit, Auto", "Auto, Explicit"])
@pytest.mark.parametrize("use", BORDERS)
def test_types_at_the_border_are_jits(use, kinds):
    types = tuple(AxisType[kind] for kind in kinds.split(", "))
    mesh = jax.make_mesh((2, 4), ("a", "b"), types)
    x = jax.device_put(X, NamedSharding(mesh, P("a" if types[0] is AxisType.Explicit else "b")))
    if use == "contraction" and types[0] is not AxisType.Explicit:
        pytest.skip("out_sharding= names Explicit axes only")
    with jax.set_mesh(mesh):
        found = [BORDERS[use](f, x) for f in (sdy.partition(jnp.sin, mesh=mesh), jax.jit(jnp.sin))]
    ours, theirs = (str(y) if isinstance(y, jax.ShapeDtypeStruct) else str(jax.typeof(y)) for y in found)
    assert re.sub("UNCONSTRAINED", "None", ours) == re.sub("UNCONSTRAINED", "None", theirs)
    if isinstance(found[0], jax.Array):
        np.testing.assert_allclose(*found, rtol=1e-5)
