"""Simplifying collectives of the mesh and shard dialects: which become which, and that the values stay the same."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import pytest
from dialect_texts import LOCAL, MIXED, in_shard

import sdy_jax as sdy
from sdy_jax.cli.opt import optimize

T = "tensor<8x8xf32>"


def program(body: str, result: str = f"%r : {T}", arguments: str = f"%x: {T}, %y: {T}", size: str = "2x4") -> str:
    type_ = result.partition(":")[2]
    text = f"mesh.mesh @m(shape = {size})\nfunc.func @main({arguments}) -> {type_} {{\n{body}\nreturn {result}\n}}\n"
    return re.sub(r"\bT\b", T, text)


def simplified(text: str) -> list[str]:
    """The ops in the function."""
    out = optimize(text, "simplify-mesh", "m.mlir")
    assert optimize(out, "simplify-mesh", "m.mlir") == out
    return [line.strip() for line in out.split("\n")[3:-3]]


GATHER = "mesh.all_gather {} on @m mesh_axes = [1] gather_axis = 0 : tensor<8x8xf32> -> tensor<32x8xf32>"
SLICE = "mesh.all_slice {} on @m mesh_axes = [1] slice_axis = 0 : tensor<32x8xf32> -> tensor<8x8xf32>"
CUT = "mesh.all_slice {} on @m mesh_axes = [1] slice_axis = 0 : tensor<8x8xf32> -> tensor<2x8xf32>"
JOIN = "mesh.all_gather {} on @m mesh_axes = [1] gather_axis = 0 : tensor<2x8xf32> -> tensor<8x8xf32>"


def reduce(of: str, axes: str = "[1]", kind: str = "sum") -> str:
    return f"mesh.all_reduce {of} on @m mesh_axes = {axes} reduction = {kind} : T -> T"


CASES = {
    "alone": (f"%a = {reduce('%x', '[]')}\n%r = mesh.gather %a on @m gather_axis = 0 root = [] : (T) -> {T}", []),
    "gathered and cut": (f"%a = {GATHER.format('%x')}\n%r = {SLICE.format('%a')}", []),
    "cut and gathered": (f"%c = {reduce('%x', '[0, 1]')}\n%a = {CUT.format('%c')}\n%r = {JOIN.format('%a')}",
                         ["mesh.all_reduce %arg0 on @m mesh_axes = [0, 1]"]),
    "a constant cut and gathered": (f"%c = stablehlo.constant dense<1.0> : T\n%a = {CUT.format('%c')}\n"
                                    f"%r = {JOIN.format('%a')}", ["stablehlo.constant"]),
    "sums": (f"%a = {reduce('%x')}\n%b = {reduce('%y')}\n%r = stablehlo.add %a, %b : T",
             ["stablehlo.add %arg0, %arg1", "mesh.all_reduce %0 on @m mesh_axes = [1] : "]),
    "maxima": (f"%a = {reduce('%x', '[0, 1]', 'max')}\n%b = {reduce('%y', '[1, 0]', 'max')}\n"
               "%r = stablehlo.maximum %a, %b : T",
               ["stablehlo.maximum %arg0, %arg1", "mesh.all_reduce %0 on @m mesh_axes = [0, 1] reduction = max"]),
    "minima of one": (f"%a = {reduce('%x', '[1]', 'min')}\n%b = {reduce('%x', '[1]', 'min')}\n"
                      "%c = stablehlo.minimum %a, %b : T\n%r = stablehlo.negate %c : T",
                      ["stablehlo.minimum %arg0, %arg0", "mesh.all_reduce %0", "stablehlo.negate %1"]),
    "no shift": ("%r = mesh.shift %x on @m mesh_axes = [1] shift_axis = 1 offset = 0 : T -> T", []),
    "a whole turn": ("%r = mesh.shift %x on @m mesh_axes = [1, 0] shift_axis = 1 offset = -8 rotate : T -> T", []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_ops_become_simpler(name):
    body, expected = CASES[name]
    lines = simplified(program(body))
    assert len(lines) == len(expected) + 1
    for line, op in zip(lines, expected, strict=False):
        assert op in line


@pytest.mark.parametrize("name", CASES)
def test_values_stay_the_same(name):
    text = program(f"%here = mesh.process_linear_index on @m : index\n{CASES[name][0]}")
    x, y = (np.random.default_rng(seed).integers(-9, 9, (8, 8, 8)).astype(np.float32) for seed in (0, 1))
    before, after = (sdy.shard.run_local(t)(x, y) for t in (text, optimize(text, "simplify-mesh", "m.mlir")))
    np.testing.assert_array_equal(before, after)


def test_a_slice_of_a_reduction_scatters():
    type_ = "tensor<2x8xf64>"
    body = (
        f"%a = mesh.all_reduce %x on @m mesh_axes = [1] reduction = max : T -> tensor<8x8xf64>\n%r = {CUT.format('%a')}"
    )
    text = program(body.replace("x8xf32> -> tensor<2x8xf32>", f"x8xf64> -> {type_}"), f"%r : {type_}")
    op = f"mesh.reduce_scatter %arg0 on @m mesh_axes = [1] reduction = max scatter_axis = 0 : {T} -> {type_}"
    assert simplified(text)[0] == f"%0 = {op}"
    assert simplified(in_shard(text))[0] == f"%0 = {in_shard(op)}"


@pytest.mark.parametrize("kind", ["sum", "product", "max"])
@pytest.mark.parametrize("axes", ["[0, 1]", "[1, 0]"])
def test_the_order_of_the_slices_decides_which_one_a_device_gets(kind, axes):
    body = f"%a = {reduce('%x', '[1, 0]', kind)}\n%r = {CUT.format('%a')}".replace(
        "mesh_axes = [1] s", f"mesh_axes = {axes} s"
    )
    text = program(body.replace("tensor<2x8", "tensor<1x8"), "%r : tensor<1x8xf32>")
    assert len(simplified(text)) == 2
    x = np.random.default_rng(0).integers(-2, 3, (8, 8, 8)).astype(np.float32)
    before, after = (sdy.shard.run_local(t)(x, x) for t in (text, optimize(text, "simplify-mesh", "m.mlir")))
    np.testing.assert_array_equal(before, after)


def test_known_sizes_are_constants():
    text = program(
        "%0:2 = mesh.mesh_shape @m : index, index\n%r = arith.addi %0#0, %0#1 : index", "%r : index", size="2x?"
    )
    assert simplified(text)[:2] == ["%c2 = arith.constant 2 : index", "%0:2 = mesh.mesh_shape @m : index, index"]
    assert simplified(text.replace("2x?", "2x4"))[:2] == [
        "%c2 = arith.constant 2 : index",
        "%c4 = arith.constant 4 : index",
    ]


WIDE = "mesh.all_gather %x on @m mesh_axes = [1, 0] gather_axis = 0 : T -> tensor<64x8xf32>"
UNCHANGED = [
    f"%a = {WIDE}\n%r = mesh.all_slice %a on @m mesh_axes = [0] slice_axis = 1 : tensor<64x8xf32> -> tensor<64x4xf32>",
    f"%a = {WIDE}\n%r = mesh.all_slice %a on @m mesh_axes = [0, 1] slice_axis = 0 : tensor<64x8xf32> -> T",
    f"%a = {GATHER.format('%x')}\n%r = mesh.all_slice %a on @m mesh_axes = [1] slice_axis = 1"
    " : tensor<32x8xf32> -> tensor<32x2xf32>",
    f"%a = {CUT.format('%x')}\n%r = {JOIN.format('%a')}",
    f"%c = {reduce('%x')}\n%a = {CUT.format('%c')}\n%b = stablehlo.negate %c : T\n"
    "%r = mesh.all_gather %a on @m mesh_axes = [1] gather_axis = 1 : tensor<2x8xf32> -> tensor<2x32xf32>",
    "%r = mesh.all_reduce %x on @m : T -> tensor<8x8xf64>",
    f"%c = {reduce('%x', '[0]')}\n%a = {CUT.format('%c')}\n%r = {JOIN.format('%a')}",
    f"%a = {reduce('%x')}\n%b = {reduce('%y', '[0]')}\n%r = stablehlo.add %a, %b : T",
    f"%a = {reduce('%x')}\n%b = {reduce('%y', '[1]', 'max')}\n%r = stablehlo.add %a, %b : T",
    f"%a = {reduce('%x')}\n%b = {reduce('%y')}\n%r = stablehlo.maximum %a, %b : T",
    f"%a = {reduce('%x')}\n%b = {reduce('%y')}\n%c = stablehlo.add %a, %b : T\n%r = stablehlo.add %b, %c : T",
    f"%a = {reduce('%x')}\n%r = stablehlo.add %a, %a : T",
    f"%a = {reduce('%x')}\n%b = {CUT.format('%a')}\n%c = stablehlo.negate %a : T\n"
    "%r = stablehlo.negate %b : tensor<2x8xf32>",
    "%r = mesh.shift %x on @m mesh_axes = [1] shift_axis = 1 offset = 4 : T -> T",
    "%r = mesh.shift %x on @m mesh_axes = [1] shift_axis = 1 offset = 2 rotate : T -> T",
    "%a = mesh.send %x on @m destination = [] : (T) -> T\n%r = mesh.recv %x on @m : (T) -> T",
]


@pytest.mark.parametrize("body", UNCHANGED)
def test_what_would_mean_something_else_stays(body):
    text = program(body, f"%r : {re.findall('tensor<[^>]*>|T', body)[-1]}")
    assert optimize(text, "simplify-mesh", "m.mlir") == optimize(text, "", "m.mlir")


def test_a_reduction_that_converts_waits_for_nothing():
    a, b = (f"mesh.all_reduce {v} on @m mesh_axes = [1] : tensor<4xi8> -> tensor<4xi32>" for v in ("%x", "%y"))
    text = program(f"%a = {a}\n%b = {b}\n%r = stablehlo.add %a, %b : tensor<4xi32>", "%r : tensor<4xi32>",
                   "%x: tensor<4xi8>, %y: tensor<4xi8>")  # fmt: skip
    assert optimize(text, "simplify-mesh", "m.mlir") == optimize(text, "", "m.mlir")


def test_no_collective_moves_into_a_region():
    inside = (
        f"%r = scf.if %c -> (tensor<2x8xf32>) {{\n%b = {CUT.format('%a')}\nscf.yield %b : tensor<2x8xf32>\n}} else {{"
    )
    body = f"%a = {reduce('%x')}\n%z = {CUT.format('%x')}\n{inside}\nscf.yield %z : tensor<2x8xf32>\n}}"
    text = program(body, "%r : tensor<2x8xf32>", f"%x: {T}, %c: i1")
    assert optimize(text, "simplify-mesh", "m.mlir") == optimize(text, "", "m.mlir")


@pytest.mark.parametrize("text", [MIXED, LOCAL])
def test_other_modules_stay_valid(text):
    for module in (text, in_shard(text)):
        out = optimize(module, "simplify-mesh", "m.mlir")
        assert optimize(out, "", "m.mlir") == out


def test_a_random_program_keeps_its_values():
    body = (f"%a = {reduce('%x')}\n%b = {reduce('%y')}\n%c = stablehlo.add %a, %b : T\n%d = {CUT.format('%c')}\n"
            f"%e = {JOIN.format('%d')}\n%r = stablehlo.add %c, %e : T")  # fmt: skip
    text = program(body)
    x = jnp.arange(512.0).reshape(8, 8, 8)
    after = optimize(text, "simplify-mesh", "m.mlir")
    assert after.count("mesh.") == 2
    np.testing.assert_array_equal(sdy.shard.run_local(text)(x, x * 2), sdy.shard.run_local(after)(x, x * 2))
