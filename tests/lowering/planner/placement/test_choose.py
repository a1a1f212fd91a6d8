# ruff: noqa: E501  (one op a line)
"""Single ops with given shardings: which collectives the partitioner inserts, and how many bytes they move.

The mesh is x=2, y=4, elements are f32. Expected bytes per device are those of the cheapest plan (ring algorithms).
"""

import pytest
from jax.extend.mlir import ir
from jax.interpreters import mlir

from sdy_jax.lowering.planner.placement.program_placement import partition_locally
from sdy_jax.lowering.planner.problem import candidate_prices
from sdy_jax.lowering.planner.setting import Setting
from sdy_jax.lowering.targets.cost_model import CostModel

DOT = '"stablehlo.dot_general"(%a, %b) {{dot_dimension_numbers = #stablehlo.dot<lhs_contracting_dimensions = [1], rhs_contracting_dimensions = [0]>, {out}}} : (tensor<64x128xf32>, tensor<128x32xf32>) -> tensor<64x32xf32>'
ADD = "stablehlo.add %a, %b {{{out}}} : tensor<64x128xf32>"


def reduce(op):
    return (
        "stablehlo.reduce(%a init: %b) applies stablehlo." + op + " across dimensions = [1] {{{out}}} "
        ": (tensor<64x128xf32>, tensor<f32>) -> tensor<64xf32>"
    )


LOOKUP = '"stablehlo.gather"(%a, %b) <{{dimension_numbers = #stablehlo.gather<offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, slice_sizes = array<i64: 1, 128>}}> {{{out}}} : (tensor<64x128xf32>, tensor<16xi32>) -> tensor<16x128xf32>'
ROW = '"stablehlo.dynamic_slice"(%a, %b, %b) <{{slice_sizes = array<i64: 1, 128>}}> {{{out}}} : (tensor<64x128xf32>, tensor<i32>, tensor<i32>) -> tensor<1x128xf32>'
TRANSPOSE = "stablehlo.transpose %a, dims = [1, 0] {{{out}}} : (tensor<64x128xf32>) -> tensor<128x64xf32>"
RESHAPE = "stablehlo.reshape %a {{{out}}} : (tensor<8x8x128xf32>) -> tensor<64x128xf32>"
SORT = '"stablehlo.sort"(%a) <{{dimension = 1 : i64}}> ({{^bb0(%l: tensor<f32>, %r: tensor<f32>): %c = stablehlo.compare LT, %l, %r : (tensor<f32>, tensor<f32>) -> tensor<i1> stablehlo.return %c : tensor<i1>}}) {{{out}}} : (tensor<64x128xf32>) -> tensor<64x128xf32>'
CHOLESKY = "stablehlo.cholesky %a, lower = true {{{out}}} : tensor<8x16x16xf32>"

CASES = [
    # op, argument types and shardings, result type and sharding, kinds, bytes
    (DOT, "64x128xf32 [{x},{y}]", "128x32xf32 [{y},{}]", "64x32xf32 [{x},{}]", "all_reduce", 6144),
    (DOT, "64x128xf32 [{x},{y}]", "128x32xf32 [{y},{}]", "64x32xf32 [{x},{y}]", "reduce_scatter", 3072),
    (DOT, "64x128xf32 [{x},{y}]", "128x32xf32 [{},{}]", "64x32xf32 [{x},{}]", "all_slice all_reduce", 6144),
    (DOT, "64x128xf32 [{x},{}]", "128x32xf32 [{},{x}]", "64x32xf32 [{x},{}]", "all_gather", 8192),
    (DOT, "64x128xf32 [{x,y},{}]", "128x32xf32 [{x},{}]", "64x32xf32 [{x,y},{}]", "all_gather", 8192),
    (DOT, "64x128xf32 [{x},{}]", "128x32xf32 [{},{y}]", "64x32xf32 [{x},{y}]", "", 0),
    (DOT, "64x128xf32 [{x},{}]", "128x32xf32 [{},{y}]", "64x32xf32 [{y},{x}]", None, 1536),
    (DOT, "64x128xf32 [{},{x}]", "128x32xf32 [{y},{}]", "64x32xf32 [{},{}]", None, 16384),
    (DOT, "64x128xf32 [{},{y:(1)2}]", "128x32xf32 [{y},{}]", "64x32xf32 [{},{}]", "all_slice all_reduce", 12288),
    (DOT, "64x128xf32 [{},{x}]", "128x32xf32 [{x},{y}]", "64x32xf32 [{},{x}]", None, 5120),
    (DOT, "64x128xf32 [{},{x,y}]", "128x32xf32 [{x,y},{}]", "64x32xf32 [{x},{y}]", "reduce_scatter", 7168),
    (DOT, "64x128xf32 [{},{x,y}]", "128x32xf32 [{x,y},{}]", "64x32xf32 [{x},{}]", "reduce_scatter all_reduce", 10240),
    (DOT, "64x128xf32 [{},{x,y}]", "128x32xf32 [{x,y},{}]", "64x32xf32 [{y,x},{}]", "reduce_scatter", 7168),
    (ADD, "64x128xf32 [{x},{}]", "64x128xf32 [{},{x}]", "64x128xf32 [{x},{}]", "all_to_all", 8192),
    (LOOKUP, "64x128xf32 [{y},{}]", "16xi32 [{x}]", "16x128xf32 [{x},{}]", "all_reduce", 6144),
    (LOOKUP, "64x128xf32 [{y},{}]", "16xi32 [{x}]", "16x128xf32 [{x},{y}]", "reduce_scatter", 3072),
    (LOOKUP, "64x128xf32 [{},{y}]", "16xi32 [{x}]", "16x128xf32 [{x},{y}]", "", 0),
    (ROW, "64x128xf32 [{y},{}]", "i32 []", "1x128xf32 [{},{}]", "all_reduce", 768),
    (reduce("add"), "64x128xf32 [{x},{y}]", "f32 []", "64xf32 [{x}]", "all_reduce", 192),
    (reduce("maximum"), "64x128xf32 [{x},{y}]", "f32 []", "64xf32 [{x}]", "all_reduce", 192),
    (reduce("add"), "64x128xf32 [{},{y}]", "f32 []", "64xf32 [{y}]", "reduce_scatter", 192),
    (SORT, "64x128xf32 [{},{y}]", "f32 []", "64x128xf32 [{},{y}]", "all_to_all all_to_all", 12288),
    (CHOLESKY, "8x16x16xf32 [{x},{y},{}]", "f32 []", "8x16x16xf32 [{x},{y},{}]", "all_to_all all_to_all", 1536),
    (RESHAPE, "8x8x128xf32 [{},{y},{}]", "f32 []", "64x128xf32 [{y},{}]", "all_to_all", 6144),
    (RESHAPE, "8x8x128xf32 [{},{y},{}]", "f32 []", "64x128xf32 [{},{}]", "all_gather", 24576),
    (TRANSPOSE, "64x128xf32 [{x},{y}]", "f32 []", "128x64xf32 [{x},{y}]", None, 6144),
]  # fmt: skip


def sharded(text):
    """`64xf32 [{x}]` as a tensor type and an attribute's body."""
    type_, axes = text.split(" ")
    for name in "xy":
        axes = axes.replace(f"{{{name}", f'{{"{name}"').replace(f",{name}", f',"{name}"')
    return f"tensor<{type_}>", f"<@mesh, {axes}>"


def module_text(op, a, b, out):
    (ta, sa), (tb, sb), (to, so) = map(sharded, (a, b, out))
    line = op.format(out=f"sdy.sharding = #sdy.sharding_per_value<[{so}]>")
    return f"""
      sdy.mesh @mesh = <["x"=2, "y"=4]>
      func.func @main(%a: {ta} {{sdy.sharding = #sdy.sharding{sa}}}, %b: {tb} {{sdy.sharding = #sdy.sharding{sb}}})
          -> ({to} {{sdy.sharding = #sdy.sharding{so}}}) {{
        %0 = {line}
        return %0 : {to}
      }}"""


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[1]} {c[2]} to {c[3]}")
def test_the_cheapest_collectives_are_inserted(case):
    op, a, b, out, kinds, wire_bytes = case
    with mlir.make_ir_context() as context:
        module = ir.Module.parse(module_text(op, a, b, out), context)
        report = partition_locally(module.operation, Setting("mesh", CostModel()))
        assert module.operation.verify()
    found = [c.kind for c in report.collectives]
    assert sum(c.wire_bytes for c in report.collectives) <= wire_bytes
    assert kinds is None or sorted(found) == sorted(kinds.split())


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[1]} {c[2]} to {c[3]}")
def test_what_is_not_priced_would_not_be_chosen(case, monkeypatch):
    def partitioned():
        with mlir.make_ir_context() as context:
            module = ir.Module.parse(module_text(*case[:4]), context)
            partition_locally(module.operation, Setting("mesh", CostModel()))
            return str(module)

    chosen = partitioned()
    monkeypatch.setattr(candidate_prices, "fastest", lambda *_: 0.0)
    monkeypatch.setattr(candidate_prices, "least_time", lambda *_: 0.0)
    assert partitioned() == chosen


TWO_USERS = """
  sdy.mesh @mesh = <["x"=2, "y"=4]>
  func.func @main(%a: tensor<8x16x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {}, {}]>})
      -> (tensor<8x4x16xf32>, tensor<8x16x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {}, {}]>}) {
    %0 = stablehlo.cholesky %a, lower = true : tensor<8x16x16xf32>
    %1 = stablehlo.slice %0 [0:8, 0:4, 0:16] : (tensor<8x16x16xf32>) -> tensor<8x4x16xf32>
    %2 = stablehlo.tanh %0 {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"y"}, {}, {}]>]>} : tensor<8x16x16xf32>
    return %1, %2 : tensor<8x4x16xf32>, tensor<8x16x16xf32>
  }"""


def test_an_op_runs_in_the_layout_in_which_its_operand_is_materialized():
    """The factorization is split along batches, whatever is expected of its result: a slice of that is gathered."""
    with mlir.make_ir_context() as context:
        report = partition_locally(ir.Module.parse(TWO_USERS, context).operation, Setting("mesh", CostModel()))
    assert [(c.kind, c.wire_bytes) for c in report.collectives] == [("all_gather", 1536)]


AGREED = """
  sdy.mesh @mesh = <["x"=2, "y"=4]>
  func.func @main(%a: tensor<256x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x", "y"}]>},
                  %b: tensor<8x256xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x", "y"}, {}]>}) -> tensor<256x256xf32> {
    %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]
        : (tensor<256x8xf32>, tensor<8x256xf32>) -> tensor<256x256xf32>
    return %0 : tensor<256x256xf32>
  }"""


def test_an_op_runs_as_all_around_it_agree():
    """Rows of the result could be made and gathered for half of the bytes, but whether its users want them gathered is a
    question for the whole program."""
    with mlir.make_ir_context() as context:
        report = partition_locally(ir.Module.parse(AGREED, context).operation, Setting("mesh", CostModel()))
    assert [(c.kind, c.wire_bytes) for c in report.collectives] == [("all_reduce", 2 * 7 / 8 * 256 * 256 * 4)]
