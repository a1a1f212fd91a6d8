"""Values that are rounded before they are moved for products, and what that costs."""

from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from machine_models import planned_for, small_costs
from op_texts import X, elementwise, main, product
from partitioned_ops import LINE

import sdy_jax as sdy
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.meshes import AxisRef, Mesh
from sdy_jax.lowering.planner.facts.fusion import rounded_values, values_kept_rounded

TPU = sdy.CostModel.of_machine("tpu v5e", ["x"])
BYTES = sdy.CostModel.of_platform("tpu")
TRANSPOSED = f"%t = stablehlo.transpose %v, dims = [1, 0] : ({X}) -> {X}\n"


@pytest.mark.parametrize(
    ("users", "is_rounded"),
    [
        (product("y", "v", "x"), True),
        (product("y", "v", "x").replace("[0] :", "[0], precision = [HIGHEST, DEFAULT] :"), False),
        (TRANSPOSED + product("y", "t", "x"), True),
        (elementwise("e", "add", "v", "x") + product("y", "v", "e"), True),
        (elementwise("y", "tanh", "v"), False),
        (f"%s = stablehlo.cholesky %v, lower = true : {X}\n" + product("y", "v", "s"), False),
    ],
)
def test_values_are_rounded_that_products_read_and_else_only_what_runs_in_any_layout(users, is_rounded):
    graph = main(elementwise("v", "tanh", "x") + users + f"return %y : {X}")
    assert (graph.main.blocks[0].ops[0].results[0] in rounded_values(graph, TPU)) == is_rounded


def test_long_chains_of_sums_are_followed():
    chain = "".join(elementwise(f"v{n + 1}", "add", f"v{n}", "x") for n in range(2000))
    graph = main(elementwise("v0", "tanh", "x") + chain + product("y", "v2000", "x") + f"return %y : {X}")
    assert graph.main.blocks[0].ops[0].results[0] in rounded_values(graph, TPU)


def test_what_is_returned_is_sent_as_it_is():
    body = elementwise("v", "tanh", "x") + product("y", "v", "x") + f"return %y, %v : {X}, {X}"
    graph = main(body, results=f"{X}, {X}")
    assert graph.main.blocks[0].ops[0].results[0] not in rounded_values(graph, TPU)


@pytest.mark.parametrize(
    ("kind", "share"),
    [("all_gather", 0.5), ("all_to_all", 0.5), ("collective_permute", 0.5), ("all_reduce", 1), ("reduce_scatter", 1)],
)
@pytest.mark.parametrize("costs", [TPU, BYTES], ids=["seconds", "bytes"])
def test_rounded_values_are_half_on_the_wire_of_tpus_but_for_sums(costs, kind, share):
    mesh, axes, rounded = Mesh.of(x=8), (AxisRef("x"),), costs.of_rounded
    assert rounded.unit == costs.unit and rounded.of_rounded == rounded
    plain = costs.rate(kind, axes, mesh)
    assert rounded.rate(kind, axes, mesh) == plain._replace(per_byte=pytest.approx(share * plain.per_byte))
    sent = [model.sending_time(kind, axes, mesh, 2.0**30) for model in (costs, rounded)]
    assert sent[1] == pytest.approx(share * sent[0], rel=1e-2)


@pytest.mark.parametrize(
    "costs", [sdy.CostModel.of_machine("h100", ["x"]), *map(sdy.CostModel.of_platform, ("cpu", "gpu"))]
)
def test_only_tpus_round(costs):
    assert costs.of_rounded is costs


def block(x, weights):
    """A feed-forward layer in a residual stream, normalized before."""
    for up, down in weights:
        h = (x - jnp.mean(x, -1, keepdims=True)) * jax.lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5)
        x = x + jnp.tanh(h @ up) @ down
    return x


def step(weights, x):
    gradients = jax.grad(lambda weights: jnp.sum(block(x, weights) ** 2))(weights)
    return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, gradients)


@pytest.mark.dear
@pytest.mark.parametrize("costs", [small_costs("tpu v5e", ["x"]), BYTES], ids=["seconds", "bytes"])
def test_layers_in_megatrons_layout_scatter_their_sums_on_tpus(costs):
    """What is scattered and gathered again, rounded, is less than what an all_reduce sends; and what is between that is
    computed on shards. So most sums are scattered, and the plan's time is that of rounded gathers."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 16, 64)).astype(np.float32)
    weights = [tuple(rng.standard_normal(s).astype(np.float32) / 8 for s in ((64, 256), (256, 64)))] * 2
    specs, plans = [(P(None, "x"), P("x"))] * 2, []
    for each in (costs, replace(costs, rounds=1.0)):
        with planned_for("tpu v5e"):
            partitioned = sdy.partition(step, mesh=LINE, in_shardings=(specs, P()), out_shardings=specs, costs=each)
            plans.append(partitioned.plan(weights, x))
            found = partitioned(weights, x)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, jax.jit(step)(weights, x))
    kinds = Counter(c.kind for c in plans[0].collectives if c.shape == x.shape)
    assert kinds["reduce_scatter"] == kinds["all_gather"] >= 2 * max(kinds["all_reduce"], 1)
    assert plans[0].time.communication < 0.9 * plans[1].time.communication


def cells(weights, biases, x):
    """A recurrent layer."""

    def cell(h, now):
        h = jnp.tanh(now + h @ weights + biases)
        return h, h

    return jnp.sum(jax.lax.scan(cell, jnp.zeros_like(x[0]), x)[1] ** 2)


@pytest.mark.dear
@pytest.mark.parametrize("memory", [None, "270KiB"])
def test_a_sum_takes_what_is_gathered_for_products_before_it_is_rounded(memory):
    """The gradient of a bias, in a loop that gathers the gradients of activations for products."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(s).astype(np.float32) / 8 for s in ((128, 128), (128,), (8, 64, 128))]
    given, costs = (P("x"), P(), P(None, "x")), small_costs("tpu v5e", ["x"])
    step = jax.grad(cells, (0, 1))
    with planned_for("tpu v5e"):
        partitioned = sdy.partition(
            step, mesh=LINE, in_shardings=given, out_shardings=given[:2], costs=costs, memory=memory
        )
        plan, found = partitioned.plan(*arrays), partitioned(*arrays)
    assert "bound" in str(plan)
    sums = [op for op in Graph(plan.stages["partitioned"]).ops if op.name == "stablehlo.reduce"]
    assert [str(op.operands[0].sharding) for op in sums if op.operands[0].shape == (64, 128)] == ['@mesh, [{"x"}, {}]']
    for ours, plain in zip(found, step(*arrays), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=2e-4, atol=1e-4)


def test_long_chains_of_sums_are_kept_rounded():
    chain = "".join(elementwise(f"v{n + 1}", "add", f"v{n}", "x") for n in range(2000))
    graph = main(elementwise("v0", "tanh", "x") + chain + product("y", "v2000", "x") + f"return %y : {X}")
    assert graph.main.blocks[0].ops[0].results[0] in values_kept_rounded(graph)
