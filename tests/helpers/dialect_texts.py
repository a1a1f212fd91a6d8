"""Texts with mesh and shard ops, shared by tests: the two forms of every op, and how one dialect becomes the other."""

from __future__ import annotations

import re
from pathlib import Path

GAP = str(-(2**63))
"""What stands in a generic list where the pretty form has a value or `?`."""

_FORMS = Path(__file__).with_name("mesh_dialect_forms.txt")
FORMS = [tuple(pair.split("\n")) for pair in _FORMS.read_text().replace("GAP", GAP).strip().split("\n\n")]
"""The pretty form of an op of the mesh dialect (some of shard), and the generic form as tools know it."""

_OPS = {"mesh.mesh": "shard.grid", "mesh.mesh_shape": "shard.grid_shape"}
_WORDS = {"mesh_axes": "grid_axes", "mesh = @": "grid = @", "#mesh<": "#shard<", "!mesh.": "!shard."}


def in_shard(text: str) -> str:
    """Text of the mesh dialect as text of the shard dialect."""
    for word, other in _WORDS.items():
        text = text.replace(word, other)
    return re.sub(r"(?<![\w@.!])mesh\.\w+", lambda op: _OPS.get(op[0], f"shard.{op[0][5:]}"), text)


FUNCTION = """
mesh.mesh @m(shape = 2x4)
func.func @f(ARGUMENTS) {
  BODY
  return
}
"""
"""A module with a mesh and a function."""


def function(body: str, arguments: str = "") -> str:
    return FUNCTION.replace("ARGUMENTS", arguments).replace("BODY", body)


MIXED = """
mesh.mesh @ring(shape = 2x4)
sdy.mesh @mesh = <["a"=2, "b"=4]>
func.func @main(%x: tensor<4x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}, {}]>}, %n: i64) -> tensor<4x6xf32> {
  %gathered = mesh.all_gather %x on @ring mesh_axes = [0]
      gather_axis = 1 : tensor<4x3xf32> -> tensor<4x6xf32> loc("model.py":3:4)
  %0 = stablehlo.tanh %gathered : tensor<4x6xf32>
  %flag = arith.constant true
  %index = scf.if %flag -> (index) {
    %1:2 = mesh.process_multi_index on @ring : index, index
    scf.yield %1#1 : index
  } else {
    %1 = mesh.process_linear_index on @ring : index
    scf.yield %1 : index
  }
  %2 = "mesh.broadcast"(%0, %index) <{mesh = @ring, mesh_axes = array<i16: 1>, root = array<i64: GAP>}> {a.b}
      : (tensor<4x6xf32>, index) -> tensor<4x6xf32>
  %3 = sdy.sharding_constraint %2 <@mesh, [{}, {}]> : tensor<4x6xf32>
  return %3 : tensor<4x6xf32>
}
func.func @annotated(%x: tensor<8x16xf32>, %n: i64) -> tensor<8x16xf32> {
  %s = mesh.sharding @ring split_axes = [[0], []] : !mesh.sharding
  %t = mesh.sharding @ring split_axes = [[], [1]] halo_sizes = [2, %n] : !mesh.sharding
  %0 = mesh.shard %x to %s : tensor<8x16xf32>
  %1 = mesh.shard %0 to %t annotate_for_users : tensor<8x16xf32>
  return %1 : tensor<8x16xf32>
}
""".replace("GAP", GAP)
"""A module with ops of many dialects, in both forms."""

_MODULES = Path(__file__).with_name("mesh_reference.mlir").read_text().split("// -----\n")
REFERENCE = {re.split(r"[\n,]", module[3:])[0]: module for module in _MODULES}
"""Every example of the mesh dialect's reference, by name; garbled ones are read as they must be meant."""

LOCAL = """
mesh.mesh @ring(shape = 2x4)
func.func @main(%0: tensor<4x3xf32>, %h: i64, %i: index, %x: tensor<8x16xf32>) -> tensor<8x8xf32> {
  %a = mesh.broadcast %0 on @ring mesh_axes = [0, 1] root = [1, %i] : (tensor<4x3xf32>, index) -> tensor<4x3xf32>
  %b = mesh.send %0 on @ring mesh_axes = [1] destination = [2] : (tensor<4x3xf32>) -> tensor<4x3xf32>
  %c = mesh.recv %0 on @ring mesh_axes = [1] source = [%i] : (tensor<4x3xf32>, index) -> tensor<4x3xf32>
  %d = mesh.shift %0 on @ring mesh_axes = [0, 1] shift_axis = 1 offset = -3 rotate : tensor<4x3xf32> -> tensor<4x3xf32>
  %e = mesh.reduce_scatter %0 on @ring mesh_axes = [0] reduction = <max> scatter_axis = 0
     : tensor<4x3xf32> -> tensor<2x3xf32>
  %f = mesh.update_halo %x on @ring split_axes = [[0], [1]] halo_sizes = [1, %h, 0, 2] : tensor<8x16xf32>
  %g:2 = mesh.neighbors_linear_indices on @ring[%i, %i] split_axes = [1] : index, index
  %k:2 = mesh.mesh_shape @ring axes = [1, 0] : index, index
  %s = mesh.sharding @ring split_axes = [[1]] sharded_dims_offsets = [0, 3, %h, 6, 8] : !mesh.sharding
  %l = mesh.scatter %x on @ring mesh_axes = [1] scatter_axis = 0 root = [%k#0]
     : (tensor<8x16xf32>, index) -> tensor<2x16xf32>
  %m = mesh.gather %0 on @ring gather_axis = 0 root = [] : (tensor<4x3xf32>) -> tensor<4x3xf32>
  %n = mesh.reduce %0 on @ring mesh_axes = [1, 0] root = [3, 1] : (tensor<4x3xf32>) -> tensor<4x3xf64>
  %o = mesh.all_slice %x on @ring mesh_axes = [1] slice_axis = 1 : tensor<8x16xf32> -> tensor<8x4xf32>
  %p = mesh.all_to_all %x on @ring mesh_axes = [0] split_axis = 1 concat_axis = 0 : tensor<8x16xf32> -> tensor<16x8xf32>
  %q = mesh.all_slice %p on @ring mesh_axes = [0] slice_axis = 0 : tensor<16x8xf32> -> tensor<8x8xf32>
  return %q : tensor<8x8xf32>
}
"""
"""A module with the ops that work on local arrays."""
