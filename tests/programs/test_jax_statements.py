"""What JAX's documentation says of explicit sharding, statement by statement, with `jax.jit` and `sdy.partition`.

Each row has the statement in short, and where it is said: a page of the documentation and its section, or the notes of
a release. What it returns (values, types, shardings, text) or raises has to be the same on both sides, and where the
page says what comes out, the row asserts that as well. The mesh is `X` of size 4 and `Y` of size 2, Explicit unless a
row says otherwise.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_jit import Seen, assert_as_jit
from jax import lax
from jax.sharding import AxisType, auto_axes, explicit_axes
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.plan.profile import collectives_in_hlo

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
Jit = Callable[..., Any]

SHARDING = "docs/201/sharding"
"""Distributed arrays and automatic parallelization"""
AUTODIFF = "docs/301/sharding-ad"
"""Autodiff and sharding"""
TYPES = "docs/notebooks/explicit-sharding"
"""Explicit sharding (a.k.a. "sharding in types")"""
MANUAL = "docs/201/shard-map"
"""Manual parallelism with shard_map"""


class Statement(NamedTuple):
    said: str
    where: str
    types: tuple[AxisType, AxisType]
    run: Callable[[Jit], Any]


TABLE: list[Statement] = []


def states(said: str, where: str, *types: AxisType) -> Callable[[Callable[[Jit], Any]], Callable[[Jit], Any]]:
    """Adds a statement, and the program that shows it."""

    def add(run: Callable[[Jit], Any]) -> Callable[[Jit], Any]:
        TABLE.append(Statement(said, where, types or (EXPLICIT, EXPLICIT), run))  # type: ignore[arg-type]
        return run

    return add


def on(array: Any, *entries: Any, **kinds: Any) -> jax.Array:
    return jax.device_put(array, P(*entries, **kinds))


def typed(*xs: Any) -> tuple[str, ...]:
    return tuple(str(jax.typeof(x)) for x in xs)


def floats(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) / 8


# Distributed arrays and automatic parallelization: meshes.


@states("Ops are partitioned as types say: sin of f32[8@X,4@Y], transposed, is f32[4@Y,8@X].", f"{SHARDING}: beginning")
def _(jit):
    y = jit(lambda x: jnp.sin(x).T)(on(floats(8, 4), "X", "Y"))
    assert typed(y) == ("float32[4@Y,8@X]",)
    return y


@states("make_mesh makes Explicit axes.", f"{SHARDING}: A Mesh is a grid of devices")
def _(jit):
    mesh = jax.make_mesh((4, 2), ("X", "Y"))
    seen = Seen()
    with jax.set_mesh(mesh):
        y = jit(seen)(on(floats(8), "X"))
    assert mesh.axis_types == (EXPLICIT, EXPLICIT) == seen.types[0][2]
    return y, seen.types


@states("Mesh(...) makes Auto axes, for reasons of history.", f"{SHARDING}: A Mesh is a grid of devices")
def _(jit):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("X", "Y"))
    seen = Seen()
    with jax.set_mesh(mesh):
        jit(lambda x: seen(x) * 2)(on(floats(8), "X"))
    assert seen.types[0][0] == "float32[8]"
    return [t for t, *_ in seen.types], mesh.axis_types


@states("set_mesh sets a mesh for all, or for a context.", f"{SHARDING}: A Mesh is a grid of devices")
def _(jit):
    before = jax.sharding.get_mesh()
    other = jax.make_mesh((8,), ("A",))
    f = jit(lambda x: x * 2)
    with jax.set_mesh(other):
        inside = f(on(floats(8), "A"))
    return inside, f(on(floats(8), "X")), jax.sharding.get_mesh() == before


@states("Under jit only the abstract mesh can be asked for.", f"{SHARDING}: A Mesh is a grid of devices")
def _(jit):
    found = []
    jit(lambda x: found.append(jax.sharding.get_abstract_mesh()) or x)(on(floats(8), "X"))
    return found[0].axis_names, found[0].axis_sizes, found[0].axis_types


@states("Under jit the concrete mesh cannot be asked for.", f"{SHARDING}: A Mesh is a grid of devices")
def _(jit):
    return jit(lambda x: x * jax.sharding.get_mesh().size)(on(floats(8), "X"))


@states("use_abstract_mesh changes names and sizes inside of a jit.", f"{SHARDING}: A Mesh is a grid of devices")
def _(jit):
    @jit
    def f(x):
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((8,), ("A",), (EXPLICIT,))):
            return jax.sharding.reshard(x, P("A", None)) * 2

    z = f(on(floats(8, 4), "X", "Y"))
    assert typed(z) == ("float32[8@A,4]",)
    return z


@states("The total size of the mesh must not change.", f"{SHARDING}: A Mesh is a grid of devices")
def _(jit):
    @jit
    def f(x):
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((4,), ("A",), (EXPLICIT,))):
            return x * 2

    return f(on(floats(8, 4), "X", "Y"))


# Shardings.


@states("Axes that a spec does not name are replicated along.", f"{SHARDING}: A Sharding describes")
def _(jit):
    y = jit(lambda x: jax.sharding.reshard(x, P("X", None)))(on(floats(8, 4), "X", "Y"))
    return y, [shard.data.tolist() for shard in y.addressable_shards]


@states("Trailing Nones may be left out.", f"{SHARDING}: A Sharding describes")
def _(jit):
    f = jit(lambda x: (jax.sharding.reshard(x, P("X")), jax.sharding.reshard(x, P("X", None))))
    return f(on(floats(8, 4)))


@states("One dimension may be split over several axes.", f"{SHARDING}: A Sharding describes")
def _(jit):
    y = jit(lambda x: jax.sharding.reshard(x, P(("X", "Y"))))(on(floats(8, 4), "X", "Y"))
    assert typed(y) == ("float32[8@(X,Y),4]",)
    return y


@states("reshard works alike at the top level and under jit.", f"{SHARDING}: A Sharding describes")
def _(jit):
    x = on(floats(8, 4), "X", "Y")
    outside, inside = jax.sharding.reshard(x, P("Y", "X")), jit(lambda x: jax.sharding.reshard(x, P("Y", "X")))(x)
    assert typed(outside) == typed(inside) and outside.sharding == inside.sharding
    return inside


@states("An unreduced array's value is the sum of its shards.", f"{SHARDING}: A Sharding describes")
def _(jit):
    y = jax.sharding.reshard(on(floats(8, 4), "X"), P("X", None, unreduced={"Y"}))
    return jit(lambda y: jax.sharding.reshard(y, P("X")))(y), typed(y)


@states("Arrays may be on different meshes.", f"{SHARDING}: A Sharding describes")
def _(jit):
    other = jax.make_mesh((8,), ("A",))
    z = jax.device_put(floats(8, 4), jax.NamedSharding(other, P("A")))
    f = jit(lambda x: x * 2)
    with jax.set_mesh(other):
        return f(z)


# Explicit mode.


@states("Types have shardings under jit.", f"{SHARDING}: Explicit sharding mode")
def _(jit):
    seen = Seen()
    jit(lambda x: seen(x) * 2)(on(floats(8, 4), "X", "Y"))
    assert seen.types[0][1] == P("X", "Y")
    return seen.types


@states("Types name Explicit axes only, each at most once.", f"{SHARDING}: Explicit sharding mode", EXPLICIT, AUTO)
def _(jit):
    seen = Seen()
    y = jit(lambda x: seen(x) * 2)(on(floats(8, 4), "X", "Y"))
    assert seen.types[0][0] == "float32[8@X,4]"
    return seen.types, np.asarray(y)


@states("f32[4@X,1] + f32[1,8@Y] is f32[4@X,8@Y].", f"{SHARDING}: Explicit sharding mode")
def _(jit):
    seen = Seen()
    z = jit(lambda x, y: seen(seen(x) + seen(y)))(on(floats(4, 1), "X", None), on(floats(1, 8), None, "Y"))
    assert typed(z) == ("float32[4@X,8@Y]",)
    return z, seen.types


@states("jax.random takes out_sharding.", f"{SHARDING}: Explicit sharding mode")
def _(jit):
    y = jit(lambda: jax.random.normal(jax.random.key(0), (8, 4), out_sharding=P("X", "Y")))()
    assert typed(y) == ("float32[8@X,4@Y]",)
    return y


@states("Collectives are inserted for a sum over a split dimension.", f"{SHARDING}: Explicit sharding mode")
def _(jit):
    x, f = on(floats(8, 4), "X", "Y"), jit(lambda x: x.sum(0))
    kinds = {c.kind for c in collectives_in_hlo(f.lower(x).compile().as_text())}
    return f(x), kinds == {"all-reduce"}


# Rules, and errors.


@states("What is made of nothing is whole unless out_sharding says otherwise.", f"{SHARDING}: Result shardings")
def _(jit):
    return jit(lambda: (jnp.zeros(8), jnp.arange(8), jnp.zeros(8, out_sharding=P("X")), jnp.ones((4, 2))))()


@states("nullary ops: full, arange, eye-like ones take out_sharding.", f"{SHARDING}: Result shardings")
def _(jit):
    spec = P("X")
    return jit(lambda: (jnp.full(8, 3.0, out_sharding=spec), jnp.arange(8.0, out_sharding=spec)))()


@states("Unary element-wise ops keep shardings.", f"{SHARDING}: Result shardings")
def _(jit):
    seen = Seen()
    y = jit(lambda x: seen(jnp.exp(seen(jnp.sin(x)))))(on(floats(8, 4), "X", "Y"))
    return y, seen.types


@states("Zipped dimensions must match, or be None.", f"{SHARDING}: Result shardings")
def _(jit):
    return jit(lambda x, y: x + y)(on(floats(8, 4), "X"), on(floats(8, 4)))


@states("Zipped dimensions that do not match are an error.", f"{SHARDING}: Result shardings")
def _(jit):
    return jit(lambda x, y: x + y)(on(floats(8, 4), "X"), on(floats(8, 4), "Y"))


@states("A result that names an axis twice is an error.", f"{SHARDING}: Result shardings")
def _(jit):
    return jit(lambda x, y: x + y)(on(floats(4, 4), "X", None), on(floats(4, 4), None, "X"))


@states("A contraction over dimensions split alike is an error.", f"{SHARDING}: Result shardings")
def _(jit):
    return jit(jnp.dot)(on(floats(8, 4), None, "X"), on(floats(4, 16), "X", None))


@states("f32[8,16]: an all-reduce.", f"{SHARDING}: Result shardings")
def _(jit):
    return jit(partial(jnp.dot, out_sharding=P()))(on(floats(8, 4), None, "X"), on(floats(4, 16), "X", None))


@states("f32[8@X,16]: a reduce-scatter on the first dimension.", f"{SHARDING}: Result shardings")
def _(jit):
    z = jit(partial(jnp.dot, out_sharding=P("X", None)))(on(floats(8, 4), None, "X"), on(floats(4, 16), "X", None))
    assert typed(z) == ("float32[8@X,16]",)
    return z


@states("f32[8,16@X]: a reduce-scatter on the second dimension.", f"{SHARDING}: Result shardings")
def _(jit):
    return jit(partial(jnp.dot, out_sharding=P(None, "X")))(on(floats(8, 4), None, "X"), on(floats(4, 16), "X"))


@states("f32[8,16]{U:X}: no communication.", f"{SHARDING}: Result shardings")
def _(jit):
    f = jit(partial(jnp.dot, out_sharding=P(None, None, unreduced={"X"})))
    x, y = on(floats(8, 4), None, "X"), on(floats(4, 16), "X")
    z = f(x, y)
    assert typed(z) == ("float32[8,16]{U:X}",)
    return jax.sharding.reshard(z, P()), typed(z), collectives_in_hlo(f.lower(x, y).compile().as_text()) == []


@states("A contraction of which one side is split gathers by itself.", f"{SHARDING}: Result shardings")
def _(jit):
    z = jit(jnp.dot)(on(floats(8, 4)), on(floats(4, 16), "X", None))
    assert typed(z) == ("float32[8,16]",)
    return z


# auto_axes, Auto mode, explicit_axes.


@states("auto_axes adds out_sharding to a function.", f"{SHARDING}: With @auto_axes the compiler chooses")
def _(jit):
    add, found = auto_axes(lambda x, y: found.append(jax.sharding.get_abstract_mesh().axis_types) or x + y), []
    f = jit(lambda x, y: add(x, y, out_sharding=P("X", None)))
    z = f(on(floats(4, 4), "X", None), on(floats(4, 4), None, "X"))
    assert found == [(AUTO, AUTO)] and typed(z) == ("float32[4@X,4]",)
    return z


@states("auto_axes(out_sharding=) says it where the function is.", f"{SHARDING}: With @auto_axes the compiler chooses")
def _(jit):
    add = auto_axes(lambda x, y: x + y, out_sharding=P("X", None))
    return jit(lambda x, y: add(x, y))(on(floats(4, 4), "X", None), on(floats(4, 4), None, "X"))


@states("auto_axes(axes=) switches some axes.", f"{SHARDING}: With @auto_axes the compiler chooses")
def _(jit):
    seen = Seen()
    g = auto_axes(lambda y: seen(y) * 2, axes="X")
    z = jit(lambda x: g(jnp.sin(x), out_sharding=P("X", "Y")) + 1)(on(floats(4, 4), "X", "Y"))
    assert seen.types[0][0] == "float32[4,4@Y]"
    return z, seen.types


@states("Without out_sharding auto_axes is an error.", f"{SHARDING}: With @auto_axes the compiler chooses")
def _(jit):
    return jit(lambda x: auto_axes(lambda x: x * 2)(x))(on(floats(8), "X"))


@states("On Auto axes a contraction is no error.", f"{SHARDING}: Auto sharding mode", AUTO, AUTO)
def _(jit):
    return np.asarray(jit(jnp.dot)(on(floats(8, 4), None, "X"), on(floats(4, 16), "X")))


@states("with_sharding_constraint states how a value lies.", f"{SHARDING}: Auto sharding mode", AUTO, AUTO)
def _(jit):
    f = jit(lambda x, y: lax.with_sharding_constraint(jnp.dot(x, y), P("X", None)))
    z = f(on(floats(8, 4), None, "X"), on(floats(4, 16), "X"))
    assert z.sharding.is_equivalent_to(jax.NamedSharding(jax.sharding.get_mesh(), P("X", None)), 2)
    return np.asarray(z)


@states("On Explicit axes with_sharding_constraint asserts.", f"{SHARDING}: Auto sharding mode")
def _(jit):
    return jit(lambda x: lax.with_sharding_constraint(x, P("X", "Y")))(on(floats(8, 4), "X", "Y"))


@states("On Explicit axes another constraint is an error.", f"{SHARDING}: Auto sharding mode")
def _(jit):
    return jit(lambda x: lax.with_sharding_constraint(x, P("Y")))(on(floats(8, 4), "X", "Y"))


@states("explicit_axes shows types on Auto axes.", f"{SHARDING}: Auto sharding mode", AUTO, AUTO)
def _(jit):
    seen = Seen()
    g = explicit_axes(lambda y: seen(seen(y) * 2))
    z = jit(lambda x: g(jnp.sin(x), in_sharding=P("X", "Y")) + 1)(on(floats(4, 4), "X", "Y"))
    assert [t for t, *_ in seen.types] == ["float32[4@X,4@Y]"] * 2
    return np.asarray(z), seen.types


@states("Arrays' shardings name Auto axes as well.", f"{SHARDING}: Concrete array shardings", EXPLICIT, AUTO)
def _(jit):
    y = jit(jnp.sin)(on(floats(8, 4), "X", "Y"))
    assert typed(y) == ("float32[8@X,4]",) and y.sharding.spec[0] == "X"
    return np.asarray(y), typed(y)


@states("shard_map makes axes Manual, and infers in_specs.", f"{SHARDING}: Manual mode")
def _(jit):
    @jax.shard_map(out_specs=P("X", None))
    def product(x, y):
        return lax.psum_scatter(jnp.dot(x, y), "X", tiled=True)

    x, y = on(floats(8, 4), None, "X"), on(floats(4, 16), "X", None)
    z = jit(product)(x, y)
    np.testing.assert_allclose(z, jnp.dot(x, y, out_sharding=P("X", None)))
    return z


# Explicit sharding, the notebook: what is not above.


@states("numpy arrays and numbers have types without shardings.", f"{TYPES}: Setting up an explicit mesh")
def _(jit):
    seen = Seen()
    jit(lambda x, y: seen(seen(x) + seen(y)))(np.arange(8), 3)
    return [t for t, *_ in seen.types]


@states("The consensus of dimensions is None if all are.", f"{TYPES}: Sharding rules")
def _(jit):
    return jit(lambda x, y: jnp.concatenate([x, y], 1))(on(floats(8, 4)), on(floats(8, 4)))


@states("Reshape: a split or merge of whole dimensions keeps the others.", f"{TYPES}: Sharding rules")
def _(jit):
    f = jit(lambda x: (x.reshape(8, 2, 3, 4), x.reshape(8, 24), x.reshape(1, 8, 6, 1, 4)))
    return f(on(floats(8, 6, 4), "X"))


@states("Reshape: a merge of split dimensions is an error.", f"{TYPES}: Sharding rules")
def _(jit):
    return jit(lambda x: x.reshape(32))(on(floats(8, 4), "X", "Y"))


@states("Reshape: something else than a split or a merge is an error.", f"{TYPES}: Sharding rules")
def _(jit):
    return jit(lambda x: x.reshape(4, 8))(on(floats(8, 4), "X"))


@states("Reshape takes out_sharding.", f"{TYPES}: Sharding rules")
def _(jit):
    return jit(lambda x: jnp.reshape(x, (32,), out_sharding=P("Y")))(on(floats(8, 4), "X", "Y"))


@states("Both branches of a cond have the same shardings.", f"{TYPES}: JAX transformations")
def _(jit):
    f = jit(lambda x: lax.cond(x.sum() > 0, lambda x: x * 2, lambda x: x + 1, x))
    return f(on(floats(8, 4), "X"))


@states("Branches with other shardings are an error.", f"{TYPES}: JAX transformations")
def _(jit):
    f = jit(lambda x: lax.cond(True, lambda x: x, lambda x: jax.sharding.reshard(x, P("Y")), x))
    return f(on(floats(8, 4), "X"))


@states("The carry of a scan keeps its sharding.", f"{TYPES}: JAX transformations")
def _(jit):
    return jit(lambda x: lax.scan(lambda c, y: (c + y, c), x[0], x))(on(floats(3, 8), None, "X"))


@states("A carry with another sharding is an error.", f"{TYPES}: JAX transformations")
def _(jit):
    f = jit(lambda x: lax.scan(lambda c, _: (jax.sharding.reshard(c, P("Y")), None), x, None, length=2)[0])
    return f(on(floats(8), "X"))


@states("The length that a scan runs over is whole.", f"{TYPES}: JAX transformations")
def _(jit):
    return jit(lambda x: lax.scan(lambda c, y: (c + y, None), jnp.zeros(4), x)[0])(on(floats(8, 4), "X"))


@states("make_jaxpr takes types with shardings.", f"{TYPES}: JAX transformations")
def _(jit):
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=jax.NamedSharding(jax.sharding.get_mesh(), P("X")))
    (found,) = jit(jnp.sin).trace(x).jaxpr.out_avals
    return str(found)


@states("Tangents are sharded as primals are.", f"{TYPES}: JAX transformations")
def _(jit):
    seen = Seen()
    f = jit(lambda x, t: jax.jvp(lambda x: seen(jnp.sin(x)), (x,), (t,)))
    return f(on(floats(8, 4), "X", "Y"), on(floats(8, 4), "X", "Y"))


@states("vmap infers the sharding of its dimension.", f"{TYPES}: JAX transformations")
def _(jit):
    seen = Seen()
    y = jit(jax.vmap(lambda x: seen(jnp.sin(x) * 2)))(on(floats(8, 4), "X", "Y"))
    return y, [t for t, *_ in seen.types]


@states("vmapped arguments have to agree.", f"{TYPES}: JAX transformations")
def _(jit):
    return jit(jax.vmap(jnp.add))(on(floats(8, 4), "X"), on(floats(8, 4), "Y"))


@states("A vmap along a mesh axis is named by spmd_axis_name.", f"{TYPES}: JAX transformations")
def _(jit):
    def f(x, w):
        return jnp.dot(x, w, out_sharding=P("Y"))

    return jit(jax.vmap(f, (0, None), spmd_axis_name="X"))(on(floats(8, 4, 4), "X", "Y"), on(floats(4, 2)))


@states("A vmap over nothing takes axis_size.", f"{TYPES}: JAX transformations")
def _(jit):
    return jit(lambda: jax.vmap(lambda: jnp.ones(4), axis_size=8)())()


@states("Lookups take out_sharding where they are ambiguous.", f"{TYPES}: Working around unimplemented sharding rules")
def _(jit):
    f = jit(lambda table, i: table.at[i].get(out_sharding=P("X")))
    return f(on(floats(16, 4)), on(np.arange(8) % 5, "X"))


@states("auto_axes is a way around an op without a rule.", f"{TYPES}: Working around unimplemented sharding rules")
def _(jit):
    put = auto_axes(lambda x, i, y: x.at[i].set(y))
    f = jit(lambda x, i, y: put(x, i, y, out_sharding=P("X")))
    return f(on(floats(8, 4), "X"), on(np.arange(2)), on(floats(2, 4)))


# Autodiff and sharding.


def sums(text: str) -> int:
    """The number of reductions in a compiled program: whole ones, and those that are scattered, and maybe gathered."""
    return sum(c.kind in ("all-reduce", "reduce-scatter") for c in collectives_in_hlo(text))


def loss(w, x):
    return jnp.sum((x @ w) ** 2)


@states("Gradients are sharded as what they are of.", f"{AUTODIFF}: Cotangent shardings")
def _(jit):
    w, x = on(floats(4, 2)), on(floats(8, 4), "X", None)
    dw, dx = jit(jax.grad(loss, (0, 1)))(w, x)
    assert typed(dw, dx) == ("float32[4,2]", "float32[8@X,4]")
    return dw, dx


@states("So is each value of the backward pass.", f"{AUTODIFF}: Cotangent shardings")
def _(jit):
    seen = []

    @jax.custom_vjp
    def spied(x):
        return x

    spied.defvjp(lambda x: (x, None), lambda _, g: (seen.append(str(jax.typeof(g))) or g,))
    slope = jit(jax.grad(lambda w, x: jnp.sum(spied(x @ spied(w)) ** 2)))(on(floats(4, 2)), on(floats(8, 4), "X"))
    return slope, seen


@states("A replicated weight's gradient is all-reduced.", f"{AUTODIFF}: Where backward-pass communication comes from")
def _(jit):
    w, x = on(floats(4, 2)), on(floats(8, 4), "X", None)
    f = jit(jax.grad(loss))
    return f(w, x), sums(f.lower(w, x).compile().as_text())


def halves() -> tuple[jax.Array, jax.Array]:
    return on(floats(4, 4), None, "X"), on(floats(4, 4) + 1, "X", None)


def terms(jit: Jit, *factors: float) -> Any:
    """Unreduced products, of one call."""
    spec = P(None, None, unreduced={"X"})
    a, b = halves()
    return jit(lambda a, b: [jnp.einsum("ij,jk->ik", a * s, b, out_sharding=spec) for s in factors])(a, b)


@states("An unreduced array is reduced by reshard.", f"{AUTODIFF}: Unreduced")
def _(jit):
    (c,) = terms(jit, 1.0)
    assert typed(c) == ("float32[4,4]{U:X}",)
    return jit(lambda c: jax.sharding.reshard(c, P(None, None)))(c), typed(c)


@states("Unreduced arrays add up without communication.", f"{AUTODIFF}: Unreduced")
def _(jit):
    c, d = terms(jit, 1.0, 2.0)
    f = jit(lambda c, d: c + d)
    silent = collectives_in_hlo(f.lower(c, d).compile().as_text()) == []
    return jax.sharding.reshard(f(c, d), P()), typed(f(c, d)), silent


@states("Ops that are not linear refuse unreduced arrays.", f"{AUTODIFF}: Unreduced")
def _(jit):
    return jit(jnp.cos)(terms(jit, 1.0)[0])


@states("Two products, summed unreduced, take one all-reduce.", f"{AUTODIFF}: Unreduced")
def _(jit):
    def f(a, b):
        one, two = (jnp.einsum("ij,jk->ik", s * a, b, out_sharding=P(unreduced={"X"})) for s in (1, 2))
        return jax.sharding.reshard(one + two, P())

    a, b = halves()
    text = jit(f).lower(a, b).compile().as_text()
    return jit(f)(a, b), len(collectives_in_hlo(text)) == 1


@states("reshard to reduced moves nothing.", f"{AUTODIFF}: Reduced")
def _(jit):
    f = jit(lambda w: jax.sharding.reshard(w, P(None, None, reduced={"X"})))
    w = on(floats(4, 2))
    y = f(w)
    assert typed(y) == ("float32[4,2]{R:X}",)
    return y, collectives_in_hlo(f.lower(w).compile().as_text()) == []


@states("Reduced primals have unreduced cotangents.", f"{AUTODIFF}: Reduced")
def _(jit):
    w = jax.sharding.reshard(on(floats(4, 2)), P(None, None, reduced={"X"}))
    slope = jit(jax.grad(loss))(w, on(floats(8, 4), "X"))
    assert typed(slope) == ("float32[4,2]{U:X}",)
    return jax.sharding.reshard(slope, P()), typed(slope)


@states("The cast's transpose is the all-reduce.", f"{AUTODIFF}: Reduced")
def _(jit):
    def cast_first(w, x):
        return loss(jax.sharding.reshard(w, P(None, None, reduced={"X"})), x)

    w, x = on(floats(4, 2)), on(floats(8, 4), "X")
    return jit(jax.grad(cast_first))(w, x)


@states("A weight that is used twice is reduced once.", f"{AUTODIFF}: Reduced")
def _(jit):
    def twice(w, x, y):
        w = jax.sharding.reshard(w, P(None, None, reduced={"X"}))
        return jnp.sum(x @ w) + jnp.sum(jnp.sin(y @ w))

    args = on(floats(4, 2)), on(floats(8, 4), "X"), on(floats(8, 4) + 1, "X")
    f = jit(jax.grad(twice))
    return f(*args), sums(f.lower(*args).compile().as_text())


def predict(layers, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0]


@states("Microbatches: gradients add up unreduced, one all-reduce per step.", f"{AUTODIFF}: Example")
def _(jit):
    @jit
    def step(layers, batches):
        def one(total, x):
            slopes = jax.grad(lambda layers: jnp.sum(predict(layers, x) ** 2))(layers)
            assert jax.typeof(slopes).sharding.spec.unreduced == {"X"}
            return total + slopes, None

        total = jax.sharding.reshard(jnp.zeros_like(layers), P(unreduced={"X"}))
        total, _ = lax.scan(one, total, batches)
        return jax.sharding.reshard(layers, P()) - 0.01 * jax.sharding.reshard(total, P())

    layers = on(np.stack([np.eye(4, dtype=np.float32) / 2] * 3), reduced={"X"})
    batches = on(floats(5, 8, 4) / 20, None, "X", None)
    assert len(collectives_in_hlo(step.lower(layers, batches).compile().as_text())) == 1
    return step(layers, batches)


@states("With replicated weights gradients are replicated.", f"{AUTODIFF}: Example")
def _(jit):
    def step(layers, x):
        return layers - 0.01 * jax.grad(lambda layers: jnp.sum(predict(layers, x) ** 2))(layers)

    return jit(step)(on(np.stack([np.eye(4, dtype=np.float32) / 2] * 3)), on(floats(8, 4) / 20, "X"))


@states("A shard_map's partial sums are unreduced outside.", f"{AUTODIFF}: Manual mode")
def _(jit):
    @jax.shard_map(in_specs=(P(None, "X"), P("X", None)), out_specs=P(None, None, unreduced={"X"}))
    def partial_product(a, b):
        return lax.pcast(a @ b, "X", to="unreduced")

    c = jit(partial_product)(*halves())
    assert typed(c) == ("float32[4,4]{U:X}",)
    return jax.sharding.reshard(c, P()), typed(c)


@states("Its backward pass communicates outside only.", f"{AUTODIFF}: Manual mode")
def _(jit):
    @jax.shard_map(in_specs=(P(None, "X"), P("X", None)), out_specs=P(None, None, unreduced={"X"}))
    def partial_product(a, b):
        return lax.pcast(a @ b, "X", to="unreduced")

    def total(a, b):
        return jnp.sum(jnp.sin(jax.sharding.reshard(partial_product(a, b), P(None, None))))

    return jit(jax.grad(total, (0, 1)))(*halves())


@states("Reduced weights of a shard_map have unreduced gradients.", f"{AUTODIFF}: Manual mode")
def _(jit):
    @jax.shard_map(in_specs=(P("X", None), P(None, None, reduced={"X"})), out_specs=P("X", None))
    def layer(x, w):
        return jnp.tanh(x @ w)

    w = jax.sharding.reshard(on(floats(4, 2)), P(None, None, reduced={"X"}))
    slope = jit(jax.grad(lambda w, x: jnp.sum(layer(x, w) ** 2)))(w, on(floats(8, 4), "X"))
    return jax.sharding.reshard(slope, P()), typed(slope)


# Manual parallelism: what it says of types.


@states("A shard_map computes what out_sharding= computes.", f"{MANUAL}: So, let's see a shard_map")
def _(jit):
    @jax.shard_map(in_specs=(P("X", "Y"), P("Y", None)), out_specs=P("X", None))
    def product(a, b):
        return lax.psum(a @ b, "Y")

    a, b = on(floats(8, 16), "X", "Y"), on(floats(16, 4), "Y", None)
    c = jit(product)(a, b)
    np.testing.assert_allclose(c, jnp.dot(a, b, out_sharding=P("X", None)), rtol=1e-5)
    return c


@states("What out_specs do not name is taken from one block.", f"{MANUAL}: Controlling how each output is assembled")
def _(jit):
    f = jax.shard_map(lambda x: lax.psum(x, "X"), in_specs=P("X", "Y"), out_specs=P(None, "Y"))
    return jit(f)(on(floats(12, 12), "X", "Y"))


@states("Types inside say along which axes values vary.", f"{MANUAL}: Tracking how values vary")
def _(jit):
    seen = []

    def body(x):
        total = lax.psum(x, "X")
        seen.extend(map(str, map(jax.typeof, (x, total))))
        return total

    y = jit(jax.shard_map(body, in_specs=P("X"), out_specs=P()))(on(floats(8), "X"))
    assert seen == ["float32[2]{V:X}", "float32[2]"]
    return y, seen


@states("A result that may vary where it must not is an error.", f"{MANUAL}: Tracking how values vary")
def _(jit):
    return jit(jax.shard_map(lambda x: x, in_specs=P("X"), out_specs=P()))(on(floats(8), "X"))


# Notes of releases.


@states("lax.axis_size gives the size of an axis by its name.", "release notes, 0.6.1")
def _(jit):
    f = jax.shard_map(lambda x: x * lax.axis_size("X"), in_specs=P("X"), out_specs=P("X"))
    return jit(f)(on(floats(8), "X"))


@states("PartitionSpec is no tuple.", "release notes, 0.6.1")
def _(jit):
    return isinstance(P("X"), tuple), jit(lambda x: jax.sharding.reshard(x, P("X")))(on(floats(8)))


@states("ShapeDtypeStruct is changed by update.", "release notes, 0.6.1")
def _(jit):
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    x = x.update(sharding=jax.NamedSharding(jax.sharding.get_mesh(), P("X")))
    return str(jit(jnp.sin).trace(x).jaxpr.out_avals[0])


@states("jax.P is PartitionSpec.", "release notes, 0.7.0")
def _(jit):
    return jit(lambda x: jax.sharding.reshard(x, jax.P("X")))(on(floats(8)))


@states("reshard, auto_axes and explicit_axes are in jax.sharding.", "release notes, 0.7.0")
def _(jit):
    f = jax.sharding.auto_axes(lambda x: jax.sharding.explicit_axes(jnp.sin)(x, in_sharding=P("X")))
    return jit(lambda x: f(x, out_sharding=P("X")))(on(floats(8), "X"))


@states("jax.set_mesh in place of use_mesh.", "release notes, 0.7.1")
def _(jit):
    return jit(lambda x: jnp.zeros_like(x) + 1)(on(floats(8), "X")), hasattr(jax.sharding, "use_mesh")


@states("lax.dot takes dimension_numbers, and out_sharding.", "release notes, 0.7.1")
def _(jit):
    numbers = (((1,), (0,)), ((), ()))
    f = jit(lambda a, b: lax.dot(a, b, dimension_numbers=numbers, out_sharding=P("X")))
    return f(*halves())


@states("jax.pmap is made of jit and shard_map; inside, it maps over devices.", "release notes, 0.8.0", AUTO, AUTO)
def _(jit):
    return jit(lambda x: jax.pmap(lambda row: row + lax.psum(row, "i"), axis_name="i")(x))(floats(8, 4))


@states("Objects with __jax_array__ are no arguments.", "release notes, 0.8.0")
def _(jit):
    class Wrapped:
        def __jax_array__(self):
            return jnp.ones(8)

    try:
        return jit(lambda x: x * 2)(Wrapped())
    except TypeError:
        return "refused"


@states("shard_maps nest, over axes of their own.", "release notes, 0.8.0")
def _(jit):
    def of_rows(x):
        return jax.shard_map(lambda x: x + lax.psum(x, "Y"), in_specs=P(None, "Y"), out_specs=P(None, "Y"))(x)

    f = jax.shard_map(of_rows, in_specs=P("X"), out_specs=P("X"), axis_names={"X"})
    return jit(f)(on(floats(8, 4), "X", "Y"))


@states("jit with options alone is a decorator.", "release notes, 0.8.1")
def _(jit):
    @jit(static_argnames=["n"])
    def f(x, n):
        return jnp.tile(x, (n, 1))

    return f(on(floats(8, 4), "X"), n=2)


@states("device_put with a sharding in place of device_put_sharded and _replicated.", "release notes, 0.8.1")
def _(jit):
    mesh = jax.sharding.get_mesh()
    whole = jax.device_put(floats(4), jax.NamedSharding(mesh, P()))
    parts = jax.device_put(np.stack([floats(4)] * 8), jax.NamedSharding(mesh, P(("X", "Y"))))
    y = jit(lambda whole, parts: whole + parts)(whole, parts)
    assert typed(y) == ("float32[8@(X,Y),4]",)
    return y


@states("pmap keeps the rank: a block has a leading dimension of one inside of its shard_map.", "release notes, 0.9.0")
def _(jit):
    def block(x):
        assert x.shape == (1, 4)
        return x * 2

    return jit(jax.shard_map(block, in_specs=P(("X", "Y")), out_specs=P(("X", "Y"))))(on(floats(8, 4), ("X", "Y")))


@states("A Ref inside is no Array.", "release notes, 0.9.1")
def _(jit):
    found = []

    @jit
    def f(x):
        ref = jax.new_ref(x)
        found.append(isinstance(ref, jax.Array))
        ref[...] = x * 2
        return ref[...]

    return f(on(floats(8), "X")), found


@states("`with mesh:` is deprecated, and says the mesh of specs.", "release notes, after 0.10.0", AUTO, AUTO)
def _(jit):
    mesh = jax.make_mesh((4, 2), ("X", "Y"), axis_types=(AUTO, AUTO))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with mesh:
            return jit(lambda x: x * 2, in_shardings=P("X"), out_shardings=P("X", "Y"))(floats(8, 4))


@states("Under set_mesh specs may be passed wherever a sharding is.", "reference, jax.set_mesh")
def _(jit):
    def f(x):
        y = jnp.zeros((8, 4), out_sharding=P("X")) + jax.random.normal(jax.random.key(0), (8, 4), out_sharding=P("X"))
        return jax.device_put(x, P("X")) + y

    return jit(f, in_shardings=P("X"), out_shardings=P("X", None))(on(floats(8, 4), "X"))


@states("lax.pcast says how a value varies in a shard_map.", "reference, jax.lax.pcast")
def _(jit):
    def block(x):
        ones = lax.pcast(jnp.ones_like(x, shape=()), ("X",), to="varying")
        return x + lax.psum(ones, "X")

    return jit(jax.shard_map(block, in_specs=P("X"), out_specs=P("X")))(on(floats(8), "X"))


@states("jax.export keeps shardings of types.", "release notes, 0.9.0")
def _(jit):
    exported = jax.export.export(jit(lambda x: jnp.sin(x) * 2))(on(floats(8, 4), "X", "Y"))
    return exported.call(on(floats(8, 4), "X", "Y"))


@states("shard_map asserts in_specs on Explicit axes.", "release notes, 0.9.1")
def _(jit):
    f = jax.shard_map(lambda x: x * 2, in_specs=P("X", "Y"), out_specs=P("X", "Y"))
    return jit(f)(on(floats(8, 8), "X", None))


@pytest.mark.parametrize("number", range(len(TABLE)), ids=[re.sub(r"\W+", " ", each.said) for each in TABLE])
def test_statements_hold_as_under_jit(number: int) -> None:
    statement = TABLE[number]
    assert_as_jit(statement.run, (4, 2), ("X", "Y"), statement.types)


def test_statements_are_told_apart() -> None:
    assert len({each.said for each in TABLE}) == len(TABLE) >= 90
    assert sdy.partition is not jax.jit
