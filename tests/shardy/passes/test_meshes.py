"""Programs on several meshes: other axes over the same devices, other orders of the devices, single devices."""

from __future__ import annotations

import math
import random
import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from partitioned_text import partitioned, run_partitioned, types_of
from plain_program import plain_module, run_plain
from random_programs import RandomProgram
from random_texts import WITHOUT, check_ways
from sdy_oracle import parse_modules
from sharding_dump import parse

import sdy_jax as sdy
from sdy_jax.errors import SdyError, ShardingError, UnsupportedError
from sdy_jax.ir.device_orders import common_part, expressed, expressed_part
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.meshes import AxisRef, Mesh
from sdy_jax.ir.parsers import parse_axis, parse_mesh
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.planner.facts.verifier import verify_partitioned
from sdy_jax.lowering.planner.placement.program_placement import partition_locally
from sdy_jax.lowering.planner.setting import Setting
from sdy_jax.lowering.targets.cost_model import CostModel

MESHES = """
sdy.mesh @mesh = <["x"=2, "y"=4]>
sdy.mesh @reversed = <["x"=2, "y"=4], device_ids=[7, 6, 5, 4, 3, 2, 1, 0]>
sdy.mesh @shuffled = <["x"=2, "y"=4], device_ids=[3, 1, 6, 2, 0, 7, 4, 5]>
sdy.mesh @rows_reversed = <["x"=2, "y"=4], device_ids=[3, 2, 1, 0, 7, 6, 5, 4]>
sdy.mesh @tall = <["p"=4, "q"=2]>
sdy.mesh @across = <["p"=4, "q"=2], device_ids=[0, 4, 1, 5, 2, 6, 3, 7]>
sdy.mesh @line_reversed = <["all"=8], device_ids=[7, 6, 5, 4, 3, 2, 1, 0]>
sdy.mesh @single = <[], device_ids=[3]>
sdy.mesh @other_single = <[], device_ids=[0]>
sdy.mesh @four = <["z"=4]>
"""
M = "tensor<16x16xf32>"
"""The type of the matrices."""


def main(body: str, arguments: list[str], result: str) -> str:
    """A module of a function of matrices with these shardings, called `%0`, `%1` and so on."""
    given = ", ".join(f"%{i}: {M} {sharded(s)}" for i, s in enumerate(arguments))
    return f"{MESHES}func.func @main({given}) -> ({M} {sharded(result)}) {{\n{body}\n}}"


def sharded(sharding: str) -> str:
    return f"{{sdy.sharding = #sdy.sharding<{sharding}>}}" if sharding else ""


def checked(text: str) -> str:
    """The text of the partitioned module, which keeps all rules and returns what the plain one does."""
    module = partitioned(text)
    verify_partitioned(module.operation)
    printed = str(module)
    assert parse_modules([printed]) != [None]
    graph, rng = Graph(module.operation), np.random.default_rng(0)
    arguments = [rng.standard_normal(v.shape).astype(np.float32) for v in graph.arguments]
    wanted = run_plain(plain_module(text), arguments, types_of(graph.outputs))
    for found, want in zip(run_partitioned(module, arguments), wanted, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)
    return printed


def collectives(printed: str) -> list[str]:
    return re.findall(r"sdy\.(?!mesh|sharding|constant)(\w+)", printed)


# Values on meshes with other axes, or another order of the devices.

FORWARDED = [  # argument, result, collectives
    ('@mesh, [{"x"}, {"y"}]', '@reversed, [{"x"}, {"y"}]', ["collective_permute"]),
    ("@mesh, [{}, {}]", '@reversed, [{"x"}, {}]', ["collective_permute", "all_slice"]),
    ('@reversed, [{"x"}, {"y"}]', '@mesh, [{}, {"x"}]', None),
    ('@reversed, [{"x"}, {}]', '@shuffled, [{"x"}, {"y"}]', None),
    ('@mesh, [{"x", "y"}, {}]', '@line_reversed, [{"all"}, {}]', ["collective_permute"]),
    ('@line_reversed, [{"all"}, {}]', '@reversed, [{"x", "y"}, {}]', []),
    ('@mesh, [{"x"}, {}]', '@rows_reversed, [{"x"}, {}]', []),
    ('@mesh, [{"x", "y":(1)2}, {"y":(2)2}]', '@tall, [{"p"}, {"q"}]', []),
    ('@mesh, [{"y"}, {"x"}]', '@across, [{"p"}, {"q"}]', []),
]


@pytest.mark.dear
@pytest.mark.parametrize(("argument", "result", "kinds"), FORWARDED)
def test_a_matrix_from_mesh_to_mesh(argument, result, kinds):
    printed = checked(main(f"return %0 : {M}", [argument], result))
    if kinds is not None:
        assert collectives(printed) == kinds


def test_steps_on_another_order_name_its_mesh():
    printed = checked(main(f"return %0 : {M}", ["@mesh, [{}, {}]"], '@reversed, [{"x"}, {}]'))
    assert 'sdy.all_slice [{"x"}, {}] %0 out_sharding=<@reversed, [{"x"}, {}]>' in printed


def test_an_op_runs_on_the_mesh_of_most_bytes_and_reduces_there():
    printed = checked(
        main(
            f"""
            %2 = stablehlo.dot_general %0, %1, contracting_dims = [1] x [0] : ({M}, {M}) -> {M}
            %3 = stablehlo.add %2, %0 : {M}
            return %3 : {M}""",
            ['@reversed, [{"x"}, {"y"}]', '@reversed, [{"y"}, {}]'],
            '@mesh, [{"x"}, {}]',
        )
    )
    assert '<@reversed, [{"x"}, {}], unreduced={"y"}>' in printed
    assert '@reversed, [{"x"}, {"y"}]> : tensor' in printed  # the reduce_scatter
    assert collectives(printed).count("collective_permute") == 1


def test_terms_of_sums_on_two_meshes_are_not_mixed():
    text = main(
        f"""
        %2 = stablehlo.dot_general %0, %0, contracting_dims = [1] x [0] : ({M}, {M}) -> {M}
        %3 = stablehlo.dot_general %1, %1, contracting_dims = [1] x [0] : ({M}, {M}) -> {M}
        %4 = stablehlo.add %2, %3 : {M}
        return %4 : {M}""",
        ['@mesh, [{}, {"y"}]', '@shuffled, [{}, {"y"}]'],
        "@mesh, [{}, {}]",
    )
    checked(text)


def test_a_loop_adds_up_terms_on_another_mesh_than_its_carry():
    printed = checked(
        main(
            f"""
            %1 = stablehlo.constant dense<0> : tensor<i32>
            %2 = stablehlo.constant dense<0.0> : {M}
            %3:2 = stablehlo.while(%i = %1, %sum = %2) : tensor<i32>, {M} cond {{
              %4 = stablehlo.constant dense<3> : tensor<i32>
              %5 = stablehlo.compare LT, %i, %4 : (tensor<i32>, tensor<i32>) -> tensor<i1>
              stablehlo.return %5 : tensor<i1>
            }} do {{
              %4 = stablehlo.constant dense<1> : tensor<i32>
              %5 = stablehlo.add %i, %4 : tensor<i32>
              %6 = stablehlo.dot_general %0, %0, contracting_dims = [1] x [1] : ({M}, {M}) -> {M}
              %7 = stablehlo.add %sum, %6 : {M}
              stablehlo.return %5, %7 : tensor<i32>, {M}
            }}
            return %3#1 : {M}""",
            ['@shuffled, [{}, {"y"}]'],
            "@mesh, [{}, {}]",
        )
    )
    assert printed.count("all_reduce") == 1
    assert printed.index("all_reduce") > printed.rindex("stablehlo.return")


def test_what_a_collective_takes_says_where_it_lies():
    body = f"%1 = stablehlo.negate %0 : {M}\n%2 = sdy.reshard %1 <@mesh, [{{}}, {{}}]> : {M}\nreturn %2 : {M}"
    checked(main(body, [""], '@reversed, [{"x"}, {}]'))


def test_what_is_whole_since_its_axes_do_not_divide_it_is_on_every_mesh():
    text = f"""{MESHES}
func.func @main(%0: tensor<7x16xf32>) -> (tensor<7x16xf32> {sharded('@reversed, [{}, {"x"}]')}) {{
  %1 = sdy.reshard %0 <@reversed, [{{"y"}}, {{}}]> : tensor<7x16xf32>
  return %1 : tensor<7x16xf32>
}}"""
    checked(text)


CHAIN = """
%2 = stablehlo.dot_general %0, %1, contracting_dims = [1] x [0] : (M, M) -> M
%3 = sdy.sharding_constraint %2 <@tall, [{"p"}, {"q"}]> : M
%4 = stablehlo.multiply %3, %1 : M
%5 = sdy.reshard %4 <@across, [{"p"}, {"q"}]> : M
%6 = stablehlo.add %5, %0 : M
%7 = sdy.sharding_constraint %6 <@line_reversed, [{"all"}, {}]> : M
%8 = stablehlo.tanh %7 : M
%9 = sdy.sharding_constraint %8 <@single, []> : M
%10 = stablehlo.add %9, %0 : M
return %10 : M"""


def test_a_chain_through_six_meshes():
    checked(main(CHAIN.replace("M", M), ['@reversed, [{"x"}, {"y"}]', '@mesh, [{"y"}, {}]'], '@shuffled, [{"y"}, {}]'))


def test_coordinates_are_those_of_the_mesh_of_the_op():
    """A looked-up table, a dynamic update and an iota, on an order that is not the function's."""
    text = f"""{MESHES}
func.func @main(%0: {M} {sharded('@shuffled, [{"y"}, {}]')}, %1: tensor<8xi32>) -> (
    tensor<8x16xf32> {sharded('@shuffled, [{"x"}, {}]')}, {M} {sharded('@shuffled, [{"y"}, {}]')}) {{
  %2 = "stablehlo.gather"(%0, %1) <{{dimension_numbers = #stablehlo.gather<offset_dims = [1],
    collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>,
    slice_sizes = array<i64: 1, 16>}}> : ({M}, tensor<8xi32>) -> tensor<8x16xf32>
  %3 = stablehlo.constant dense<3> : tensor<i32>
  %4 = stablehlo.constant dense<7.0> : tensor<2x16xf32>
  %5 = stablehlo.dynamic_update_slice %0, %4, %3, %3 :
    ({M}, tensor<2x16xf32>, tensor<i32>, tensor<i32>) -> {M}
  %6 = stablehlo.iota dim = 0 : {M}
  %7 = stablehlo.add %5, %6 : {M}
  return %2, %7 : tensor<8x16xf32>, {M}
}}"""
    module = partitioned(text)
    verify_partitioned(module.operation)
    rng = np.random.default_rng(0)
    arguments = [rng.standard_normal((16, 16)).astype(np.float32), rng.integers(0, 16, 8).astype(np.int32)]
    wanted = run_plain(plain_module(text), arguments, types_of(Graph(module.operation).outputs))
    for found, want in zip(run_partitioned(module, arguments), wanted, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-6)
    assert re.search("stablehlo.iota .*<@shuffled, ", str(module))


def in_random_order(seed: int) -> str:
    """A random program of which half of the shardings are on a mesh with the devices in a random order."""
    text = RandomProgram(seed, ops=20, without=(*WITHOUT, "manual", "meshes", "inline"), devices=8).text
    text = re.sub(r"(epsilon = [\d.e-]+ : )f64", r"\1f32", text.replace("f32", "f64"))
    line, rng = re.search(r"sdy.mesh @mesh = <(\[.*?\])>\n", text), random.Random(seed)
    count = math.prod(map(int, re.findall(r"=(\d+)", line[1])))
    ids = rng.sample(range(count), count)
    if ids == sorted(ids):
        return text
    text = re.sub("<@mesh,", lambda _: rng.choice(["<@mesh,", "<@shuffled,"]), text)
    return text.replace(line[0], f"{line[0]}sdy.mesh @shuffled = <{line[1]}, device_ids={ids}>\n")


def fuzz(seed: int) -> dict[str, int]:
    """How often a random program could be compared, its layouts chosen in one way or another; fails if it is wrong."""
    return {"numeric": check_ways(in_random_order(seed), seed, count=2)["same"]}


@pytest.mark.more("random programs on meshes in two orders")
def test_random_programs_on_two_orders_return_what_they_return_on_one_device():
    assert sum(fuzz(seed)["numeric"] for seed in range(24)) >= 22


# Single devices.


def test_a_value_on_a_single_device_is_computed_by_all_and_the_plan_says_so():
    text = main(
        f"""%1 = stablehlo.tanh %0 {{sdy.sharding = #sdy.sharding_per_value<[<@single, []>]>}} : {M}
            %2 = stablehlo.constant
              {{sdy.sharding = #sdy.sharding_per_value<[<@other_single, []>]>}} dense<2.0> : {M}
            %3 = stablehlo.add %1, %2 : {M}
            return %3 : {M}""",
        ['@mesh, [{"x"}, {}]'],
        '@mesh, [{"x"}, {}]',
    )
    assert "single" not in checked(text).partition("func.func")[2]


def notes_of(text: str) -> list[str]:
    module = parse(text)
    with module.context:
        return [note.message for note in partition_locally(module.operation, Setting("mesh", CostModel())).notes]


def test_what_is_lost_is_noted():
    text = main(f"%1 = sdy.reshard %0 <@single, []> : {M}\nreturn %1 : {M}", [""], "")
    assert notes_of(text) == ["is on device 3 alone by its sharding; every device has it"]


def test_arguments_and_results_on_a_single_device_are_on_all():
    text = main(
        f"%1 = stablehlo.tanh %0 : {M}\n%2 = stablehlo.add %1, %1 : {M}\nreturn %2 : {M}",
        ["@single, []"],
        "@single, []",
    )
    printed = checked(text)
    assert "@single, []" not in printed
    says = "is on device 3 alone by its sharding; every device has it"
    assert set(notes_of(text)) == {f"argument 0 {says}", says}
    devices = np.array(jax.devices()).reshape(2, 4)
    function = sdy.partition(sdy.loads(text), mesh=jax.sharding.Mesh(devices, ("x", "y")), on_unknown="ignore")
    x = np.random.default_rng(5).standard_normal((16, 16)).astype(np.float32)
    result = function(x)
    assert f"argument: `arg0` {says}" in str(function.plan(x))
    np.testing.assert_allclose(result, 2 * np.tanh(x), rtol=1e-5)
    assert result.sharding.is_fully_replicated


def test_axes_that_are_no_parts_of_the_mesh_are_left_out():
    text = f"""
sdy.mesh @mesh = <["x"=2, "y"=3]>
sdy.mesh @turned = <["p"=3, "q"=2]>
func.func @main(%0: tensor<12x6xf32> {sharded('@mesh, [{"y"}, {}]')}) -> tensor<12x6xf32> {{
  %1 = stablehlo.negate %0 : tensor<12x6xf32>
  %2 = sdy.reshard %1 <@turned, [{{"p", "q"}}, {{}}]> : tensor<12x6xf32>
  %3 = sdy.reshard %2 <@turned, [{{}}, {{"q"}}]> : tensor<12x6xf32>
  return %3 : tensor<12x6xf32>
}}"""
    printed = checked(text)
    assert "@turned," not in printed
    assert any("cannot be expressed in axes of" in note for note in notes_of(text))


REFUSED = {
    "an op on two single devices": (
        main(
            f"""%1:2 = stablehlo.optimization_barrier
                {{sdy.sharding = #sdy.sharding_per_value<[<@single, []>, <@other_single, []>]>}} %0, %0 : {M}, {M}
                return %1#0 : {M}""",
            [""],
            "",
        ),
        ShardingError,
        "results on the single devices 3, 0",
    ),
    "a mesh of other devices": (
        main(f"return %0 : {M}", ['@four, [{"z"}, {}]'], ""),
        ShardingError,
        "all meshes of a function must have the same devices",
    ),
    "a manual computation on another mesh": (
        main(
            f"""%1 = sdy.manual_computation(%0) in_shardings=[<@reversed, [{{"x"}}, {{}}]>]
                  out_shardings=[<@reversed, [{{"x"}}, {{}}]>] manual_axes={{"x"}} (%2: tensor<8x16xf32>) {{
                  sdy.return %2 : tensor<8x16xf32>
                }} : ({M}) -> {M}
                return %1 : {M}""",
            [""],
            "",
        ),
        UnsupportedError,
        "manual on x",
    ),
    "a named computation on another mesh in a manual one": (
        main(
            f"""%1 = sdy.manual_computation(%0) in_shardings=[<@mesh, [{{"x"}}, {{}}]>]
                  out_shardings=[<@mesh, [{{"x"}}, {{}}]>] manual_axes={{"x"}} (%2: tensor<8x16xf32>) {{
                  %3 = sdy.named_computation<"f">(%2)
                      in_shardings=[<@reversed, [{{}}, {{"y"}}]>] (%4: tensor<8x16xf32>) {{
                    sdy.return %4 : tensor<8x16xf32>
                  }} : (tensor<8x16xf32>) -> tensor<8x16xf32>
                  sdy.return %3 : tensor<8x16xf32>
                }} : ({M}) -> {M}
                return %1 : {M}""",
            [""],
            "",
        ),
        UnsupportedError,
        "manual on x",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    text, kind, message = REFUSED[name]
    with pytest.raises(kind, match=re.escape(message)):
        notes_of(text)


# The algebra: axes of one mesh in axes of another.

EXPRESSED = [  # axis, its mesh, other mesh, axes of the other mesh
    ('"p"', '<["p"=4, "q"=2]>', '<["x"=2, "y"=4]>', '"x", "y":(1)2'),
    ('"q"', '<["p"=4, "q"=2]>', '<["x"=2, "y"=4]>', '"y":(2)2'),
    ('"p"', '<["p"=4, "q"=2], device_ids=[0, 4, 1, 5, 2, 6, 3, 7]>', '<["x"=2, "y"=4]>', '"y"'),
    ('"p":(1)2', '<["p"=8]>', '<["x"=2, "y"=4]>', '"x"'),
    ('"p"', '<["p"=4], device_ids=[0, 2, 1, 3]>', '<["a"=2, "b"=2]>', '"b", "a"'),
    ('"p"', '<["p"=4], device_ids=[3, 2, 1, 0]>', '<["a"=2, "b"=2]>', None),
    ('"p"', '<["p"=3, "q"=2]>', '<["x"=2, "y"=3]>', None),
    ('"p"', '<["p"=2, "q"=2], device_ids=[3, 2, 1, 0]>', '<["x"=4], device_ids=[3, 2, 1, 0]>', '"x":(1)2'),
    ('"p"', '<["p"=1, "q"=2]>', '<["x"=2]>', ""),
]  # fmt: skip


@pytest.mark.parametrize(("axis", "own", "other", "axes"), EXPRESSED)
def test_axes_are_expressed_in_axes_of_another_mesh(axis, own, other, axes):
    found = expressed(parse_axis(axis), parse_mesh(own), parse_mesh(other))
    assert (None if found is None else ", ".join(map(str, found))) == axes


def test_the_part_of_a_list_that_two_meshes_have_in_common():
    mesh, other = parse_mesh('<["x"=2, "y"=4]>'), parse_mesh('<["x"=2, "y"=4], device_ids=[1, 0, 3, 2, 5, 4, 7, 6]>')
    listed = (parse_axis('"x"'), parse_axis('"y"'))
    assert list(map(str, common_part(listed, mesh, other))) == ['"x"', '"y":(1)2']
    assert list(map(str, expressed_part(listed, other, mesh))) == ['"x"', '"y":(1)2']
    assert common_part(listed[1:], mesh, Mesh(mesh.axes, (7, 6, 5, 4, 3, 2, 1, 0))) == ()


# Functions.

X = np.arange(256, dtype=np.float32).reshape(16, 16)


def jax_mesh(shape: tuple[int, ...], names: str, order: slice | None = None) -> jax.sharding.Mesh:
    devices = np.array(jax.devices()[:8])
    return jax.sharding.Mesh((devices[order] if order else devices).reshape(shape), tuple(names))


XY = jax_mesh((2, 4), "xy")
TALL = jax_mesh((4, 2), "pq")
LINE = jax_mesh((8,), "l")
ACROSS = jax.sharding.Mesh(XY.devices.T, ("p", "q"))
REVERSED = jax_mesh((2, 4), "xy", slice(None, None, -1))

MESH = parse_mesh('<["x"=2, "y"=4], device_ids=[7, 6, 5, 4, 3, 2, 1, 0]>')

SAID = [  # what the user says, what it is on the function's mesh
    (NamedSharding(TALL, P("p", "q")), '[{"x", "y":(1)2}, {"y":(2)2}]'),
    (NamedSharding(LINE, P(None, "l")), '[{}, {"x", "y"}]'),
    (NamedSharding(ACROSS, P("p", "q")), '[{"y"}, {"x"}]'),
    (NamedSharding(LINE, P("l")), '[{"x", "y"}, {}]'),
]


@pytest.mark.parametrize(("said", "meant"), SAID)
def test_shardings_on_other_axes_of_the_devices_are_understood_at_the_border(said, meant):
    into = sdy.partition(lambda x: x + 1, mesh=XY, in_shardings=said)
    assert str(into.plan(X).arguments[0].sharding) == f"@mesh, {meant}"
    np.testing.assert_array_equal(into(X), X + 1)
    out = sdy.partition(lambda x: x + 1, mesh=XY, out_shardings=said)
    assert str(out.plan(X).results[0].sharding) == f"@mesh, {meant}"
    result = out(X)
    np.testing.assert_array_equal(result, X + 1)
    assert result.sharding.devices_indices_map(X.shape) == said.devices_indices_map(X.shape)


@pytest.mark.parametrize("constrain", [sdy.sharding_constraint, jax.lax.with_sharding_constraint])
def test_constraints_on_other_axes_of_the_devices_propagate(constrain):
    function = sdy.partition(lambda x: constrain(x + 1, NamedSharding(TALL, P("p"))) * 2, mesh=XY)
    assert str(function.plan(X).arguments[0].sharding).endswith(', [{"x"}, {}]')  # without the part of an axis
    np.testing.assert_array_equal(function(X), (X + 1) * 2)


@pytest.mark.parametrize(
    ("said", "meant"),
    [(NamedSharding(ACROSS, P("p")), '@mesh, [{"y"}, {}]'), (NamedSharding(REVERSED, P("x")), '@mesh_0, [{"x"}, {}]')],
)
def test_constraints_are_about_the_devices_of_their_mesh(said, meant):
    function = sdy.partition(lambda x: sdy.sharding_constraint(x + 1, said) * 2, mesh=XY)
    assert str(function.plan(X).results[0].sharding) == meant
    np.testing.assert_array_equal(function(X), (X + 1) * 2)


@pytest.mark.parametrize("where", ["in_shardings", "sharding_constraint"])
def test_shardings_on_other_devices_are_refused_in_one_sentence(where):
    said = NamedSharding(jax.sharding.Mesh(XY.devices[:, :2], ("x", "y")), P("x"))
    if where == "in_shardings":
        function = sdy.partition(lambda x: x + 1, mesh=XY, in_shardings=said)
    else:
        function = sdy.partition(lambda x: sdy.sharding_constraint(x, said), mesh=XY)
    with pytest.raises(ShardingError, match=rf"{where} for `x` is on the mesh .* not those of the function's mesh"):
        function.plan(X)


def test_vmap_of_a_constraint_on_another_mesh():
    said = NamedSharding(ACROSS, P("p"))
    function = sdy.partition(lambda x: jax.vmap(lambda row: sdy.sharding_constraint(row, said))(x) + 1, mesh=XY)
    np.testing.assert_array_equal(function(X), X + 1)
    named = jax.vmap(lambda row: sdy.sharding_constraint(row, said), spmd_axis_name="x")
    with pytest.raises(ShardingError, match=r"vmap splits its dimension along 'x', and .* has no such axis"):
        sdy.partition(named, mesh=XY).plan(X)


def test_a_sharding_on_a_mesh_without_devices_is_laid_out_in_the_order_of_the_function():
    function = sdy.partition(lambda x: x + 1, mesh=XY, in_shardings=TensorSharding.closed(MESH, [[AxisRef("x")], []]))
    assert str(function.plan(X).arguments[0].sharding) == '@mesh, [{"x"}, {}]'
    np.testing.assert_array_equal(function(X), X + 1)


def test_a_module_on_two_orders_runs_and_its_plan_names_the_other(tmp_path):
    body = f'%1 = sdy.reshard %0 <@reversed, [{{"y"}}, {{}}]> : {M}\n%2 = stablehlo.tanh %1 : {M}\nreturn %2 : {M}'
    path = tmp_path / "two.mlir"
    path.write_text(main(body, ['@mesh, [{"x"}, {}]'], '@reversed, [{"y"}, {}]'))
    np.testing.assert_allclose(sdy.partition(sdy.load(path))(X), np.tanh(X), rtol=1e-6)
    function = sdy.partition(sdy.load(path), layouts="local")
    np.testing.assert_allclose(function(X), np.tanh(X), rtol=1e-6)
    assert re.search(r"collective_permute +f32\[16@y,16\] on @reversed", str(function.plan(X)))


@pytest.mark.parametrize("where", ["in_shardings", "out_shardings"])
def test_another_order_of_the_devices_is_refused_as_jit_does(where):
    function = sdy.partition(lambda x: x + 1, mesh=XY, **{where: NamedSharding(REVERSED, P("x"))})
    path = "x" if where == "in_shardings" else "result"
    with pytest.raises(ShardingError, match=f"{where} for `{path}` .* devices are in another order"):
        function(X)


@pytest.mark.parametrize(
    ("sharding", "said"),
    [
        (NamedSharding(REVERSED, P("x")), "in another order"),
        (jax.sharding.SingleDeviceSharding(jax.devices()[3]), "a single device"),
    ],
)
def test_an_array_that_jit_cannot_take_is_named(sharding, said):
    function = sdy.partition(lambda params: params["w"] + 1, mesh=XY)
    with pytest.raises(SdyError, match=rf"`params\['w'\]` lies on .*{said}"):
        function({"w": jax.device_put(X, sharding)})
