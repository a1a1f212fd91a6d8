"""`jax.Ref`s as arguments of partitioned functions, next to jit's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

X = np.arange(128, dtype=np.float32).reshape(8, 16) / 16
JITS = (sdy.partition, jax.jit)


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=str)
def mesh(request):
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=(request.param,) * 2)


def read(r, x):
    return r[...] + x


def written(r, x):
    r[...] = x * 2


def read_after_write(r, x):
    before = r[...]
    r[...] = before + x
    return before, r[...]


def in_a_loop(r, x):
    def body(i, c):
        r[...] = r[...] * 2 + c
        return c + 1

    return lax.fori_loop(0, 3, body, x)


def in_a_branch(r, x):
    def changed():
        r[...] += x

    lax.cond(x.sum() > 0, changed, lambda: None)
    return r[...].sum()


FUNCTIONS = [read, written, read_after_write, in_a_loop, in_a_branch]


def outcome(jit, function, mesh, outer=lambda f: f):
    x = jax.device_put(X, NamedSharding(mesh, P("a")))
    ref = jax.new_ref(jax.device_put(X + 1, NamedSharding(mesh, P("a"))))
    f = outer(jit(function))
    results = [f(ref, x), f(ref, x)]
    return results, ref[...]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("outer", [lambda f: f, jax.jit], ids=["direct", "in jit"])
def test_reads_and_writes_are_those_of_jit(mesh, function, outer):
    with jax.set_mesh(mesh):
        ours, theirs = (outcome(jit, function, mesh, outer) for jit in JITS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, theirs)
    assert ours[1].sharding.is_equivalent_to(theirs[1].sharding, 2)


def test_trees_static_arguments_keywords_and_plans(mesh):
    def f(n, state, *, scale):
        state["count"][...] += n
        state["sum"][...] *= scale
        return state["sum"][...].sum(), state["plain"]

    x = jax.device_put(X, NamedSharding(mesh, P("a", "b")))
    count = jax.device_put(jnp.zeros((), jnp.int32), NamedSharding(mesh, P()))
    state = {"count": jax.new_ref(count), "plain": x, "sum": jax.new_ref(x)}
    run = sdy.partition(f, mesh=mesh, static_argnums=0)
    with jax.set_mesh(mesh):
        for call in (1, 2):
            total, plain = run(3, state, scale=2.0)
            np.testing.assert_allclose(total, X.sum() * 2**call, rtol=1e-5)
        assert state["count"][...] == 6 and state["sum"][...].sharding.spec == P("a", "b")
        np.testing.assert_array_equal(plain, X)
        assert "state['sum']" in str(run.plan(3, state, scale=2.0))


def test_a_reference_on_one_device_is_refused_as_an_array_there(mesh):
    with pytest.raises(sdy.ShardingError, match="`r` lies on a single device"):
        sdy.partition(read, mesh=mesh)(jax.new_ref(jnp.zeros(8)), np.zeros(8, np.float32))


@pytest.mark.parametrize("device", [0, 3])
def test_a_reference_on_one_device_is_brought_to_the_mesh_where_it_is_stated_whole(device):
    whole = NamedSharding(jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2), P())

    def outcome(jit):
        ref, x = jax.new_ref(jax.device_put(X, jax.devices()[device])), X * 2
        f = jit(read_after_write, in_shardings=(whole, None))
        return [f(ref, x), f(ref, x)], ref[...]

    try:
        theirs = outcome(jax.jit)
    except jax.errors.JaxRuntimeError:  # since jax 0.12
        with pytest.raises(sdy.ShardingError, match=r"`r` is a jax\.Ref that lies on other devices"):
            outcome(sdy.partition)
        return
    ours = outcome(sdy.partition)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, theirs)
    assert ours[1].sharding == theirs[1].sharding


@pytest.mark.parametrize("jit", JITS)
def test_a_reference_on_one_device_that_is_stated_split_is_refused_before_anything_runs(jit, mesh):
    seen = []
    ref = jax.new_ref(jnp.asarray(X))

    def f(r, x):
        jax.debug.callback(seen.append, x.sum())
        return read_after_write(r, x)

    with pytest.raises(ValueError, match=r"does not match the sharding|`r` is a jax.Ref that lies on other devices"):
        jit(f, in_shardings=(NamedSharding(mesh, P("a")), None))(ref, X)
    jax.effects_barrier()
    assert not seen
    np.testing.assert_array_equal(ref[...], X)


@pytest.mark.parametrize("lies, stated", [(P("a"), P()), (P(), P("a")), (P("a"), P("b")), (P("a"), P(None, "a"))])
@pytest.mark.parametrize("jit", JITS)
def test_a_reference_that_is_split_otherwise_than_is_stated_is_refused(jit, mesh, lies, stated):
    ref = jax.new_ref(jax.device_put(jnp.asarray(X), NamedSharding(mesh, lies)))
    refused = ValueError if jit is sdy.partition else (ValueError, jax.errors.JaxRuntimeError)  # since jax 0.12
    with pytest.raises(refused, match=r"does not match|Array of different sharding"):
        jit(read_after_write, in_shardings=(NamedSharding(mesh, stated), None))(ref, X)
    np.testing.assert_array_equal(ref[...], X)
    sdy.partition(read_after_write, in_shardings=(NamedSharding(mesh, lies), None))(ref, X)
    np.testing.assert_array_equal(ref[...], X * 2)


@pytest.mark.parametrize("jit", JITS)
def test_a_reference_is_passed_once(mesh, jit):
    ref = jax.new_ref(jnp.zeros(8))
    with jax.set_mesh(mesh), pytest.raises(ValueError):
        jit(lambda r, s: r[...] + s[...])(ref, ref)


# Closed over.


def closing(ref):
    def accumulated(x, *, scale=1.0):
        ref[...] += x * scale
        return ref[...].sum()

    def looped(x, *, scale=1.0):
        def body(i, c):
            ref[...] = ref[...] * 2 + c
            return c + scale

        return lax.fori_loop(0, 3, body, x)

    def branching(x, *, scale=1.0):
        def changed():
            ref[...] += x

        lax.cond(x.sum() > 0, changed, lambda: None)

    return accumulated, looped, branching


STATED = [None, (P("a"),), (P("a"), None), {"x": P("a")}]


@pytest.mark.parametrize("in_jit", [False, True], ids=["direct", "in jit"])
@pytest.mark.parametrize("stated", [0, 1])
@pytest.mark.parametrize("number", range(3))
def test_references_that_are_closed_over_are_written(mesh, number, stated, in_jit):
    """Each function with all that may be stated, two of these in `jit`."""
    stated, outer = STATED[2 * stated + (number + in_jit) % 2], jax.jit if in_jit else lambda f: f

    def outcome(jit, **options):
        ref = jax.new_ref(jax.device_put(X + 1, NamedSharding(mesh, P("a"))))
        f = outer(jit(closing(ref)[number], **options))
        x = jax.device_put(X, NamedSharding(mesh, P("a")))
        return [f(x), f(x, scale=2.0), f(x)], ref[...]

    with jax.set_mesh(mesh):
        ours, theirs = outcome(sdy.partition, in_shardings=stated), outcome(jax.jit)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, theirs)


def test_references_that_are_taken_and_closed_over(mesh):
    with jax.set_mesh(mesh):
        zeros = jax.device_put(jnp.zeros(8), NamedSharding(mesh, P()))
        one, other, taken = jax.new_ref(zeros), jax.new_ref(zeros), jax.new_ref(zeros)

        def f(n, r, x):
            one[...] += x
            if n > 1:
                other[...] += r[...]
            r[...] = x * n
            return x

        run = sdy.partition(f, mesh=mesh, static_argnums=0)
        for n in (1, 2, 2):
            run(n, taken, jnp.ones(8))
        assert [float(r[...][0]) for r in (one, other, taken)] == [3.0, 3.0, 2.0]


# Ahead of time.


STAGES = {
    "compiled": lambda f, r, x: [compiled(r, x) for compiled in [f.lower(r, x).compile()] for _ in range(2)],
    "traced": lambda f, r, x: str(f.trace(r, x).out_info),
    "types": lambda f, r, x: str(f.eval_shape(r, x)),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("function", [read, written, read_after_write, in_a_loop])
def test_stages_of_functions_of_references(mesh, function, stage):
    def outcome(jit):
        x = jax.device_put(X, NamedSharding(mesh, P("a")))
        ref = jax.new_ref(x + 1)
        return STAGES[stage](jit(function), ref, x), ref[...]

    with jax.set_mesh(mesh):
        (ours, value), (theirs, wanted) = map(outcome, JITS)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    if isinstance(theirs, str):
        assert ours == theirs
    jax.tree.map(lambda a, b: isinstance(b, str) or np.testing.assert_allclose(a, b, rtol=1e-5), ours, theirs)


def test_stages_of_functions_that_close_over_references(mesh):
    def outcome(jit):
        one, other = (jax.new_ref(jax.device_put(X + i, NamedSharding(mesh, P("a")))) for i in range(2))

        def f(x):
            one[...] += x
            other[...] *= one[...]
            return one[...] * 2

        compiled = jit(f).lower(X).compile()
        return compiled(X), compiled(X), one[...], other[...]

    with jax.set_mesh(mesh):
        ours, theirs = map(outcome, JITS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, theirs)
