"""Loops count: what comes into a loop is resharded once, what an op in it communicates, in every iteration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sharding_dump import parse

import sdy_jax as sdy
from sdy_jax.ir.graph import Graph
from sdy_jax.lowering.planner.facts.loops import UNKNOWN, executions, times_as_often, trip_count, trips

LOOP = """
func.func @main(%x: tensor<4xf32>, %n: tensor<i32>) -> tensor<4xf32> {{
  %start = stablehlo.constant dense<{start}> : tensor<i32>
  %step = stablehlo.constant dense<{step}> : tensor<i32>
  %end = stablehlo.constant dense<{end}> : tensor<i32>
  %0:2 = stablehlo.while(%i = %start, %y = %x) : tensor<i32>, tensor<4xf32>
  cond {{
    %1 = stablehlo.compare {direction}, %i, {bound} : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %1 : tensor<i1>
  }} do {{
    %1 = stablehlo.{next} %i, %step : tensor<i32>
    %2 = stablehlo.add %y, %x : tensor<4xf32>
    stablehlo.return %1, %2 : tensor<i32>, tensor<4xf32>
  }}
  return %0#1 : tensor<4xf32>
}}"""


def loop(start=0, step=1, end=20, direction="LT", bound="%end", next="add"):
    module = parse(LOOP.format(start=start, step=step, end=end, direction=direction, bound=bound, next=next))
    return module, next_named(Graph(module.operation), "stablehlo.while")


def next_named(graph, name):
    return next(op for op in graph.ops if op.name == name)


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ({}, 20),
        ({"start": 5, "step": 2}, 8),
        ({"end": -3}, 1),
        ({"bound": "%n"}, UNKNOWN),
        ({"direction": "LE"}, 21),
        ({"start": 20, "end": 0, "next": "subtract", "direction": "GT"}, 20),
        ({"start": 20, "step": -3, "end": 0, "direction": "GE"}, 7),
        ({"step": 4, "direction": "NE"}, 5),
        ({"step": 3, "direction": "NE"}, UNKNOWN),
        ({"next": "multiply"}, UNKNOWN),
        ({"step": 0}, UNKNOWN),
    ],
    ids=str,
)
def test_iterations_are_counted_where_constants_tell_them(given, count):
    _module, op = loop(**given)
    assert trips(op) == count


def test_an_op_runs_once_per_iteration_for_what_comes_into_the_loop():
    _module, op = loop()
    adding = op.blocks[1].ops[1]
    assert [times_as_often(adding, value) for value in adding.operands] == [1, 20]
    assert times_as_often(op, op.operands[1]) == 1


def layers(xs, w):
    def body(total, x):
        return total + jnp.tanh(x @ w), ()

    return jax.lax.scan(body, jnp.zeros((16, 512), xs.dtype), xs)[0]


@pytest.mark.parametrize("repeat_work", [False, True])
def test_a_weight_moves_before_the_loop_rather_than_its_product_in_every_iteration(repeat_work):
    mesh = jax.make_mesh((8,), ("m",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_shardings": (P(), P("m", None)), "out_shardings": P()}
    partitioned = sdy.partition(layers, mesh=mesh, costs=sdy.CostModel(repeat_work=repeat_work), **specs)
    rng = np.random.default_rng(0)
    xs, w = rng.normal(size=(20, 16, 64)).astype("f"), rng.normal(size=(64, 512)).astype("f")
    # Along columns the weight moves once, and only the result is gathered; reducing the product would take
    # 2 * 7/8 * 32 KiB in each of 20 iterations.
    plan = partitioned.plan(xs, w)
    assert {c.depth for c in plan.collectives if c.wire_bytes} == {0}, plan
    assert plan.wire_bytes == 7 / 64 * w.nbytes + 7 / 8 * 16 * 512 * 4
    np.testing.assert_allclose(partitioned(xs, w), layers(xs, w), rtol=1e-4, atol=1e-4)


def test_in_a_single_iteration_the_product_is_reduced():
    mesh = jax.make_mesh((8,), ("m",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_shardings": (P(), P("m", None)), "out_shardings": P()}
    partitioned = sdy.partition(layers, mesh=mesh, costs=sdy.CostModel(), **specs, layouts="local")
    plan = partitioned.plan(jax.ShapeDtypeStruct((1, 16, 64), "float32"), jax.ShapeDtypeStruct((64, 512), "float32"))
    assert "all_reduce" in {c.kind for c in plan.collectives}


# Trip counts of loops in all forms that jax writes, against running them.


def up(start, end, step=1, dtype="int32"):
    end, step = np.array(end, dtype), np.array(step, dtype)
    return np.array(start, dtype), lambda i: i < end, lambda i: i + step


def fori(lower, upper):
    return lambda x: jax.lax.fori_loop(lower, upper, lambda _, n: n + 1, x)


def loops_while(start, goes_on, following):
    def run(x):
        return jax.lax.while_loop(lambda s: goes_on(s[0]), lambda s: (following(s[0]), s[1] + 1), (start, x))[1]

    return run


COUNTED = {
    "fori": fori(0, 7),
    "fori from below zero": fori(-3, 4),
    "fori over arrays": fori(jnp.int32(2), jnp.int32(9)),
    "not once": loops_while(*up(5, 2)),
    "scan": lambda x: jax.lax.scan(lambda n, _: (n + 1, None), x, None, length=7)[0],
    "reversed scan": lambda x: jax.lax.scan(lambda n, _: (n + 1, None), x, None, length=7, reverse=True)[0],
    "unrolled scan": lambda x: jax.lax.scan(lambda n, _: (n + 1, None), x, None, length=8, unroll=2)[0],
    "map": lambda x: jax.lax.map(lambda n: n + x, jnp.arange(7)).sum(),
    "steps": loops_while(*up(1, 12, 3)),
    "int8": loops_while(*up(-5, 12, 4, "int8")),
    "uint16": loops_while(*up(3, 300, 7, "uint16")),
    "down": loops_while(np.int32(9), lambda i: i > 2, lambda i: i - 2),
    "down to": loops_while(np.int32(9), lambda i: i >= 3, lambda i: i - 2),
    "up to": loops_while(np.int32(0), lambda i: i <= 9, lambda i: i + 3),
    "bound first": loops_while(np.int32(0), lambda i: i < 9, lambda i: 2 + i),
    "not": loops_while(np.int32(0), lambda i: ~(i >= 9), lambda i: i + 2),
    "until": loops_while(np.int32(0), lambda i: i != 9, lambda i: i + 3),
    "two steps": loops_while(np.int32(0), lambda i: i < 9, lambda i: (i + 1) + 1),
    "ahead": loops_while(np.int32(0), lambda i: i + 3 < 9, lambda i: i + 2),
    "converted": loops_while(
        np.int32(0), lambda i: i.astype("int16") < 9, lambda i: (i.astype("int16") + 2).astype("int32")
    ),
    "folded bound": loops_while(np.int32(0), lambda i: i < jnp.minimum(jnp.int32(4) * 3, 100), lambda i: i + 1),
}


def counted_loops(fun):
    plan = sdy.partition(fun, mesh=jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))).plan(
        np.int32(0)
    )
    graph = Graph(plan.stages["imported"])
    return graph, [op for op in graph.ops if op.name == "stablehlo.while"]


@pytest.mark.parametrize("form", COUNTED)
def test_the_counts_of_loops_are_how_often_they_run(form):
    fun = COUNTED[form]
    _graph, (loop,) = counted_loops(fun)
    ran = {"map": 7, "unrolled scan": 4}.get(form) or int(fun(np.int32(0)))
    assert trip_count(loop) == ran


def test_bounds_that_are_carried_into_loops_are_known():
    def inner(bound, x):
        return jax.lax.while_loop(lambda s: s[0] < s[1], lambda s: (s[0] + 1, s[1], s[2] + 1), (0, bound, x))[2]

    def outer(x):
        bound = jnp.int32(5)
        return jax.lax.fori_loop(0, 3, lambda _, s: (s[0], inner(s[0], s[1])), (bound, x))[1]

    _graph, (around, within) = counted_loops(outer)
    assert (trip_count(around), trip_count(within)) == (3, 5)
    assert executions(within.blocks[1].terminator)[:4] == (15, 15, True, 2)
    assert executions(within.blocks[0].terminator)[:4] == (18, 18, True, 2)


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: jax.lax.fori_loop(0, x, lambda _, n: n + 1, x),
        lambda x: jax.lax.while_loop(lambda s: s < 9, lambda s: s * 2, x),
        loops_while(np.int32(1), lambda i: i < 9, lambda i: i * 2),
        loops_while(np.int32(0), lambda i: (i < 9) & (i < 20), lambda i: i + 1),
        loops_while(np.float32(0), lambda i: i < 9, lambda i: i + 1),
        loops_while(np.uint8(200), lambda i: i < 250, lambda i: i + np.uint8(100)),
    ],
    ids=["argument", "value", "doubled", "both", "float", "overflow"],
)
def test_other_counts_are_unknown_and_guessed_for_costs(fun):
    _graph, (loop,) = counted_loops(fun)
    assert trip_count(loop) is None and trips(loop) == UNKNOWN
    assert executions(loop.blocks[1].terminator)[:4] == (1, 10, False, 1)


def test_a_loop_that_depends_on_one_around_it_is_unknown():
    def outer(x):
        return jax.lax.fori_loop(0, 4, lambda i, n: jax.lax.fori_loop(0, i, lambda _, n: n + 1, n), x)

    _graph, (_around, within) = counted_loops(outer)
    assert executions(within.blocks[1].terminator)[:4] == (4, 40, False, 2)


BRANCHES = [lambda n: n + 1, lambda n: n * 2, lambda n: n - 3]


def branches_of(choose, trips):
    """The executions of the branches of a switch in a loop, on the number of the trip."""
    step = lambda i, x: jax.lax.switch(choose(i), BRANCHES, x)  # noqa: E731
    _graph, (loop,) = counted_loops(lambda x: jax.lax.fori_loop(0, trips, step, x))
    switch = next_named(loop.blocks[1], "stablehlo.case")
    return [executions(block.terminator) for block in switch.blocks]


def test_branches_that_the_trip_chooses_run_as_often_as_they_are_chosen():
    """Numbers out of range are clamped."""
    for choose, count, wanted in [
        (lambda i: i, 5, [1, 1, 3]),
        (lambda i: 3 - i, 6, [3, 1, 2]),
        (lambda i: i, 2, [1, 1, 0]),
    ]:
        assert branches_of(choose, count) == [(times, times, True, 1, ()) for times in wanted]


def test_other_branches_may_be_taken_in_all_trips():
    assert [(each.times, len(each.branches)) for each in branches_of(lambda i: i * i, 6)] == [(6, 1)] * 3
