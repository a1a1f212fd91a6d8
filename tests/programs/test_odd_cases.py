"""Behaviours that JAX's own tests look for and few programs meet, a row each, next to jit's: callbacks in contexts,
derivatives of what is computed again, integers, layouts in memory under an outer jit, `compute_on`, names."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import io_callback
from jax.experimental.compute_on import compute_on
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

X = np.arange(128, dtype=np.float32).reshape(8, 16) / 16
JITS = (sdy.partition, jax.jit)
KINDS = [AxisType.Auto, AxisType.Explicit]
TABLE: dict[str, Callable[..., Any]] = {}


def row(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds a function of jit, a mesh and an array on it that is split along its first axis."""
    TABLE[function.__name__.replace("_", " ")] = function
    return function


def mesh_of(kind):
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2)


@contextlib.contextmanager
def with_mesh(mesh):
    """The deprecated context."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with mesh:
            yield


def called(jit, x, ordered):
    """What a callback with effects saw, and the result."""
    seen: list[Any] = []

    def note(x):
        seen.append(np.asarray(x).sum())
        return np.asarray(x) * 3

    def fun(x):
        for _ in range(2):
            x = io_callback(note, jax.typeof(x), x, ordered=ordered)
        return x + 1

    result = jit(fun)(x)
    jax.effects_barrier()
    return seen, result


@row
def ordered_callbacks_under_with_mesh(jit, mesh, x):
    with with_mesh(mesh):
        return called(jit, x, ordered=True)


@row
def callbacks_under_with_mesh(jit, mesh, x):
    with with_mesh(mesh):
        return called(jit, x, ordered=False)


@row
def callbacks_under_set_mesh(jit, mesh, x):
    with jax.set_mesh(mesh):
        return called(jit, x, ordered=True)


def again(x):
    return jax.checkpoint(lambda x: jnp.sin(jnp.sin(x) * 2))(x)


@row
def a_rematerialized_function_is_linearized(jit, mesh, x):
    y, push = jax.linearize(jit(again), x)
    return y, push(x)


@row
def a_linearization_is_jitted(jit, mesh, x):
    return jit(lambda x: jax.linearize(again, x)[1](x))(x)


@row
def a_gradient_with_respect_to_integers(jit, mesh, x):
    with jax.set_mesh(mesh):
        f = jit(lambda x, n: (x * n).sum())
        return jax.grad(f, (0, 1), allow_int=True)(x, np.arange(16))


@row
def cotangents_of_integers(jit, mesh, x):
    y, pull = jax.vjp(jit(lambda x, n: x * n * 2), x, np.int32(3))
    return y, pull(y)


@row
def derivatives_of_integers_inside(jit, mesh, x):
    with jax.set_mesh(mesh):
        return jit(jax.grad(lambda x, n: (x * n).sum(), (0, 1), allow_int=True))(x, np.arange(16))


@row
def donated_by_name_and_passed_by_keyword(jit, mesh, x):
    y = jit(lambda *, x, y: x + y, donate_argnames=("x",))(x=jnp.copy(x), y=x)
    return y, x.is_deleted()


@row
def a_type_made_of_an_array(jit, mesh, x):
    type_ = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    return jit(lambda x: x * 2).lower(type_).compile()(x), str(jit(jnp.sin).eval_shape(jax.typeof(x)))


@row
def an_exported_function_has_derivatives(jit, mesh, x):
    stated = NamedSharding(mesh, P("a"))
    f = jit(lambda x: jnp.sin(x) * 2, in_shardings=stated, out_shardings=stated)
    found = export.deserialize(export.export(f)(x).serialize(vjp_order=1))
    return found.vjp().in_shardings_hlo is not None, jax.vjp(found.call, x)[1](x)


@row
def shardings_of_exported_derivatives_where_nothing_is_stated(jit, mesh, x):
    found = export.export(jit(jnp.sin))(jax.ShapeDtypeStruct(x.shape, x.dtype)) if mesh_is_auto(mesh) else None
    return found is None or [sharding is None for sharding in found.vjp().in_shardings_hlo]


def mesh_is_auto(mesh):
    return mesh.axis_types[0] == AxisType.Auto


@row
def exported_under_an_abstract_mesh(jit, mesh, x):
    stated = NamedSharding(mesh.abstract_mesh, P("a"))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        found = export.export(jit(jnp.sin, in_shardings=stated))(jax.ShapeDtypeStruct(x.shape, x.dtype))
    return found.nr_devices, found.call(x) if mesh_is_auto(mesh) else None


@row
def names_of_functions_in_jaxprs(jit, mesh, x):
    def doubled(x):
        return x * 2

    traced = jit(doubled).trace(x)
    text = str(jax.make_jaxpr(lambda x: jit(doubled)(x))(x))
    return traced.fun_name, re.findall(r"name=(doubled)", text)[:1], "jit_doubled" in traced.lower().as_text()


@row
def named_calls_inside(jit, mesh, x):
    return jit(jax.named_call(lambda x: jnp.sin(x) * x, name="scores"))(x)


@row
def printed_values(jit, mesh, x):
    def fun(x):
        jax.debug.print("sum {s:.1f}", s=x.sum())
        jax.debug.callback(lambda s: None, x.sum())
        return x

    return jit(fun)(x)


# Computed on the host. Its ops run there on accelerators; on CPUs they are those of the program.


@row
def an_op_on_the_host(jit, mesh, x):
    def fun(x):
        with compute_on("device_host"):
            y = jnp.sin(x)
        return y * 2

    return jit(fun)(x)


@row
def a_function_on_the_host(jit, mesh, x):
    @compute_on("device_host")
    @jax.jit
    def on_host(x):
        return jnp.sin(x).sum(1)

    return jit(lambda x: on_host(x) + 1)(x), jit(jax.grad(lambda x: on_host(x).sum()))(x)


@row
def a_loop_with_ops_on_the_host(jit, mesh, x):
    def step(carry, row):
        with compute_on("device_host"):
            row = row * 2
        return carry + row, row

    return jit(lambda x: jax.lax.scan(step, jnp.zeros_like(x[:, 0]), x.T))(x)


# Layouts in memory, under an outer jit.


def stated(mesh, layout):
    return Format(layout, NamedSharding(mesh, P("a")))


COLUMNS = Layout((1, 0))


def with_layouts(name: str, use: Callable[..., Any]) -> None:
    def of_both(jit: Any, mesh: Any, x: Any) -> Any:
        result = use(jit, partial(stated, mesh), x)
        return result, [getattr(leaf.format.layout, "major_to_minor", None) for leaf in jax.tree.leaves(result)]

    TABLE[f"layouts: {name}"] = of_both


def double(x):
    return x * 2


with_layouts("stated of an argument", lambda jit, f, x: jax.jit(lambda x: jit(double, in_shardings=f(COLUMNS))(x))(x))
with_layouts("stated of a result", lambda jit, f, x: jax.jit(lambda x: jit(double, out_shardings=f(COLUMNS))(x))(x))
with_layouts("of the array", lambda jit, f, x: jit(double)(jax.device_put(x, f(COLUMNS))))
with_layouts(
    "of the outer function",
    lambda jit, f, x: jax.jit(lambda x: jit(double)(x), in_shardings=f(COLUMNS), out_shardings=f(COLUMNS))(
        jax.device_put(x, f(COLUMNS))
    ),
)
with_layouts(
    "the compiler's, of the result",
    lambda jit, f, x: jax.jit(lambda x: jit(double, out_shardings=f(Layout.AUTO))(x))(x),
)
with_layouts(
    "the compiler's, outside",
    lambda jit, f, x: (
        jax.jit(lambda x: jit(double)(x), in_shardings=f(Layout.AUTO), out_shardings=f(Layout.AUTO))
        .lower(jax.ShapeDtypeStruct(x.shape, x.dtype))
        .compile()(x)
    ),
)
with_layouts(
    "of another order than is stated",
    lambda jit, f, x: jit(double, in_shardings=f(COLUMNS))(jax.device_put(x, f(None))),
)
with_layouts("the compiler's for an array", lambda jit, f, x: jit(double, in_shardings=f(Layout.AUTO))(x))


def outcome(name, jit, kind):
    mesh = mesh_of(kind)
    x = jax.device_put(X, NamedSharding(mesh, P("a")))
    try:
        return TABLE[name](partial(partitioned, mesh=mesh) if jit is sdy.partition else jit, mesh, x)
    except Exception as error:
        return error


def partitioned(fun, mesh, **options):
    return sdy.partition(fun, mesh=mesh, **options)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", TABLE)
@pytest.mark.filterwarnings("ignore::sdy_jax.PartitionWarning", "ignore:Some donated buffers")
def test_as_jit(name, kind):
    ours, theirs = (outcome(name, jit, kind) for jit in JITS)
    if isinstance(theirs, Exception):
        kinds = [kind for kind in type(theirs).__mro__ if kind.__module__ == "builtins"]
        assert isinstance(ours, kinds[0]), (theirs, ours)
        return
    if isinstance(ours, Exception):
        raise ours
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        if not isinstance(b, (jax.Array, np.ndarray)):
            assert a == b
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if b.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)
