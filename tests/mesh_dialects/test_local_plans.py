"""Plans of programs on local arrays: what each op of the mesh and shard dialects sends, as counted in compiled HLO."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.cli.main import main
from sdy_jax.errors import SdyError, UnsupportedError
from sdy_jax.plan.profile import collectives_in_hlo, totals


def program(body, argument="tensor<8x4xf32>", result="tensor<8x4xf32>", mesh="2x4"):
    return (
        f"mesh.mesh @m(shape = {mesh})\n"
        f"func.func @main(%x: {argument}) -> {result} {{\n{body}\n  return %r : {result}\n}}"
    )


def reduction(op, attributes, argument, result):
    return program(f"  %r = mesh.{op} %x on @m {attributes} : {argument} -> {result}", argument, result)


T, HALF, QUARTER, TWICE = "tensor<8x4xf32>", "tensor<4x4xf32>", "tensor<2x4xf32>", "tensor<16x4xf32>"
# name: the program, and what it sends per device: kinds and bytes.
PROGRAMS = {
    "all_gather": (
        program("  %r = mesh.all_gather %x on @m mesh_axes = [0] gather_axis = 0 : " + f"{T} -> {TWICE}", T, TWICE),
        {"all_gather": 128},
    ),
    "all_gather over both": (
        program(
            f"  %r = mesh.all_gather %x on @m mesh_axes = [1, 0] gather_axis = 1 : {T} -> tensor<8x32xf32>",
            T,
            "tensor<8x32xf32>",
        ),
        {"all_gather": 7 * 128},
    ),
    "all_reduce": (reduction("all_reduce", "mesh_axes = [1]", T, T), {"all_reduce": 2 * 0.75 * 128}),
    "all_reduce to f64": (
        reduction("all_reduce", "mesh_axes = [0] reduction = max", T, "tensor<8x4xf64>"),
        {"all_reduce": 256},
    ),
    "all_reduce, product": (
        reduction("all_reduce", "mesh_axes = [1] reduction = product", T, T),
        {"all_gather": 3 * 128},  # of so few elements all terms
    ),
    "all_reduce of booleans": (
        reduction("all_reduce", "mesh_axes = [1] reduction = max", "tensor<8xi1>", "tensor<8xi1>"),
        {"all_reduce": 1.5 * 8},
    ),
    "all_slice": (reduction("all_slice", "mesh_axes = [0] slice_axis = 0", T, HALF), {}),
    "all_to_all": (
        reduction("all_to_all", "mesh_axes = [1] split_axis = 0 concat_axis = 1", T, "tensor<2x16xf32>"),
        {"all_to_all": 96},
    ),
    "broadcast": (
        program(f"  %r = mesh.broadcast %x on @m mesh_axes = [0] root = [1] : ({T}) -> {T}"),
        {"all_reduce": 128},
    ),
    "gather": (
        program(f"  %r = mesh.gather %x on @m mesh_axes = [0] gather_axis = 0 root = [1] : ({T}) -> {TWICE}", T, TWICE),
        {"all_gather": 128},
    ),
    "scatter": (
        program(
            f"  %r = mesh.scatter %x on @m mesh_axes = [1] scatter_axis = 0 root = [3] : ({T}) -> {QUARTER}",
            T,
            QUARTER,
        ),
        {"all_to_all": 96},
    ),
    "reduce": (
        program(f"  %r = mesh.reduce %x on @m mesh_axes = [1] root = [0] : ({T}) -> {T}"),
        {"all_reduce": 192},
    ),
    "reduce_scatter": (
        reduction("reduce_scatter", "mesh_axes = [1] scatter_axis = 0", T, QUARTER),
        {"reduce_scatter": 96},
    ),
    "reduce_scatter, min": (
        reduction("reduce_scatter", "mesh_axes = [1] reduction = min scatter_axis = 0", T, QUARTER),
        {"all_to_all": 96},
    ),
    "shift": (
        program(f"  %r = mesh.shift %x on @m mesh_axes = [1] shift_axis = 1 offset = 1 : {T} -> {T}"),
        {"collective_permute": 128},
    ),
    "shift around": (
        program(f"  %r = mesh.shift %x on @m mesh_axes = [1] shift_axis = 1 offset = 6 rotate : {T} -> {T}"),
        {"collective_permute": 128},
    ),
    "shift by nothing": (
        program(f"  %r = mesh.shift %x on @m mesh_axes = [1] shift_axis = 1 offset = 4 rotate : {T} -> {T}"),
        {},
    ),
    "shift off the end": (
        program(f"  %r = mesh.shift %x on @m mesh_axes = [1] shift_axis = 1 offset = 5 : {T} -> {T}"),
        {},
    ),
    "send and recv": (
        program(
            f"  %s = mesh.send %x on @m mesh_axes = [1] destination = [2] : ({T}) -> {T}\n"
            f"  %r = mesh.recv %x on @m mesh_axes = [1] source = [0] : ({T}) -> {T}"
        ),
        {"collective_permute": 128},
    ),
    "send and recv, devices known for each": (
        program(
            "  %i = mesh.process_linear_index on @m : index\n"
            "  %four = arith.constant 4 : index\n"
            "  %to = arith.remsi %i, %four : index\n"
            f"  %s = mesh.send %x on @m mesh_axes = [1] destination = [%to] : ({T}, index) -> {T}\n"
            f"  %r = mesh.recv %x on @m mesh_axes = [1] source = [%to] : ({T}, index) -> {T}"
        ),
        None,
    ),
    "send and recv, devices known in the run": (
        program(
            "  %i = stablehlo.convert %x : (tensor<8x4xf32>) -> tensor<8x4xi32>\n"
            "  %p = arith.constant 0 : index\n"
            "  %e = tensor.extract %i[%p, %p] : tensor<8x4xi32>\n"
            "  %to = arith.index_cast %e : i32 to index\n"
            f"  %s = mesh.send %x on @m mesh_axes = [1] destination = [%to] : ({T}, index) -> {T}\n"
            f"  %r = mesh.recv %x on @m mesh_axes = [1] source = [%to] : ({T}, index) -> {T}"
        ),
        {"all_gather": 3 * (128 + 4)},
    ),
    "update_halo": (
        program("  %r = mesh.update_halo %x on @m split_axes = [[1], [0]] halo_sizes = [1, 2, 0, 1] : tensor<8x4xf32>"),
        # One column of 8 rows along axis 0, then rows of 4: three of them, sent on.
        {"collective_permute": 8 * 4 + (1 + 2) * 4 * 4},
    ),
    "in a loop": (
        program(
            "  %a = arith.constant 0 : index\n  %b = arith.constant 5 : index\n  %c = arith.constant 1 : index\n"
            f"  %r = scf.for %i = %a to %b step %c iter_args(%y = %x) -> ({T}) {{\n"
            f"    %t = mesh.all_reduce %y on @m mesh_axes = [1] : {T} -> {T}\n"
            f"    scf.yield %t : {T}\n  }}"
        ),
        {"all_reduce": 5 * 192},
    ),
    "the shard dialect": (
        "shard.grid @m(shape = 2x4)\n"
        f"func.func @main(%x: {T}) -> {TWICE} {{\n"
        f"  %r = shard.all_gather %x on @m grid_axes = [0] gather_axis = 0 : {T} -> {TWICE}\n  return %r : {TWICE}\n}}",
        {"all_gather": 128},
    ),
    "StableHLO's own": (
        program(
            '  %s = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, channel_handle = '
            "#stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3], [4, 5, 6, 7]]> : "
            f"tensor<2x4xi64>, use_global_device_ids}} : ({T}) -> tensor<32x4xf32>\n"
            "  %r = mesh.all_slice %s on @m mesh_axes = [1] slice_axis = 0 : tensor<32x4xf32> -> tensor<8x4xf32>"
        ),
        {"all_gather": 384},
    ),
}


def stack(function):
    (value,) = function.arguments
    dtype = {"f32": np.float32, "i1": np.bool_}[str(value.dtype)]
    return (np.random.default_rng(0).standard_normal((8, *value.shape)) > 0.2).astype(dtype)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_plan_counts_what_compiled_programs_send(name):
    text, expected = PROGRAMS[name]
    with jax.enable_x64(True):
        function = sdy.shard.run_local(text)
        x = stack(function)
        plan = function.plan(x)
        found = totals(collectives_in_hlo(function.lower(x).compile().as_text())).by_kind
    planned = {kind: (count, wire) for kind, (count, wire) in plan.totals.by_kind().items() if wire}
    assert planned == {kind.replace("-", "_"): value for kind, value in found.items() if value[1]}
    if expected is not None:
        assert {kind: wire for kind, (_, wire) in planned.items()} == expected
    assert {c.origin for c in plan.collectives} <= {"user"}


def test_the_command_line_prints_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.mlir").write_text(PROGRAMS["broadcast"][0])
    assert main(["plan", "m.mlir"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("plan of main on local arrays, on mesh axis0=2, axis1=4 (8 devices): 1 collective, 128 B")
    assert "arg0  f32[8,4]\n" in out
    assert 'all_reduce {"axis0"}  f32[8,4]  128 B  m.mlir:3  for mesh.broadcast' in out
    assert main(["plan", "m.mlir", "--stage", "traced"]) == 0
    assert "mesh.broadcast" in capsys.readouterr().out
    assert main(["plan", "m.mlir", "--stage", "partitioned"]) == 1
    assert "the stages are traced" in capsys.readouterr().err
    assert main(["plan", "m.mlir", "--why", "arg0"]) == 1
    assert "nothing propagates" in capsys.readouterr().err


def test_sizes_that_are_known_when_it_is_called(tmp_path, monkeypatch, capsys):
    text = program(
        "  %r = mesh.all_gather %x on @m mesh_axes = [0] gather_axis = 0 : tensor<?x4xf32> -> tensor<?x4xf32>",
        "tensor<?x4xf32>",
        "tensor<?x4xf32>",
    )
    function = sdy.shard.run_local(text)
    assert function.plan(jax.ShapeDtypeStruct((8, 6, 4), jnp.float32)).wire_bytes == 96
    assert function.plan(jax.ShapeDtypeStruct((8, 2, 4), jnp.float32)).wire_bytes == 32
    with pytest.raises(SdyError, match="argument 0 has shape"):
        function.plan(jnp.ones((3, 4)))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.mlir").write_text(text)
    assert main(["plan", "m.mlir"]) == 1
    assert "the program takes f32[8,?,4]" in capsys.readouterr().err


def test_arrays_that_lie_as_specs_say():
    function = sdy.shard.run_local(
        PROGRAMS["all_gather"][0], in_specs=P(("axis0", "axis1")), out_specs=P(("axis0", "axis1"))
    )
    plan = function.plan(jnp.ones((64, 4)))
    assert (plan.arguments[0].type, plan.results[0].type) == ("f32[8,4]", "f32[16,4]")
    assert plan.wire_bytes == 128
    with pytest.raises(UnsupportedError):
        plan.why("arg0")
    with pytest.raises(UnsupportedError, match="no text in Python"):
        plan.to_python()


def test_python_functions_in_shard_map_are_counted_too():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def body(x):
        y = sdy.shard.all_gather(x, grid_axes="b", gather_axis=1)
        return sdy.shard.shift(y, grid_axes="a", shift_axis="a", offset=1)

    def function(x):
        return jax.shard_map(body, mesh=mesh, in_specs=P("a", "b"), out_specs=P("a"), check_vma=False)(x)

    run = sdy.partition(function, mesh=mesh, in_shardings=P("a", "b"))
    x = jnp.ones((8, 16))
    plan = run.plan(x)
    assert [(c.kind, c.wire_bytes, c.origin) for c in plan.collectives] == [
        ("all_gather", 3 * 64, "user"),
        ("collective_permute", 256, "user"),
    ]
    found = totals(collectives_in_hlo(run.lower(x).compile().as_text()))
    assert found.wire_bytes == plan.wire_bytes
    lines = [c.source.rsplit(":", 1) for c in plan.collectives]
    assert [line for file, line in lines if file.endswith("test_local_plans.py")] == [
        str(body.__code__.co_firstlineno + 1),
        str(body.__code__.co_firstlineno + 2),
    ]


MANUAL = """
sdy.mesh @mesh = <["a"=2, "b"=4]>
mesh.mesh @devices(shape = 2x4)
func.func @main(%x: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}, {"b"}]>}) -> tensor<8x16xf32> {
  %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"a"}, {"b"}]>] out_shardings=[<@mesh, [{"a"}, {"b"}]>]
      manual_axes={"a", "b"} (%y: tensor<4x4xf32>) {
    %1 = mesh.all_reduce %y on @devices mesh_axes = [1] : tensor<4x4xf32> -> tensor<4x4xf32>
    %2 = mesh.shift %1 on @devices mesh_axes = [0] shift_axis = 0 offset = 1 rotate : tensor<4x4xf32> -> tensor<4x4xf32>
    sdy.return %2 : tensor<4x4xf32>
  } : (tensor<8x16xf32>) -> tensor<8x16xf32>
  return %0 : tensor<8x16xf32>
}
"""


def test_ops_in_manual_computations_of_whole_programs_are_counted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.mlir").write_text(MANUAL)
    run, x = sdy.partition(sdy.load("m.mlir")), jnp.ones((8, 16))
    plan = run.plan(x)
    assert [(c.kind, c.wire_bytes, c.cause, c.source) for c in plan.collectives if c.origin == "user"] == [
        ("all_reduce", 96, "mesh.all_reduce", "m.mlir:7"),
        ("collective_permute", 64, "mesh.shift", "m.mlir:8"),
    ]
    found = totals(collectives_in_hlo(run.lower(x).compile().as_text()))
    assert found.wire_bytes == plan.wire_bytes
    np.testing.assert_array_equal(jax.jit(run)(x)[:, :4], 4 * x[:, :4])
