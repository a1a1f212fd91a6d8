"""Programs as other compilers write them: with attributes, ops, meshes and statements that are none of JAX's."""

from __future__ import annotations

import re

import numpy as np
import pytest

import sdy_jax as sdy
from sdy_jax import passes

MESH = 'sdy.mesh @mesh = <["x"=2, "y"=4]>'
T = "tensor<16x4xf32>"
SPLIT = 'sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>'
X, W = np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4), np.eye(4, dtype=np.float32) + 1

SYMMETRIC = f"""
module @step attributes {{enzymexla.options = #enzymexla.options<fast, level = 3>, mhlo.num_partitions = 8 : i32}} {{
  {MESH}
  func.func @main(%a: {T} {{enzymexla.effects = ["read", "write"], tf.aliasing_output = 0 : i32, {SPLIT}}})
      -> ({T} {{enzymexla.kind = #enzymexla<kind result>, {SPLIT}}}) attributes {{enzymexla.effects = ["read"]}} {{
    %0 = stablehlo.add %a, %a {{enzymexla.symmetric = [#enzymexla.guarantee<NONE>],
      mhlo.frontend_attributes = {{}}}} : {T}
    return %0 : {T}
  }}
}}"""
TYPED = f"""
#role = #ttcore.argument_type<parameter>
module @jit_f attributes {{ttcore.meshes = #ttcore.meshes<[<"mesh" = 2x4>]>,
    ttcore.system = #ttcore.system<[{{a = ")"}}]>}} {{
  {MESH}
  func.func public @main(%a: {T} {{ttcore.argument_type = #ttcore.argument_type<input>, ttir.name = "in", {SPLIT}}},
      %w: tensor<4x4xf32> {{ttcore.argument_type = #role, ttcore.local = #ttcore<local shape = tensor<4x1xf32>>}})
      -> ({T} {{jax.result_info = "y", ttcore.status = !ttcore.status<i32>}}) {{
    %0 = stablehlo.dot_general %a, %w, contracting_dims = [1] x [0] : ({T}, tensor<4x4xf32>) -> {T}
    %1 = stablehlo.composite "vendor.squash" %0 {{decomposition = @squash}} : ({T}) -> {T}
    return %1 : {T}
  }}
  func.func private @squash(%p: {T}) -> {T} {{
    %0 = stablehlo.tanh %p {{ttir.fused = #ttir.fused<"}}>">}} : {T}
    return %0 : {T}
  }}
}}"""
PROGRAMS = {"symmetric": (SYMMETRIC, (X,), X + X), "typed": (TYPED, (X, W), np.tanh(X @ W))}


def words(text: str) -> set[str]:
    """The attributes of foreign dialects, by name."""
    return set(re.findall(r"\b(?:enzymexla|ttcore|ttir|mhlo)\.\w+(?= =)", text))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_with_foreign_attributes_runs_and_keeps_them(name: str) -> None:
    text, arguments, expected = PROGRAMS[name]
    np.testing.assert_allclose(sdy.partition(sdy.loads(text))(*arguments), expected, rtol=1e-5)
    after = passes.run(text, passes.parse("sdy-propagation-pipeline"))
    assert words(after) == words(text) and len(words(text)) > 3


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("stage", ["traced", "imported", "propagated", "partitioned"])
def test_its_plan_has_them_at_the_same_arguments_and_results(name: str, stage: str) -> None:
    text, arguments, _ = PROGRAMS[name]
    after = signature(sdy.partition(sdy.loads(text)).plan(*arguments).mlir(stage))
    counts = {"mhlo.num_partitions", "mhlo.num_replicas"}  # which jax states
    assert [words(part) - counts for part in after] == [words(part) - counts for part in signature(text)]


def signature(text: str) -> list[str]:
    """What a module says of its main function's arguments and results, one by one, after what it says of itself."""
    head, _, rest = text.partition("@main")
    return [head.split("func.func")[0], *re.split(r"tensor<", rest.split("\n    %")[0].split("attributes {")[0])[1:]]


def test_a_program_with_foreign_attributes_verifies() -> None:
    run = sdy.partition(sdy.loads(TYPED))
    assert sdy.verify(run, X, W).ok


UNKNOWN = {
    "generic": ('"ttir.matmul"(%a, %a) : (TYPE, TYPE) -> TYPE', "ttir.matmul", "`ttir`"),
    "pretty": ("enzymexla.rotate %a {amount = 2 : si32} : (TYPE) -> TYPE", "enzymexla.rotate", "`enzymexla`"),
    "without operands": ("ttir.empty() : TYPE", "ttir.empty", "`ttir`"),
}


@pytest.mark.parametrize("how", UNKNOWN)
@pytest.mark.parametrize("take", [sdy.loads, lambda text: passes.run(text, passes.parse("sdy-basic-propagate"))])
def test_an_op_that_nobody_knows_is_named_with_its_line_and_what_to_do(how: str, take) -> None:
    op, name, dialect = UNKNOWN[how]
    text = f"""module attributes {{ttcore.x = #ttcore.x<1>}} {{
  {MESH}
  func.func @main(%a: {T}) -> {T} {{
    %0 = {op.replace("TYPE", T)}
    return %0 : {T}
  }}
}}"""
    with pytest.raises(sdy.SdyError, match=re.escape(name)) as error:
        take(text)
    message = str(error.value)
    assert dialect in message and ":4:10:" in message and "to fix: lower it to StableHLO" in message
    assert "allow-unregistered" not in message and len(message.splitlines()) == 3


MESHES = 'sdy.mesh @m1 = <["x"=4]>\nsdy.mesh @m2 = <["x"=8]>\n'


def unary(head: str, mesh: str) -> str:
    sharding = '[{"x"}, {}]>'
    return f"""func.func {head}(%a: {T} {{sdy.sharding = #sdy.sharding<@{mesh}, {sharding}}}) -> {T} {{
  %0 = stablehlo.tanh %a {{sdy.sharding = #sdy.sharding_per_value<[<@{mesh}, {sharding}]>}} : {T}
  return %0 : {T}
}}
"""


MAIN, OTHER = unary("@main", "m2"), unary("private @other", "m1")


@pytest.mark.parametrize("functions", [MAIN, OTHER + MAIN, MAIN + OTHER], ids=["alone", "behind", "in front"])
def test_a_function_that_nobody_calls_may_be_on_any_mesh(functions: str) -> None:
    run = sdy.partition(sdy.loads(MESHES + functions))
    np.testing.assert_allclose(run(X), np.tanh(X), rtol=1e-5)
    assert "on mesh x=8 (8 devices)" in str(run.plan(X))


def for_gspmd(*ops: str) -> str:
    return f"""{MESH}
func.func @main(%a: {T} {{{SPLIT}, mhlo.sharding = "{{devices=[2,1,4]<=[8] last_tile_dim_replicate}}"}}) -> {T} {{
  {chr(10).join(ops)}
  return %1 : {T}
}}"""


def test_statements_for_gspmd_compute_nothing() -> None:
    text = for_gspmd(
        f'%0 = stablehlo.custom_call @Sharding(%a) {{mhlo.sharding = "{{replicated}}"}} : ({T}) -> {T}',
        f"%1 = stablehlo.tanh %0 : {T}",
    )
    run = sdy.partition(sdy.loads(text))
    np.testing.assert_allclose(run(X), np.tanh(X), rtol=1e-5)
    assert "f32[16@x,4]" in str(run.plan(X)) and not run.plan(X).collectives


def test_manual_regions_of_gspmd_are_refused() -> None:
    text = for_gspmd(
        f"%0 = stablehlo.custom_call @SPMDFullToShardShape(%a) : ({T}) -> tensor<8x4xf32>",
        f"%1 = stablehlo.custom_call @SPMDShardToFullShape(%0) : (tensor<8x4xf32>) -> {T}",
    )
    with pytest.raises(sdy.SdyError, match=r"manual region of GSPMD.*to fix: export the program with jax_use_shardy"):
        sdy.partition(sdy.loads(text)).plan(X)
