"""Callbacks inside of partitioned functions: how often, with which values and in which order they run, beside jit."""

import collections
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE, PLANE

import sdy_jax as sdy
from sdy_jax.errors import ShardingError, UnsupportedError
from sdy_jax.plan.profile import collectives_in_hlo, totals

LOG: list[tuple] = []
X = jnp.arange(32.0).reshape(8, 4)


def note(tag, *values):
    """Sums differ in their last bits."""
    LOG.append((tag, *(np.round(np.asarray(value, np.float64), 3).tolist() for value in values)))


def debug(tag, ordered=False, **options):
    """`jax.debug.callback` of values."""
    return lambda *values: jax.debug.callback(partial(note, tag), *values, ordered=ordered, **options)


def tripled(tag, x):
    note(tag, x)
    return np.asarray(x) * 3


def pure(x, **options):
    return jax.pure_callback(partial(tripled, "pure"), jax.typeof(x), x, **options)


def io(x, ordered=False, **options):
    return io_callback(partial(tripled, "io"), jax.typeof(x), x, ordered=ordered, **options)


def events(fun, *args):
    """What was noted, and the results."""
    LOG.clear()
    results = jax.block_until_ready(fun(*args))
    jax.effects_barrier()
    return list(LOG), results


def assert_like(ours, jits, in_order):
    """Equal events, as often, and equal results."""
    (mine, result), (theirs, expected) = ours, jits
    assert mine == theirs if in_order else counted(mine) == counted(theirs)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), result, expected)


def counted(found):
    return collections.Counter(map(str, found))


def sharded(mesh, *specs):
    return {"in_shardings": tuple(NamedSharding(mesh, spec) for spec in specs)}


# Each with `ordered`, which is what it passes on to its callbacks.


def in_line(ordered, x):
    debug("a", ordered)(x, x.sum())
    debug("b", ordered)()
    return x * 2


def printed_keys(ordered, x):
    def noted(keys):
        note("keys", jax.random.key_data(keys))

    jax.debug.callback(noted, jax.random.split(jax.random.key(0)), ordered=ordered)
    return x


def in_scan(ordered, x):
    def trip(carry, i):
        debug("trip", ordered)(i, carry.sum())
        return carry + 1, i

    return jax.lax.scan(trip, x, jnp.arange(3))


def in_while(ordered, x):
    def body(carry):
        debug("body", ordered)(carry[0])
        return carry[0] + 1, carry[1] * 2

    return jax.lax.while_loop(lambda carry: carry[1].sum() < 500, body, (0, x))


def in_branches(ordered, x):
    def branch(tag, x):
        debug(tag, ordered)(x.sum())
        return x + 1

    return jax.lax.cond(x.sum() > 0, partial(branch, "true"), partial(branch, "false"), x)


def in_vmap(ordered, x):
    def row(x):
        debug("row", ordered)(x)
        return x * 2

    return jax.vmap(row)(x)


def in_derivative(ordered, x):
    def loss(x):
        debug("loss", ordered)(x.sum())
        return jnp.sin(x).sum()

    return jax.value_and_grad(loss)(x)


def rematerialized(ordered, x):
    """The scan over layers runs its callbacks once more in the backward pass."""

    @jax.checkpoint
    def layer(x, i):
        debug("layer", ordered)(i)
        return jnp.sin(x), None

    return jax.grad(lambda x: jax.lax.scan(layer, x, jnp.arange(3))[0].sum())(x)


def of_cosines(ordered, x):
    return jax.checkpoint(lambda x: jnp.sin(layer_with_callback(ordered, jnp.cos(x))))(x)


def layer_with_callback(ordered, x):
    debug("inner", ordered)(x.sum())
    return jnp.sin(x) * pure(jax.lax.stop_gradient(x))


def scan_of_rematerialized(ordered, x):
    layer = jax.checkpoint(partial(layer_with_callback, ordered))
    return jax.lax.scan(lambda x, _: (layer(x), None), x, None, length=3)[0]


def rematerialized_scan(ordered, x):
    return jax.checkpoint(partial(in_scan_of_layers, ordered))(x)


def in_scan_of_layers(ordered, x):
    return jax.lax.scan(lambda x, _: (layer_with_callback(ordered, x), None), x, None, length=3)[0]


def pulled_twice(f, x):
    y, pull = jax.vjp(f, x)
    return y, pull(x), pull(y)


def pushed_twice(f, x):
    y, push = jax.linearize(f, x)
    return y, push(x), push(y)


FROM_OUTSIDE = {
    "gradient": lambda f, x: jax.grad(lambda x: (f(x) ** 2).sum())(x),
    "gradient under jit": lambda f, x: jax.jit(jax.value_and_grad(lambda x: (f(x) ** 2).sum()))(x),
    "vjp": pulled_twice,
    "linearize": pushed_twice,
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "jvp under jit": lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
    "columns": lambda f, x: jax.jacfwd(lambda a: f(a * x))(jnp.ones(3)[0]),
    "jvp of a jvp": lambda f, x: jax.jvp(lambda x: jax.jvp(f, (x,), (x,))[1], (x,), (x,)),
    "jvp of a gradient": lambda f, x: jax.jvp(jax.grad(lambda x: f(x).sum()), (x,), (x,)),
}

STRAIGHT = ("gradient", "linearize", "columns", "jvp of a jvp")
AROUND = ("gradient under jit", "vjp", "jvp", "jvp under jit", "jvp of a gradient")
"""Half of them each, for programs beside one that is differentiated by all of them."""


@pytest.mark.dear
@pytest.mark.parametrize(
    ("program", "name"),
    [
        *((scan_of_rematerialized, name) for name in FROM_OUTSIDE),
        *((of_cosines, name) for name in STRAIGHT),
        *((rematerialized_scan, name) for name in AROUND),
    ],
)
def test_callbacks_of_what_is_rematerialized_run_as_often_where_it_is_differentiated_from_outside(program, name):
    x, function = np.asarray(X) / 9, partial(program, False)  # on no device: the mesh is known by the program alone
    ours = sdy.partition(function, mesh=LINE, in_shardings=P("x"), on_unknown="ignore")
    mine, theirs = (events(partial(FROM_OUTSIDE[name], f), x) for f in (ours, jax.jit(function)))
    assert_like(mine, theirs, False)


@pytest.mark.dear
@pytest.mark.parametrize(
    ("layers", "name"),
    [*((in_scan_of_layers, name) for name in FROM_OUTSIDE), *((layer_with_callback, name) for name in AROUND)],
)
def test_callbacks_of_a_function_that_is_rematerialized_from_outside_run_as_often(layers, name):
    """With `jax.checkpoint` around the partitioned function."""
    x, function = np.asarray(X) / 9, partial(layers, False)
    ours = sdy.partition(function, mesh=LINE, in_shardings=P("x"), on_unknown="ignore")
    runs = [partial(FROM_OUTSIDE[name], jax.checkpoint(f)) for f in (ours, jax.jit(function))]
    mine, theirs = (events(run, x) for run in runs)
    assert_like(mine, theirs, False)


def test_io_callbacks_of_what_is_rematerialized_run_once_where_tangents_are_pushed_forward():
    def run(x):
        return jax.checkpoint(lambda x: jnp.sin(jnp.cos(x)) + io(jax.lax.stop_gradient(x)))(x)

    ours = sdy.partition(run, mesh=LINE, in_shardings=P("x"), on_unknown="ignore")
    for push in (FROM_OUTSIDE["jvp"], FROM_OUTSIDE["jvp under jit"]):
        mine, theirs = (events(partial(push, f), np.asarray(X)) for f in (ours, jax.jit(run)))
        assert len(mine[0]) == 1
        assert_like(mine, theirs, False)


def called_twice(ordered, x):
    inner = jax.jit(partial(in_line, ordered))
    return inner(inner(x))


def in_named_computation(ordered, x):
    return sdy.named_computation(partial(in_scan, ordered), name="inner")(x)


def with_results(ordered, x):
    y = io(x, ordered)
    debug("after", ordered)(y[0])
    return jax.lax.fori_loop(0, 2, lambda _, y: io(y + 1, ordered), y)


def with_unused_results(ordered, x):
    io(x, ordered)
    return x


PROGRAMS = [
    in_line,
    printed_keys,
    in_scan,
    in_while,
    in_branches,
    in_vmap,
    in_derivative,
    rematerialized,
    called_twice,
    in_named_computation,
    with_results,
    with_unused_results,
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_callbacks_run_as_often_as_under_jit_with_whole_values(program):
    run = partial(program, False)
    theirs = events(jax.jit(run, **sharded(LINE, P("x"))), X)
    assert theirs[0]
    assert_like(events(sdy.partition(run, mesh=LINE, in_shardings=P("x"), on_unknown="ignore"), X), theirs, False)


@pytest.mark.parametrize("program", PROGRAMS)
def test_ordered_callbacks_run_in_the_order_of_the_program(program):
    """As under jit on one device; on several, jit refuses those of `jax.debug`."""
    run = partial(program, True)
    theirs = events(jax.jit(run), X)
    ours = sdy.partition(run, mesh=PLANE, in_shardings=P("y", "x"), on_unknown="ignore")
    assert_like(events(ours, X), theirs, True)


def pure_twice(x):
    return pure(x) + pure(x)


def pure_unused(x):
    pure(x)
    return x


def pure_of_nothing(x):
    return x + jax.pure_callback(lambda: tripled("nothing", np.ones(4, np.float32)), jax.typeof(x[0]))


def pure_in_scan(x):
    return jax.lax.scan(lambda x, _: (pure(x), None), x, None, length=2)[0]


def partitioned(x):
    debug("block", partitioned=True)(x)
    return x


def on_another_device(x):
    io_callback(partial(note, "third"), None, x, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[2]))
    return x


def per_device(x):
    return jax.shard_map(pure, mesh=LINE, in_specs=P("x"), out_specs=P("x"), check_vma=False)(x)


PURE = [pure, pure_twice, pure_unused, pure_of_nothing, pure_in_scan, partitioned, on_another_device, per_device]


@pytest.mark.parametrize("run", PURE)
def test_results_and_places_are_those_of_jit(run):
    theirs = events(jax.jit(run, **sharded(LINE, P("x"))), X)
    assert_like(events(sdy.partition(run, mesh=LINE, in_shardings=P("x"), on_unknown="ignore"), X), theirs, False)


def test_results_of_several_ranks():
    def both(x):
        types = (jax.ShapeDtypeStruct((), "float32"), jax.typeof(x))
        return jax.pure_callback(lambda x: (np.float32(x.sum()), np.asarray(x) * 2), types, x)

    total, twice = sdy.partition(both, mesh=PLANE, in_shardings=P("x"), on_unknown="ignore")(X)
    assert total.shape == () and total == X.sum()
    np.testing.assert_array_equal(twice, 2 * X)


@pytest.mark.parametrize("method", ["sequential", "expand_dims", "broadcast_all"])
def test_results_under_vmap_inside_and_outside(method):
    def run(x):
        return jax.vmap(partial(pure, vmap_method=method))(x)

    theirs = events(jax.jit(run, **sharded(LINE, P("x"))), X)
    assert_like(events(sdy.partition(run, mesh=LINE, in_shardings=P("x"), on_unknown="ignore"), X), theirs, False)
    outside = jax.vmap(sdy.partition(partial(pure, vmap_method=method), mesh=PLANE))
    assert_like(events(outside, X), theirs, False)


def test_one_device_per_block_calls_back_in_a_manual_computation():
    """Along axes that are free there, the devices hold the same."""

    def run(x):
        return jax.shard_map(
            partial(io, ordered=True),
            mesh=PLANE,
            in_specs=P("x"),
            out_specs=P("x"),
            axis_names={"x"},
            check_vma=False,
        )(x)

    found, result = events(sdy.partition(run, mesh=PLANE, in_shardings=P("x", "y"), on_unknown="ignore"), X)
    assert counted(found) == counted([("io", X[:4].tolist()), ("io", X[4:].tolist())])
    np.testing.assert_array_equal(result, X * 3)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "bfloat16", "float16", "float32", "complex64", "int32"])
def test_results_of_all_types_keep_their_bits(dtype):
    x = jnp.array([0.0, -0.0, 1.5, jnp.nan, jnp.inf, -2.0, 3.0, 100.0]).astype(dtype)
    run = sdy.partition(
        lambda x: jax.pure_callback(np.asarray, jax.typeof(x), x), mesh=PLANE, in_shardings=P("x"), on_unknown="ignore"
    )
    assert np.asarray(run(x)).tobytes() == np.asarray(x).tobytes()


@pytest.mark.parametrize("dtype", ["int4", "uint4"])
def test_results_of_less_than_a_byte_are_refused(dtype):
    """They would hang: one device ends, the others wait for it. As operands they are fine."""
    x = jnp.arange(8).astype(dtype)
    seen = []
    run = sdy.partition(lambda x: (jax.debug.callback(seen.append, x), x)[1], mesh=PLANE, in_shardings=P("x"))
    jax.block_until_ready(run(x))
    jax.effects_barrier()
    np.testing.assert_array_equal(seen, [np.arange(8)])
    returned = sdy.partition(lambda x: jax.pure_callback(np.asarray, jax.typeof(x), x), mesh=PLANE, in_shardings=P("x"))
    with pytest.raises(UnsupportedError, match=rf"jax.pure_callback is to return {dtype}\[8\]; .* to fix: return int8"):
        returned(x)


# Transformations of partitioned functions with callbacks.


def noisy(x):
    debug("noisy")(x.sum())
    return jnp.sin(x) * 2


OUTSIDE = {
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "grad of jit": lambda f: jax.jit(jax.grad(lambda x: f(x).sum())),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "hessian": lambda f: jax.hessian(lambda x: f(x).sum()),
    "vmap": lambda f: jax.vmap(f),
    "scan": lambda f: lambda x: jax.lax.scan(lambda x, _: (f(x), None), x, None, length=2)[0],
    "grad of scan": lambda f: jax.grad(lambda x: jax.lax.scan(lambda x, _: (f(x), None), x, None, length=2)[0].sum()),
    "unused": lambda f: jax.jit(lambda x: (f(x), x)[1]),
    "compiled": lambda f: lambda x: f.lower(x).compile()(jax.device_put(x, NamedSharding(PLANE, P("x", "y")))),
}


@pytest.mark.parametrize("transformation", OUTSIDE)
def test_under_transformations_callbacks_run_as_often_as_under_jit(transformation):
    transform, x, spec = OUTSIDE[transformation], X, P("x", "y")
    if transformation == "vmap":
        x, spec = X[:, None], P(None, "y")
    theirs = events(transform(jax.jit(noisy, **sharded(PLANE, spec))), x)
    assert_like(events(transform(sdy.partition(noisy, mesh=PLANE, in_shardings=spec)), x), theirs, False)


def test_derivatives_with_respect_to_what_callbacks_do_not_take():
    def loss(x, w):
        return (io(x, ordered=True) * w).sum()

    theirs = events(jax.grad(jax.jit(loss), argnums=1), X, X)
    assert_like(events(jax.grad(sdy.partition(loss, mesh=PLANE), argnums=1), X, X), theirs, True)


@pytest.mark.parametrize("options", [{"layouts": "local"}, {"layouts": "propagated"}, {"combine": 1 << 20}])
def test_every_way_of_planning_keeps_the_order(options):
    theirs = events(jax.jit(partial(with_results, True)), X)
    run = sdy.partition(
        partial(with_results, True), mesh=PLANE, in_shardings=P("x", "y"), on_unknown="ignore", **options
    )
    assert_like(events(run, X), theirs, True)


TIMED = sdy.CostModel(latency=1e-7, flop=1e-11, bandwidth={"x": 1e9}, memory=1e-13)


def test_layers_whose_weights_are_fetched_ahead_call_back_once_per_layer():
    """Under a limit of memory copies are freed and made again as well."""
    layers, x = jnp.ones((4, 16, 16)) / 16, jnp.ones((8, 16))

    def loss(layers, x):
        @jax.checkpoint
        def layer(x, both):
            i, w = both
            debug("layer", ordered=True)(i)
            return jnp.tanh(x @ w), None

        return jax.lax.scan(layer, x, (jnp.arange(4), layers))[0].sum()

    theirs = events(jax.jit(jax.value_and_grad(loss)), layers, x)
    for options in ({}, {"costs": TIMED}, {"memory": 6000}):
        specs = (P(None, "x"), P("x"))
        run = sdy.partition(jax.value_and_grad(loss), mesh=LINE, in_shardings=specs, on_unknown="ignore", **options)
        assert_like(events(run, layers, x), theirs, True)


def test_refined_meshes_and_meshes_with_explicit_axes():
    def split_by_parts(x):
        return io(jax.lax.with_sharding_constraint(x.reshape(4, 8), NamedSharding(PLANE, P("x", "y"))), ordered=True)

    found, result = events(sdy.partition(split_by_parts, mesh=PLANE, in_shardings=P("y"), on_unknown="ignore"), X)
    assert found == [("io", X.reshape(4, 8).tolist())]
    np.testing.assert_array_equal(result, 3 * X.reshape(4, 8))
    explicit = jax.make_mesh((2, 4), ("x", "y"))
    tripled = sdy.partition(partial(io, ordered=True), mesh=explicit, in_shardings=P("y"), on_unknown="ignore")
    assert events(tripled, X)[0] == [("io", X.tolist())]


def test_ordered_callbacks_under_vmap_outside():
    """In their order, or refused, as under jit."""
    f = partial(in_line, True)
    assert_like(events(jax.vmap(sdy.partition(f, mesh=PLANE)), X), events(jax.vmap(jax.jit(f)), X), True)
    for jit in (jax.jit, partial(sdy.partition, mesh=PLANE)):
        with pytest.raises(ValueError, match="Cannot `vmap` ordered IO"):
            jax.vmap(jit(partial(io, ordered=True)))(X)


def test_callbacks_with_effects_under_vmap_outside():
    def row(x):
        return io(x, ordered=False) + 1

    theirs = events(jax.vmap(jax.jit(row)), X)
    assert_like(events(jax.vmap(sdy.partition(row, mesh=PLANE)), X), theirs, False)


# What plans say.


def test_a_plan_says_what_callbacks_gather_and_give_back():
    def run(x):
        jax.debug.print("{}", x)
        return pure(x)

    with pytest.warns(sdy.PartitionWarning, match="jax.debug.print: one device calls the host"):
        plan = sdy.partition(run, mesh=LINE, in_shardings=P("x")).plan(X)
    gather, *back = plan.collectives
    assert (gather.cause, gather.kind, gather.wire_bytes) == ("jax.debug.print", "all_gather", X.nbytes * 7 / 8)
    assert {(each.cause, each.kind) for each in back} == {("jax.pure_callback", "all_reduce")}
    assert [note.op for note in plan.why("x").notes] == ["jax.debug.print", "jax.pure_callback"]
    assert "`x`, f32[8@x,4]; it is gathered: all_gather, 112 B per device" in str(plan.why("x"))
    line = run.__code__.co_firstlineno + 1
    assert [note.op for note in plan.why(f"test_callbacks.py:{line}").notes] == ["jax.debug.print"]


def test_planned_bytes_are_those_of_the_compiled_program():
    run = sdy.partition(pure, mesh=LINE, in_shardings=P("x"), on_unknown="ignore")
    sent = totals(collectives_in_hlo(run.lower(X).compile().as_text()))
    assert sent.wire_bytes == run.plan(X).wire_bytes


@pytest.mark.parametrize("spec", [P("x"), P(None, "y"), P(("x", "y")), P()])
def test_inspect_array_sharding_says_what_it_says_under_jit(spec):
    def inspected(x):
        jax.debug.inspect_array_sharding(x, callback=lambda sharding: LOG.append(sharding))
        return x

    theirs, _ = events(jax.jit(inspected, **sharded(PLANE, spec)), X)
    ours, _ = events(sdy.partition(inspected, mesh=PLANE, in_shardings=spec), X)
    assert len(ours) == len(theirs) == 1
    assert ours[0].is_equivalent_to(theirs[0], X.ndim)


# Errors.


def test_a_callback_on_a_device_that_is_not_on_the_mesh():
    two = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    with pytest.raises(ShardingError, match="expected a SingleDeviceSharding of a device of the function's mesh"):
        sdy.partition(on_another_device, mesh=two)(X)


def test_the_text_of_a_program_has_no_callbacks():
    text = jax.jit(pure).lower(X).as_text()
    with pytest.raises(UnsupportedError, match="partition the function that was traced"):
        sdy.partition(sdy.loads(text), mesh=LINE)(X)


START = """
import jax, jax.numpy as jnp, numpy as np, sdy_jax as sdy
from jax.experimental import io_callback
mesh, x = jax.make_mesh((8,), ("x",)), jnp.arange(8.0)
"""

PRINTS = """
run = sdy.partition(lambda x: (jax.debug.print("sum {}", x.sum(), ordered=True), x)[1], mesh=mesh)
run(x)
run(jnp.arange(9.0))
"""

RAISES = """
def none(x): raise KeyError("no such row")
def three(x): return np.zeros(3, np.float32)
for function in none, three:
    for call in jax.pure_callback, io_callback:
        run = lambda x: call(function, jax.typeof(x), x).sum()
        try:
            sdy.partition(run, mesh=mesh, in_shardings=jax.P("x"))(x).block_until_ready()
        except Exception as error:
            print(str(error).splitlines()[-1], flush=True)
import os; os._exit(0)
"""


def printed(program):
    return subprocess.run([sys.executable, "-c", START + program], capture_output=True, text=True).stdout.splitlines()


@pytest.mark.more("a process of its own")
def test_what_was_ordered_is_printed_before_the_process_ends():
    assert printed(PRINTS) == ["sum 28.0", "sum 36.0"]


RAISES_ALONE = """
def none(x): raise KeyError("no such row")
calls = [
    lambda x: jax.debug.callback(none, x),
    lambda x: jax.debug.callback(none, x, ordered=True),
    lambda x: io_callback(none, None, x),
    lambda x: io_callback(none, None, x, ordered=True),
]
for call in calls:
    run = lambda x: (call(x), x.cumsum() + x.sum())[1]
    try:
        sdy.partition(run, mesh=mesh, in_shardings=jax.P("x"))(x).block_until_ready()
        jax.effects_barrier()
        print("fine", flush=True)
    except Exception as error:
        print(str(error).splitlines()[-1], flush=True)
import os; os._exit(0)
"""


@pytest.mark.more("errors before collectives")
def test_a_callback_without_results_that_raises_does_not_keep_collectives_after_it_waiting():
    assert printed(RAISES_ALONE) == ["KeyError: 'no such row'"] * 4


@pytest.mark.more("a process that ends")
def test_a_callback_that_raises_ends_the_program_on_every_device():
    """The others would wait for its result."""
    no_row, other = "KeyError: 'no such row'", "ValueError: the function returned float32[3], expected float32[8]"
    assert printed(RAISES) == [no_row, no_row, other, other]
