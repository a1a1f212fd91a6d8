"""Plans count the operations that several devices perform alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE, PLANE
from planned_steps import step

import sdy_jax as sdy
from sdy_jax.plan.estimates import flops

X, W = np.ones((64, 32), np.float32), np.ones((32, 16), np.float32)
DOT = 2 * 64 * 32 * 16


def plan_of(function, *args, mesh=LINE, **options):
    return sdy.partition(function, mesh=mesh, on_unknown="ignore", **options).plan(*args)


def dot(x, w):
    return x @ w


def test_a_product_that_every_device_computes_is_repeated_but_for_a_device_s_part():
    plan = plan_of(dot, X, W)
    assert plan.repeated_flops == DOT * 7 / 8
    assert flops(plan.work) == DOT


@pytest.mark.parametrize("specs", [(P("x"), P()), (P(), P(None, "x")), (P(None, "x"), P("x"))], ids=str)
def test_nothing_is_repeated_by_an_op_in_as_many_shards_as_devices(specs):
    plan = plan_of(dot, X, W, in_shardings=specs)
    assert plan.repeated_flops == 0
    assert flops(plan.work) == DOT / 8


def test_an_op_in_fewer_shards_repeats_what_exceeds_a_devices_part():
    plan = plan_of(dot, X, W, mesh=PLANE, in_shardings=(P("x"), P()), out_shardings=P("x"))
    assert plan.repeated_flops == DOT / 2 - DOT / 8
    (work,) = plan.work
    assert (work.op, work.alike, work.type) == ("stablehlo.dot_general", 4, "f32[64@x,16]")


def test_a_loop_counts_as_often_as_it_runs():
    def looped(x, w):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0]

    plan = plan_of(looped, X, np.ones((5, 32, 32), np.float32))
    assert plan.repeated_flops == 5 * 2 * 64 * 32 * 32 * 7 / 8


def test_the_largest_branch_counts():
    def branched(index, x):
        return jax.lax.switch(index, [lambda x: x @ x, lambda x: x @ x @ x, lambda x: x], x)

    assert plan_of(branched, np.int32(1), np.ones((16, 16), np.float32)).repeated_flops == 2 * 2 * 16**3 * 7 / 8


def test_padding_is_not_repeated_work():
    def uneven(x):
        return jnp.sin(jax.lax.with_sharding_constraint(x[:65], NamedSharding(LINE, P("x")))).sum(0)

    plan = plan_of(uneven, np.ones((72, 4), np.float32), in_shardings=P("x"))
    assert plan.repeated_flops == 0 < flops(plan.work)


def test_a_manual_computation_repeats_nothing_along_its_axes():
    def inside(x, w):
        return jax.shard_map(dot, mesh=PLANE, in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"})(x, w)

    assert plan_of(inside, X, W, mesh=PLANE, in_shardings=(P("x"), P())).repeated_flops == DOT / 2 - DOT / 8


@pytest.mark.parametrize(
    "function, count",
    [
        (jnp.tanh, 64 * 32),
        (lambda x: x.T.reshape(-1), 0),
        (lambda x: x.sum(0), 64 * 32),
        (lambda x: jnp.sort(x, 1), 64 * 32 * 5),
        (lambda x: jnp.fft.fft(x), 5 * 64 * 32 * 5 + 64 * 32),
        (lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (2, 2), (2, 2), "VALID"), 64 * 32),
        (lambda x: jax.lax.conv(x[None, None], jnp.ones((4, 1, 3, 3)), (1, 1), "SAME"), 2 * 64 * 32 * 4 * 9),
    ],
)
def test_what_counts(function, count):
    work = plan_of(function, X).work
    assert sum(w.flops for w in work) == count


def test_the_plan_lists_much_repeated_work_with_line_type_and_reason():
    large = np.ones((128, 128), np.float32)
    text = str(plan_of(dot, large, large))
    assert "repeated work (operations per device that other devices repeat)\n" in text
    (line,) = [line for line in text.splitlines() if "stablehlo.dot_general  f32[128,128]  3.7 Mflop" in line]
    assert "test_repeated_work.py:" in line
    assert line.endswith("the same on 8 devices; nothing around it is split further")
    assert "repeated work" not in str(plan_of(dot, X, W))


def test_the_plan_says_where_splitting_would_cost_more():
    narrow, wide = np.ones((128, 32), np.float32), np.ones((32, 512), np.float32)
    free = sdy.CostModel(flop=1e-9, repeat_work=True)

    def whole(x, w):
        return jax.lax.with_sharding_constraint(x @ w, NamedSharding(LINE, P(None, None)))

    plan = plan_of(whole, narrow, wide, in_shardings=(P("x"), P()), out_shardings=P(), costs=free)
    (line,) = [line for line in str(plan).splitlines() if "stablehlo.dot_general" in line and "Mflop" in line]
    assert line.endswith("the same on 8 devices; to split it costs more")


def measured(function, args, **options):
    """Bytes on the wire, and the operations of one device in the compiled program."""
    found = sdy.partition(function, mesh=LINE, on_unknown="ignore", **options)
    return found.plan(*args).wire_bytes, found.lower(*args).compile().cost_analysis()["flops"]


def test_products_are_repeated_only_where_the_costs_allow_it():
    """Weights are small beside what gradients cost to reduce: without a cap every device would compute everything."""
    layer, batch = (jnp.ones((64, 256)), jnp.ones((256, 64))), (jnp.ones((32, 64)), jnp.ones((32, 64)))
    shardings = {"in_shardings": (P(), P("x"), P("x")), "out_shardings": P()}
    args, planned = ([layer] * 2, *batch), {"layouts": "global", "memory": "1GiB", **shardings}
    baseline, baseline_flops = measured(step, args, layouts="local", costs=sdy.CostModel(), **shardings)
    capped, capped_flops = measured(step, args, costs=sdy.CostModel(), **planned)
    free, free_flops = measured(step, args, costs=sdy.CostModel(repeat_work=True), **planned)
    jit = jax.jit(step, in_shardings=[NamedSharding(LINE, s) for s in shardings["in_shardings"]])
    assert capped <= baseline and capped_flops <= baseline_flops * 1.01
    assert baseline_flops <= 1.1 * jit.lower(*args).compile().cost_analysis()["flops"]
    assert free < 0.2 * capped and free_flops > 2 * capped_flops


def convolved(groups):
    def function(x, kernel):
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", None, None, dims, feature_group_count=groups)

    return function


@pytest.mark.parametrize("flop", [1e-6, 0.0])
@pytest.mark.parametrize("groups", [1, 8])
def test_convolutions_are_not_repeated_either(groups, flop):
    """Nor those by channel, where nothing is contracted but the windows; nor where work costs nothing.

    The result is four times as large as the operand, so that to gather the operand sends less.
    """
    args = jnp.ones((8, 2, 2, 8)), jnp.ones((3, 3, 8 // groups, 32))
    shardings, planned = {"in_shardings": (P("x"), P()), "out_shardings": P()}, {"layouts": "global", "memory": "1GiB"}
    _, baseline = measured(convolved(groups), args, layouts="local", **shardings)
    _, capped = measured(convolved(groups), args, costs=sdy.CostModel(flop=flop), **planned, **shardings)
    _, free = measured(
        convolved(groups), args, costs=sdy.CostModel(flop=flop, repeat_work=True), **planned, **shardings
    )
    assert capped <= baseline < free


@pytest.mark.dear
@pytest.mark.parametrize(("steps", "repeats"), [(1, True), (30, False)])
def test_other_work_is_repeated_as_long_as_it_is_little_in_all(steps, repeats):
    """Every device could look up all tokens, and compute all of what follows, so that only tokens would be sent."""

    def function(tokens, table, w):
        found = table[tokens]
        for _ in range(steps):
            found = found * found + 0.5
        return found @ w

    args = jnp.zeros(64, jnp.int32), jnp.ones((16, 32)), jnp.ones((32, 4096))
    shardings = {"in_shardings": (P("x"), P(), P(None, "x")), "out_shardings": P(None, "x"), "memory": "1GiB"}
    sent, done = measured(function, args, costs=sdy.CostModel(), **shardings)
    free, most = measured(function, args, costs=sdy.CostModel(repeat_work=True), **shardings)
    tokens, looked_up = 64 * 4 * 7 / 8, 64 * 32 * 4 * 7 / 8
    assert free == tokens and sent == (tokens if repeats else looked_up)
    assert done == most if repeats else done < 0.96 * most
    said = "the program does no more work in all than op by op; with CostModel(repeat_work=True)"
    plan = sdy.partition(function, mesh=LINE, costs=sdy.CostModel(), **shardings).plan(*args)
    assert (said in str(plan)) is not repeats


@pytest.mark.parametrize("machine", ["tpu v5e", "h100"])
def test_a_short_chain_of_small_products_is_gathered_once_and_computed_by_all(machine):
    """Where time is what is known, and each product would wait for others."""

    def chain(a):
        for _ in range(4):
            a = jnp.tanh(a @ a)
        return a

    a = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32) / 8
    costs = sdy.CostModel.of_machine(machine, PLANE)
    options = {"mesh": PLANE, "in_shardings": P(*PLANE.axis_names), "out_shardings": P(), "costs": costs}
    planned, gathered = (sdy.partition(f, **options) for f in (chain, lambda a: a * 1.0))
    assert planned.plan(a).wire_bytes == gathered.plan(a).wire_bytes
    np.testing.assert_allclose(planned(a), chain(jnp.asarray(a)), rtol=1e-5, atol=1e-6)


def test_large_products_repeat_nothing():
    a = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)
    costs = sdy.CostModel.of_machine("tpu v5e", PLANE)
    plan = plan_of(lambda a: a @ a @ a, a, mesh=PLANE, in_shardings=P(*PLANE.axis_names), costs=costs)
    assert plan.repeated_flops == 0
