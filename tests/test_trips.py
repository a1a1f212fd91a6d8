"""Loops count: what comes into a loop is resharded once, what an op in it communicates, in every iteration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sharding_dump import parse

import sdy_jax as sdy
from sdy_jax.graph import Graph
from sdy_jax.lowering.trips import UNKNOWN, times_as_often, trips

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


def test_a_weight_is_gathered_before_the_loop_rather_than_its_product_reduced_in_every_iteration():
    mesh = jax.make_mesh((8,), ("m",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_shardings": (P(), P("m", None)), "out_shardings": P()}
    partitioned = sdy.partition(layers, mesh=mesh, costs=sdy.CostModel(), **specs)
    rng = np.random.default_rng(0)
    xs, w = rng.normal(size=(20, 16, 64)).astype("f"), rng.normal(size=(64, 512)).astype("f")
    moved = {(c.kind, c.depth): c.wire_bytes for c in partitioned.plan(xs, w).collectives if c.wire_bytes}
    # Reducing would take 2 * 7/8 * 32 KiB in each of 20 iterations.
    assert moved == {("all_gather", 0): 7 / 8 * w.nbytes, ("all_gather", 1): 7 / 8 * 16 * 64 * 4}
    np.testing.assert_allclose(partitioned(xs, w), layers(xs, w), rtol=1e-4, atol=1e-4)


def test_in_a_single_iteration_the_product_is_reduced():
    mesh = jax.make_mesh((8,), ("m",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_shardings": (P(), P("m", None)), "out_shardings": P()}
    partitioned = sdy.partition(layers, mesh=mesh, costs=sdy.CostModel(), **specs)
    plan = partitioned.plan(jax.ShapeDtypeStruct((1, 16, 64), "float32"), jax.ShapeDtypeStruct((64, 512), "float32"))
    assert "all_reduce" in {c.kind for c in plan.collectives}
