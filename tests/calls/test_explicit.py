"""Sharding in types, a row per sentence of JAX's documentation, with `jax.jit` and `partition` side by side.

A row is a function of `jit`, which is one of both, under a mesh of Explicit axes `a` of size 2 and `b` of size 4. What
it returns has to be the same on both sides: values, types, and shardings of arrays. An error has to be of the class of
jit's, and to begin with its words.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_jit import Seen, assert_as_jit
from jax import lax
from jax.sharding import AxisType, NamedSharding, auto_axes, explicit_axes, reshard
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

TABLE: dict[str, Callable[..., Any]] = {}
KINDS: dict[str, tuple[AxisType, AxisType]] = {}
EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
RNG = np.random.default_rng(30)
X, W, S = (RNG.standard_normal(shape, dtype=np.float32) for shape in ((8, 16), (16, 32), (16, 16)))


def row(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds a function to the table."""
    TABLE[function.__name__.replace("_", " ")] = function
    return function


def on_axes(*kinds: AxisType) -> Callable[..., Any]:
    """Adds a function whose mesh has these kinds of axes."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        KINDS[function.__name__.replace("_", " ")] = kinds
        return row(function)

    return add


def on(array: Any, *entries: Any, **kinds: Any) -> jax.Array:
    return jax.device_put(array, P(*entries, **kinds))


def typed(*xs: Any) -> tuple[str, ...]:
    """The types of arrays, as text that a function can return through its closure."""
    return tuple(str(jax.typeof(x)) for x in xs)


# Types inside.


@row
def types_show_shardings(jit):
    seen = Seen()
    y = jit(lambda x: seen(jnp.sin(seen(x)).T) * 2)(on(X, "a", "b"))
    return y, seen.types[:2]


@row
def the_mesh_in_context_is_the_users(jit):
    found = []

    def f(x):
        found.append(jax.sharding.get_abstract_mesh())
        return x + 1

    return jit(f)(on(X, "a")), found[0]


@row
def types_of_what_is_made_inside(jit):
    seen = Seen()
    return jit(lambda x: x + seen(jnp.arange(16.0)) + seen(jnp.ones((8, 16))))(on(X, "a")), seen.types[:2]


@row
def products_have_the_axes_of_their_operands(jit):
    return jit(lambda x, w: x @ w)(on(X, "a"), on(W, None, "b"))


@row
def a_sum_over_a_split_dimension_is_reduced(jit):
    return jit(lambda x: (x.sum(0), x.sum(1), x.max()))(on(X, "a", "b"))


@row
def an_ambiguous_product_is_an_error(jit):
    return jit(lambda x, w: x @ w)(on(X, None, "b"), on(W, "b"))


@row
def an_ambiguous_sum_is_an_error(jit):
    return jit(jnp.add)(on(S, "a"), on(S, "b"))


@row
def an_ambiguous_reshape_is_an_error(jit):
    return jit(lambda x: x.reshape(128))(on(X, "a", "b"))


# `out_sharding`


@row
def einsum_takes_out_sharding(jit):
    return jit(lambda x, w: jnp.einsum("ij,jk->ik", x, w, out_sharding=P("a")))(on(X, "a", "b"), on(W, "b"))


@row
def dot_takes_out_sharding(jit):
    return jit(lambda x, w: jnp.dot(x, w, out_sharding=P(None, "b")))(on(X, None, "b"), on(W, "b"))


@row
def matmul_takes_out_sharding(jit):
    return jit(lambda x, w: jnp.matmul(x, w, out_sharding=P("b")))(on(X, None, "b"), on(W, "b"))


@row
def dot_general_takes_out_sharding(jit):
    dims = (((1,), (0,)), ((), ()))
    return jit(lambda x, w: lax.dot_general(x, w, dims, out_sharding=P("a", "b")))(on(X, "a", "b"), on(W, "b"))


@row
def zeros_ones_and_full_take_it(jit):
    def f():
        return (
            jnp.zeros((8, 16), out_sharding=P("a")),
            jnp.ones(8, out_sharding=P("b")),
            jnp.full((8,), 3, out_sharding=P("a")),
        )

    return jit(f)()


@row
def arange_takes_it(jit):
    return jit(lambda: (jnp.arange(8.0, out_sharding=P("a")), lax.iota(jnp.int32, 8)))()


@row
def reshape_takes_it(jit):
    return jit(lambda x: jnp.reshape(x, (4, 2, 16), out_sharding=P("a", None, "b")))(on(X, "a", "b"))


@row
def lookups_take_it(jit):
    at = jnp.array([1, 3, 5, 7])
    return jit(lambda x: x.at[at].get(out_sharding=P(None, "b")))(on(X, "a", "b"))


@row
def random_numbers_take_it(jit):
    def f(key):
        bits = jax.random.bits(key, (8, 8), out_sharding=P("a"))
        return (
            bits,
            jax.random.uniform(key, (8, 16), out_sharding=P("a", "b")),
            jax.random.normal(key, (8,), out_sharding=P("b")),
        )

    return jit(f)(jax.random.key(0))


@row
def one_hot_takes_it(jit):
    return jit(lambda x: jax.nn.one_hot(jnp.argmax(x, 1), 16, out_sharding=P("a", None)))(on(X, "a"))


@row
def broadcast_to_takes_it(jit):
    return jit(lambda x: jnp.broadcast_to(x, (4, 16), out_sharding=P("b")))(on(X[0]))


@row
def zeros_like_are_typed_as_what_they_are_like(jit):
    return jit(lambda x: jax.tree.map(jnp.zeros_like, (x, x.T)))(on(X, "a", "b"))


# `reshard`, `auto_axes`, `explicit_axes`


@row
def reshard_changes_the_type(jit):
    seen = Seen()
    return jit(lambda x: seen(reshard(x, P("b", "a"))) * 2)(on(X, "a", "b")), seen.types[0]


@row
def reshard_takes_trees(jit):
    return jit(lambda t: reshard(t, {"x": P("b"), "w": P(None, "a")}))({"x": on(X, "a"), "w": on(W)})


@row
def auto_axes_hands_axes_to_the_compiler(jit):
    seen = Seen()
    y = jit(auto_axes(lambda x, w: seen(x) @ w, out_sharding=P("a", None)))(on(X, None, "b"), on(W, "b"))
    return y, seen.types[0]


@row
def auto_axes_of_some_axes(jit):
    seen = Seen()
    f = auto_axes(lambda x, w: seen(x) @ w, axes="b", out_sharding=P("a", "b"))
    return jit(lambda x, w: f(x, w) + 1)(on(X, "a", "b"), on(W, "b")), seen.types[0]


@on_axes(AUTO, AUTO)
def explicit_axes_types_values_on_auto_axes(jit):
    seen = Seen()

    def inner(x):
        return seen(jnp.sin(x))

    def f(x):
        return explicit_axes(inner, in_sharding=P("a", "b"))(x) + 1

    return jit(f)(jnp.asarray(X)), seen.types[0]


@row
def a_sharding_constraint_asserts(jit):
    return jit(lambda x: lax.with_sharding_constraint(x, P("a")))(on(X, "a"))


@row
def a_sharding_constraint_that_is_wrong_is_an_error(jit):
    return jit(lambda x: lax.with_sharding_constraint(x, P("b")))(on(X, "a"))


# Meshes with axes of both kinds


@on_axes(EXPLICIT, AUTO)
def types_name_explicit_axes_only(jit):
    seen = Seen()
    return jit(lambda x: seen(x * 2) + 1)(on(X, "a")), seen.types[0]


@on_axes(AUTO, EXPLICIT)
def products_on_a_mesh_of_both_kinds(jit):
    return jit(lambda x, w: jnp.dot(x, w, out_sharding=P(None, "b")))(on(X, None, "b"), on(W, "b"))


@on_axes(EXPLICIT, AUTO)
def constraints_on_auto_axes_of_typed_values(jit):
    return jit(lambda x: lax.with_sharding_constraint(x, P(None, "b")) * 2)(on(X, "a"))


# Sums that are not reduced yet, and values whose cotangents are such


@row
def an_unreduced_product_is_reduced_by_reshard(jit):
    seen = Seen()

    def f(x, w):
        return reshard(seen(jnp.dot(x, w, out_sharding=P("a", unreduced={"b"}))), P("a"))

    return jit(f)(on(X, "a", "b"), on(W, "b")), seen.types[0]


@row
def unreduced_values_add_up(jit):
    def f(x, w):
        y = jnp.dot(x, w, out_sharding=P("a", unreduced={"b"}))
        return reshard(y + y, P("a", "b"))

    return jit(f)(on(X, "a", "b"), on(W, "b"))


@row
def a_result_may_be_unreduced(jit):
    y = jit(lambda x, w: jnp.dot(x, w, out_sharding=P("a", unreduced={"b"})))(on(X, "a", "b"), on(W, "b"))
    return reshard(y, P("a")), typed(y)


@row
def an_argument_may_be_unreduced(jit):
    y = jax.jit(lambda x, w: jnp.dot(x, w, out_sharding=P("a", unreduced={"b"})))(on(X, "a", "b"), on(W, "b"))
    return jit(lambda y: reshard(y, P("a")) * 2)(y)


@row
def reduced_values_have_unreduced_cotangents(jit):
    def loss(w, x):
        return jnp.einsum("ij,jk->ik", x, w, out_sharding=P("a")).sum()

    def f(w, x):
        w = reshard(w, P(None, None, reduced={"a"}))
        return reshard(jax.grad(loss)(w, x), P("a"))

    return jit(f)(on(W), on(X, "a"))


@row
def a_result_may_be_reduced(jit):
    return typed(jit(lambda x: reshard(x, P(None, "b", reduced={"a"})))(on(X, "a", "b")))


# Control flow and transformations inside


@row
def carries_of_scans_have_types(jit):
    seen = Seen()
    f = jit(lambda x: lax.scan(lambda c, _: (jnp.sin(seen(c)), c.sum()), x, None, length=3))
    return f(on(X, "a", "b")), seen.types[0]


@row
def scans_over_typed_layers(jit):
    layers = on(np.stack([S, S, S]) / 8, None, None, "b")

    def f(x, layers):
        return lax.scan(lambda x, w: (jnp.tanh(jnp.dot(x, w, out_sharding=P("a"))), None), x, layers)[0]

    return jit(f)(on(X, "a"), layers)


@row
def a_carry_whose_type_changes_is_an_error(jit):
    return jit(lambda x: lax.scan(lambda c, _: (reshard(c, P("b")), None), x, None, length=2)[0])(on(X, "a"))


@row
def branches_have_types(jit):
    return jit(lambda p, x: lax.cond(p, jnp.sin, lambda x: x * 2, x))(jnp.array(True), on(X, "a", "b"))


@row
def branches_of_other_types_are_an_error(jit):
    return jit(lambda p, x: lax.cond(p, jnp.sin, lambda x: reshard(x, P("b")), x))(jnp.array(True), on(X, "a"))


@row
def while_loops_have_types(jit):
    return jit(lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, x)))(on(X, "a", "b"))


@row
def gradients_inside_have_the_types_of_primals(jit):
    def loss(w, x):
        return (jnp.tanh(x @ w) ** 2).mean()

    return jit(jax.value_and_grad(loss, (0, 1)))(on(W, None, "b"), on(X, "a"))


@row
def vmap_inside(jit):
    return jit(jax.vmap(lambda x, w: jnp.dot(x, w), (0, None)))(on(X, "a"), on(W, None, "b"))


@row
def vmap_over_a_split_dimension(jit):
    return jit(lambda x: jax.vmap(lambda row: jnp.dot(row, row, out_sharding=P()))(x))(on(X, "a"))


@row
def vmap_with_spmd_axis_name(jit):
    return jit(lambda x: jax.vmap(lambda row: row * 2, spmd_axis_name="a")(x))(on(X, "a"))


@row
def shard_map_infers_in_specs(jit):
    f = jax.shard_map(lambda x: lax.psum(x, "b"), out_specs=P("a", None))
    return jit(lambda x: f(x) + 1)(on(X, "a", "b"))


@row
def shard_map_with_specs(jit):
    f = jax.shard_map(lambda x: x * lax.axis_index("a"), in_specs=P("a", "b"), out_specs=P("a", "b"))
    return jit(lambda x: f(x) + 1)(on(X, "a", "b"))


@row
def shard_map_with_other_specs_is_an_error(jit):
    f = jax.shard_map(lambda x: x, in_specs=P("b"), out_specs=P("b"))
    return jit(f)(on(X, "a"))


@row
def a_nested_jit(jit):
    seen = Seen()
    inner = jax.jit(lambda x: seen(x) * 2)
    return jit(lambda x: inner(x).T)(on(X, "a", "b")), seen.types[0]


@row
def rematerialization(jit):
    f = jax.checkpoint(lambda w, x: jnp.tanh(x @ w).sum())
    return jit(jax.grad(f))(on(W, None, "b"), on(X, "a"))


@row
def custom_derivatives(jit):
    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    f.defvjp(lambda x: (f(x), x), lambda x, ct: (ct * jnp.cos(x) * 2,))
    return jit(lambda x: jax.grad(lambda x: f(x).sum())(x))(on(X, "a", "b"))


# Transformations from outside


@row
def a_gradient_from_outside(jit):
    f = jit(lambda w, x: (jnp.tanh(x @ w) ** 2).mean())
    return jax.value_and_grad(f, (0, 1))(on(W, None, "b"), on(X, "a"))


@row
def a_gradient_of_a_product_with_out_sharding(jit):
    f = jit(lambda w, x: jnp.einsum("ij,jk->ik", x, w, out_sharding=P("a")))
    return jax.grad(lambda w, x: (f(w, x) ** 2).sum(), (0, 1))(on(W, "b"), on(X, "a", "b"))


@row
def a_tangent_from_outside(jit):
    f = jit(lambda x: jnp.sin(x).T)
    return jax.jvp(f, (on(X, "a", "b"),), (on(X, "a", "b"),))


@row
def a_second_derivative(jit):
    f = jit(lambda x: (x**3).sum())
    return jax.jvp(jax.grad(f), (on(X, "a", "b"),), (on(X, "a", "b"),))


@row
def vmap_from_outside_of_what_is_unreduced(jit):
    f = jit(lambda x, w: jnp.dot(x, w, out_sharding=P("a", unreduced={"b"})))
    xs = on(np.stack([X, X + 1, X * 2]), None, "a", "b")
    return reshard(jax.vmap(f, (0, None))(xs, on(W, "b")), P(None, "a"))


@row
def vmap_from_outside(jit):
    return jax.vmap(jit(lambda x: jnp.sin(x) * 2))(on(X, "a", "b"))


@row
def an_outer_jit(jit):
    f = jit(lambda x: x.T * 2)
    return jax.jit(lambda x: f(x + 1) * 3)(on(X, "a", "b"))


@row
def an_outer_scan(jit):
    f = jit(jnp.sin)
    return jax.jit(lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0])(on(X, "a", "b"))


@row
def the_type_of_the_result_beforehand(jit):
    f = jit(lambda x, w: jnp.dot(x, w, out_sharding=P("a")))
    found = f.eval_shape(on(X, "a", "b"), on(W, "b"))
    return found.shape, found.dtype, found.sharding.spec


# What comes in and what goes out


@row
def arrays_on_no_mesh(jit):
    return jit(lambda x, y: x + y)(jnp.asarray(X), on(X, "a"))


@row
def in_shardings_are_types(jit):
    seen = Seen()
    mesh = jax.sharding.get_mesh()
    return jit(lambda x: seen(x) * 2, in_shardings=NamedSharding(mesh, P("a")))(X), seen.types[0]


@row
def out_shardings_are_kept(jit):
    mesh = jax.sharding.get_mesh()
    return jit(lambda x: x * 2, out_shardings=NamedSharding(mesh, P("b", None)))(on(X, "a"))


@row
def donated_arguments(jit):
    x = on(X, "a", "b")
    return jit(lambda x: x * 2, donate_argnums=0)(x), x.is_deleted()


@row
def keys_have_types(jit):
    keys = jax.random.split(jax.random.key(0), 8)
    return jax.random.key_data(jit(lambda k: k)(jax.device_put(keys, P("a"))))


# More of these together


@row
def values_go_through_many_types(jit):
    def f(x):
        for spec in (P(), P("a"), P("b"), P(("a", "b")), P(None, "a"), P("b", "a"), P(None, ("b", "a"))):
            x = reshard(x, spec) * 2
        return x

    return jit(f)(on(X, "a", "b"))


@row
def a_sum_that_is_unreduced_along_all_axes(jit):
    return jit(lambda x: reshard(jnp.einsum("ij->", x, out_sharding=P(unreduced={"a", "b"})), P()))(on(X, "a", "b"))


@row
def terms_are_scattered(jit):
    def f(x, w):
        return reshard(jnp.dot(x, w, out_sharding=P("a", unreduced={"b"})), P("a", "b"))

    return jit(f)(on(X, "a", "b"), on(W, "b"))


@row
def a_shard_map_returns_terms(jit):
    f = jax.shard_map(lambda x: x.sum(1, keepdims=True), out_specs=P("a", None, unreduced={"b"}))
    return jit(lambda x: reshard(f(x), P("a")))(on(X, "a", "b"))


@row
def gradients_of_terms_add_up_in_a_scan(jit):
    def f(x, w):
        w = reshard(w, P(None, None, reduced={"a"}))
        slope = jax.grad(lambda w: (jnp.dot(x, w) ** 2).sum())
        terms = jnp.zeros((16, 32), out_sharding=P(None, None, unreduced={"a"}))
        terms, _ = lax.scan(lambda acc, _: (acc + slope(w), None), terms, None, length=3)
        return reshard(terms, P("a", None)) / 100

    return jit(f)(on(X, "a"), on(W))


@row
def a_gradient_that_is_unreduced_outside(jit):
    def f(w, x):
        return jnp.dot(x, w).sum()

    w = reshard(on(W), P(None, None, reduced={"a"}))
    slope = jax.grad(jit(f))(w, on(X, "a"))
    return reshard(slope, P("a")), typed(slope)


@row
def gradients_of_lookups(jit):
    def f(w, at):
        return jax.grad(lambda w: (w.at[at].get(out_sharding=P("a", "b")) ** 2).sum())(w)

    return jit(f)(on(W, None, "b"), on(np.arange(8) % 5, "a"))


@row
def nested_jits_that_state_results(jit):
    mesh = jax.sharding.get_mesh()
    inner = jax.jit(lambda x: x * 2, out_shardings=NamedSharding(mesh, P("b")))
    return jit(lambda x: inner(x) + 1)(on(X, "a", "b"))


@row
def matrices_along_a_split_dimension(jit):
    x, w = on(np.stack([X] * 4), "a", None, "b"), on(np.stack([W] * 4), "a", "b")
    return jit(lambda x, w: jnp.einsum("bij,bjk->bik", x, w, out_sharding=P("a")))(x, w)


@row
def parts_of_a_function_on_auto_axes_and_back(jit):
    @partial(auto_axes, out_sharding=P("b", None))
    def auto(x):
        y = lax.with_sharding_constraint(x.T @ x, P("b"))
        return explicit_axes(lambda t: t * 2, in_sharding=P("a"))(y) + 1

    return jit(lambda x: auto(x) * 2)(on(X, "a", "b"))


# Programs


def trained(jit, specs, batch):
    """Two steps of gradient descent, of a network whose products say how their results lie."""
    rng = np.random.default_rng(0)
    params = {"up": rng.standard_normal((16, 32)) / 4, "down": rng.standard_normal((32, 16)) / 6}
    params = {k: on(v.astype(np.float32), *specs[k]) for k, v in params.items()}

    def loss(params, x):
        h = jax.nn.gelu(jnp.einsum("bi,ij->bj", x, params["up"], out_sharding=P(batch, specs["down"][0])))
        y = jnp.einsum("bj,ji->bi", h, params["down"], out_sharding=P(batch))
        return jnp.mean((y - x) ** 2)

    @partial(jit, donate_argnums=0)
    def step(params, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    x = on(X, batch)
    params, first = step(params, x)
    params, second = step(params, x)
    return params, first, second


@row
def a_training_step_with_split_weights(jit):
    return trained(jit, {"up": (None, "b"), "down": ("b", None)}, "a")


@row
def a_training_step_with_split_batch(jit):
    return trained(jit, {"up": (None, None), "down": (None, None)}, ("a", "b"))


def test_an_ambiguous_op_says_what_to_do(mesh):
    f = sdy.partition(jnp.matmul, mesh=mesh)
    with pytest.raises(Exception, match="Contracting dimensions are sharded") as caught:
        f(placed(mesh, X, None, "b"), placed(mesh, W, "b"))
    assert "auto_axes" in "".join(caught.value.__notes__)


@pytest.mark.dear(cases=20)
@pytest.mark.parametrize("name", TABLE)
def test_types_are_jits(name: str) -> None:
    assert_as_jit(TABLE[name], (2, 4), ("a", "b"), KINDS.get(name, (EXPLICIT, EXPLICIT)))


# What jit has nothing like: annotations, the mesh as an option, plans.


@pytest.fixture
def mesh():
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=(EXPLICIT, EXPLICIT))


def placed(mesh, array, *entries):
    return jax.device_put(array, NamedSharding(mesh, P(*entries)))


def test_annotations_are_statements_and_types(mesh):
    seen = Seen()

    @sdy.partition(mesh=mesh)
    def f(x):
        y = seen(sdy.reshard(x * 2, P("b")))
        z = seen(sdy.sharding_constraint(y + 1, '[{"b"}, {"a"}]'))
        return seen(sdy.sharding_constraint(z * 2, '[{"b", ?}, {?}]'))

    y = f(placed(mesh, X, "a"))
    assert [t for t, *_ in seen.types] == ["float32[8@b,16]", "float32[8@b,16@a]", "float32[8@b,16@a]"]
    assert str(jax.typeof(y)) == "float32[8@b,16@a]"
    np.testing.assert_allclose(y, (X * 2 + 1) * 2, rtol=1e-6)


ANNOTATED = {
    "an edge": (lambda x: sdy.data_flow_edge(lax.fori_loop(0, 3, lambda i, x: x * 2, x), P("a", "b")), X * 8),
    "a rule": (lambda x: sdy.with_sharding_rule(jnp.sin, "([i,j])->([i,j]) {i=8,j=16}")(x), np.sin(X)),
    "an op": (lambda x: sdy.custom_op(lambda b: b * 2, "([i,j])->([i,j]) {i=8,j=16}")(x), X * 2),
    "a name": (lambda x: sdy.named_computation("part")(jnp.sin)(x), np.sin(X)),
    "a barrier": (lambda x: sdy.propagation_barrier(x * 2, "NONE"), X * 2),
    "a group": (lambda x: sdy.shard_alike(x * 2, x + 1)[0], X * 2),
    "a collective": (lambda x: sdy.all_gather(sdy.reshard(x, P("a")), [["a"], []]), X),
    "a manual computation": (
        lambda x: sdy.manual_computation(lambda b: b * 2, in_shardings=P("a"), out_shardings=P("a"), manual_axes={"a"})(
            x
        ),
        X * 2,
    ),
}


@pytest.mark.parametrize("name", ANNOTATED)
def test_annotations_of_values_with_types(mesh, name):
    function, expected = ANNOTATED[name]
    with jax.set_mesh(mesh):
        run, x = sdy.partition(function), placed(mesh, X, "a")
        np.testing.assert_allclose(run(x), expected, rtol=1e-6)
        assert "shard_map" in run.plan(x).to_python()


def test_closed_over_arrays_have_types(mesh):
    with jax.set_mesh(mesh):
        x, w = placed(mesh, X, "a"), placed(mesh, W, None, "b")
        f = sdy.partition(lambda x: x @ w)
        assert str(jax.typeof(f(x))) == "float32[8@a,32@b]"
        gradient = jax.grad(lambda w: (sdy.partition(lambda x: x @ w)(x) ** 2).sum())(w)
    assert str(jax.typeof(gradient)) == "float32[16,32@b]"
    np.testing.assert_allclose(gradient, 2 * X.T @ (X @ W), rtol=1e-4, atol=1e-4)


def test_stated_results_have_the_stated_types(mesh):
    x = placed(mesh, X, "a")
    f = sdy.partition(lambda x: (x * 2, x + 1), mesh=mesh, out_shardings=(P(None, "b"), None))
    y, z = f(x)
    assert [str(jax.typeof(r)) for r in (y, z)] == ["float32[8,16@b]", "float32[8@a,16]"]
    assert [str(r.sharding.spec) for r in jax.tree.leaves(f.eval_shape(x))] == ["P(None, 'b')", "P('a', None)"]
    with jax.set_mesh(mesh):
        gradient = jax.grad(lambda x: (f(x)[0] ** 2).sum())(x)
    assert str(jax.typeof(gradient)) == "float32[8@a,16]"
    np.testing.assert_allclose(gradient, 8 * X, rtol=1e-6)


def test_terms_are_returned_only_in_a_type_that_says_so(mesh):
    f = sdy.partition(lambda x, w: x @ w, mesh=mesh, out_shardings='[{"a"}, {}], unreduced={"b"}')
    with pytest.raises(sdy.UnsupportedError, match=r"`result` is to be .*leave out unreduced="):
        f(X, W)
    y = f(placed(mesh, X, "a"), placed(mesh, W))
    assert jax.typeof(y).sharding.spec.unreduced == {"b"}
    np.testing.assert_allclose(reshard(y, NamedSharding(mesh, P("a"))), X @ W, rtol=1e-5, atol=1e-5)


def test_an_argument_that_is_moved_is_seen_as_stated(mesh):
    seen, x = Seen(), placed(mesh, X, "a")
    f = sdy.partition(lambda x: seen(x) * 2, mesh=mesh, in_shardings=P(None, "b"), on_unknown="ignore")
    y = f(x)
    assert seen.types[0][0] == "float32[8,16@b]" and str(jax.typeof(y)) == "float32[8,16@b]"
    with jax.set_mesh(mesh):
        gradient = jax.grad(lambda x: (f(x) ** 2).sum())(x)
    assert str(jax.typeof(gradient)) == "float32[8@a,16]"
    np.testing.assert_allclose(gradient, 8 * X, rtol=1e-6)


@pytest.mark.parametrize("kind", [None, AUTO, EXPLICIT])
def test_arrays_on_no_mesh_have_no_types(mesh, kind):
    """As under jit: so products need no `out_sharding`, whatever is stated of the arguments."""
    stated = {"in_shardings": (P("a", "b"), P("b")), "out_shardings": P("a")}
    f = sdy.partition(jnp.matmul, mesh=mesh, on_unknown="ignore", **stated)
    with nullcontext() if kind is None else jax.set_mesh(jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2)):
        for x in (X, jnp.asarray(X)):
            y = f(x, W)
            assert str(jax.typeof(y)) == "float32[8@a,32]"
            np.testing.assert_allclose(y, X @ W, rtol=1e-5, atol=1e-5)


def test_shardings_may_be_stated_of_what_is_made_of_such_arrays(mesh):
    def f(x, w):
        return jnp.einsum("ij,jk->ik", x, w, out_sharding=P("a")), jnp.zeros(8, out_sharding=P("b"))

    product, zeros = sdy.partition(f, mesh=mesh)(X, W)
    assert [str(jax.typeof(r)) for r in (product, zeros)] == ["float32[8@a,32]", "float32[8@b]"]
    np.testing.assert_allclose(product, X @ W, rtol=1e-5, atol=1e-5)


def test_a_partitioned_function_in_another_one(mesh):
    seen = Seen()
    inner = sdy.partition(lambda x: seen(jnp.sin(x)), mesh=mesh, in_shardings=P("b"), out_shardings=P(None, "a"))
    outer = sdy.partition(lambda x: inner(x) * 2, mesh=mesh)
    y = outer(placed(mesh, X, "a"))
    assert seen.types[0][0] == "float32[8@b,16]" and str(jax.typeof(y)) == "float32[8,16@a]"
    np.testing.assert_allclose(y, 2 * np.sin(X), rtol=1e-5)


@pytest.mark.parametrize("called", ["pure_callback", "inspected"])
def test_callbacks_where_no_context_has_the_mesh(mesh, called):
    """Types know no devices, which jax wants to know of functions that call the host."""
    found = []

    def f(x):
        if called == "inspected":
            jax.debug.inspect_array_sharding(x, callback=found.append)
            return x * 2
        return jax.pure_callback(lambda x: np.asarray(x) * 2, jax.ShapeDtypeStruct(X.shape, X.dtype), x)

    x = placed(mesh, X, "a")
    np.testing.assert_array_equal(sdy.partition(f, on_unknown="ignore")(x), 2 * X)
    assert [s.is_equivalent_to(x.sharding, 2) for s in found] == [True] * (called == "inspected")
