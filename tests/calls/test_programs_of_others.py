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


# Files with several functions and modules, as suites of tests have them.

LIBRARY = f"""// RUN: some-opt %s -split-input-file | FileCheck %s
module @ops {{
  sdy.mesh @unused = <["q"=64]>
  {MESH}
  // CHECK-LABEL: func.func @doubled
  func.func @doubled(%a: {T} {{{SPLIT}}}) -> {T} {{
    %0 = call @main(%a) : ({T}) -> {T}
    %1 = stablehlo.add %0, %0 : {T}
    return %1 : {T}
  }}
  func.func @main(%a: {T} {{{SPLIT}}}) -> {T} {{
    %0 = stablehlo.sine %a : {T}
    return %0 : {T}
  }}
  func.func @blocks(%a: {T}) -> {T} {{
    %0 = sdy.manual_computation(%a) in_shardings=[<@mesh, [{{"x"}}, {{}}]>] out_shardings=[<@mesh, [{{"x"}}, {{}}]>]
        manual_axes={{"x"}} (%b: tensor<8x4xf32>) {{
      %1 = stablehlo.tanh %b : tensor<8x4xf32>
      sdy.return %1 : tensor<8x4xf32>
    }} : ({T}) -> {T}
    return %0 : {T}
  }}
  func.func private @elsewhere({T}) -> {T}
}}
// -----
{MESH}
func.func @negated(%a: {T} {{{SPLIT}}}) -> {T} {{
  %0 = stablehlo.negate %a : {T}
  return %0 : {T}
}}
"""
FUNCTIONS = {"doubled": 2 * np.sin(X), "main": np.sin(X), "blocks": np.tanh(X), "negated": -X}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_program_begins_at_the_function_that_is_named(name: str, tmp_path) -> None:
    file = tmp_path / "library.mlir"
    file.write_text(LIBRARY)
    for program in (sdy.loads(LIBRARY, function=name), sdy.load(file, function=name)):
        assert program.name == name
        np.testing.assert_allclose(sdy.partition(program)(X), FUNCTIONS[name], rtol=1e-5)


def test_what_a_program_does_not_call_does_not_hinder_it_on_other_meshes() -> None:
    run = sdy.partition(sdy.loads(LIBRARY, function="main"))
    assert sdy.verify(run, X, targets=["cpu"]).ok


def test_the_named_function_may_be_in_a_module_of_the_module() -> None:
    text = "\n".join(
        f"module {{ {unary(f'@{name}', 'mesh').join([MESH + chr(10), ''])} }}" for name in ("main", "other")
    )
    np.testing.assert_allclose(sdy.partition(sdy.loads(text, function="other"))(X), np.tanh(X), rtol=1e-5)
    with pytest.raises(sdy.SdyError, match=r"has 2 modules in it.*function= \(--function\)"):
        sdy.loads(text)


def test_a_module_alone_in_another_is_the_program() -> None:
    text = f"module @outer {{ module @inner {{ {MESH}\n{unary('@main', 'mesh')} }} }}"
    np.testing.assert_allclose(sdy.partition(sdy.loads(text))(X), np.tanh(X), rtol=1e-5)


DECLARED = f"func.func private @elsewhere({T}) -> {T}\n"
CALLING = f"""func.func @main(%a: {T}) -> {T} {{
  %0 = call @elsewhere(%a) : ({T}) -> {T}
  return %0 : {T}
}}"""
UNCLEAR = {
    "an unknown function": (LIBRARY, "doubbled", r"no function is called @doubbled; did you mean 'doubled'"),
    "in several parts": (f"{MAIN}// -----\n{MAIN}", "main", "2 of the parts between lines `// -----` define .* @main"),
    "in several modules": (f"module {{\n{MAIN}}}\nmodule {{\n{MAIN}}}".replace("@m2", "@mesh"), "main", None),
    "parts and no name": (
        f"{MESHES}{MAIN}// -----\n{MESHES}{MAIN}",
        None,
        r"part this text into 2 modules.*--function",
    ),
    "no name": (MESHES + unary("@a", "m1") + unary("@b", "m1"), None, r"@a, @b, .* not known where .*--function"),
    "declared only": (
        DECLARED + CALLING,
        None,
        "@elsewhere is declared without a body, at <text>:1; to fix: define it",
    ),
}


@pytest.mark.parametrize("case", UNCLEAR)
def test_where_it_is_not_clear_what_the_program_is_an_error_says_what_to_do(case: str) -> None:
    text, function, message = UNCLEAR[case]
    if message is None:
        text, message = text.replace("module {\n", f"module {{\n{MESH}\n"), "2 modules of the text define .*@main, at"
    with pytest.raises(sdy.SdyError, match=message):
        sdy.loads(text, function=function)


# Values and constants of unusual kinds.


def with_resource(elements: str) -> str:
    digits = np.arange(4, dtype="<f4").tobytes().hex()
    return f"""{MESH}
func.func @main(%a: {T} {{{SPLIT}}}) -> {T} {{
  %c = stablehlo.constant {elements} : tensor<4xf32>
  %0 = stablehlo.broadcast_in_dim %c, dims = [1] : (tensor<4xf32>) -> {T}
  %1 = stablehlo.add %a, %0 : {T}
  return %1 : {T}
}}
{{-# dialect_resources: {{ builtin: {{ bias: "0x04000000{digits}", "bias 2": "0x04000000{digits}" }} }} #-}}"""


@pytest.mark.parametrize("name", ["bias", '"bias 2"'])
def test_a_constant_whose_elements_are_a_resource_of_the_file_has_them(name: str) -> None:
    run = sdy.partition(sdy.loads(with_resource(f"dense_resource<{name}>")))
    np.testing.assert_allclose(run(X), X + np.arange(4, dtype=np.float32), rtol=1e-6)


def test_constants_of_complex_numbers_stand_beside_resources() -> None:
    text = """func.func @main(%x: tensor<8xcomplex<f32>>) -> tensor<8xcomplex<f32>> {
  %c = stablehlo.constant dense<(0.0, 1.0)> : tensor<8xcomplex<f32>>
  %0 = stablehlo.multiply %x, %c : tensor<8xcomplex<f32>>
  return %0 : tensor<8xcomplex<f32>>
}"""
    x = np.arange(8, dtype=np.complex64)
    np.testing.assert_array_equal(sdy.partition(sdy.loads(f"{MESH}\n{text}"))(x), x * 1j)


@pytest.mark.parametrize("elements", ["dense_resource<__elided__>", "sparse<[[1]], [2.0]>"])
def test_a_constant_without_its_elements_is_planned_and_said_when_it_runs(elements: str) -> None:
    run = sdy.partition(sdy.loads(with_resource(elements)))
    assert not run.plan(X).collectives
    with pytest.raises(sdy.SdyError, match=r"<text>:3: the elements of a constant are sparse, or not in the program"):
        run(X)


def test_a_resource_of_the_wrong_size_is_an_error() -> None:
    text = with_resource("dense_resource<bias>").replace("tensor<4xf32>", "tensor<8x4xf32>", 1)
    with pytest.raises(sdy.SdyError, match="has not the elements of a tensor<8x4xf32>"):
        sdy.loads(
            text.replace("dims = [1] : (tensor<4xf32>)", "dims = [0, 1] : (tensor<8x4xf32>)").replace("16x4", "8x4")
        )


def test_attributes_may_be_of_types_that_nobody_knows_and_values_may_not() -> None:
    text = f"{MESH}\nfunc.func @main(%a: {T} {{my.type = !my.type<{T}>}}) -> {T} {{\n  return %a : {T}\n}}"
    assert "my.type = !my.type<" in passes.run(text, passes.parse("sdy-basic-propagate"))
    np.testing.assert_array_equal(sdy.partition(sdy.loads(text))(X), X)
    with pytest.raises(sdy.SdyError, match=r":2:\d+: error: a type or attribute of the unknown dialect `my`"):
        sdy.loads(text.replace("(%a", "(%t: !my.token, %a"))


# Calls that compute something else on blocks than on whole values, or that do more than compute.


@pytest.mark.parametrize("target", ["RotateRight", "MultiRotate", "MultiSlice", "MultiPad", "Wrap"])
def test_calls_of_xlas_partitioner_are_refused(target: str) -> None:
    call = f'%1 = stablehlo.custom_call @_SPMDInternalOp_{target}(%a) {{backend_config = "dimension=0"}} : ({T}) -> {T}'
    with pytest.raises(sdy.SdyError, match=f"_SPMDInternalOp_{target} is expanded by XLA's own partitioner"):
        sdy.partition(sdy.loads(for_gspmd(call))).plan(X)


@pytest.mark.parametrize("results", ["", "%0 = "])
def test_a_call_with_effects_whose_results_nobody_uses_runs(results: str) -> None:
    call = (
        f"{results}stablehlo.custom_call @vendor.log(%a) {{has_side_effect = true}} : ({T}) -> {T if results else '()'}"
    )
    run = sdy.partition(sdy.loads(for_gspmd(call, f"%1 = stablehlo.tanh %a : {T}")), on_unknown="ignore")
    with pytest.raises(sdy.SdyError, match=r"<text>:3: stablehlo.custom_call @vendor.log: no function of this name"):
        run(X)


def test_named_computations_verify() -> None:
    text = for_gspmd(
        f'%1 = sdy.named_computation<"layer">(%a) (%b: {T}) {{\n    %2 = stablehlo.tanh %b : {T}',
        f"    sdy.return %2 : {T}\n  }} : ({T}) -> {T}",
    )
    assert sdy.verify(sdy.partition(sdy.loads(text)), X, targets=["cpu"]).ok


@pytest.mark.parametrize(
    ("handle", "missing"),
    [("channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, ", "use_global"), ("", "handle")],
)
def test_groups_of_replicas_that_there_are_not_are_refused(handle: str, missing: str) -> None:
    text = f"""{MESH}
func.func @main(%a: {T}) -> {T} {{
  %0 = sdy.manual_computation(%a) in_shardings=[<@mesh, [{{"x"}}, {{}}]>] out_shardings=[<@mesh, [{{"x"}}, {{}}]>]
      manual_axes={{"x", "y"}} (%b: tensor<8x4xf32>) {{
    %1 = "stablehlo.all_reduce"(%b) <{{{handle}replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>}}> ({{
    ^bb0(%p: tensor<f32>, %q: tensor<f32>):
      %2 = stablehlo.add %p, %q : tensor<f32>
      stablehlo.return %2 : tensor<f32>
    }}) : (tensor<8x4xf32>) -> tensor<8x4xf32>
    sdy.return %1 : tensor<8x4xf32>
  }} : ({T}) -> {T}
  return %0 : {T}
}}"""
    with pytest.raises(sdy.SdyError, match=f"name replica 1, and a partitioned program is one replica.*{missing}"):
        sdy.partition(sdy.loads(text)).plan(X)


def test_shardings_in_frontend_attributes_are_those_of_the_program() -> None:
    text = rf"""
module attributes {{mhlo.frontend_attributes = {{xla.sdy.meshes = "{{ring = #sdy.mesh<[\22x\22=2, \22y\22=4]>}}"}}}} {{
  func.func @main(%a: {T} {{mhlo.frontend_attributes = {{
        xla.sdy.sharding = "#sdy.sharding<@ring, [{{\22x\22}}, {{}}]>"}},
      mhlo.sharding = "{{devices=[2,1,4]<=[8] last_tile_dim_replicate}}", ttir.name = "a"}}) -> {T} {{
    %0 = stablehlo.tanh %a : {T}
    %1 = stablehlo.custom_call @xla.sdy.FuncResultSharding(%0) {{has_side_effect = true, mhlo.frontend_attributes =
      {{xla.sdy.sharding = "#sdy.sharding_per_value<[<@ring, [{{}}, {{\22y\22}}]>]>"}}}} : ({T}) -> {T}
    return %1 : {T}
  }}
}}"""
    run = sdy.partition(sdy.loads(text))
    np.testing.assert_allclose(run(X), np.tanh(X), rtol=1e-5)
    report = str(run.plan(X))
    assert "on mesh x=2, y=4" in report and "f32[16@x,4]" in report and "f32[16,4@y]" in report
