"""What no result needs is neither computed nor moved; everything else is, with the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.ir.graph import Graph
from sdy_jax.lowering.planner.rewrites.preparation import erase_dead_code, inline_settled_branches
from sdy_jax.testing import assert_same

X = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
SPECS = P("data", "model")


def plain(x):
    jnp.sort(x, 0)
    return jnp.tanh(x)


def loop(x):
    carried = jax.lax.fori_loop(0, 3, lambda _, c: (jnp.sort(c[0], 0), jnp.tanh(c[1]), c[2] + 1), (x, x, 0))
    return carried[1] + carried[2]


def loops_that_need_each_other(x):
    """Of three values that a loop carries, the first needs the second one."""
    return jax.lax.fori_loop(0, 3, lambda _, c: (c[1] + 1, c[0].T, jnp.sort(c[2], 0)), (x, x, x))[0]


def branch(x):
    branches = [lambda x: (jnp.sort(x, 0), jnp.tanh(x)), lambda x: (x, jnp.sin(x))]
    return jax.lax.switch(jnp.int32(x[0, 0] > 0), branches, x)[1]


def nested(x):
    return jax.lax.scan(lambda c, _: ((loop(c[0]), jnp.sort(c[1], 0)), None), (x, x), None, length=2)[0][0]


def manual(x):
    def body(x):
        return jax.lax.psum(jnp.sort(x, 0), "data"), jnp.tanh(x)

    return jax.shard_map(body, in_specs=P("data"), out_specs=(P(), P("data")), axis_names={"data"})(x)[1]


def named(x):
    return sdy.named_computation("part")(lambda x: (jnp.sort(x, 0), jnp.tanh(x)))(x)[1]


def arguments_of_computations(x):
    return jax.shard_map(lambda x, y: jnp.tanh(x), in_specs=P("data"), out_specs=P("data"))(x, jnp.sort(x, 0))


@pytest.mark.parametrize(
    "fun",
    [plain, loop, loops_that_need_each_other, branch, nested, manual, named, arguments_of_computations],
    ids=lambda fun: fun.__name__,
)
def test_sorting_for_nobody_is_left_out(mesh, fun):
    with jax.set_mesh(mesh):
        plan = assert_same(jax.jit(fun), X, mesh=mesh, in_shardings=SPECS)
    assert "stablehlo.sort" not in plan.mlir()
    assert "stablehlo.all_reduce" not in plan.mlir()


def test_what_a_loop_carries_for_nobody_is_not_moved(mesh):
    def carried(x):
        y = jnp.tanh(x)
        loop = jax.lax.fori_loop(0, 3, lambda _, c: (y, jnp.sin(c[1])), (x.T, x))
        return loop[1] + y

    for layouts in ("local", "global"):
        assert not assert_same(carried, X, mesh=mesh, in_shardings=SPECS, layouts=layouts).collectives


def test_what_a_loops_condition_needs_stays(mesh):
    def until(x):
        return jax.lax.while_loop(lambda c: c[0].sum() < 50, lambda c: (jnp.sort(c[0], 0) + 1, jnp.tanh(c[1])), (x, x))[
            1
        ]

    assert "stablehlo.sort" in assert_same(until, X, mesh=mesh, in_shardings=SPECS).mlir()


def test_what_branches_that_are_not_there_would_keep_is_not_held(mesh):
    """`jnp.diagonal` asks which devices it is for, and its gradient has a whole matrix of ones for the others."""

    def lost(x, y):
        scores = x @ y.T
        return (jax.nn.logsumexp(scores, -1) - jnp.diagonal(scores)).sum()

    plan = assert_same(jax.grad(lost), X, X, mesh=mesh, in_shardings=P("data"), out_shardings=P("data"))
    assert "stablehlo.case" not in plan.mlir() and "dense<1.000000e+00> : tensor<8x8xf32>" not in plan.mlir()


def left(text):
    """The names of the ops that are left."""
    module = ir.Module.parse(text, mlir.make_ir_context())
    with module.context:
        graph = erase_dead_code(inline_settled_branches(Graph(module.operation)))
    assert module.operation.verify()
    return [op.name for op in graph.main.walk()]


def test_effects_and_what_they_need_stay():
    found = left("""
func.func @main(%x: tensor<8xf32>, %p: tensor<i1>) -> tensor<8xf32> {
  %0 = stablehlo.sine %x : tensor<8xf32>
  %1 = stablehlo.cosine %x : tensor<8xf32>
  %2 = "stablehlo.if"(%p) ({
    %3 = stablehlo.custom_call @log(%0) {has_side_effect = true} : (tensor<8xf32>) -> tensor<8xf32>
    %4 = stablehlo.tanh %1 : tensor<8xf32>
    stablehlo.return %4 : tensor<8xf32>
  }, {
    stablehlo.return %1 : tensor<8xf32>
  }) : (tensor<i1>) -> tensor<8xf32>
  return %x : tensor<8xf32>
}""")
    assert "stablehlo.custom_call" in found and "stablehlo.sine" in found
    assert "stablehlo.tanh" not in found and "stablehlo.cosine" not in found


@pytest.mark.parametrize(
    ("number", "taken"), [("0", "sine"), ("1", "cosine"), ("-1", "cosine"), ("7", "cosine"), ("%x", "")]
)
def test_the_branch_that_is_always_taken_is_what_is_left(number, taken):
    found = left(f"""
func.func @main(%x: tensor<i32>, %y: tensor<8xf32>) -> tensor<8xf32> {{
  {"" if number == "%x" else f"%0 = stablehlo.constant dense<{number}> : tensor<i32>"}
  %1:2 = "stablehlo.case"({"%x" if number == "%x" else "%0"}) ({{
    %2 = stablehlo.sine %y : tensor<8xf32>
    stablehlo.return %2, %y : tensor<8xf32>, tensor<8xf32>
  }}, {{
    %2 = stablehlo.cosine %y : tensor<8xf32>
    stablehlo.return %2, %y : tensor<8xf32>, tensor<8xf32>
  }}) : (tensor<i32>) -> (tensor<8xf32>, tensor<8xf32>)
  return %1#0 : tensor<8xf32>
}}""")
    if taken:
        assert found == ["func.func", f"stablehlo.{taken}", "func.return"]
    else:
        assert {"stablehlo.case", "stablehlo.sine", "stablehlo.cosine"} <= {*found}


@pytest.mark.parametrize("truth", ["true", "false"])
def test_a_test_that_is_settled_leaves_one_branch_and_its_effects(truth):
    found = left(f"""
func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {{
  %p = stablehlo.constant dense<{truth}> : tensor<i1>
  "stablehlo.if"(%p) ({{
    stablehlo.custom_call @log(%x) {{has_side_effect = true}} : (tensor<8xf32>) -> ()
    stablehlo.return
  }}, {{
    stablehlo.custom_call @warn(%x) {{has_side_effect = true}} : (tensor<8xf32>) -> ()
    stablehlo.return
  }}) : (tensor<i1>) -> ()
  return %x : tensor<8xf32>
}}""")
    assert found == ["func.func", "stablehlo.custom_call", "func.return"]


@pytest.mark.parametrize("dtype", ["f32", "i1", "ui8", "i4", "complex<f32>", "bf16", "f8E8M0FNU"])
def test_zeros_of_every_type_stand_for_what_a_branch_returns_to_nobody(dtype):
    found = left(f"""
func.func @main(%p: tensor<i1>, %x: tensor<4x{dtype}>) -> tensor<4x{dtype}> {{
  %0:2 = "stablehlo.if"(%p) ({{
    %1 = stablehlo.custom_call @make(%x) : (tensor<4x{dtype}>) -> tensor<4x{dtype}>
    stablehlo.return %1, %x : tensor<4x{dtype}>, tensor<4x{dtype}>
  }}, {{
    stablehlo.return %x, %x : tensor<4x{dtype}>, tensor<4x{dtype}>
  }}) : (tensor<i1>) -> (tensor<4x{dtype}>, tensor<4x{dtype}>)
  return %0#1 : tensor<4x{dtype}>
}}""")
    assert "stablehlo.custom_call" not in found and "stablehlo.constant" in found


def test_a_program_without_dead_code_stays_as_it_is():
    module = ir.Module.parse(
        "func.func @main(%x: tensor<f32>) -> tensor<f32> { return %x : tensor<f32> }", mlir.make_ir_context()
    )
    graph = Graph(module.operation)
    assert erase_dead_code(graph) is graph
