"""What compilers hide by themselves, against the times of single collectives and products."""

import pytest
from partitioned_text import LOCAL, partition_report
from sharding_dump import parse

from sdy_jax.ir.meshes import AxisRef, Mesh
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.lowering.targets.target import Target, family_of_platform

COSTS = CostModel.of_machine("tpu v5e", ["x"])
MESH, WIDTH = Mesh.of(x=8), 1024


def text(batch, trips=0):
    """Two layers whose weights are gathered; with the first one in a loop."""
    x, w = f"tensor<{batch}x{WIDTH}xf32>", f"tensor<{WIDTH}x{WIDTH}xf32>"
    first = "stablehlo.dot_general {}, %u, contracting_dims = [1] x [0] : " + f"({x}, {w}) -> {x}"
    layer = f"%a = {first.format('%x')}"
    if trips:
        layer = f"""
      %n = stablehlo.constant dense<0> : tensor<i32>
      %a, %k = stablehlo.while(%h = %x, %i = %n) : {x}, tensor<i32>
      cond {{
        %end = stablehlo.constant dense<{trips}> : tensor<i32>
        %p = stablehlo.compare LT, %i, %end, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %p : tensor<i1>
      }} do {{
        %one = stablehlo.constant dense<1> : tensor<i32>
        %j = stablehlo.add %i, %one : tensor<i32>
        %g = {first.format("%h")}
        stablehlo.return %g, %j : {x}, tensor<i32>
      }}"""
        layer = layer.replace("%a, %k = stablehlo", "%r:2 = stablehlo")
    made = "%r#0" if trips else "%a"
    rows = '{sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}'
    return f"""
    sdy.mesh @mesh = <["x"=8]>
    func.func @main(%x: {x} {rows}, %u: {w} {rows}, %v: {w} {rows}) -> ({x} {rows}) {{
      {layer}
      %b = stablehlo.tanh {made} : {x}
      %c = stablehlo.dot_general %b, %v, contracting_dims = [1] x [0] : ({x}, {w}) -> {x}
      return %c : {x}
    }}"""


def report(module_text, platform):
    return partition_report(parse(module_text), LOCAL, COSTS, Target(family_of_platform(platform)))


def product(batch):
    """How long one layer's product takes the units of a device, and its memory."""
    rows = batch / 8
    return COSTS.flop * rows * WIDTH * WIDTH, COSTS.memory * 4 * (2 * rows * WIDTH + WIDTH * WIDTH)


def gather(found):
    """The time of the bytes of a gather of weights."""
    record = found.collectives[0]
    return record.costs(COSTS).bytes_time("all_gather", (AxisRef("x"),), MESH, record.wire_bytes, record.cut)


def hidden(found, work, platform="tpu"):
    """What is hidden of a gather beside work that takes the units and the memory so long: all but what it lacks of
    them while three bytes are read and written for each byte that is sent."""
    sending, wire = gather(found), found.collectives[0].wire_bytes
    units, memory = (taken / max(work) for taken in work)
    sends = family_of_platform(platform).compiler.collectives.units
    lacking = max(0.0, units + sends - 1, memory + 3 * COSTS.memory * wire / sending - 1)
    return min(sending, max(work)) * (1 - lacking)


@pytest.mark.parametrize("batch", [8192, 65536])
@pytest.mark.parametrize("platform", ["tpu", "gpu", "cpu"])
def test_the_second_gather_is_sent_while_the_first_layer_computes(batch, platform):
    found = report(text(batch), platform)
    assert [record.kind for record in found.collectives] == ["all_gather", "all_gather"]
    assert found.hidden == pytest.approx(0.0 if platform == "cpu" else hidden(found, product(batch), platform))
    assert (max(product(batch)) < gather(found)) == (batch == 8192)  # both cases occur


def test_scatters_are_waited_for_on_tpus():
    """Where compilers start what they send, gradients are scattered while the next product runs."""
    w = f"tensor<{WIDTH}x{WIDTH}xf32>"
    x = f"tensor<8192x{WIDTH}xf32>"
    rows = '{sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}'
    module = f"""
    sdy.mesh @mesh = <["x"=8]>
    func.func @main(%x: {x} {rows}, %y: {x} {rows}, %z: {x} {rows}) -> ({w} {rows}, {x} {rows}) {{
      %g = stablehlo.dot_general %x, %y, contracting_dims = [0] x [0] : ({x}, {x}) -> {w}
      %s = stablehlo.dot_general %y, %z, contracting_dims = [1] x [1] : ({x}, {x}) -> tensor<8192x8192xf32>
      %t = stablehlo.dot_general %s, %x, contracting_dims = [1] x [0] : (tensor<8192x8192xf32>, {x}) -> {x}
      return %g, %t : {w}, {x}
    }}"""
    on_tpus, on_gpus = report(module, "tpu"), report(module, "gpu")
    assert {record.kind for record in on_gpus.collectives} == {"reduce_scatter", "all_gather"}
    assert on_gpus.hidden > on_tpus.hidden


def kernel(batch, flops, moved):
    """A kernel on rows, while which the weights of a product are gathered."""
    x, w = f"tensor<{batch}x{WIDTH}xf32>", f"tensor<{WIDTH}x{WIDTH}xf32>"
    rows = '{sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}'
    rule = f"#sdy.op_sharding_rule<([i, j])->([i, j]) {{i={batch}, j={WIDTH}}} need_replication={{j}}, custom>"
    work = f'{{basis = "", bytes = {moved:.0f}, efficiency = 5.0e-1 : f64, flops = {flops:.0f}}}'
    return f"""
    sdy.mesh @mesh = <["x"=8]>
    func.func @main(%x: {x} {rows}, %v: {w} {rows}) -> ({x} {rows}) {{
      %a = stablehlo.custom_call @kernel(%x) {{sdy.sharding_rule = {rule}, sdy_jax.work = {work}}} : ({x}) -> {x}
      %b = stablehlo.dot_general %a, %v, contracting_dims = [1] x [0] : ({x}, {w}) -> {x}
      return %b : {x}
    }}"""


@pytest.mark.parametrize(("flops", "moved"), [(8e8, 0.0), (8e8, 6e8), (8e13, 0.0), (0.0, 8e11)])
def test_what_is_gathered_hides_behind_a_kernel(flops, moved):
    """As long as its share of the work takes, at half of the peak, or of what it reads and writes."""
    found = report(kernel(8192, flops, moved), "tpu")
    assert [record.kind for record in found.collectives] == ["all_gather"]
    share = COSTS.flop * flops / 8 / 2 / 0.5, COSTS.memory * moved / 8
    assert found.hidden == pytest.approx(hidden(found, share))
    assert found.work == pytest.approx(max(share) + max(product(8192)) + 2 * COSTS.product_launch)


def test_the_device_with_most_blocks_of_a_kernel_decides():
    """Nine on eight devices: one has two."""
    found = report(kernel(9, 9e11, 0.0), "tpu")
    assert found.work == pytest.approx(COSTS.work_time(2e11 / 2 / 0.5, 0.0), rel=0.01)


@pytest.mark.parametrize(("batch", "trips", "is_hidden"), [(1024, 3, False), (1024, 30, True), (8192, 3, True)])
def test_loops_hide_what_is_sent_around_them(batch, trips, is_hidden):
    found = report(text(batch, trips), "tpu")
    assert [(record.kind, record.times) for record in found.collectives] == [("all_gather", 1)] * 2
    trips_take = [trips * each for each in product(batch)]
    assert found.hidden == pytest.approx(hidden(found, trips_take))
    assert (gather(found) <= max(trips_take)) == is_hidden
