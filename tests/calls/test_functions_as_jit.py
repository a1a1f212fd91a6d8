"""Functions that jit takes, of every kind that JAX documents, with `jax.jit` and `partition` side by side.

A row is a function of `jit`, which is one of both, and what it returns has to be the same: values, types, what was
printed or counted. Where the mesh is Explicit or results are stated, shardings are compared, too.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

AUTO = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
EXPLICIT = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
NAMED = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
HALF = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
ONE = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
X = np.arange(64, dtype=np.float32).reshape(8, 8)
GROUPS = np.array([3, 0, 5], np.int32)
EXPERTS = np.arange(96, dtype=np.float32).reshape(3, 8, 4)
ROWS = NamedSharding(AUTO, P("x"))
WHOLE = NamedSharding(AUTO, P())
STATED = {"in_shardings": ROWS, "out_shardings": ROWS}

TABLE: dict[str, Callable[[Callable[..., Any]], Any]] = {}


def row(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds a function to the table."""
    TABLE[function.__name__.replace("_", " ")] = function
    return function


def same(name: str, fun: Callable[..., Any], *args: Any, use: Callable[..., Any] = lambda f: f, **options: Any) -> None:
    """Adds a call of what `use` makes of a jitted function."""
    TABLE[name] = lambda jit: use(jit(fun, **options))(*args)


def typed(
    name: str, fun: Callable[..., Any], *args: Any, use: Callable[..., Any] = lambda f: f, **options: Any
) -> None:
    """Adds such a call on Explicit axes."""

    def run(jit: Callable[..., Any]) -> Any:
        with jax.set_mesh(EXPLICIT):
            return use(jit(fun, **options))(*args)

    TABLE[f"typed: {name}"] = run


def on(mesh: jax.sharding.Mesh, *entries: Any, value: Any = X) -> jax.Array:
    return jax.device_put(value, NamedSharding(mesh, P(*entries)))


def summed(f: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda *xs: f(*xs).sum())


class Counted:
    """A function that counts how often it is traced."""

    def __init__(self, fun: Callable[..., Any]):
        self.count = 0
        self._fun = fun

    def __call__(self, *args: Any) -> Any:
        self.count += 1
        return self._fun(*args)


# Derivatives and maps.


def curved(x):
    return jnp.sin(x) * x.sum()


@jax.custom_jvp
def doubled(x):
    return x * 2


doubled.defjvp(lambda primals, tangents: (doubled(*primals), tangents[0] * 5))

saved = jax.checkpoint(curved, policy=jax.checkpoint_policies.dots_saveable)

same("its gradient", curved, X, use=summed, **STATED)
same("linearized", curved, X, use=lambda f: lambda x: (jax.linearize(f, x)[0], jax.linearize(f, x)[1](x)), **STATED)
same("transposed", lambda x: x @ X, X, use=lambda f: lambda x: jax.linear_transpose(f, x)(x)[0], **STATED)
same("forward over reverse", curved, X, use=lambda f: lambda x: jax.jvp(summed(f), (x,), (x,)), **STATED)
same("its hessian", lambda x: (x**3).sum(), X[0, :4], use=jax.hessian, in_shardings=ROWS)
same("checkpoint inside", jax.checkpoint(curved), X, use=summed, **STATED)
same("checkpoint outside", curved, X, use=lambda f: summed(jax.checkpoint(f)), **STATED)
same("checkpoint with a policy", saved, X, use=summed, **STATED)
same("a custom tangent", doubled, X, use=lambda f: lambda x: jax.jvp(f, (x,), (x,)), **STATED)
same("a custom tangent, in reverse", lambda x: doubled(x) + doubled(x * 2), X, use=summed, **STATED)
same("mapped along the last dimension", curved, np.stack([X, X], -1), use=lambda f: jax.vmap(f, -1, 1), **STATED)
same("mapped along an axis", curved, np.stack([X, X]), use=lambda f: jax.vmap(f, spmd_axis_name="y"), in_shardings=ROWS)
same("a mean over a vmap inside", jax.vmap(lambda r: r - lax.pmean(r, "i"), axis_name="i"), X, **STATED)
same("of integers", lambda x: x * 1.0, X, use=lambda f: lambda x: jax.grad(lambda i: f(i).sum())(x), **STATED)
typed("its gradient", curved, on(EXPLICIT, "x"), use=summed)
typed("linearized", curved, on(EXPLICIT, "x"), use=lambda f: lambda x: jax.linearize(f, x)[1](x))


# Types of results.

same("booleans", lambda x: x > 3, X, **STATED)
same("bfloat16", lambda x: x.astype(jnp.bfloat16), X, **STATED)
same("int4", lambda x: x.astype(jnp.int4), X, **STATED)
same("float8", lambda x: x.astype(jnp.float8_e4m3fn), X, **STATED)
same("complex", lambda x: x + 1j, X, **STATED)
same("one array twice", lambda x: (x, x), X, **STATED)
same("a spec by its short name", lambda x: x * 2, X, in_shardings=ROWS, out_shardings=NamedSharding(AUTO, jax.P(None)))
same("a move inside", lambda x: jax.device_put(x, NamedSharding(AUTO, P("y"))) * 2, X, **STATED)
same("another jit inside", lambda x: jax.jit(lambda y: y + 1, out_shardings=WHOLE)(x) * 2, X, **STATED)
typed("a result of its argument's type", lambda x: x * 2, on(EXPLICIT, "x", "y"))
typed("a product", lambda x, y: x @ y, on(EXPLICIT, "x"), on(EXPLICIT, None, "y"))
typed("a stated result", lambda x: (x * 2, x.T), on(EXPLICIT, "x"), out_shardings=(P("y"), None))
typed("a sum", lambda x: x.sum(), on(EXPLICIT, "x"))
typed("of numpy's", lambda x: x * 2, X)


def partial_sums(x, y):
    return jnp.einsum("ij,jk->ik", x, y, out_sharding=P(unreduced={"x"}))


@row
def typed_partial_sums_of_a_number(jit):
    with jax.set_mesh(EXPLICIT):
        found = jit(lambda x, y: partial_sums(x, y).sum())(on(EXPLICIT, None, "x"), on(EXPLICIT, "x"))
        return str(jax.typeof(found)), jax.sharding.reshard(found, P())


@row
def typed_partial_sums_of_a_row(jit):
    with jax.set_mesh(EXPLICIT):
        found = jit(lambda x, y: partial_sums(x, y).sum(0))(on(EXPLICIT, None, "x"), on(EXPLICIT, "x"))
        return str(jax.typeof(found)), jax.sharding.reshard(found, P())


@row
def weak_types(jit):
    found = jit(lambda x: (x, x * 2, jnp.float32(1) * x), in_shardings=WHOLE)(2.0)
    return [(y.dtype, y.weak_type) for y in found]


# What a function sees while it is traced.


def seen(jit: Callable[..., Any], x: Any, **options: Any) -> list[Any]:
    found: list[Any] = []

    def look(x: Any) -> Any:
        type_ = jax.typeof(x)
        found.append((str(type_), type_.sharding.spec, type_.sharding.mesh.axis_types, type_.vma))
        return x * 2

    jit(look, **options)(x)
    return found


@row
def types_on_auto_axes(jit):
    return seen(jit, X, **STATED)


@row
def types_on_auto_axes_in_context(jit):
    with jax.set_mesh(AUTO):
        return seen(jit, X, in_shardings=P("x"))


@row
def types_on_explicit_axes(jit):
    with jax.set_mesh(EXPLICIT):
        return seen(jit, on(EXPLICIT, "x", "y"))


@row
def types_of_what_is_stated(jit):
    return seen(jit, X, in_shardings=NamedSharding(EXPLICIT, P("x")))


@row
def devices_of_a_value(jit):
    return jit(lambda x: x * len(x.devices()), **STATED)(X)


@row
def whether_a_value_is_committed(jit):
    return jit(lambda x: x * x.committed, **STATED)(X)


@row
def types_of_results(jit):
    f = jit(lambda x: {"a": x.T}, **STATED)
    return f.eval_shape(X), [str(t) for t in jax.make_jaxpr(f)(X).out_avals], jax.eval_shape(f, X)["a"].shape


# Printing and looking.


def printed(jit: Callable[..., Any], look: Callable[..., Any], **options: Any) -> str:
    def run(x: Any) -> Any:
        look(x)
        return x * 2

    with contextlib.redirect_stdout(io.StringIO()) as text:
        jit(run, **options)(X)
        jax.effects_barrier()
    return text.getvalue()


@row
def a_value_is_printed(jit):
    return printed(jit, lambda x: jax.debug.print("x {x}", x=x), **STATED)


@row
def a_sum_is_printed(jit):
    return printed(jit, lambda x: jax.debug.print("sum {}", x.sum()), **STATED)


@row
def each_device_prints_its_part(jit):
    text = printed(jit, lambda x: jax.debug.print("x {}", x, partitioned=True), **STATED)
    return sorted(re.sub(r"\s+", " ", text))


@row
def a_picture_of_a_result(jit):
    y = jit(lambda x: x * 2, **STATED)(X)
    with contextlib.redirect_stdout(io.StringIO()) as text:
        jax.debug.visualize_array_sharding(y, use_color=False)
    return text.getvalue()


@row
def a_picture_inside(jit):
    return printed(jit, lambda x: jax.debug.visualize_array_sharding(x, use_color=False), **STATED)


def called_back(jit: Callable[..., Any], **options: Any) -> list[Any]:
    found: list[Any] = []

    def run(x: Any) -> Any:
        jax.debug.callback(lambda v: found.append(np.array(v)), x, **options)  # a copy: buffers are taken again
        return x * 2

    jit(run, **STATED)(X)
    jax.effects_barrier()
    return sorted(v.tolist() for v in found)


@row
def a_callback_with_the_value(jit):
    return called_back(jit)


@row
def a_callback_on_each_device(jit):
    return called_back(jit, partitioned=True)


@row
def the_sharding_of_a_value(jit):
    found: list[Any] = []
    printed(jit, lambda x: jax.debug.inspect_array_sharding(x, callback=found.append), **STATED)
    return [sharding.is_equivalent_to(ROWS, 2) for sharding in found]


# Caches and log lines.


@row
def calls_in_the_cache(jit):
    f, sizes = jit(lambda x: x * 2, **STATED), []
    for x in (on(AUTO, "x"), on(AUTO, "x"), on(AUTO, "x", value=X[:4]), on(AUTO, "x", value=X[:4])):
        f(x)
        sizes.append(f._cache_size())
    f.clear_cache()
    return [*sizes, f._cache_size()]


@row
def kinds_of_arrays_in_the_cache(jit):
    f, sizes = jit(lambda x: x * 2, out_shardings=ROWS), []
    for x in (on(AUTO, "x"), on(AUTO, "y"), X, jnp.asarray(X), on(AUTO, "x")):
        f(x)
        sizes.append(f._cache_size())
    return sizes


@row
def one_trace_for_two_wrappers(jit):
    counted = Counted(lambda x: x * 2)
    jit(counted, in_shardings=ROWS)(X)
    jit(counted, in_shardings=ROWS)(X)
    return counted.count


@row
def one_trace_for_other_results(jit):
    counted = Counted(lambda x: x * 2)
    return [np.asarray(jit(counted, out_shardings=s)(X)) for s in (ROWS, WHOLE)], counted.count


@row
def typed_a_trace_for_each_stated_type(jit):
    counted = Counted(lambda x: x * 2)
    stated = [NamedSharding(EXPLICIT, P("x")), NamedSharding(EXPLICIT, P("y")), NamedSharding(EXPLICIT, P("x"))]
    return [jit(counted, out_shardings=s)(on(EXPLICIT, "x")) for s in stated]


@row
def traces_end_when_caches_are_cleared(jit):
    counted = Counted(lambda x: x * 2)
    f = jit(counted, **STATED)
    f(X)
    jax.clear_caches()
    f(X)
    return counted.count


@row
def one_trace_for_other_meshes_in_context(jit):
    counted = Counted(lambda x: x * 2)
    f = jit(counted)
    for mesh in (AUTO, AUTO, NAMED, AUTO):
        with jax.set_mesh(mesh):
            f(on(mesh))
    return counted.count


@row
def a_trace_for_each_type(jit):
    counted = Counted(lambda x: x * 2)
    f = jit(counted)
    with jax.set_mesh(EXPLICIT):
        for entries in (("x",), ("y",), ("x",), ("x", None)):
            f(on(EXPLICIT, *entries))
    return counted.count


def logged(run: Callable[[], Any], name: str) -> list[str]:
    """The lines about a function, without times."""
    lines: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("jax")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        with jax.log_compiles():
            run()
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
    return [re.sub(r"[\d.e-]+ sec", "a time", line)[:60] for line in lines if name in line]


@row
def what_is_compiled_is_logged(jit):
    def logged_function(x):
        return x * 2

    f = jit(logged_function, **STATED)
    runs = (lambda: f(X), lambda: f(X), lambda: f(X[:4]), lambda: f.lower(X[:2]), lambda: f.lower(X[:6]).compile())
    return [logged(run, "logged_function") for run in runs]


# Refs.


@row
def a_ref_that_is_made_inside(jit):
    def run(x):
        ref = jax.new_ref(x)
        ref[0] = ref[0] * 2
        ref[...] += 1
        return ref[...]

    return jit(run, **STATED)(X)


@row
def a_ref_in_a_loop(jit):
    def run(x):
        ref = jax.new_ref(jnp.zeros(8))
        lax.fori_loop(0, 8, lambda i, _: ref.__setitem__(i, x[i].sum()), None)
        return jax.freeze(ref)

    return jit(run, in_shardings=ROWS)(X)


def _added(ref, x):
    ref[...] += x
    return x * 2


@row
def a_ref_as_an_argument(jit):
    ref = jax.new_ref(on(AUTO, "x"))
    return jit(_added)(ref, on(AUTO, "x")), ref[...]


@row
def typed_a_ref_as_an_argument(jit):
    with jax.set_mesh(EXPLICIT):
        ref = jax.new_ref(on(EXPLICIT, "x"))
        return jit(_added)(ref, on(EXPLICIT, "x")), ref[...], str(jax.typeof(ref[...]))


@row
def a_ref_that_is_closed_over(jit):
    ref = jax.new_ref(on(AUTO, "x"))
    return jit(lambda x: _added(ref, x))(on(AUTO, "x")), ref[...]


@row
def a_ref_twice(jit):
    ref = jax.new_ref(on(AUTO, "x"))
    return jit(_added)(ref, ref)


@row
def a_ref_that_is_returned(jit):
    return jit(jax.new_ref, **STATED)(X)


# Ragged products.


def ragged(x, experts, groups):
    return lax.ragged_dot(x, experts, groups)


SPLIT = (ROWS, NamedSharding(AUTO, P(None, None, "y")), None)
CONTRACTED = (NamedSharding(AUTO, P(None, "x")), NamedSharding(AUTO, P(None, "x")), None)


def squared(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, w, groups: jax.grad(lambda x, w: (f(x, w, groups) ** 2).sum(), (0, 1))(x, w)


same("a ragged product", ragged, X, EXPERTS, GROUPS, in_shardings=SPLIT)
same("one over a split dimension", ragged, X, EXPERTS, GROUPS, in_shardings=CONTRACTED, out_shardings=WHOLE)
same("its gradients", ragged, X, EXPERTS, GROUPS, use=squared, in_shardings=SPLIT)
same(
    "one over ragged groups",
    lambda x, y, groups: lax.ragged_dot_general(
        x, y, groups, lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])
    ),
    X,
    X[:, :4],
    GROUPS,
    in_shardings=(ROWS, ROWS, None),
)
typed("a ragged product", ragged, on(EXPLICIT), on(EXPLICIT, value=EXPERTS), on(EXPLICIT, value=GROUPS))


# `jax.shard_map` inside, and around.


def over_rows(mesh: jax.sharding.Mesh | None = None, **options: Any) -> Callable[..., Any]:
    return jax.shard_map(lambda x: lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P(), **options)


same("a shard_map", lambda x: over_rows(AUTO)(x) + 1, X, in_shardings=ROWS, out_shardings=WHOLE)
same("a shard_map's gradient", over_rows(AUTO), X, use=summed, in_shardings=ROWS, out_shardings=WHOLE)
same("a shard_map on other axes", jax.shard_map(jnp.sin, mesh=NAMED, in_specs=P("a"), out_specs=P("a")), X, **STATED)
same("a shard_map on fewer devices", jax.shard_map(jnp.sin, mesh=HALF, in_specs=P("x"), out_specs=P("x")), X, **STATED)
same("an axis that there is not", jax.shard_map(jnp.sin, mesh=AUTO, in_specs=P("z"), out_specs=P()), X, **STATED)
same("a shard_map of a size that does not divide", over_rows(AUTO), X[:7], in_shardings=WHOLE)
same("in a shard_map", jnp.sin, X, use=lambda f: jax.shard_map(f, mesh=AUTO, in_specs=P("x"), out_specs=P("x")))
typed("a shard_map", lambda x: over_rows()(x) + 1, on(EXPLICIT, "x"))
typed("a shard_map along one axis", lambda x: over_rows(axis_names={"x"})(x) + 1, on(EXPLICIT, "x", None))


# Compiled functions, and what they are called with.


def compiled(jit: Callable[..., Any]) -> Any:
    w, x, y = (NamedSharding(AUTO, P(*entries)) for entries in ((None, "y"), ("x",), ("x", "y")))
    f = jit(lambda p, x: {"y": x @ p["w"]}, in_shardings=({"w": w}, x), out_shardings=y)
    return f.lower({"w": X}, X).compile()


def called(name: str, p: Callable[[], Any], x: Callable[[], Any]) -> None:
    """Adds a call of a compiled function."""
    TABLE[f"compiled: {name}"] = lambda jit: compiled(jit)({"w": p()}, x())


def right() -> jax.Array:
    return on(AUTO, "x")


def columns() -> jax.Array:
    return on(AUTO, None, "y")


called("as stated", columns, right)
called("numpy's", lambda: X, lambda: X)
called("arrays that are not committed", lambda: jnp.asarray(X), lambda: jnp.asarray(X))
called("another spelling", columns, lambda: on(AUTO, "x", None))
called("another shape", columns, lambda: on(AUTO, "x", value=X[:4]))
called("another rank", columns, lambda: on(AUTO, "x", value=X[0]))
called("another dtype", columns, lambda: right().astype(jnp.int32))
called("another sharding", columns, lambda: on(AUTO, "y"))
called("another sharding of a leaf", lambda: on(AUTO, "x"), right)
called("other devices", columns, lambda: jax.device_put(X, jax.devices()[3]))
called("an array on Explicit axes", columns, lambda: on(EXPLICIT, "x"))
called("no array", columns, lambda: "x")
TABLE["compiled: another tree"] = lambda jit: compiled(jit)({"v": X}, right())
TABLE["compiled: too few"] = lambda jit: compiled(jit)({"w": columns()})
TABLE["compiled: too many"] = lambda jit: compiled(jit)({"w": columns()}, right(), right())
TABLE["compiled: by name"] = lambda jit: compiled(jit)({"w": columns()}, x=right())
TABLE["compiled: mapped"] = lambda jit: jax.vmap(compiled(jit))({"w": np.stack([X, X])}, np.stack([X, X]))
TABLE["compiled: in a jit"] = lambda jit: jax.jit(lambda x: compiled(jit)({"w": x}, x))(X)


@row
def compiled_for_a_weak_type(jit):
    return jit(lambda x: x * 2, in_shardings=WHOLE).lower(1.0).compile()(jnp.float32(2))


@row
def compiled_with_a_static_argument(jit):
    return jit(lambda x, n: x * n, static_argnums=1, in_shardings=ROWS).lower(X, 2).compile()(X)


@row
def shardings_of_compiled_functions(jit):
    f = jit(lambda x, y: x * 2, **STATED).lower(X, X).compile()
    g = jit(lambda x, *, k: (x * 2, k), out_shardings=ROWS).lower(right(), k=columns()).compile()
    return f.input_shardings, f.output_shardings, g.input_shardings, g.output_shardings


@row
def arguments_of_no_use_are_kept(jit):
    counts = []
    for keep in (True, False):
        text = jit(lambda x, y: y * 2, keep_unused=keep, in_shardings=ROWS).lower(X, X).as_text()
        counts.append(text.partition("@main")[2].partition("->")[0].count("%arg"))
    return counts


@row
def what_is_kept_and_donated_is_gone(jit):
    x = right()
    y = jit(lambda x, y: y * 2, keep_unused=True, donate_argnums=0, **STATED)(x, right())
    return y, x.is_deleted()


# Devices by jit's own options.


def on_third(jit: Callable[..., Any], x: Any) -> Any:
    y = jit(lambda x: x * 2, device=jax.devices()[3])(x)
    return y, y.devices()


TABLE["device="] = lambda jit: on_third(jit, X)
TABLE["device= of an array elsewhere"] = lambda jit: on_third(jit, jax.device_put(X, jax.devices()[2]))
TABLE["device= of an array there"] = lambda jit: on_third(jit, jax.device_put(X, jax.devices()[3]))
TABLE["backend="] = lambda jit: jit(lambda x: x * 2, backend="cpu")(X)
TABLE["a backend that there is not"] = lambda jit: jit(lambda x: x * 2, backend="nope")(X)


@row
def a_mesh_by_with_is_for_names_alone(jit):
    with AUTO:
        return jit(lambda x: x + 1)(on(HALF, "x"))


# Exported functions.


def exported(jit: Callable[..., Any], **options: Any) -> export.Exported:
    stated = STATED | options
    return export.export(jit(jnp.sin, **stated))(jax.ShapeDtypeStruct((8, 8), np.float32))


@row
def exported_types(jit):
    found = exported(jit)
    return found.nr_devices, found.in_avals, found.out_avals, found.in_shardings_jax(AUTO)


TABLE["exported: on the same devices"] = lambda jit: exported(jit).call(right())
TABLE["exported: on one device"] = lambda jit: exported(jit).call(X)
TABLE["exported: on four"] = lambda jit: exported(jit).call(on(HALF, "x"))
TABLE["exported: written and read"] = lambda jit: export.deserialize(exported(jit).serialize()).call(right())
TABLE["exported: from one device, on eight"] = lambda jit: jax.jit(
    exported(jit, in_shardings=NamedSharding(ONE, P("x")), out_shardings=None).call, in_shardings=ROWS
)(X)


BY_SHARDINGS = re.compile(r"typed|stated|compiled: ")
"""Rows whose results lie as types or the user say; others lie as jit's compiler and the planner choose."""


def outcome(name: str, jit: Callable[..., Any]) -> Any:
    """What a row returns, or the error that it raises."""
    try:
        return TABLE[name](jit)
    except Exception as error:
        return error


def leaves(found: Any) -> Iterator[Any]:
    yield from jax.tree.leaves(found, is_leaf=lambda x: x is None)


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::sdy_jax.PartitionWarning")
def test_as_jit(name):
    theirs, ours = outcome(name, jax.jit), outcome(name, sdy.partition)
    if isinstance(theirs, Exception):
        kind = next(kind for kind in type(theirs).__mro__ if kind.__module__ == "builtins")
        assert isinstance(ours, kind), (theirs, ours)
        return
    if isinstance(ours, Exception):
        raise ours
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for own, wanted in zip(leaves(ours), leaves(theirs), strict=True):
        if not isinstance(wanted, (jax.Array, np.ndarray)):
            assert own == wanted
            continue
        assert str(jax.typeof(own)) == str(jax.typeof(wanted))
        np.testing.assert_allclose(np.asarray(own), np.asarray(wanted), rtol=1e-4, atol=1e-5)
        if isinstance(wanted, jax.Array) and BY_SHARDINGS.search(name):
            assert own.sharding.is_equivalent_to(wanted.sharding, wanted.ndim)
