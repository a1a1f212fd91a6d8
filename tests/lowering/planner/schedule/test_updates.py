"""What element-wise ops make of a gradient is computed with it, and waited for, where compilers would put it off."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gradient_programs import late  # noqa: F401 - a fixture
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE
from sharding_dump import parse

import sdy_jax as sdy
from sdy_jax.ir.graph import Graph
from sdy_jax.lowering.planner.schedule import op_order
from sdy_jax.lowering.planner.schedule.op_order import order_gradients
from sdy_jax.lowering.targets.family import Arrays

SQUARE, WHOLE = "tensor<16x16xf32>", "<@mesh, [{}, {}]>"


@pytest.fixture(autouse=True)
def _arrays_of_any_size(monkeypatch):
    monkeypatch.setattr(op_order, "_LEAST", 0)


def written(op):
    """`h = dot_general x w` as an op on square arrays that are whole on every device."""
    result, right = op.split(" = ")
    kind, *operands = right.split()
    names = ", ".join(f"%{name}" for name in operands)
    if kind == "all_reduce":
        return f'%{result} = sdy.all_reduce {{"a"}} {names} out_sharding={WHOLE} : {SQUARE}'
    types = f"({SQUARE}, {SQUARE}) -> {SQUARE}" if kind == "dot_general" else SQUARE
    contracting = ", contracting_dims = [1] x [0]" if kind == "dot_general" else ""
    sharding = f"{{sdy.sharding = #sdy.sharding_per_value<[{WHOLE}]>}}"
    return f"%{result} = stablehlo.{kind} {names}{contracting} {sharding} : {types}"


def prompt(program, results):
    """The kinds of a program's ops after the pass, of those that wait with what they wait for."""
    arguments = ", ".join(f"%{name}: {SQUARE} {{sdy.sharding = #sdy.sharding{WHOLE}}}" for name in "xwm")
    types = ", ".join([SQUARE] * len(results))
    module = parse(f"""
        sdy.mesh @mesh = <["a"=4]>
        func.func @main({arguments}) -> ({types}) {{
        {chr(10).join(map(written, program))}
        return {", ".join("%" + name for name in results)} : {types}
        }}""")
    order_gradients(module.operation, arrays=Arrays(rounded=2))
    assert module.operation.verify()
    return [kind_of(op) for op in Graph(module.operation).main.blocks[0].ops]


def kind_of(op):
    if op.key == "sdy_jax.after":
        return ("after", *(kind_of(value.defining_op) for value in op.operands[1:]))
    return op.name.partition(".")[2]


FORWARD = ["h = dot_general x w", "t = tanh h"]
GRADIENT = "g = dot_general t t"
BACKWARD = ["d = dot_general t x", "r = dot_general d x"]
MOMENT = ["k = multiply m m", "n = add k g"]


def test_an_update_runs_with_its_gradient_and_is_waited_for():
    found = prompt([*FORWARD, GRADIENT, *BACKWARD, *MOMENT], "nr")
    update = ["multiply", "add"]
    assert found == ["dot_general", "tanh", "dot_general", *update, ("after", "add"), *["dot_general"] * 2, "return"]


def test_what_is_no_update_is_waited_for_only_where_it_is_smaller():
    """Here it is as large as what it is computed of."""
    for between in ("n = all_reduce g", "n = dot_general g g"):
        found = prompt([*FORWARD, GRADIENT, *BACKWARD, between], "nr")
        assert found == ["dot_general", "tanh", *["dot_general"] * 3, between.split()[2], "return"]


def test_an_update_of_what_comes_later_stays_where_it_is():
    program = [*FORWARD, GRADIENT, *BACKWARD, "s = all_reduce r", "n = add s g"]
    assert [kind for kind in prompt(program, "n") if isinstance(kind, tuple)] == []


def test_what_reads_the_weight_that_an_update_replaces_runs_before():
    """Else compilers would copy the weight."""
    backward = ["d = dot_general t w", "f = dot_general d x", "r = dot_general f x"]
    found = prompt([*FORWARD, GRADIENT, *backward, "n = subtract w g"], "nr")
    step, following = ["dot_general"], [("after", "subtract"), "dot_general", "dot_general"]
    assert found == ["dot_general", "tanh", "dot_general", "subtract", *step, *following, "return"]


def test_an_op_of_two_updates_moves_once():
    other = ["q = tanh r", "l = dot_general q q", "o = dot_general q x", "e = dot_general o x"]
    found = prompt([*FORWARD, GRADIENT, *BACKWARD, *other, *MOMENT, "p = add k l"], "npe")
    assert found.count("multiply") == 1 and found.index("multiply") < found.index("add")
    assert [kind for kind in found if isinstance(kind, tuple)] == [("after", "add"), ("after", "add")]


def loss(weights, x):
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.sum(x**2)


def step(weights, moments, x):
    """With gradients that are larger than what they are computed of."""
    gradients = jax.grad(loss)(weights, x)
    moments = [0.9 * m + 0.1 * g for m, g in zip(moments, gradients, strict=True)]
    return [w - 0.1 * m for w, m in zip(weights, moments, strict=True)], moments


@pytest.mark.parametrize("donated", [(), (0, 1)])
def test_the_numbers_are_the_plain_functions(late, donated):  # noqa: F811 - the fixture
    rng = np.random.default_rng(0)
    weights, moments = ([jnp.asarray(rng.normal(0, 0.2, (64, 64)), jnp.float32) for _ in range(3)] for _ in range(2))
    x = jnp.asarray(rng.normal(size=(8, 64)), jnp.float32)
    spec = [P("x"), P(None, "x"), P("x")]
    shardings = {"in_shardings": (spec, spec, P()), "out_shardings": (spec, spec)}
    ours = sdy.partition(step, mesh=LINE, donate_argnums=donated, **shardings)
    plan = ours.plan(weights, moments, x)
    waiting = [op for op in Graph(plan.stages["partitioned"]).ops if op.key == "sdy_jax.after"]
    assert "stablehlo.add" in {value.defining_op.name for op in waiting for value in op.operands[1:]}
    wanted = jax.jit(step)(weights, moments, x)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5), ours(weights, moments, x), wanted)
