"""Where the mesh of a call comes from, and calls in places where libraries put them."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_jit import compare
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

pytestmark = pytest.mark.filterwarnings("ignore:.with mesh:DeprecationWarning")
X = np.arange(128, dtype=np.float32).reshape(8, 16) / 16
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
JITS = (sdy.partition, jax.jit)


def mesh_of(kind=AUTO, shape=(2, 4), names=("a", "b")):
    return Mesh(np.array(jax.devices()[:8]).reshape(shape), names, axis_types=(kind,) * len(shape))


def normal(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def on(mesh, *entries):
    return jax.device_put(X, NamedSharding(mesh, P(*entries)))


def test_with_mesh():
    f = sdy.partition(lambda x: x * 2, in_shardings=P("a"), out_shardings=P("a", "b"))
    with mesh_of():
        y = f(X)
    assert y.sharding == NamedSharding(mesh_of(), P("a", "b"))
    with mesh_of(shape=(4, 2)):
        assert f(X).sharding.mesh == mesh_of(shape=(4, 2))
    np.testing.assert_array_equal(y, X * 2)


def test_types_come_before_with_mesh():
    x = on(mesh_of(EXPLICIT), "a")
    for jit in JITS:
        with mesh_of(shape=(8,), names=("z",)):
            y = jit(lambda x: x * 2)(x)
        assert str(jax.typeof(y)) == "float32[8@a,16]" and y.sharding.mesh == mesh_of(EXPLICIT)


def test_constraints_under_with_mesh():
    with mesh_of():
        y = sdy.partition(lambda x: lax.with_sharding_constraint(x * 2, P("a", "b")))(X)
    assert y.sharding.spec == P("a", "b")


def test_set_mesh_comes_before_with_mesh():
    with mesh_of(shape=(8,), names=("z",)), jax.set_mesh(mesh_of()):
        assert sdy.partition(lambda x: x * 2, in_shardings=P("a"))(X).sharding.mesh == mesh_of()


def test_an_abstract_mesh_in_context():
    mesh = mesh_of(EXPLICIT)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        y = sdy.partition(lambda x: reshard(x, P("b")) * 2)(on(mesh, "a"))
    assert str(jax.typeof(y)) == "float32[8@b,16]"
    np.testing.assert_array_equal(y, X * 2)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize(("shape", "names"), [((8,), ("z",)), ((4, 2), ("a", "b")), ((2, 4), ("u", "v"))], ids=str)
@pytest.mark.parametrize("stated", [None, P("b")], ids=str)
def test_arrays_with_types_on_another_mesh_of_the_devices(kind, shape, names, stated):
    mesh, x = mesh_of(kind), on(mesh_of(EXPLICIT, shape, names), names[0])
    f = sdy.partition(lambda x: x * 2, mesh=mesh, in_shardings=stated, on_unknown="ignore")
    for y in (f(x), jax.jit(f)(x)):
        assert y.sharding.mesh == mesh
        np.testing.assert_array_equal(y, X * 2)


@pytest.mark.parametrize("jit", JITS)
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_types_show_the_mesh(jit, kind):
    seen = []

    def f(x):
        y = jnp.where(x > 1, x, 0) @ jnp.ones((16, 4))
        seen.extend((x.aval.sharding.mesh, jax.typeof(y).sharding.mesh))
        return y

    x = on(mesh_of(kind), "a")
    with jax.set_mesh(mesh_of(kind)):
        jit(f)(x)
    jit(f)(x)
    assert seen == [mesh_of(kind).abstract_mesh] * 4


@pytest.mark.parametrize("jit", JITS)
def test_another_mesh_in_context_inside(jit):
    def f(x):
        with jax.sharding.use_abstract_mesh(mesh_of(EXPLICIT).abstract_mesh):
            return jnp.sin(x)

    with jax.set_mesh(mesh_of()):
        np.testing.assert_allclose(jit(f)(X), np.sin(X), rtol=1e-5)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_the_mesh_of_the_types_has_devices_for_callbacks(kind):
    def f(x):
        return jax.pure_callback(lambda x: x * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x) + 1

    np.testing.assert_array_equal(sdy.partition(f, on_unknown="ignore")(on(mesh_of(kind), "a")), X * 2 + 1)


@pytest.mark.parametrize("jit", JITS)
@pytest.mark.parametrize(
    ("around", "own"),
    [
        (mesh_of(EXPLICIT), mesh_of(EXPLICIT, (8,), ("z",))),
        (mesh_of(EXPLICIT), mesh_of()),
        (mesh_of(), mesh_of(EXPLICIT)),
        (mesh_of(), mesh_of(EXPLICIT, (8,), ("z",))),
    ],
    ids=str,
)
def test_an_argument_on_another_mesh_than_that_in_context(jit, around, own):
    x = on(own, own.axis_names[0])
    with jax.set_mesh(around), pytest.raises(ValueError, match="mesh"):
        jit(lambda x: x * 2)(x)


@pytest.mark.parametrize("jit", JITS)
def test_an_argument_on_another_mesh_with_auto_axes(jit):
    with jax.set_mesh(mesh_of()):
        np.testing.assert_array_equal(jit(lambda x: x * 2)(on(mesh_of(shape=(8,), names=("z",)), "z")), X * 2)


# In the body of a shard_map, on blocks.


@jax.custom_jvp
def tripled_slope(x):
    return jnp.sin(x)


tripled_slope.defjvp(lambda primals, tangents: (tripled_slope(*primals), tangents[0] * 3))

BODIES = {
    "element-wise": lambda x: jnp.sin(x) * 2,
    "a collective": lambda x: x + lax.psum(x, "a"),
    "an index": lambda x: x * lax.axis_index("b"),
    "a custom derivative": tripled_slope,
}


def called(f, x):
    return f(x), jax.jit(f)(x), jax.grad(lambda x: f(x).sum())(x)


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.more("calls inside of shard_map, beside jit")
def test_in_a_shard_map_it_is_what_jit_is(name, kind):
    def mapped(jit):
        f = jit(BODIES[name])
        return jax.shard_map(lambda x: f(x) + 1, in_specs=P("a", "b"), out_specs=P("a", "b"))

    with jax.set_mesh(mesh_of(kind)):
        x = on(mesh_of(kind), "a", "b")
        ours, theirs = (called(mapped(jit), x) for jit in JITS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, theirs)


def test_in_a_shard_map_on_some_axes():
    f = sdy.partition(lambda x: lax.with_sharding_constraint(lax.psum(x, "a"), P(None, "b")))
    with jax.set_mesh(mesh_of()):
        y = jax.jit(jax.shard_map(f, in_specs=P("a"), out_specs=P(), axis_names={"a"}))(X)
    np.testing.assert_allclose(y, X[:4] + X[4:])


# A shard_map inside, on another mesh of the same devices.

LINE, NAMED_OTHERWISE = mesh_of(shape=(8,), names=("z",)), mesh_of(names=("u", "v"))
MAPPED = {
    "over all axes": (LINE, P("z"), lambda x: x * lax.axis_index("z") + lax.psum(x, "z")),
    "ring": (LINE, P("z"), lambda x: lax.ppermute(x, "z", [(i, (i + 1) % 8) for i in range(8)])),
    "other names": (NAMED_OTHERWISE, P("u", "v"), lambda x: lax.psum(jnp.sin(x), "v") + lax.axis_index("u")),
    "some axes": (NAMED_OTHERWISE, P("u"), lambda x: lax.pmean(x, "u") + x),
}


@pytest.mark.parametrize("name", MAPPED)
def test_a_shard_map_on_another_mesh_of_the_devices(name):
    inner, spec, body = MAPPED[name]
    some = {"u"} if name == "some axes" else set()
    mapped = jax.shard_map(body, mesh=inner, in_specs=spec, out_specs=spec, axis_names=some, check_vma=False)

    def of_both(jit):
        f = jit(lambda x: mapped(x) + 1, in_shardings=NamedSharding(mesh_of(), P("a")))
        return f(X), jax.jit(f)(X), jax.grad(lambda x: (f(x) ** 2).sum())(X)

    ours, theirs = map(of_both, JITS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, theirs)
    assert ours[0].sharding.is_equivalent_to(theirs[0].sharding, 2)


@pytest.mark.parametrize("jit", JITS)
def test_a_shard_map_on_another_mesh_than_that_in_context_is_refused(jit):
    mapped = jax.shard_map(lambda x: lax.psum(x, "z"), mesh=LINE, in_specs=P("z"), out_specs=P())
    with jax.set_mesh(mesh_of()), pytest.raises(ValueError, match="should match the mesh passed to"):
        jit(mapped)(X)


# Of meshes that cut the axes of the function's: the program is on one of the parts.

CUBE = mesh_of(shape=(2, 2, 2), names=("a", "b", "c"))
ABC = ("a", "b", "c")
CUTTING = {
    "sums and indices": (
        P("a", ("b", "c")),
        P(None, "b"),
        lambda x: lax.psum(x * 2, ("a", "c")) + lax.axis_index("b"),
    ),
    "gathered": (P("a", ("b", "c")), P("a", "b"), lambda x: lax.all_gather(x, "c", axis=1, tiled=True)),
    "permuted": (P("b", "c"), P("b", "c"), lambda x: lax.ppermute(x, "b", [(0, 1), (1, 0)]) * lax.axis_index("c")),
    "all to all": (P(("a", "b"), "c"), P("b", ("c", "a")), lambda x: lax.all_to_all(x, "a", 0, 1, tiled=True)),
    "scattered": (P("c", ("b", "a")), P(("c", "b", "a")), lambda x: lax.psum_scatter(x, ("b", "a"), tiled=True)),
    "groups": (P(ABC), P(ABC), lambda x: lax.psum(x, ABC, axis_index_groups=[[0, 5, 2, 3], [1, 4, 6, 7]])),
    "on some axes": (P(None, "b"), P(None, "b"), lambda x: x @ lax.pmean(x, "b").T + lax.axis_index("b")),
}


@pytest.mark.parametrize("name", CUTTING)
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_a_shard_map_on_a_mesh_that_cuts_axes(name, kind):
    in_specs, out_specs, body = CUTTING[name]
    some = {"b"} if name == "on some axes" else set()
    x, line = normal(8, 8), mesh_of(kind, (4, 2), ("x", "y"))
    mapped = jax.shard_map(body, mesh=CUBE, in_specs=in_specs, out_specs=out_specs, axis_names=some, check_vma=False)

    ours, theirs = (
        jit(lambda x: mapped(jnp.sin(x)) + 1, in_shardings=NamedSharding(line, P("x", "y"))) for jit in JITS
    )
    for found in (ours(x), jax.jit(ours)(x)):  # which jit refuses of some of its own
        np.testing.assert_allclose(found, theirs(x), rtol=1e-5, atol=1e-5)
    if kind == AUTO:  # on Explicit axes jit refuses: the cotangent has a type
        f = sdy.partition(mapped, mesh=line, in_shardings=P("x", "y"))
        ours, theirs = (jax.grad(lambda x, g=g: (g(x) ** 2).sum())(x) for g in (f, jax.jit(mapped)))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


BUDGET = sdy.Budget(axes={"x": ("all_gather", "all_reduce", "all_to_all"), "y": ("all_reduce",)})


def test_results_of_a_shard_map_that_cuts_axes_are_on_the_mesh_and_so_is_what_plans_say():
    line, row = mesh_of(AUTO, (4, 2), ("x", "y")), P("x", "y")
    mapped = jax.shard_map(lambda x: lax.psum(x, "c") * 2, mesh=CUBE, in_specs=P("a", "c"), out_specs=P("a"))
    f = sdy.partition(
        lambda x: mapped(x) @ x[:4], mesh=line, in_shardings=row, out_shardings=row, strict="y", budget=BUDGET
    )
    y = f(normal(8, 8))
    assert y.sharding.is_equivalent_to(NamedSharding(line, row), 2)
    with pytest.raises(sdy.ContractError, match="along 'x' only nothing may send"):
        sdy.partition(f.__wrapped__, mesh=line, in_shardings=row, budget=sdy.Budget(axes={"x": ()}))(normal(8, 8))
    plan = f.plan(normal(8, 8))
    assert "x:(1)2" in str(plan) and plan.input_specs == ((row,), {})
    theirs = jax.vmap(lambda x: mapped(x) @ x[:4])(normal(3, 8, 8))
    np.testing.assert_allclose(jax.vmap(f)(normal(3, 8, 8)), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("jit", JITS)
@pytest.mark.parametrize("number", [4, 8])
def test_a_shard_map_on_other_devices_or_in_another_order_is_refused(jit, number):
    other = jax.sharding.Mesh(np.array(jax.devices()[:number][::-1]).reshape(2, -1), ("u", "v"))
    mapped = jax.shard_map(lambda x: x, mesh=other, in_specs=P("u"), out_specs=P("u"))
    with pytest.raises(ValueError, match="Received incompatible devices"):
        jit(mapped)(on(mesh_of(), "a"))


@pytest.mark.parametrize("jit", JITS)
def test_pmap_inside_and_around(jit):
    def doubled(row):
        return row * 2 + lax.psum(row, "i")

    inside = jit(lambda x: jax.pmap(doubled, axis_name="i")(x) + 1)(on(mesh_of(), "a"))
    around = jax.pmap(jit(doubled), axis_name="i")(X)
    np.testing.assert_allclose(inside, X * 2 + X.sum(0) + 1, rtol=1e-6)
    np.testing.assert_allclose(around, X * 2 + X.sum(0), rtol=1e-6)


# An axis that a vmap around a function names: what is planned is the mapped function.

ROUND = [(0, 1), (1, 2), (2, 3), (3, 0)]
STACK = normal(4, 8, 8)
OVER_AN_AXIS = {
    "mean": lambda x: jnp.sin(x) @ lax.pmean(x, "i").T,
    "maximum": lambda x: lax.pmax(lax.stop_gradient(x), "i") * x,
    "index": lambda x: x * lax.axis_index("i"),
    "size": lambda x: x * lax.axis_size("i") + lax.psum(1, "i"),
    "gathered": lambda x: lax.all_gather(x, "i", tiled=True).sum(0) + x,
    "permuted": lambda x: lax.ppermute(x, "i", ROUND),
    "scattered": lambda x: lax.psum_scatter(x, "i", scatter_dimension=0, tiled=True),
    "all to all": lambda x: lax.all_to_all(x, "i", 0, 1, tiled=True),
    "in a loop": lambda x: lax.scan(lambda c, _: (jnp.sin(c) + lax.pmean(c, "i"), None), x, None, length=3)[0],
    "in a branch": lambda x: lax.cond(x[0, 0] > 0, lambda x: lax.psum(x, "i"), jnp.sin, x),
    "rematerialized": jax.checkpoint(lambda x: jnp.sin(x - lax.pmean(x, "i"))),
}


def over_an_axis(jit, body, around):
    f = jit(body, in_shardings=NamedSharding(mesh_of(shape=(4, 2)), P(None, "b")))

    def loss(x):
        return (around(f)(x) ** 2).sum()

    return around(f)(STACK), jax.jit(around(f))(STACK), jax.grad(loss)(STACK)


@pytest.mark.dear
@pytest.mark.parametrize(
    ("name", "axes"), [*((name, None) for name in OVER_AN_AXIS), ("mean", "a"), ("in a loop", "a")]
)
def test_an_axis_of_a_vmap_around_a_function(name, axes):
    around = partial(jax.vmap, axis_name="i", spmd_axis_name=axes)
    ours, theirs = (over_an_axis(jit, OVER_AN_AXIS[name], around) for jit in JITS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), ours, theirs)


def slopes(f):
    return jax.vmap(jax.grad(lambda x: (f(x) ** 2).sum()), axis_name="i")(STACK)


def both_axes(f):
    inner = jax.vmap(lambda x: f(x) + lax.psum(f(x), "j"), axis_name="i")
    return jax.vmap(inner, axis_name="j")(STACK.reshape(2, 2, 8, 8))


AROUND = {
    "derivatives inside": slopes,
    "two axes": both_axes,
    "in a partitioned function": lambda f: sdy.partition(jax.vmap(f, axis_name="i"), mesh=mesh_of())(STACK),
    "not mapped itself": lambda f: jax.vmap(lambda x: x + f(X), axis_name="i")(STACK[:, :, :1]),
    "other sizes": lambda f: [jax.vmap(f, axis_name="i")(STACK[:n]) for n in (2, 4, 2)],
}


@pytest.mark.parametrize("name", AROUND)
def test_vmaps_around_a_function_over_an_axis(name):
    def body(x):
        return jnp.sin(x) - lax.pmean(x, "i") * lax.axis_index("i")

    ours, theirs = (AROUND[name](f) for f in (sdy.partition(body, mesh=mesh_of()), jax.jit(body)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), ours, theirs)


def test_results_that_are_the_same_along_the_axis_are_not_mapped():
    def normalized(x, mean):
        return x - lax.pmean(x, "i"), 0.9 * mean + 0.1 * lax.pmean(x, "i")

    def of_both(jit, **options):
        f = jax.vmap(jit(normalized, **options), axis_name="i", in_axes=(0, None), out_axes=(0, None))

        def loss(x, mean):
            return sum((y**2).sum() for y in f(x, mean))

        return f(STACK, STACK[0]), jax.grad(loss, (0, 1))(STACK, STACK[0])

    ours, theirs = of_both(sdy.partition, mesh=mesh_of()), of_both(jax.jit)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), ours, theirs)


def test_a_mapped_function_is_traced_and_planned_once():
    traces = []

    def body(x):
        traces.append(x)
        return x - lax.pmean(x, "i")

    f = jax.vmap(sdy.partition(body, mesh=mesh_of(), in_shardings=P("b")), axis_name="i")
    first = f(STACK)
    count = len(traces)
    np.testing.assert_array_equal(first, f(STACK))
    assert len(traces) == count + 1  # where jit learns that it names an axis
    assert "b" in str(first.sharding.spec)


def test_a_plan_of_a_function_over_an_axis_is_refused_by_name():
    f = sdy.partition(lambda row: row - lax.pmean(row, "rows"), mesh=mesh_of())
    with pytest.raises(sdy.UnsupportedError, match=r"over 'rows', an axis of a jax.vmap around it.*vmap inside"):
        jax.vmap(lambda row: f.plan(row) and row, axis_name="rows")(X)


# What has no values.


@pytest.mark.parametrize("jit", JITS)
def test_float0_stays_float0(jit):
    def pulled(x):
        return jax.vjp(lambda x, n: (x * n).sum(), x, np.int32(2))[1](1.0)

    with jax.set_mesh(mesh_of()):
        slope, nothing = jit(pulled)(X)
        _, passed = jit(lambda x, z: (x, z))(X, np.zeros(3, jax.dtypes.float0))
    assert nothing.dtype == jax.dtypes.float0 and nothing.shape == ()
    assert passed.dtype == jax.dtypes.float0 and passed.shape == (3,)
    np.testing.assert_array_equal(slope, np.full_like(X, 2))


@pytest.mark.parametrize("jit", JITS)
def test_types_may_be_lowered_as_shaped_arrays(jit):
    with jax.set_mesh(mesh_of()):
        compiled = jit(lambda x: x * 2, in_shardings=P("a")).lower(jax.core.ShapedArray(X.shape, X.dtype)).compile()
        np.testing.assert_array_equal(compiled(on(mesh_of(), "a")), X * 2)


# Arguments on another mesh with Explicit axes, of the same devices, that a function passes through.

PASSED = {
    "behind": lambda jit, x, y: jit(lambda x, y: (x * 2, y))(x, y),
    "in a tree": lambda jit, x, y: jit(lambda x, y: {"a": y, "b": [x, y, x + 1]})(x, y),
    "again": lambda jit, x, y: (lambda f: f(*f(x, y)))(jit(lambda x, y: (x * 2, y))),
    "donated": lambda jit, x, y: jit(lambda x, y: (x * 2, y), donate_argnums=1)(x, y),
    "stated beside it": lambda jit, x, y: jit(lambda x, y: (x, y), out_shardings=(x.sharding, None))(x, y),
    "stated": lambda jit, x, y: jit(lambda x, y: (x, y), out_shardings=(None, x.sharding))(x, y),
    "under jit": lambda jit, x, y: jax.jit(jit(lambda x, y: (x * 2, y)))(x, y),
    "ahead of time": lambda jit, x, y: jit(lambda x, y: (x * 2, y)).lower(x, y).compile()(x, y),
    "tangents": lambda jit, x, y: jax.jvp(jit(lambda x, y: (x * 2, y)), (x, y), (x, y)),
    "cotangents": lambda jit, x, y: (lambda found: found[1](found[0]))(jax.vjp(jit(lambda x, y: (x * 2, y)), x, y)),
    "linear map": lambda jit, x, y: jax.linearize(jit(lambda x, y: (x * 2, y)), x, y)[1](x, y),
}


@pytest.mark.parametrize("name", PASSED)
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_what_is_passed_through_keeps_its_type_on_another_mesh(name, kind):
    x, y = on(mesh_of(kind), "a"), on(mesh_of(EXPLICIT, (4, 2), ("u", "v")), "u", "v")
    ours, theirs = (PASSED[name](jit, jnp.copy(x), jnp.copy(y)) for jit in JITS)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(a, b)
        assert str(jax.typeof(a)) == str(jax.typeof(b))
        if b.sharding.mesh.axis_types[0] == EXPLICIT:
            assert a.sharding.is_equivalent_to(b.sharding, 2) and a.sharding.mesh == b.sharding.mesh


BESIDE_THE_CONTEXT = {
    "passed through": lambda jit, x, y: jit(lambda x, y: (x * 2, y))(x, y),
    "alone": lambda jit, x, y: jit(lambda y: y)(y),
    "not used": lambda jit, x, y: jit(lambda x, y: x * 2)(x, y),
    "moved": lambda jit, x, y: jit(lambda x, y: x + reshard(y, P("a")))(x, y),
    "used": lambda jit, x, y: jit(lambda x, y: (x, y * 2))(x, y),
    "both": lambda jit, x, y: jit(lambda x, y: x + y)(x, y),
}


@pytest.mark.parametrize("name", BESIDE_THE_CONTEXT)
def test_an_argument_on_another_mesh_than_that_in_context_may_be_passed_and_moved(name):
    x, y = on(mesh_of(EXPLICIT), "a"), on(mesh_of(EXPLICIT, (4, 2), ("u", "v")), "u", "v")

    def found(jit):
        try:
            with jax.set_mesh(mesh_of(EXPLICIT)):
                return BESIDE_THE_CONTEXT[name](jit, x, y)
        except ValueError as error:
            return error

    ours, theirs = map(found, JITS)
    if isinstance(theirs, Exception):
        assert isinstance(ours, ValueError)
        return
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(a, b)
        assert str(jax.typeof(a)) == str(jax.typeof(b))
        assert a.sharding.is_equivalent_to(b.sharding, 2) and a.sharding.mesh == b.sharding.mesh


MOVED_INSIDE = {
    "reshard": lambda x, y: reshard(x, y) * 2,
    "device_put": lambda x, y: jax.device_put(x, y) * 2,
    "passed on": lambda x, y: (jax.device_put(x, y), x * 2),
    "and used both": lambda x, y: (reshard(x * 3, y).sum(), jnp.sin(x)),
}


@pytest.mark.parametrize("name", MOVED_INSIDE)
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_arrays_are_moved_inside_to_another_mesh_with_explicit_axes(name, kind):
    x, y = on(mesh_of(kind), "a"), NamedSharding(mesh_of(EXPLICIT, (4, 2), ("u", "v")), P("u", "v"))
    ours, theirs = (jit(partial(MOVED_INSIDE[name], y=y))(x) for jit in JITS)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
        assert str(jax.typeof(a)) == str(jax.typeof(b))
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


INSIDE = NamedSharding(jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,)), P("x"))
TYPED_INSIDE = NamedSharding(jax.make_mesh((8,), ("x",)), P("x"))
EIGHT = np.arange(8, dtype=np.float32)


def constrained_inside(x):
    return jax.lax.with_sharding_constraint(x, INSIDE) * 2


def mapped_inside(x):
    return jax.shard_map(lambda x: x * jax.lax.axis_size("x"), mesh=INSIDE.mesh, in_specs=P("x"), out_specs=P("x"))(x)


STATED_INSIDE = {
    "constraint": lambda jit: jit(constrained_inside)(EIGHT),
    "of jax's array": lambda jit: jit(constrained_inside)(jnp.asarray(EIGHT)),
    "twice, of other sizes": lambda jit: [jit(constrained_inside)(np.ones(n, np.float32)) for n in (8, 16)],
    "constant": lambda jit: jit(lambda: jax.lax.with_sharding_constraint(jnp.ones(8), INSIDE))(),
    "moved": lambda jit: jit(lambda x: jax.device_put(x, INSIDE) * 2)(EIGHT),
    "moved to Explicit axes": lambda jit: jit(lambda x: jax.device_put(x, TYPED_INSIDE) * 2)(EIGHT),
    "mapped": lambda jit: jit(mapped_inside)(EIGHT),
    "in a function of jit": lambda jit: jit(lambda x: jax.jit(constrained_inside)(x) + 1)(EIGHT),
    "in a loop": lambda jit: jit(lambda x: jax.lax.fori_loop(0, 2, lambda _, x: constrained_inside(x), x))(EIGHT),
    "under jit": lambda jit: jax.jit(lambda x: jit(constrained_inside)(x) + 1)(EIGHT),
    "gradient": lambda jit: jax.grad(lambda x: (jit(constrained_inside)(x) ** 2).sum())(EIGHT),
    "compiled": lambda jit: jit(constrained_inside).lower(EIGHT).compile()(EIGHT),
    "type": lambda jit: jit(constrained_inside).eval_shape(EIGHT).shape,
    "the argument's before it": lambda jit: jit(constrained_inside)(jax.device_put(EIGHT, INSIDE)),
    "no mesh in context": lambda jit: jit(lambda x: jax.lax.with_sharding_constraint(x, P("x")))(EIGHT),
    "constraint on Explicit axes": lambda jit: jit(lambda x: jax.lax.with_sharding_constraint(x, TYPED_INSIDE))(EIGHT),
    "other devices": lambda jit: jit(constrained_inside)(jax.device_put(EIGHT, jax.devices()[1])),
}


@pytest.mark.parametrize("name", STATED_INSIDE)
def test_a_mesh_that_the_function_alone_states_is_taken(name):
    def found(jit):
        try:
            return STATED_INSIDE[name](jit)
        except Exception as error:
            return error

    ours, theirs = found(sdy.partition), found(jax.jit)
    if isinstance(theirs, Exception):
        assert isinstance(ours, ValueError if isinstance(theirs, ValueError) else type(theirs)), ours
        return
    assert not isinstance(ours, Exception), ours
    compare(ours, theirs)


def test_of_several_meshes_inside_none_is_taken():
    other = NamedSharding(jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2), P("a"))
    both = sdy.partition(lambda x: jax.lax.with_sharding_constraint(constrained_inside(x), other))
    with pytest.raises(sdy.ShardingError, match="partition needs a mesh"):
        both(EIGHT)


# Lowered where 64-bit types are enabled otherwise than where it was traced


def counted(x, i):
    """A loop that counts in as many bits as integers have, and changes a row of its result."""
    return jax.lax.scan(lambda carry, row: (carry + row, row * i), x[0], x)


def with_tangents(function):
    return lambda x, i: jax.vmap(lambda y, j: jax.jvp(lambda z: function(z, j), (y,), (2 * y,)))(x, i)


@pytest.mark.parametrize("transformed", [jax.vmap, with_tangents], ids=["vmap", "jvp"])
@pytest.mark.parametrize("traced, lowered, dtype", [(True, False, "f4"), (True, False, "f8"), (False, True, "f4")])
def test_functions_are_lowered_with_the_widths_that_they_were_traced_with(mesh, transformed, traced, lowered, dtype):
    x, i = np.linspace(-1, 1, 192).reshape(3, 8, 8).astype(dtype), np.array([1, 5, 9], np.int32)
    function = jax.jit(transformed(sdy.partition(counted, mesh=mesh, in_shardings=(P("data"), None))))
    with jax.enable_x64(traced):
        wanted = transformed(counted)(x, i)
        trace = function.trace(x, i)
    with jax.enable_x64(lowered):
        program = trace.lower()
    with jax.enable_x64(traced):
        found = program.compile()(x, i)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5)
