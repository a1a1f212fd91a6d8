"""The rules of the mesh and shard dialects: what breaks one is said with the op's name, at its line and column."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from dialect_texts import GAP, REFERENCE, function, in_shard
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.cli.opt import optimize
from sdy_jax.ir.text.mesh_dialects import OPS
from sdy_jax.ir.text.modules import SourceError, parse_module
from sdy_jax.ir.validity import RuleError
from sdy_jax.mesh_dialects.meshes import stated_sharding
from sdy_jax.mesh_dialects.verification import RULES, verify_ops
from sdy_jax.mesh_dialects.view import dialect_ops, pair_up


def error(text: str) -> str:
    with pytest.raises(SourceError) as caught:
        optimize(text, "", "m.mlir")
    return str(caught.value)


def check_mistake(text: str, message: str) -> None:
    """`^` in a text is before the op that is wrong."""
    before, _, after = text.partition("^")
    line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
    op = re.match(r'"?([\w.]+)', after)
    found = error(before + after)
    assert found.startswith(f"m.mlir:{line}:{column}: error: {op[1]}")
    assert message in found


def one(statement: str, message: str) -> tuple[str, str]:
    """An op on `%0`, whose type is the first in the statement."""
    type_ = re.search(r": \(?(\w+<[^>]*>+|f32)", statement)
    return function(f"%1 = ^{statement}", f"%0: {type_[1] if type_ else 'f32'}, %i: index, %h: i64"), message


def sharding(text: str, message: str) -> tuple[str, str]:
    return one(f"mesh.sharding @m {text} : !mesh.sharding", message)


def sharded(stated: str, type_: str, message: str) -> tuple[str, str]:
    text = f"%s = mesh.sharding @m {stated} : !mesh.sharding\n  %a = ^mesh.shard %0 to %s : {type_}"
    return function(text, f"%0: {type_}, %h: i64"), message


def shards(body: str, message: str = "") -> tuple[str, str]:
    """Annotations of `%x` with two shardings."""
    text = "\n".join(f"%s{n} = mesh.sharding @m split_axes = [[{n}]] : !mesh.sharding" for n in range(2))
    return function(f"{text}\n{body}".replace(" : T", " : tensor<8x8xf32>"), "%x: tensor<8x8xf32>, %i: index"), message


F4 = "tensor<4xf32>"
SAME = f"{F4} -> {F4}"
I2 = "(tensor<2xi8>) -> tensor<2xi8>"
F6 = "(tensor<6xf32>) -> tensor<6xf32>"

MISTAKES = {
    "B01": one(f"mesh.all_gather %0 on @nope gather_axis = 0 : {SAME}", "no mesh named @nope"),
    "B02": one(f"shard.all_gather %0 on @m gather_axis = 0 : {SAME}", "no grid named @m"),
    "B03": one(f"mesh.all_reduce %0 on @m mesh_axes = [2] : {SAME}", "mesh_axes contains 2, but @m has axes 0..1"),
    "B04": one(f"mesh.all_reduce %0 on @m mesh_axes = [-1] : {SAME}", "mesh_axes contains -1, but @m has axes 0..1"),
    "B05": one(f"mesh.all_slice %0 on @m mesh_axes = [1, 0, 1] slice_axis = 0 : {SAME}",
               "mesh_axes = [1, 0, 1] repeats axis 1"),
    "B06": one("mesh.all_gather %0 on @m mesh_axes = [0] gather_axis = 1 : tensor<3xf32> -> tensor<6xf32>",
               "gather_axis = 1 is outside 0..0"),
    "B07": one("mesh.all_gather %0 on @m mesh_axes = [0] gather_axis = -1 : tensor<3xf32> -> tensor<6xf32>",
               "gather_axis = -1 is outside 0..0"),
    "B08": one("mesh.all_gather %0 on @m mesh_axes = [1] gather_axis = 0 : tensor<3xf32> -> tensor<6xf32>",
               "result dimension 0 is 6, expected 12"),
    "B09": one("mesh.all_gather %0 on @m mesh_axes = [1] gather_axis = 0 : tensor<?xf32> -> tensor<12xf32>",
               "result dimension 0 is 12, expected ? because the operand's size or the number of devices"
               " is known in the run only"),
    "B10": one("mesh.all_gather %0 on @m mesh_axes = [1] gather_axis = 0 : tensor<3xf32> -> tensor<12xf64>",
               "input has element type f32, result f64"),
    "B11": one("mesh.all_gather %0 on @m gather_axis = 0 : tensor<f32> -> tensor<f32>",
               "needs a ranked tensor of rank at least 1, got tensor<f32>"),
    "B12": one("mesh.all_gather %0 on @m mesh_axes = [1] gather_axis = 0 : tensor<3xf32> -> tensor<12x1xf32>",
               "input has rank 1, result 2"),
    "B13": one("mesh.all_slice %0 on @m mesh_axes = [1] slice_axis = 0 : tensor<6xf32> -> tensor<?xf32>",
               "dimension 0 of size 6 does not split into 4 equal pieces"),
    "B14": one("mesh.all_to_all %0 on @m mesh_axes = [1] split_axis = 0 concat_axis = 0"
               " : tensor<6xf32> -> tensor<6xf32>",
               "dimension 0 of size 6 does not split into 4 equal pieces"),
    "B15": one("mesh.all_to_all %0 on @m mesh_axes = [0] split_axis = 0 concat_axis = 1"
               " : tensor<4x2xi8> -> tensor<2x2xi8>", "result dimension 1 is 2, expected 4"),
    "B16": one("mesh.all_reduce %0 on @m mesh_axes = [0] : tensor<4xf32> -> tensor<5xf32>",
               "result dimension 0 is 5, expected 4"),
    "B18": one(f"mesh.all_reduce %0 on @m mesh_axes = [0] reduction = bitwise_or : {SAME}",
               "reduction = bitwise_or needs integers, got f32"),
    "B19": one(f"mesh.all_reduce %0 on @m mesh_axes = [0] reduction = median : {SAME}",
               "attribute reduction must be one of sum, max, min"),
    "B20": one("mesh.reduce_scatter %0 on @m mesh_axes = [0] scatter_axis = 0 : tensor<3x4xf32> -> tensor<1x4xf64>",
               "dimension 0 of size 3 does not split into 2 equal pieces"),
    "B21": one(f"mesh.broadcast %0 on @m mesh_axes = [0] root = [2] : {I2}",
               "root[0] = 2 is outside 0..1, the range of mesh axis 0"),
    "B22": one(f"mesh.broadcast %0 on @m mesh_axes = [0] root = [1, 1] : {I2}",
               "root has 2 coordinates for 1 mesh axes"),
    "B23": one(f"mesh.reduce %0 on @m mesh_axes = [1, 0] root = [1, 2] : {I2}",
               "root[1] = 2 is outside 0..1, the range of mesh axis 0"),
    "B24": one(f'"mesh.gather"(%0) <{{gather_axis = 0 : index, mesh = @m, root = array<i64: {GAP}>}}> : {I2}',
               "root has 1 dynamic entries but 0 operands"),
    "B25": one(f"mesh.send %0 on @m mesh_axes = [1] destination = [2] : {F6}",
               "this send has no matching recv (same mesh, mesh_axes and type, later in the block)"),
    "B26": one(f"mesh.recv %0 on @m mesh_axes = [1] source = [2] : {F6}\n"
               f"%2 = mesh.send %0 on @m mesh_axes = [1] destination = [2] : {F6}",
               "this recv has no earlier matching send"),
    "B27": one(f"mesh.send %0 on @m mesh_axes = [0] destination = [1] : {F6}\n"
               f"%2 = mesh.recv %0 on @m mesh_axes = [1] source = [2] : {F6}", "this send has no matching recv"),
    "B29": one(f"mesh.shift %0 on @m mesh_axes = [0] shift_axis = 1 offset = 1 : {SAME}",
               "shift_axis = 1 is not among mesh_axes = [0]"),
    "B30": one("mesh.update_halo %0 on @m split_axes = [[0], [1]] halo_sizes = [1, 1] : tensor<4x4xf32>",
               "2 halo sizes for 2 split dimensions, expected 4"),
    "B31": one(f"mesh.update_halo %0 on @m split_axes = [[0]] halo_sizes = [2, 1] : {F4}",
               "dimension 0 of size 4 leaves a core of 1, smaller than halo size 2"),
    "B32": ("^mesh.mesh @z(shape = [])", "a mesh needs at least one axis"),
    "B33": ("mesh.mesh @m(shape = 2x4)\n  ^mesh.mesh @m(shape = 2)", "@m is already defined"),
    "B34": (function("%1:2 = ^mesh.mesh_shape @m axes = [0] : index, index"), "2 results, expected 1"),
    "B35": (function("%1 = ^mesh.process_multi_index on @m : index"), "1 results, expected 2"),
    "B36": (function("%1:2 = ^mesh.neighbors_linear_indices on @m[%i] split_axes = [0] : index, index", "%i: index"),
            "1 device coordinates for a mesh of rank 2"),
    "B37": sharding("split_axes = [[0], [0]]", "mesh axis 0 is used twice"),
    "B38": sharding("split_axes = [[0]] partial = sum [0]", "mesh axis 0 is used twice"),
    "B39": sharding("split_axes = [[0]] partial = generic [1]", "partial = generic is not allowed"),
    "B40": sharding("split_axes = []", "split_axes needs at least one, possibly empty, list"),
    "B41": sharding("split_axes = [[0]] halo_sizes = [1, 1] sharded_dims_offsets = [0, 2, 4]",
                    "halo_sizes and sharded_dims_offsets exclude each other"),
    "B42": sharding("split_axes = [[0], [1]] sharded_dims_offsets = [0, 2, 4, 0, 2, 4, 6]", "7 offsets, expected 8"),
    "B43": sharding("split_axes = [[0, 1]] sharded_dims_offsets = [0, 1, 2, 3, 4, 5, 6]", "7 offsets, expected 9"),
    "B44": sharding("split_axes = [[1]] sharded_dims_offsets = [0, 2, 3, 2, 8]",
                    "offsets of dimension 0 decrease at position 3"),
    "B45": sharding("split_axes = [[0]] sharded_dims_offsets = [1, 2, 4]",
                    "offsets of dimension 0 start at 1, expected 0"),
    "B46": (sharding("split_axes = [[0]] sharded_dims_offsets = [0, 2, 4]", "")[0].replace("2x4", "2x?"),
            "sharded_dims_offsets need a mesh without ?"),
    "B47": sharded("split_axes = [[0]] sharded_dims_offsets = [0, 2, 5]", "tensor<4x8xf32>",
                   "offsets of dimension 0 end at 5, the dimension has size 4"),
    "B48": sharded("split_axes = [[], [0]]", F4, "split_axes has 2 lists, the tensor 1 dimensions"),
    "B49": shards("%a = mesh.shard %x to %s0 : T\n%b = ^mesh.shard %a to %s1 : T",
                  " is already sharded at m.mlir:6:6; use annotate_for_users to reshard for its users"),
    "B50": shards("%a = mesh.shard %x to %s0 : T\n%b = ^mesh.shard %x to %s1 : T",
                  "%x has two different shardings, here and at m.mlir:6:6"),
    "B51": shards("%a = mesh.shard %x to %s0 annotate_for_users : T\n"
                  "%b = ^mesh.shard %a to %s1 annotate_for_users : T",
                  " is already annotated for its users at m.mlir:6:6; annotate the value itself a second time"),
    "B52": shards("%a = mesh.shard %x to %s0 annotate_for_users : T\n%b = ^mesh.shard %a to %s1 : T",
                  " is annotated for its users at m.mlir:6:6 and cannot be given another sharding after that"),
    "B53": one(f"mesh.get_sharding %0 : {F4} -> !mesh.sharding",
               "the sharding of %0 is not known here; annotate it with mesh.shard"),
    "B54": shards("%a = mesh.shard %x to %s0 : T\n%b = ^mesh.all_reduce %a on @m : tensor<8x8xf32> -> tensor<8x8xf32>",
                  "mesh.all_reduce works on per-device arrays, but @f is annotated with mesh.shard; "
                  "put it in sdy.manual_computation"),
}  # fmt: skip
"""Each with its text and what is said of it. Those that need devices are elsewhere."""

BOTH_DOORS = [
    ((), "split_axes = []", {"split_axes": []}, "split_axes needs at least one, possibly empty, list"),
    ((), "split_axes = [[0]] halo_sizes = [1]", {"split_axes": [[0]], "halo_sizes": [1]},
     "1 halo sizes for 1 split dimensions, expected 2"),
    ((), "split_axes = [[0]] halo_sizes = [1, -1]", {"split_axes": [[0]], "halo_sizes": [1, -1]},
     "halo size -1 is negative"),
    ((), "split_axes = [[1]] sharded_dims_offsets = [0, 2, 3, 2, 8]",
     {"split_axes": [[1]], "sharded_dims_offsets": [0, 2, 3, 2, 8]}, "offsets of dimension 0 decrease at position 3"),
    ((9, 8), "split_axes = [[0]] halo_sizes = [1, 0]", {"split_axes": [[0]], "halo_sizes": [1, 0]},
     "dimension 0 of size 9 does not split evenly; halos need that"),
    ((8, 8), "split_axes = [[1]] halo_sizes = [0, 3]", {"split_axes": [[1]], "halo_sizes": [0, 3]},
     "halo size 3 exceeds the shard size 2 of dimension 0"),
    ((4, 8), "split_axes = [[0]] sharded_dims_offsets = [0, 2, 5]",
     {"split_axes": [[0]], "sharded_dims_offsets": [0, 2, 5]},
     "offsets of dimension 0 end at 5, the dimension has size 4"),
    ((4,), "split_axes = [[], [0]]", {"split_axes": [[], [0]]}, "split_axes has 2 lists, the tensor 1 dimensions"),
]  # fmt: skip
"""Shardings that are none, or none of a tensor of this shape: in text, in Python, and what both say of it."""


@pytest.mark.parametrize(("shape", "text", "arguments", "message"), BOTH_DOORS)
def test_text_and_python_refuse_the_same_shardings(shape, text, arguments, message):
    type_ = f"tensor<{''.join(f'{size}x' for size in shape)}f32>"
    check_mistake(*(sharded(text, type_, message) if shape else sharding(text, message)))
    grid = jax.sharding.AbstractMesh((2, 4), ("a", "b"))
    with pytest.raises(sdy.SdyError) as caught:
        sdy.shard.shard_shape(shape or (8, 8), sdy.shard.Sharding(**arguments, grid=grid), 0)
    assert re.sub(r"^shard\.\w+: ", "", str(caught.value)) == message


def test_the_shard_of_a_tensor_with_uneven_halos_has_no_shape():
    stated = "%s = mesh.sharding @m split_axes = [[0]] halo_sizes = [1, 0] : !mesh.sharding"
    asked = "%r:2 = ^mesh.shard_shape 9x8 %s %i : index, index"
    check_mistake(function(f"{stated}\n{asked}", "%i: index"), "dimension 0 of size 9 does not split evenly")


def test_halos_that_are_no_halos_need_no_even_blocks():
    stated = (
        "%z = arith.constant 0 : i64\n%s = mesh.sharding @m split_axes = [[0]] halo_sizes = [%z, 0] : !mesh.sharding"
    )
    optimize(function(f"{stated}\n%a = mesh.shard %0 to %s : tensor<9x8xf32>", "%0: tensor<9x8xf32>"), "", "m.mlir")
    grid = jax.sharding.AbstractMesh((2, 4), ("a", "b"))
    assert sdy.shard.shard_shape((9, 8), sdy.shard.Sharding([[0]], halo_sizes=[0, 0], grid=grid), 0) == (5, 8)


SHARD_WORDS = {"mesh_axes": "grid_axes", "mesh axis": "grid axis", "mesh axes": "grid axes", "mesh named": "grid named"}


def in_shard_message(message: str) -> str:
    message = re.sub(r"\b(a|same) mesh\b", r"\1 grid", in_shard(message))
    for word, other in SHARD_WORDS.items():
        message = message.replace(word, other)
    return message


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_said_at_its_place(name):
    check_mistake(*MISTAKES[name])


@pytest.mark.parametrize("name", [name for name in MISTAKES if name != "B02"])
def test_the_shard_dialect_says_grid(name):
    text, message = MISTAKES[name]
    check_mistake(in_shard(text), in_shard_message(message))


# Rules that the table leaves out.

MORE = [
    one("mesh.all_reduce %0 on @m : f32 -> f32", "needs a ranked tensor, got f32"),
    one("mesh.all_reduce %0 on @m : tensor<*xf32> -> tensor<*xf32>", "needs a ranked tensor, got tensor<*xf32>"),
    one("mesh.all_gather %0 on @m gather_axis = 0 : memref<4xf32> -> memref<4xf32>", "got memref<4xf32>"),
    one("mesh.all_reduce %0 on @m : memref<4xf32> -> tensor<4xf32>", "result type tensor<4xf32> differs from memref"),
    one("mesh.broadcast %0 on @m root = [] : (tensor<4xf32>) -> tensor<5xf32>", "result dimension 0 is 5, expected 4"),
    one("mesh.all_reduce %0 on @m : tensor<?xf32> -> tensor<4xf32>", "result dimension 0 is 4, expected ?"),
    one("mesh.all_reduce %0 on @m reduction = average : tensor<4xi1> -> tensor<4xi1>", "average needs numbers, got i1"),
    one("mesh.all_reduce %0 on @m reduction = max : tensor<complex<f32>> -> tensor<complex<f32>>",
        "reduction = max needs ordered values, got complex<f32>"),
    one("mesh.all_reduce %0 on @m reduction = bitwise_xor : tensor<i32> -> tensor<f32>", "needs integers, got f32"),
    one('"mesh.all_gather"(%0) {mesh = @m} : (tensor<4xf32>) -> tensor<4xf32>', "attribute gather_axis is missing"),
    one('"mesh.all_gather"(%0) {gather_axis = 0, mesh = @m} : (tensor<4xf32>) -> tensor<4xf32>',
        "attribute gather_axis must be an index"),
    one('"mesh.all_reduce"(%0) {mesh = @m, mesh_axes = [0]} : (tensor<4xf32>) -> tensor<4xf32>',
        "attribute mesh_axes must be an array of i16"),
    one('"mesh.all_reduce"(%0) {mesh = @m::@n} : (tensor<4xf32>) -> tensor<4xf32>', "attribute mesh must be a symbol"),
    one('"mesh.all_reduce"(%0) {mesh = @m, reduction = #shard<partial max>} : (tensor<4xf32>) -> tensor<4xf32>',
        "attribute reduction must be one of sum"),
    one('"mesh.all_reduce"(%0) {mesh = @m, mesh_axis = array<i16: 0>} : (tensor<4xf32>) -> tensor<4xf32>',
        "attribute mesh_axis is unknown; the op has mesh, mesh_axes, reduction"),
    one('"mesh.all_reduce"() {mesh = @m} : () -> tensor<4xf32>', "0 operands, expected 1"),
    one('"mesh.broadcast"() {mesh = @m, root = array<i64>} : () -> index', "0 operands, expected at least 1"),
    one('"mesh.process_linear_index"(%i) {mesh = @m} : (index) -> index', "1 operands, expected 0"),
    one("mesh.process_linear_index on @m : i64", "result 0 has type i64, expected index"),
    one("mesh.broadcast %0 on @m mesh_axes = [0] root = [%0] : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>",
        "operand root_dynamic has type tensor<4xf32>, expected index"),
    one("mesh.shift %0 on @m mesh_axes = [1] shift_axis = 1 offset = 1 : tensor<4xf32> -> tensor<2xf32>",
        "result dimension 0 is 2, expected 4"),
    one("mesh.update_halo %0 on @m split_axes = [[0], [1, 0]] : tensor<4x4xf32>",
        "split_axes = [[0], [1, 0]] repeats axis 0"),
    one("mesh.update_halo %0 on @m split_axes = [[2]] : tensor<4xf32>", "split_axes contains 2, but @m has axes 0..1"),
    one("mesh.update_halo %0 on @m split_axes = [[], []] : tensor<4xf32>",
        "split_axes has 2 lists, the tensor 1 dimensions"),
    one("mesh.update_halo %0 on @m split_axes = [[0]] halo_sizes = [-1, 0] : tensor<4xf32>", "size -1 is negative"),
    (function("%1:2 = ^mesh.neighbors_linear_indices on @m[%i, %i] split_axes = [] : index, index", "%i: index"),
     "split_axes is empty"),
    (function("%1:2 = ^mesh.neighbors_linear_indices on @m[%i, %i] split_axes = [2] : index, index", "%i: index"),
     "split_axes contains 2, but @m has axes 0..1"),
    (function("%1 = ^mesh.neighbors_linear_indices on @m[%i, %i] split_axes = [1] : index", "%i: index"),
     "1 results, expected 2"),
    (function("^mesh.mesh @n(shape = 2)"), "a mesh stands at the top of a module, not in func.func"),
    ('^"mesh.mesh"() {shape = array<i64: 2, -3>, sym_name = "m"} : () -> ()', "axis 1 has size -3"),
    ("^mesh.mesh @m(shape = 2)\nfunc.func private @m()", "@m is already defined"),
    ("mesh.mesh @m(shape = 2)\n^shard.grid @m(shape = 2)", "@m is already defined"),
    sharding("split_axes = [[2]]", "split_axes contains 2, but @m has axes 0..1"),
    sharding("split_axes = [[]] partial = sum [5]", "partial_axes contains 5, but @m has axes 0..1"),
    sharding("split_axes = [[]] partial = sum [1, 1]", "mesh axis 1 is used twice"),
    sharding("split_axes = [[]] partial = sum []", "partial needs a kind and at least one axis"),
    sharding("split_axes = [[0]] halo_sizes = [1]", "1 halo sizes for 1 split dimensions, expected 2"),
    sharding("split_axes = [[0]] halo_sizes = [%h, -2]", "halo size -2 is negative"),
    sharding("split_axes = [[1]] sharded_dims_offsets = [0, 5, %h, 3, 8]", "decrease at position 3"),
    sharding("split_axes = [[0], [1]] sharded_dims_offsets = [0, 2, 4, 0, 1, 2, 1, 4]",
             "offsets of dimension 1 decrease at position 3"),
    (function('%1 = ^"mesh.sharding"() {mesh = @m, operandSegmentSizes = array<i32: 0, 1>,'
              " split_axes = #mesh<axisarray[[]]>} : () -> !mesh.sharding"),
     "operandSegmentSizes = [0, 1] does not divide 0 operands"),
    (function('%1 = ^"shard.shard_shape"(%i, %s, %s, %i) {device = array<i64>, dims = array<i64>, operandSegmentSizes'
              " = array<i32: 1, 2, 1>} : (index, !shard.sharding, !shard.sharding, index) -> index",
              "%s: !shard.sharding, %i: index"),
     "operandSegmentSizes = [1, 2, 1] does not divide 4 operands"),
    one("mesh.all_to_all %0 on @m mesh_axes = [1] split_axis = 0 concat_axis = 1 : tensor<6x2xf32> -> tensor<1x8xf32>",
        "dimension 0 of size 6 does not split into 4 equal pieces"),
    sharded("split_axes = [[0]]", "tensor<f32>", "split_axes has 1 lists, the tensor 0 dimensions"),
    sharded("split_axes = [[0]] halo_sizes = [1, 3]", F4, "halo size 3 exceeds the shard size 2 of dimension 0"),
    sharded("split_axes = [[]]", "vector<4xf32>", "needs a ranked tensor, got vector<4xf32>"),
    (function('%s = mesh.sharding @m split_axes = [[]] : !mesh.sharding\n'
              '%1 = ^"mesh.shard"(%0, %s) : (tensor<4xf32>, !mesh.sharding) -> tensor<4xf64>', "%0: tensor<4xf32>"),
     "result type tensor<4xf64> differs from tensor<4xf32>"),
    shards("%1 = ^mesh.shard_shape 8x8 %s0 %i : index", "1 results, expected 2"),
    shards("%1:2 = ^mesh.shard_shape 8x? %s0 %i : index, index", "size of dimension 1 is unknown"),
    shards("%a = mesh.shard %x to %s0 : T\n%g = mesh.get_sharding %a : tensor<8x8xf32> -> !mesh.sharding\n"
           "%b = mesh.shard %a to %g : T\n%c = ^mesh.shard %b to %s1 : T", " is already sharded at m.mlir:8:6"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), MORE, ids=[message[:60] for _, message in MORE])
def test_what_else_is_a_mistake(text, message):
    check_mistake(text, message)


SHAPES = """
shard.grid @m(shape = 2x4)
func.func @f(%i: index) {
  %s = shard.sharding @m split_axes = [[0], [1]] : !shard.sharding
  %1 = ^shard.shard_shape dims = [8] sharding = %s device = [%i] : index
  return
}
"""


@pytest.mark.parametrize(
    ("dims", "device", "message"),
    [
        ("8", "%i", "split_axes has 2 lists, the tensor 1 dimensions"),
        ("8, 8", "0, 0, 0", "3 device coordinates for a grid of rank 2"),
        ("8, 8", "2, 0", "device[0] = 2 is outside 0..1, the range of grid axis 0"),
        ("8, %i", "%i, -1", "device[1] = -1 is outside 0..3, the range of grid axis 1"),
        ("8, 8", "8", "device 8 is outside 0..7"),
    ],
)
def test_the_shape_of_a_shard_is_that_of_a_device(dims, device, message):
    text = SHAPES.replace("dims = [8]", f"dims = [{dims}]").replace("device = [%i]", f"device = [{device}]")
    if "," in dims:
        text = text.replace("%1 =", "%1:2 =").replace(": index\n", ": index, index\n")
    check_mistake(text, message)
    if "," in dims:
        optimize(text.replace("^", "").replace(f"device = [{device}]", "device = [1, 3]"), "", "m.mlir")
        optimize(text.replace("^", "").replace(f"device = [{device}]", "device = [7]"), "", "m.mlir")


# What is right.


def right(statement: str) -> str:
    return one(statement, "")[0].replace("^", "")


IN_OTHER = """mesh.mesh @m(shape = 2)
module {
  mesh.mesh @m(shape = 3)
  func.func @f() { %1 = mesh.mesh_shape @m axes = [0] : index return }
}"""
EARLY = "func.func @f() { %1 = mesh.process_linear_index on @m : index return }\nmesh.mesh @m(shape = 2)"
LOCAL = "tensor<6xf32> -> tensor<?xf32>"
KNOWN = "%0: tensor<4xf32> {sdy.sharding = #sdy.sharding<@s, [{}]>}"

VALID = {
    "a mesh after its use": EARLY,
    "a mesh of the other dialect": "mesh.mesh @m(shape = 2)\nshard.grid @g(shape = 2)",
    "a mesh without devices": "mesh.mesh @m(shape = 2x0)",
    "a slice for no device": right(f"mesh.all_slice %0 on @m mesh_axes = [1] slice_axis = 0 : {LOCAL}").replace(
        "2x4", "2x0"
    ),
    "a module of its own": IN_OTHER,
    "a reduction of memrefs": right("mesh.all_reduce %0 on @m : memref<4xf32> -> memref<4xf64>"),
    "halos of memrefs": right("mesh.update_halo %0 on @m split_axes = [[0]] halo_sizes = [1, 1] : memref<4xf32>"),
    "a scalar": right("mesh.all_reduce %0 on @m mesh_axes = [0] : tensor<f32> -> tensor<f64>"),
    "an open result": right(f"mesh.all_gather %0 on @m mesh_axes = [1] gather_axis = 0 : {LOCAL}"),
    "an open operand": right("mesh.all_gather %0 on @m gather_axis = 0 : tensor<?x3xf32> -> tensor<?x3xf32>"),
    "a mesh of unknown size": right(f"mesh.all_slice %0 on @m mesh_axes = [1] slice_axis = 0 : {LOCAL}").replace(
        "2x4", "2x?"
    ),
    "an exchange that does not divide": right(
        "mesh.all_to_all %0 on @m mesh_axes = [1] split_axis = 0 concat_axis = 1 : tensor<6x2xf32> -> tensor<?x8xf32>"
    ),
    "a group of one": right(
        f"mesh.send %0 on @m destination = [] : {F6}\n%2 = mesh.recv %0 on @m : {F6}",
    ),
    "a coordinate of the run": right(
        "mesh.broadcast %0 on @m mesh_axes = [0] root = [%i] : (tensor<4xf32>, index) -> tensor<4xf32>"
    ),
    "halos without sizes": right("mesh.update_halo %0 on @m split_axes = [[0, 1], []] : tensor<4x4xf32>"),
    "bits of booleans": right("mesh.all_reduce %0 on @m reduction = bitwise_and : tensor<4xi1> -> tensor<4xi1>"),
    "offsets of two axes": right(
        "mesh.sharding @m split_axes = [[0, 1]] sharded_dims_offsets = [0, 1, 1, 2, 3, 4, %h, 6, 8] : !mesh.sharding"
    ),
    "partial and halo": right(
        "mesh.sharding @m split_axes = [[0]] partial = max [1] halo_sizes = [1, %h] : !mesh.sharding"
    ),
    "longer lists of nothing": sharded("split_axes = [[0], [], []]", F4, "")[0].replace("^", ""),
    "an annotated argument": function("%1 = mesh.get_sharding %0 : tensor<4xf32> -> !mesh.sharding", KNOWN)
    + 'sdy.mesh @s = <["a"=2]>',
    "an attribute of another dialect": right("mesh.all_reduce %0 on @m {a.b} : tensor<f32> -> tensor<f32>"),
}


@pytest.mark.parametrize("name", VALID)
def test_what_is_right_is_accepted(name):
    optimize(VALID[name], "", "m.mlir")


@pytest.mark.parametrize("name", REFERENCE)
def test_the_reference_is_right_in_both_dialects(name):
    optimize(REFERENCE[name], "", "m.mlir")
    optimize(in_shard(REFERENCE[name]), "", "m.mlir")


def test_every_declared_rule_is_there_and_used():
    assert {rule for op in OPS.values() for rule in op.rules} == set(RULES)


# Annotations that meet.

SAME_SHARDING = [
    ("split_axes = [[0]]", "split_axes = [[0], [], []]"),
    ("split_axes = [[0]]", "split_axes = [[0]] halo_sizes = [0, %zero]"),
    ("split_axes = [[0]]", "split_axes = [[0]] sharded_dims_offsets = [0, 4, 8]"),
    ("split_axes = [[], [1]]", "split_axes = [[], [1]] sharded_dims_offsets = [0, 2, 4, 5, 5]"),
    ("split_axes = [[]] partial = max [0, 1]", "split_axes = [[]] partial = max [1, 0]"),
    ("split_axes = [[0]] halo_sizes = [1, %n]", "split_axes = [[0]] halo_sizes = [%one, %n]"),
]
OTHER_SHARDING = [
    ("split_axes = [[0]]", "split_axes = [[], [0]]"),
    ("split_axes = [[0, 1]]", "split_axes = [[1, 0]]"),
    ("split_axes = [[0]]", "split_axes = [[0]] halo_sizes = [0, %n]"),
    ("split_axes = [[0]]", "split_axes = [[0]] sharded_dims_offsets = [0, 5, 8]"),
    ("split_axes = [[]] partial = max [0]", "split_axes = [[]] partial = min [0]"),
    ("split_axes = [[0]]", "split_axes = [[0]] partial = sum [1]"),
    ("split_axes = [[0]] halo_sizes = [1, %n]", "split_axes = [[0]] halo_sizes = [1, %one]"),
]


def annotated(one: str, other: str, first: str = "", second: str = "", on: str = "%x") -> str:
    return f"""mesh.mesh @m(shape = 2x4)
func.func @f(%x: tensor<8x5xf32>, %n: i64) -> tensor<8x5xf32> {{
  %zero = arith.constant 0 : i64
  %one = arith.constant 1 : i64
  %s = mesh.sharding @m {one} : !mesh.sharding
  %t = mesh.sharding @m {other} : !mesh.sharding
  %a = mesh.shard %x to %s {first} : tensor<8x5xf32>
  %b = mesh.shard {on} to %t {second} : tensor<8x5xf32>
  return %b : tensor<8x5xf32>
}}"""


@pytest.mark.parametrize(("one", "other"), SAME_SHARDING)
@pytest.mark.parametrize(("first", "second", "on"), [("", "", "%x"), ("", "", "%a"), *[
    ("annotate_for_users", second, "%a") for second in ("annotate_for_users", "")]])  # fmt: skip
def test_one_sharding_may_be_said_twice(one, other, first, second, on):
    optimize(annotated(one, other, first, second, on), "", "m.mlir")


def test_shardings_on_huge_meshes_compare_at_once():
    text = annotated("split_axes = [[0, 1]]", "split_axes = [[0, 1], []]")
    optimize(text.replace("2x4", "1000000000x1000000000"), "", "m.mlir")
    assert "9 offsets, expected 1000000000000000001" in error(
        annotated(
            "split_axes = [[0, 1]]", "split_axes = [[0, 1]] sharded_dims_offsets = [0, 1, 2, 3, 4, 5, 6, 7, 8]"
        ).replace("2x4", "1000000000x1000000000")
    )


@pytest.mark.parametrize(("one", "other"), OTHER_SHARDING)
def test_two_shardings_are_two(one, other):
    assert "has two different shardings" in error(annotated(one, other))
    optimize(annotated(one, other, "", "annotate_for_users", "%a"), "", "m.mlir")
    optimize(annotated(one, other, "annotate_for_users", "annotate_for_users", "%x"), "", "m.mlir")
    optimize(annotated(one, other, "annotate_for_users", "", "%x"), "", "m.mlir")


@pytest.mark.parametrize(("name", "tolerated"), [("B49", True), ("B50", False), ("B51", True), ("B52", False)])
def test_chains_of_annotations_may_be_reshards(name, tolerated):
    module = parse_module(MISTAKES[name][0].replace("^", ""), mlir.make_ir_context())
    with pytest.raises(RuleError):
        verify_ops(module.operation)
    if tolerated:
        verify_ops(module.operation, strict=False)
    else:
        with pytest.raises(RuleError):
            verify_ops(module.operation, strict=False)


def test_what_a_sharding_says_is_read_through_get_sharding():
    text = shards("%a = mesh.shard %x to %s0 : T\n%g = mesh.get_sharding %a : tensor<8x8xf32> -> !mesh.sharding")[0]
    module = parse_module(text, mlir.make_ir_context())
    *_, asked = dialect_ops(module.operation)
    stated = stated_sharding(asked.result)
    assert stated is not None
    assert (stated.dialect, stated.mesh, stated.layout.split) == ("mesh", "m", ((0,),))


# Whole tensors and local arrays.

IN_MANUAL = """
  %a = mesh.shard %x to %s0 : T
  %d = sdy.manual_computation(%a) in_shardings=[<@sdy, [{"a"}, {}]>] out_shardings=[<@sdy, [{"a"}, {}]>]
    manual_axes={"a"} (%arg: tensor<4x8xf32>) {
    %r = mesh.all_reduce %arg on @m : tensor<4x8xf32> -> tensor<4x8xf32>
    sdy.return %r : tensor<4x8xf32>
  } : (tensor<8x8xf32>) -> tensor<8x8xf32>"""


def test_manual_computations_communicate_in_annotated_functions():
    text, _ = shards(IN_MANUAL)
    optimize(text + 'sdy.mesh @sdy = <["a"=2]>', "", "m.mlir")


def test_functions_are_local_or_annotated_each():
    other = "func.func @g(%x: tensor<f32>) { %0 = mesh.all_reduce %x on @m : tensor<f32> -> tensor<f32> return }"
    text, _ = shards("%a = mesh.shard %x to %s0 : T")
    optimize(text + other, "", "m.mlir")


def test_regions_belong_to_their_function():
    text, message = MISTAKES["B54"]
    inside = (
        "%c = arith.constant true\nscf.if %c { %b = ^mesh.all_reduce %x on @m : tensor<8x8xf32> -> tensor<8x8xf32> }"
    )
    check_mistake(re.sub(r"%b = .*", inside, text), message)


# Sends and receives.


def moves(*ops: str) -> list[str]:
    """Lines of sends and receives: `s0`, `r1`, ... along axis 0 or 1; capitals are on other tensors."""
    lines = []
    for number, op in enumerate(ops):
        name, axis = {"s": ("send", "destination"), "r": ("recv", "source")}[op[0].lower()], op[1]
        value, type_ = ("%x", "tensor<4xf32>") if op[0].islower() else ("%y", "tensor<2xf32>")
        lines.append(f"%{number} = mesh.{name[0]} {value} on @m mesh_axes = [{axis}] {name[1]} = [{number}]"
                     f" : ({type_}) -> {type_}")  # fmt: skip
    return lines


def views(*ops: str) -> list:
    text = function("\n".join(moves(*ops)), "%x: tensor<4xf32>, %y: tensor<2xf32>").replace("2x4", "90x90")
    module = parse_module(text, mlir.make_ir_context())
    return [module, *(op for op in dialect_ops(module.operation) if op.name != "mesh")]


@pytest.mark.parametrize(
    ("ops", "pairs", "alone"),
    [
        (["s0", "r0"], [(0, 1)], []),
        (["s0", "s0", "r0", "r0"], [(0, 2), (1, 3)], []),
        (["s0", "s1", "r1", "r0"], [(1, 2), (0, 3)], []),
        (["s0", "S0", "R0", "r0"], [(1, 2), (0, 3)], []),
        (["s0", "R0"], [], [0, 1]),
        (["r0", "s0", "s0", "r0"], [(1, 3)], [0, 2]),
    ],
)
def test_sends_and_receives_pair_in_order(ops, pairs, alone):
    _module, *found = views(*ops)
    numbers = {op.operation: number for number, op in enumerate(found)}
    made, left = pair_up(found)
    assert [(numbers[a.operation], numbers[b.operation]) for a, b in made] == pairs
    assert [numbers[op.operation] for op in left] == alone


def test_a_pair_is_in_one_block():
    send, recv = moves("s0", "r0")
    inside = f"{send}\n%c = arith.constant true\nscf.if %c {{ {recv} }}"
    text = function(inside, "%x: tensor<4xf32>").replace("%0 = ", "%0 = ^", 1)
    check_mistake(text, "this send has no matching recv")


@pytest.mark.parametrize("shape", ["4x2", "8", "2x?x4"])
def test_an_sdy_mesh_of_the_same_name_has_the_same_sizes(shape):
    sdy_mesh = 'sdy.mesh @m = <["a"=2, "b"=4]>\n'
    for form in ("mesh.mesh", "shard.grid"):
        check_mistake(f"{sdy_mesh}^{form} @m(shape = {shape})", f"@m is {shape}, but sdy.mesh @m is <")


def test_sizes_that_are_not_known_are_those_of_the_sdy_mesh():
    optimize('sdy.mesh @m = <["a"=2, "b"=4]>\nmesh.mesh @m(shape = ?x4)', "", "m.mlir")


SAME_WORDS = [
    ("all_slice %0 on @m mesh_axes = [1] slice_axis = 0 : tensor<6xf32> -> tensor<?xf32>",
     lambda x: sdy.shard.all_slice(x, grid_axes="b", slice_axis=0)),
    ("update_halo %0 on @m split_axes = [[0, 0]] halo_sizes = [1, 1] : tensor<6xf32>",
     lambda x: sdy.shard.update_halo(x, split_axes=[["a", "a"]], halo_sizes=[1, 1])),
    ("update_halo %0 on @m split_axes = [[0]] halo_sizes = [1, 4] : tensor<6xf32>",
     lambda x: sdy.shard.update_halo(x, split_axes=[["a"]], halo_sizes=[1, 4])),
    ("broadcast %0 on @m mesh_axes = [0] root = [2] : (tensor<6xf32>) -> tensor<6xf32>",
     lambda x: sdy.shard.broadcast(x, grid_axes="a", root=(2,))),
    ("all_reduce %0 on @m mesh_axes = [0] reduction = bitwise_or : tensor<6xf32> -> tensor<6xf32>",
     lambda x: sdy.shard.all_reduce(x, grid_axes="a", reduction="bitwise_or")),
]  # fmt: skip


@pytest.mark.parametrize(("text", "called"), SAME_WORDS)
def test_text_and_python_say_the_same_of_a_mistake(text, called):
    mesh = jax.sharding.AbstractMesh((2, 4), ("a", "b"))
    with pytest.raises(sdy.SdyError) as caught:
        run = jax.shard_map(called, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        jax.eval_shape(run, jax.ShapeDtypeStruct((6,), np.float32))
    said = str(caught.value).replace("'a'", "0").replace("'b'", "1")
    assert error(in_shard(one(f"mesh.{text}", "")[0].replace("^", ""))).partition("error: ")[2].startswith(said)
