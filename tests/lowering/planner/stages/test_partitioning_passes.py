"""The stages of partitioning as passes: validity, meaning on eight devices, and bytes next to jaxlib's own passes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import jax
import numpy as np
import pytest
from jax.extend.mlir import ir
from jax.sharding import PartitionSpec
from partitioning_oracle import ours, wire_bytes
from plain_program import plain_module, run_plain
from sdy_oracle import Oracle
from sharding_dump import parse

from sdy_jax.cli.opt import optimize
from sdy_jax.errors import SdyError, UnsupportedError
from sdy_jax.ir.collectives import COLLECTIVE_OPS
from sdy_jax.ir.operations import function_type, functions, main_function, module_meshes, named
from sdy_jax.ir.stored_shardings import function_shardings
from sdy_jax.lowering.ops.re_emission import numpy_dtype
from sdy_jax.shardy.passes.pipelines import run_pipeline

MESHES = """
sdy.mesh @mesh = <["x"=2, "y"=4]>
sdy.mesh @turned = <["x"=2, "y"=4], device_ids=[0, 4, 1, 5, 2, 6, 3, 7]>
"""
FULL = "sdy-insert-explicit-reshards{enable-full-version=true}"
COLLECTIVELY = f"{FULL},sdy-reshard-to-collectives,sdy-optimize-collectives"
CHEAPLY = COLLECTIVELY.replace("true}", "true compat=sdy_jax}").replace("collectives,", "collectives{compat=sdy_jax},")
"""As `compat=sdy_jax` has them: planned."""
THEIRS = f"func.func({FULL}),func.func(sdy-reshard-to-collectives),canonicalize"


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    with Oracle() as running:
        yield running


HALVES = {'"x"': ("x",), '"y"': ("p", "q"), '"y":(1)2': ("p",), '"y":(2)2': ("q",)}
"""The axes of the test's mesh that are an axis, or part of one, of the programs' mesh."""


def stated(sharding: str) -> str:
    return f"{{sdy.sharding = #sdy.sharding<@mesh, {sharding}>}}"


def made(sharding: str) -> str:
    return f"{{sdy.sharding = #sdy.sharding_per_value<[<@mesh, {sharding}>]>}}"


def resharding(*targets: str, source: str = '@mesh, [{"x"}, {}]', ends: str = "") -> str:
    """A function that reshards its argument again and again."""
    lines = [f"%{i} = sdy.reshard %{i - 1} <{t}> : tensor<8x16xf32>" for i, t in enumerate(targets, 1)]
    return f"""{MESHES}
    func.func @main(%0: tensor<8x16xf32> {{sdy.sharding = #sdy.sharding<{source}>}})
        -> (tensor<8x16xf32> {{sdy.sharding = #sdy.sharding<{ends or targets[-1]}>}}) {{
      {"; ".join(lines).replace("; ", chr(10))}
      return %{len(targets)} : tensor<8x16xf32>
    }}"""


MATMUL = f"""{MESHES}
func.func @main(%a: tensor<8x16xf32> {stated('[{"x"}, {"y"}]')}, %b: tensor<16x8xf32> {stated('[{"y"}, {}]')})
    -> (tensor<8x8xf32> {stated('[{}, {"x"}]')}) {{
  %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] {made('[{"x"}, {}]')}
      : (tensor<8x16xf32>, tensor<16x8xf32>) -> tensor<8x8xf32>
  %1 = stablehlo.tanh %0 {made('[{}, {"x"}]')} : tensor<8x8xf32>
  return %1 : tensor<8x8xf32>
}}"""
MLP = f"""{MESHES}
func.func @main(%x: tensor<16x8xf32> {stated('[{"x"}, {}]')}, %a: tensor<8x32xf32> {stated('[{}, {"y"}]')},
    %b: tensor<32x8xf32> {stated('[{"y"}, {}]')}) -> (tensor<16x8xf32> {stated('[{"x", "y"}, {}]')}, tensor<8xf32>) {{
  %0 = stablehlo.dot_general %x, %a, contracting_dims = [1] x [0] {made('[{"x"}, {"y"}]')}
      : (tensor<16x8xf32>, tensor<8x32xf32>) -> tensor<16x32xf32>
  %1 = stablehlo.tanh %0 {made('[{"x"}, {"y"}]')} : tensor<16x32xf32>
  %2 = stablehlo.dot_general %1, %b, contracting_dims = [1] x [0] {made('[{"x", "y"}, {}]')}
      : (tensor<16x32xf32>, tensor<32x8xf32>) -> tensor<16x8xf32>
  %c = stablehlo.constant dense<0xFF800000> : tensor<f32>
  %3 = stablehlo.reduce(%2 init: %c) applies stablehlo.maximum across dimensions = [0] {made("[{}]")}
      : (tensor<16x8xf32>, tensor<f32>) -> tensor<8xf32>
  return %2, %3 : tensor<16x8xf32>, tensor<8xf32>
}}"""
LOOP = f"""{MESHES}
func.func @main(%x: tensor<8x8xf32> {stated('[{"x"}, {}]')}, %w: tensor<8x8xf32> {stated('[{}, {"y"}]')})
    -> (tensor<8x8xf32> {stated('[{"x"}, {}]')}) {{
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %0:2 = stablehlo.while(%i = %zero, %y = %x) : tensor<i32>, tensor<8x8xf32>
      attributes {{sdy.sharding = #sdy.sharding_per_value<[<@mesh, []>, <@mesh, [{{"x"}}, {{}}]>]>}}
  cond {{
    %three = stablehlo.constant dense<3> : tensor<i32>
    %t = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %t : tensor<i1>
  }} do {{
    %one = stablehlo.constant dense<1> : tensor<i32>
    %j = stablehlo.add %i, %one : tensor<i32>
    %p = stablehlo.dot_general %y, %w, contracting_dims = [1] x [0] {made('[{"x"}, {"y"}]')}
        : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
    %q = stablehlo.tanh %p {made('[{"x"}, {"y"}]')} : tensor<8x8xf32>
    stablehlo.return %j, %q : tensor<i32>, tensor<8x8xf32>
  }}
  return %0#1 : tensor<8x8xf32>
}}"""
UNEVEN = f"""{MESHES}
func.func @main(%a: tensor<7x5xf32>, %b: tensor<5x3xf32>) -> (tensor<7x3xf32>, tensor<7xf32>) {{
  %e = stablehlo.exponential %a {made('[{"y"}, {"x"}]')} : tensor<7x5xf32>
  %0 = stablehlo.dot_general %e, %b, contracting_dims = [1] x [0] {made('[{"y"}, {}]')}
      : (tensor<7x5xf32>, tensor<5x3xf32>) -> tensor<7x3xf32>
  %c = stablehlo.constant dense<0.0> : tensor<f32>
  %1 = stablehlo.reduce(%e init: %c) applies stablehlo.maximum across dimensions = [1] {made('[{"y"}]')}
      : (tensor<7x5xf32>, tensor<f32>) -> tensor<7xf32>
  return %0, %1 : tensor<7x3xf32>, tensor<7xf32>
}}"""
SHIFT = f"""{MESHES}
func.func @main(%unused: tensor<4xf32>, %a: tensor<16x8xf32> {stated('[{"x"}, {"y"}]')})
    -> (tensor<16x8xf32> {stated('[{"x"}, {"y"}]')}, tensor<16x8xf32> {stated('[{"x"}, {"y"}]')}) {{
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %0 = stablehlo.pad %a, %zero, low = [3, 0], high = [-3, 0], interior = [0, 0] {made('[{"x"}, {"y"}]')}
      : (tensor<16x8xf32>, tensor<f32>) -> tensor<16x8xf32>
  %1 = stablehlo.reverse %a, dims = [0, 1] {made('[{"x"}, {"y"}]')} : tensor<16x8xf32>
  return %0, %1 : tensor<16x8xf32>, tensor<16x8xf32>
}}"""
CALLS = f"""{MESHES}
func.func private @f(%a: tensor<8x8xf32> {stated('[{"y"}, {}]')}) -> (tensor<8x8xf32> {stated('[{}, {"y"}]')}) {{
  %0 = stablehlo.sine %a {made('[{"y"}, {}]')} : tensor<8x8xf32>
  return %0 : tensor<8x8xf32>
}}
func.func @main(%a: tensor<8x8xf32> {stated('[{"x"}, {}]')}) -> (tensor<8x8xf32> {stated('[{"x"}, {}]')}) {{
  %0 = call @f(%a) {made('[{}, {"y"}]')} : (tensor<8x8xf32>) -> tensor<8x8xf32>
  %1 = call @f(%0) {made('[{}, {"y"}]')} : (tensor<8x8xf32>) -> tensor<8x8xf32>
  return %1 : tensor<8x8xf32>
}}"""
ORDERS = f"""{MESHES}
func.func @main(%a: tensor<8x8xf32> {{sdy.sharding = #sdy.sharding<@turned, [{{"y"}}, {{}}]>}},
    %b: tensor<8x8xf32> {stated('[{"x"}, {}]')})
    -> (tensor<8x8xf32> {{sdy.sharding = #sdy.sharding<@turned, [{{"x"}}, {{}}]>}}) {{
  %0 = stablehlo.sine %a {made('[{"y"}, {}]')} : tensor<8x8xf32>
  %1 = stablehlo.add %0, %b {made('[{"x"}, {"y"}]')} : tensor<8x8xf32>
  %2 = stablehlo.add %1, %1 {made('[{"y":(2)2}, {"x"}]')} : tensor<8x8xf32>
  return %2 : tensor<8x8xf32>
}}"""
PROGRAMS = {"matmul": MATMUL, "mlp": MLP, "loop": LOOP, "uneven": UNEVEN, "shift": SHIFT}


def body(text: str) -> list[str]:
    """The ops of a text without its shardings' arguments."""
    return [line.strip() for line in text.splitlines() if re.match(r"\s+%", line)]


def inputs(text: str) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    types = function_type(main_function(parse(text).operation)).inputs
    return [rng.standard_normal(ir.RankedTensorType(t).shape).astype(np.float32) for t in types]


@cache
def on_one_device(text: str) -> list[np.ndarray]:
    whole = plain_module(text)
    return [np.asarray(x) for x in run_plain(whole, inputs(text), results_of(whole))]


def results_of(module: ir.Module) -> list[jax.core.ShapedArray]:
    types = map(ir.RankedTensorType, function_type(main_function(module.operation)).results)
    return [jax.core.ShapedArray(tuple(t.shape), numpy_dtype(str(t.element_type))) for t in types]


def on_eight_devices(text: str, arguments: list[np.ndarray]) -> list[np.ndarray]:
    """What a module of local types computes of blocks."""
    module = parse(text)
    main, meshes = main_function(module.operation), module_meshes(module.operation)
    assert not named(module.operation, *COLLECTIVE_OPS, "sdy.reshard", "sdy.manual_computation")

    def specs(side: str) -> tuple[PartitionSpec, ...]:
        found = function_shardings(main, side)
        return tuple(
            PartitionSpec(*(tuple(n for a in axes for n in HALVES[str(a)]) for axes in s.axes))
            if s
            else PartitionSpec()
            for s in found
        )

    mesh = jax.make_mesh((2, 2, 2), ("x", "p", "q"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    assert str(meshes["mesh"]) == str(module_meshes(parse(MESHES).operation)["mesh"])
    run = jax.shard_map(
        lambda *blocks: tuple(run_plain(module, blocks, results_of(module))),
        mesh=mesh,
        in_specs=specs("arg_attrs"),
        out_specs=specs("res_attrs"),
        check_vma=False,
    )
    return [np.asarray(x) for x in jax.jit(run)(*arguments)]


def check_meaning(text: str, passes: str) -> str:
    """The module after passes computes on eight devices what it computed on one; returns its text."""
    after = ours(text, passes)
    local = ours(after, "sdy-convert-global-to-local")
    for found, expected in zip(on_eight_devices(local, inputs(text)), on_one_device(text), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    return after


STAGES = {
    "reshards": FULL,
    "collectives": COLLECTIVELY,
    "cheap collectives": CHEAPLY,
    "export": "sdy-export-pipeline{enable-insert-explicit-collectives=true}",
    "local": "symbol-dce",
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_stage_is_valid_for_jaxlib_and_means_the_same(program: str, stage: str, oracle: Oracle) -> None:
    after = check_meaning(PROGRAMS[program], STAGES[stage])
    local = ours(after, "sdy-convert-global-to-local")
    for text in (after, local):
        assert oracle.run(text) is not None, oracle.error
    if stage not in ("reshards", "local"):
        assert "sdy.reshard" not in after


@pytest.mark.parametrize("text", [CALLS, ORDERS], ids=["calls", "orders"])
def test_functions_and_device_orders(text: str, oracle: Oracle) -> None:
    assert oracle.run(check_meaning(text, COLLECTIVELY)) is not None


@pytest.mark.parametrize("program", ["matmul", "mlp"])
def test_no_more_bytes_than_jaxlibs_own_stages(program: str, oracle: Oracle) -> None:
    theirs = oracle.run(PROGRAMS[program], THEIRS)
    assert theirs is not None
    for passes in (COLLECTIVELY, CHEAPLY):
        assert wire_bytes(ours(PROGRAMS[program], passes)) <= wire_bytes(theirs)


@pytest.mark.parametrize("program", ["matmul", "mlp"])
def test_jaxlib_goes_on_from_our_reshards(program: str, oracle: Oracle) -> None:
    reshards = ours(PROGRAMS[program], FULL)
    theirs = oracle.run(reshards, "func.func(sdy-reshard-to-collectives)")
    assert theirs is not None and "sdy.reshard" not in theirs
    assert wire_bytes(ours(reshards, "sdy-reshard-to-collectives")) <= wire_bytes(theirs)


SAME = [
    resharding("@mesh, [{}, {}]"),
    resharding('@mesh, [{}, {"x"}]'),
    resharding('@mesh, [{"x", "y"}, {}]'),
    resharding('@mesh, [{?}, {"x", ?}]', ends='@mesh, [{}, {"x"}]'),
    resharding('@turned, [{"x"}, {}]'),
    resharding('@mesh, [{"y"}, {}]'),
    resharding('@mesh, [{}, {"y"}]', source='@mesh, [{"y":(1)2}, {}]'),
    resharding('@mesh, [{"x"}, {}]'),
]


def test_reshards_become_jaxlibs_collectives_where_these_are_the_cheapest(oracle: Oracle) -> None:
    passes = "sdy-reshard-to-collectives"
    for text in SAME:
        theirs = oracle.run(text, f"func.func({passes})")
        assert theirs is not None
        assert wire_bytes(ours(text, passes)) <= wire_bytes(theirs)
        if body(theirs)[0:1] and "all_slice" not in theirs:
            assert body(ours(text, passes)) == body(theirs)


def test_a_redundant_reshard_is_kept_where_asked(oracle: Oracle) -> None:
    text = resharding('@mesh, [{"x"}, {}]')
    kept = "sdy-reshard-to-collectives{keep-redundant-reshards=true}"
    assert body(ours(text, kept)) == body(oracle.run(text, f"func.func({kept})") or "") != []
    assert body(ours(text, "sdy-reshard-to-collectives")) == []


def test_reshards_in_a_row_are_one() -> None:
    back = resharding('@mesh, [{}, {"x"}]', '@mesh, [{"x"}, {}]')
    assert body(ours(back, "sdy-reshard-to-collectives{compat=sdy_jax}")) == []
    kept = body(ours(back, "sdy-reshard-to-collectives{keep-redundant-reshards=true compat=sdy_jax}"))
    assert kept == ['%0 = sdy.reshard %arg0 <@mesh, [{"x"}, {}]> : tensor<8x16xf32>']


def test_a_reshard_from_axes_of_size_one_is_a_valid_chain(oracle: Oracle) -> None:
    """They are no part of any plan, and the operand of the first collective is split along them."""
    text = """sdy.mesh @one = <["o"=1, "x"=8]>
      func.func @main(%0: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@one, [{"o"}, {}]>}) -> tensor<8x16xf32> {
        %1 = sdy.reshard %0 <@one, [{}, {"x"}]> : tensor<8x16xf32>
        return %1 : tensor<8x16xf32>
      }"""
    found = ours(text, "sdy-reshard-to-collectives")
    assert "all_slice" in found
    assert oracle.run(found, "sdy-close-shardings") is not None


def test_a_reshard_to_a_mesh_with_other_axes_is_refused() -> None:
    text = 'sdy.mesh @z = <["z"=8]>' + resharding('@z, [{"z"}, {}]')
    with pytest.raises(UnsupportedError, match="both must have the same axes and devices"):
        run_pipeline(parse(text).operation, "sdy-reshard-to-collectives")


def collective(*ops: str, ends: str) -> str:
    """Collectives on a value that is split along x and equal, or partial, along y."""
    lines = "\n".join(f"%{i} = sdy.{op.replace('%', f'%{i - 1}', 1)} : tensor<8x16xf32>" for i, op in enumerate(ops, 1))
    return f"""{MESHES}
    func.func @main(%a: tensor<8x16xf32> {stated('[{"x"}, {}]')}) -> (tensor<8x16xf32> {stated(ends)}) {{
      %0 = stablehlo.tanh %a {made('[{"x"}, {}]')} : tensor<8x16xf32>
      {lines}
      return %{len(ops)} : tensor<8x16xf32>
    }}"""


CHAINS = [
    (
        collective(
            'all_reduce {"y"} % out_sharding=<@mesh, [{"x"}, {}]>',
            'all_slice [{}, {"y"}] % out_sharding=<@mesh, [{"x"}, {"y"}]>',
            ends='[{"x"}, {"y"}]',
        ),
        ["reduce_scatter"],
    ),
    (
        collective(
            'all_gather [{"x"}, {}] % out_sharding=<@mesh, [{}, {}]>',
            'all_slice [{"x"}, {}] % out_sharding=<@mesh, [{"x"}, {}]>',
            ends='[{"x"}, {}]',
        ),
        [],
    ),
    (
        collective(
            'all_slice [{"y"}, {}] % out_sharding=<@mesh, [{"x", "y"}, {}]>',
            'collective_permute % out_sharding=<@mesh, [{"y", "x"}, {}]>',
            'collective_permute % out_sharding=<@mesh, [{"x", "y"}, {}]>',
            'all_gather [{"y"}, {}] % out_sharding=<@mesh, [{"x"}, {}]>',
            ends='[{"x"}, {}]',
        ),
        [],
    ),
    (
        collective(
            'all_gather [{"x"}, {}] % out_sharding=<@mesh, [{}, {}]>',
            'all_reduce {"x"} % out_sharding=<@mesh, [{}, {}]>',
            ends="[{}, {}]",
        ),
        ["all_gather", "all_reduce"],
    ),
]


@pytest.mark.parametrize(("text", "expected"), CHAINS)
def test_collectives_in_a_row_become_the_cheapest(text: str, expected: list[str], oracle: Oracle) -> None:
    """The last chain adds equal values up: its reduction is not of what the gather's operand lacks."""
    passes = "sdy-optimize-collectives"
    after = ours(text, passes)
    assert re.findall(r"sdy\.(\w+) [%{\[]", "\n".join(body(after))) == expected
    assert oracle.run(after) is not None
    theirs = oracle.run(text, "canonicalize{enable-patterns=sdy-collective}")
    assert theirs is not None and wire_bytes(after) <= wire_bytes(theirs)


def test_collectives_with_other_users_stay() -> None:
    reduced = stated('[{"x"}, {}]')
    text = CHAINS[0][0].replace("return %2 : tensor<8x16xf32>", "return %1, %2 : tensor<8x16xf32>, tensor<8x16xf32>")
    text = text.replace("-> (tensor<8x16xf32>", f"-> (tensor<8x16xf32> {reduced}, tensor<8x16xf32>", 1)
    assert body(ours(text, "sdy-optimize-collectives")) == body(ours(text, "symbol-dce"))


DOT = f"""{MESHES}
func.func @main(%a: tensor<8x16xf32> {stated('[{"x"}, {}]')}, %b: tensor<16x8xf32> {stated('[{}, {"y"}]')}) -> RESULT {{
  BODY
}}"""
GATHER = '%g = sdy.all_gather [{"x"}, {}] %a out_sharding=<@mesh, [{}, {}]> : tensor<8x16xf32>'
TYPES = "(tensor<8x16xf32>, tensor<16x8xf32>) -> tensor<8x8xf32>"
MULTIPLY = f"""%d = stablehlo.dot_general %g, %b, contracting_dims = [1] x [0] {made('[{}, {"y"}]')} : {TYPES}"""
SCATTER = f"""%d = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] {made("[{}, {}]")} : {TYPES}
  %r = sdy.reduce_scatter [{{"x"}}, {{"y"}}] %d out_sharding=<@mesh, [{{"x"}}, {{"y"}}]> : tensor<8x8xf32>"""
DOTS = [
    (f"{GATHER}\n{MULTIPLY}", ["%d"]),
    (f"{GATHER}\n{MULTIPLY}\n{MULTIPLY.replace('%d', '%e')}", ["%d", "%e"]),
    (SCATTER, ["%r"]),
    (SCATTER, ["%r", "%d"]),
]


@pytest.mark.parametrize(("ops", "returned"), DOTS)
def test_what_is_left_to_the_collective_matmul_is_what_jaxlib_leaves(
    ops: str, returned: list[str], oracle: Oracle
) -> None:
    types = ", ".join("tensor<8x8xf32>" for _ in returned)
    text = DOT.replace("RESULT", f"({types})").replace("BODY", f"{ops}\nreturn {', '.join(returned)} : {types}")
    passes = "sdy-remove-all-gather-reduce-scatter-for-cmv1"
    theirs = oracle.run(text, f"func.func({passes})")
    assert theirs is not None and ours(text, passes) == theirs


PARTIAL = '[{"x"}, {}], unreduced={"y"}'
ROWS = '[{"x"}, {}]'
NEGATE = "%1 = stablehlo.negate %a"
UNREDUCED = [
    (PARTIAL, f"{NEGATE} {made(ROWS)}", ROWS, 'operand 0 is unreduced by sum along {"y"}, result 0 is not'),
    (PARTIAL, f"{NEGATE}", ROWS, "result 0 is not"),
    (PARTIAL, f"{NEGATE} {made(PARTIAL)}", ROWS, "what it flows into is not"),
    (PARTIAL, f"{NEGATE} {made(PARTIAL)}", PARTIAL, ""),
    (ROWS, f"{NEGATE} {made(PARTIAL)}", PARTIAL, ""),
    (PARTIAL, f"%1 = sdy.reshard %a <@mesh, {ROWS}>", ROWS, ""),
    (PARTIAL, f"%1 = sdy.sharding_constraint %a <@mesh, {ROWS}>", ROWS, ""),
]


@pytest.mark.parametrize(("given", "op", "returned", "problem"), UNREDUCED)
def test_unreduced_values_end_at_reshards_only(
    given: str, op: str, returned: str, problem: str, oracle: Oracle
) -> None:
    passes = "sdy-verify-unreduced-axes"
    text = f"""{MESHES}
    func.func @main(%a: tensor<8x16xf32> {stated(given)}) -> (tensor<8x16xf32> {stated(returned)}) {{
      {op} : tensor<8x16xf32>
      return %1 : tensor<8x16xf32>
    }}"""
    if problem:
        with pytest.raises(SdyError, match=re.escape(problem)):
            optimize(text, passes, "-")
    else:
        assert ours(text, passes) == ours(text, "symbol-dce")
    if jax.__version_info__ >= (0, 12):
        assert (oracle.run(text, f"func.func({passes})") is None) == bool(problem)


def test_a_local_module_has_local_types_and_groups_of_partitions() -> None:
    local = ours(MATMUL, f"{COLLECTIVELY},sdy-convert-global-to-local")
    assert "tensor<4x4xf32> {sdy.sharding" in local and "sdy.all_" not in local
    assert "replica_groups" in local and set(functions(parse(local).operation)) == {"main"}


def test_a_mesh_with_device_ids_of_its_own_has_no_local_module() -> None:
    with pytest.raises(UnsupportedError, match="leave out its device_ids"):
        run_pipeline(parse(MATMUL.replace("@mesh,", "@turned,")).operation, "sdy-convert-global-to-local")


WRAPPING = [
    ("uneven", "sdy-pad-for-divisibility", 7),
    ("mlp", "sdy-per-instruction-partitioning", 5),
    ("mlp", "sdy-per-instruction-partitioning{filter=dot,tanh}", 3),
    ("loop", "sdy-per-instruction-partitioning{filter=while}", 1),
]


@pytest.mark.parametrize(("program", "passes", "count"), WRAPPING)
def test_ops_become_manual_computations(program: str, passes: str, count: int, oracle: Oracle) -> None:
    after = check_meaning(PROGRAMS[program], passes)
    assert after.count("sdy.manual_computation") == count
    assert oracle.run(after) is not None, oracle.error


def test_padded_dimensions_are_whole_blocks(oracle: Oracle) -> None:
    """jaxlib goes on from there: it refuses what does not divide."""
    after = ours(UNEVEN, "sdy-pad-for-divisibility")
    assert "tensor<8x6xf32>" in after and ours(after, "sdy-pad-for-divisibility") == after
    local = oracle.run(after, "sdy-convert-global-to-local")
    assert local is not None and "sdy.manual_computation" not in local


@pytest.mark.parametrize("program", ["matmul", "mlp", "loop"])
def test_what_is_partitioned_and_divides_stays(program: str) -> None:
    collectives = ours(PROGRAMS[program], CHEAPLY)
    assert ours(collectives, "sdy-pad-for-divisibility") == collectives


def test_permuted_factors_are_resolved_between_reshards(oracle: Oracle) -> None:
    """The pad takes three rows of a neighbour, the reversal whole blocks; what sends nothing stays as it is."""
    after = check_meaning(SHIFT, "sdy-resolve-permutation-factors")
    assert oracle.run(after) is not None
    assert after.count("sdy.manual_computation") == 2 and after.count("stablehlo.collective_permute") == 2
    (halo, whole) = re.findall(r"stablehlo.collective_permute.*-> tensor<(\w+)>", after)
    assert (halo, whole) == ("3x2xf32", "8x2xf32")
    assert "sdy.manual_computation" not in ours(MLP, "sdy-resolve-permutation-factors")
    check_meaning(SHIFT, "sdy-resolve-permutation-factors,sdy-reshard-to-collectives,sdy-pad-for-divisibility")


SINGLE = f"""{MESHES}
sdy.mesh @third = <[], device_ids=[3]>
func.func @main(%a: tensor<8x16xf32> {stated('[{"x"}, {"y"}]')}) -> (tensor<8x16xf32> {stated('[{"x"}, {}]')}) {{
  %0 = stablehlo.OP {{sdy.sharding = #sdy.sharding_per_value<[<@third, []>]>}} : OF
  %1 = stablehlo.add %0, %a {made('[{"x"}, {}]')} : tensor<8x16xf32>
  return %1 : tensor<8x16xf32>
}}"""
RESOLVE = "sdy-resolve-single-device-sharding"


def test_what_is_on_one_device_is_computed_by_all() -> None:
    after = check_meaning(SINGLE.replace("OP", "tanh %a").replace("OF", "tensor<8x16xf32>"), RESOLVE)
    assert after.count("@third") == 1 and "[<@mesh, [{}, {}]>]" in after


def test_side_effects_on_one_device_are_refused() -> None:
    call = SINGLE.replace("OP {", "custom_call @print(%a) {has_side_effect = true, ")
    with pytest.raises(SdyError, match="has side effects and is on one device"):
        optimize(call.replace("OF", "(tensor<8x16xf32>) -> tensor<8x16xf32>"), RESOLVE, "-")


EXPORT = [
    ("enable-insert-explicit-collectives=true", "sdy.all_"),
    ("partitioner-stage=reshard-to-collectives", "sdy.all_"),
    ("partitioner-stage=resolve-permutation-factors", "sdy.all_"),
    ("partitioner-stage=pad-for-divisibility", "sdy.all_"),
    ("partitioner-stage=resolve-single-device-sharding", "sdy.all_"),
    ("partitioner-stage=convert-global-to-local", "stablehlo.all_"),
    ("partitioner-stage=convert-global-to-local enable-per-instruction-partitioning=true", "sdy.manual_computation"),
]


@pytest.mark.parametrize(("options", "made"), EXPORT)
def test_export_goes_up_to_the_stage_that_is_asked_for(options: str, made: str) -> None:
    after = ours(MATMUL, f"sdy-export-pipeline{{{options}}}")
    assert made in after and "sdy.reshard" not in after


def test_export_partitions_each_instruction_at_the_last_stage_only() -> None:
    with pytest.raises(SdyError, match="needs partitioner-stage=convert-global-to-local"):
        optimize(MATMUL, "sdy-export-pipeline{enable-per-instruction-partitioning=true}", "-")


HALO = ("sdy-resolve-permutation-factors", "sdy-per-instruction-partitioning{filter=pad,reverse}")


@pytest.mark.parametrize("passes", HALO)
def test_without_halo_exchange_dimensions_are_gathered(passes: str) -> None:
    options = "enable-halo-exchange=false"
    without = passes.replace("}", f" {options}}}") if "{" in passes else f"{passes}{{{options}}}"
    after = check_meaning(SHIFT, without)
    assert "collective_permute" not in after and "collective_permute" in ours(SHIFT, passes)


NUMBERED = [
    "sdy-resolve-permutation-factors",
    "sdy-per-instruction-partitioning",
    "sdy-convert-global-to-local",
]


@pytest.mark.parametrize("name", NUMBERED)
def test_devices_are_partitions_or_replicas(name: str, oracle: Oracle) -> None:
    partitions, replicas = (ours(SHIFT, f"{name}{{{side}-count=8}}") for side in ("partition", "replica"))
    assert partitions == ours(SHIFT, name)
    assert "partition_id" in partitions and "partition_id" not in replicas
    permutes = [line for line in replicas.splitlines() if "collective_permute" in line]
    assert permutes and not any("channel_handle" in line for line in permutes)
    assert oracle.run(replicas) is not None


COUNTS = [
    ("partition-count=2 replica-count=4", "a mesh is made of partitions or of replicas"),
    ("partition-count=3", "the mesh @mesh has 8 devices"),
    ("replica-count=x", "it is a number of devices"),
]


@pytest.mark.parametrize(("options", "problem"), COUNTS)
def test_counts_that_are_none_of_the_mesh_are_refused(options: str, problem: str) -> None:
    with pytest.raises(SdyError, match=problem):
        optimize(MATMUL, f"sdy-convert-global-to-local{{{options}}}", "-")


LIKE_JAXLIB = [
    "sdy-convert-global-to-local{per-dim-all-gather=true combine-multi-dimension-reduce-scatter=true enable-rgv3=true}",
    "sdy-insert-explicit-reshards{mark-partial-result-with-unreduced-axes=true}",
    "sdy-per-instruction-partitioning{rng-bit-generator-unsafe=false}",
    "sdy-resolve-permutation-factors{rng-bit-generator-unsafe=false}",
    "sdy-resolve-single-device-sharding{partition-count=8}",
]


@pytest.mark.parametrize("passes", LIKE_JAXLIB)
def test_options_that_change_nothing_are_known(passes: str) -> None:
    assert ours(MATMUL, passes) == ours(MATMUL, passes.partition("{")[0])
