"""Gradients of weights are computed where they stand in the program, though only results need them."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gradient_programs import ROUNDED, late  # noqa: F401 - a fixture
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE
from sharding_dump import parse

import sdy_jax as sdy
from sdy_jax.ir.graph import Graph
from sdy_jax.lowering.ops.registry import EMITTERS
from sdy_jax.lowering.planner.schedule import op_order
from sdy_jax.lowering.planner.schedule.op_order import order_gradients
from sdy_jax.testing import assert_same

LONG, SQUARE = "tensor<96x8xf32>", "tensor<8x8xf32>"
SPLIT = 'sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"a"}, {}]>]>'


@pytest.fixture(autouse=True)
def _arrays_of_any_size(monkeypatch):
    monkeypatch.setattr(op_order, "_LEAST", 0)


def product(result, left, right, kind):
    """`kind`: "gradient" of a weight, or "step" through one."""
    contracting, types, sharding = {
        "gradient": ("[0] x [0]", f"({LONG}, {LONG}) -> {SQUARE}", '<@mesh, [{}, {}], unreduced={"a"}>'),
        "step": ("[1] x [0]", f"({LONG}, {SQUARE}) -> {LONG}", '<@mesh, [{"a"}, {}]>'),
    }[kind]
    attribute = f"{{sdy.sharding = #sdy.sharding_per_value<[{sharding}]>}}"
    return (
        f"%{result} = stablehlo.dot_general %{left}, %{right}, contracting_dims = {contracting} {attribute} : {types}\n"
    )


def tanh(result, operand):
    return f"%{result} = stablehlo.tanh %{operand} {{{SPLIT}}} : {LONG}\n"


def awaited(body, results, width=8, rows=96):
    """Per product that waits, the kinds of the ops whose results it waits for."""
    found = waits(body, results, width, rows)
    return [(op.results[0].uses[0][0].name, [v.defining_op.name for v in op.operands[1:]]) for op in found]


def waits(body, results, width=8, rows=96, weight="", memory=0.0):
    argument = f'%x: {LONG} {{sdy.sharding = #sdy.sharding<@mesh, [{{"a"}}, {{}}]>}}, %w: {SQUARE} {weight}'
    types = ", ".join(SQUARE if name.startswith("g") else LONG for name in results)
    text = f"""
        sdy.mesh @mesh = <["a"=4]>
        func.func @main({argument}) -> ({types}) {{
        {body}
        return {", ".join("%" + name for name in results)} : {types}
        }}"""
    module = parse(text.replace("8x8xf32", f"{width}x{width}xf32").replace("96x8xf32", f"{rows}x{width}xf32"))
    found, again = order_gradients(module.operation, memory, ROUNDED), Graph(module.operation)
    assert module.operation.verify()
    assert [(op.mlir, [v.mlir for v in op.operands]) for op in found.ops] == [
        (op.mlir, [v.mlir for v in op.operands]) for op in again.ops
    ]
    return [op for op in found.ops if op.key == "sdy_jax.after"]


STEP = product("h", "x", "w", "step") + tanh("t", "h")


AFTER_IT = product("v", "u", "w", "step") + product("r", "v", "w", "step")


def test_nothing_waits_for_what_is_computed_of_little(monkeypatch):
    body = STEP + tanh("u", "h") + product("g", "t", "t", "gradient") + AFTER_IT
    kept = 96 // 4 * 8 * 2  # rounded to bfloat16
    for least, count in ((kept, 1), (kept + 1, 0)):
        monkeypatch.setattr(op_order, "_LEAST", least)
        assert len(awaited(body, ["g", "r"])) == count


def test_a_product_waits_for_the_gradient_before_it():
    body = STEP + tanh("u", "h") + product("g", "t", "t", "gradient") + AFTER_IT
    assert awaited(body, ["g", "r"]) == [("stablehlo.dot_general", ["stablehlo.dot_general"])]


def test_nothing_waits_for_a_gradient_where_a_device_holds_all_values_at_once():
    body = STEP + tanh("u", "h") + product("g", "t", "t", "gradient") + AFTER_IT
    long, square = 96 // 4 * 8 * 4, 8 * 8 * 4  # bytes on a device
    together = 6 * long + 2 * square  # x, h, t, u, v, r and w, g
    assert waits(body, ["g", "r"], memory=together - 1) and not waits(body, ["g", "r"], memory=together)


def test_nothing_waits_for_a_sum():
    """It is computed with what it adds up, and to wait for it is an op of its own."""
    stacked = f"%q = stablehlo.reshape %t {{{SPLIT.replace('{}]', '{}, {}]')}}} : ({LONG}) -> tensor<12x8x8xf32>\n"
    sharding = 'sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{}, {}], unreduced={"a"}>]>'
    types = f"(tensor<12x8x8xf32>, tensor<f32>) -> {SQUARE}"
    summed = f"""%zero = stablehlo.constant dense<0.0> : tensor<f32>
        %g = stablehlo.reduce(%q init: %zero) applies stablehlo.add across dimensions = [0] {{{sharding}}} : {types}
        """
    assert awaited(STEP + stacked + tanh("u", "h") + summed + AFTER_IT, ["g", "r"]) == []


@pytest.mark.parametrize("weight", ["", "{sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}"])
def test_what_waits_is_the_weight_where_that_is_an_argument_in_place(weight):
    body = STEP + tanh("u", "h") + product("g", "t", "t", "gradient") + AFTER_IT
    (wait,) = waits(body, ["g", "r"], weight=weight)
    assert (wait.operands[0].defining_op is None) == bool(weight)


def test_the_last_gradient_holds_nothing_up():
    body = STEP + tanh("u", "h") + AFTER_IT + product("g", "t", "t", "gradient")
    assert awaited(body, ["g", "r"]) == []


def test_a_gradient_that_is_larger_than_what_it_is_computed_of_may_come_later():
    body = STEP + tanh("u", "h") + product("g", "t", "t", "gradient") + AFTER_IT
    assert awaited(body, ["g", "r"], width=16) == []


def test_operands_count_as_they_are_kept():
    """Those of products alone are kept rounded: 16 x 8 of two bytes on a device, beside 8 x 8 of four."""
    body = STEP + tanh("u", "h") + product("g", "t", "t", "gradient") + AFTER_IT
    assert awaited(body, ["g", "r"], rows=64) == []
    exact = body.replace("contracting_dims = [0] x [0]", "contracting_dims = [0] x [0], precision = [HIGHEST, HIGHEST]")
    assert awaited(exact, ["g", "r"], rows=64) == [("stablehlo.dot_general", ["stablehlo.dot_general"])]


def test_arguments_are_no_reason_to_wait():
    body = product("g", "x", "x", "gradient") + STEP + product("r", "t", "w", "step")
    assert awaited(body, ["g", "r"]) == []


def loss(weights, x):
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.sum(x**2)


def step(weights, x):
    value, gradients = jax.value_and_grad(loss)(weights, x)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value


@pytest.mark.parametrize("layouts", ("local", "global"))
@pytest.mark.parametrize("spec", (P(), P("x"), P(None, "x")))
def test_the_numbers_are_the_plain_functions(late, spec, layouts):  # noqa: F811
    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.normal(0, 0.3, (16, 16)), jnp.float32) for _ in range(3)]
    x = jnp.asarray(rng.normal(size=(256, 16)), jnp.float32)
    shardings = {"in_shardings": ([spec] * 3, P("x")), "out_shardings": ([spec] * 3, P())}
    plan = sdy.partition(step, mesh=LINE, layouts=layouts, **shardings).plan(weights, x)
    waiting = [op for op in Graph(plan.stages["partitioned"]).ops if op.key == "sdy_jax.after"]
    assert waiting, "the gradients of the second and the third weight are smaller than what they are computed of"
    assert_same(step, weights, x, mesh=LINE, layouts=layouts, atol=1e-4, rtol=1e-4, **shardings)


def convolved(weights, x):
    """The gradients of weights that are parts of an argument."""

    def loss(weights):
        y = x
        for weight in weights:
            y = jnp.tanh(jax.lax.conv(y, weight, (1, 1), "SAME"))
        return jnp.mean(y**2)

    return jax.grad(loss)(weights)


def test_parts_of_a_whole_argument_are_weights_as_well(late):  # noqa: F811
    rng = np.random.default_rng(0)
    weights, x = rng.normal(size=(3, 4, 4, 3, 3)) / 6, rng.normal(size=(16, 4, 12, 4))
    assert_same(convolved, weights.astype(np.float32), x.astype(np.float32), mesh=LINE, in_shardings=(P(), P("x")))


def test_gradients_without_elements_are_always_there(late):  # noqa: F811
    def total(weights, empty, x):
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.sum(x**2) + jnp.sum(x @ empty)

    x, weight = np.linspace(-1, 1, 512, dtype=np.float32).reshape(64, 8), np.eye(8, dtype=np.float32)
    step = jax.grad(total, (0, 1))
    assert_same(step, [weight] * 3, np.ones((8, 0), np.float32), x, mesh=LINE, in_shardings=(P(), P(), P("x")))


@pytest.mark.parametrize(
    ("platform", "attributes", "barriers"), [("tpu", {}, 1), ("cpu", {}, 0), ("tpu", {"sdy_jax.in_order": None}, 0)]
)
def test_only_tpus_wait_behind_a_barrier(platform, attributes, barriers):
    """Elsewhere XLA drops barriers before it looks for equal ops, and on TPUs before ops get their order."""
    local = SimpleNamespace(op=SimpleNamespace(attributes=attributes))
    wait = EMITTERS["sdy_jax.after"]
    traced = jax.jit(lambda x, y: wait(local, x, y)).trace(jnp.ones(4), jnp.ones((2, 2)))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("stablehlo.optimization_barrier") == barriers
    assert text.count("stablehlo.select") == 1 - barriers
