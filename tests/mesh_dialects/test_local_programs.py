"""Programs in text that communicate: every op of the mesh and shard dialects on devices, and the sizes left open."""

from __future__ import annotations

import re
import warnings

import jax
import numpy as np
import pytest
import shard_model as model
from dialect_texts import in_shard
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P
from shard_devices import grid_mesh
from shard_vectors import VECTORS

import sdy_jax as sdy
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.text.modules import parse_module
from sdy_jax.ir.verification import verify_module
from sdy_jax.lowering.ops.re_emission import mlir_name
from sdy_jax.mesh_dialects.local_program import LocalProgram, is_local
from sdy_jax.mesh_dialects.meshes import DeviceMesh, resolved_sizes
from sdy_jax.shardy.rules import RuleBook


def read(text):
    module = parse_module(text, mlir.make_ir_context())
    verify_module(module.operation)
    return module.operation.clone().operation


def runnable(text, **options):
    return LocalProgram(read(text), **options)


# The value tables as text.

ORDER = [
    "mesh_axes",
    "gather_axis",
    "reduction",
    "slice_axis",
    "scatter_axis",
    "split_axis",
    "concat_axis",
    "shift_axis",
    "offset",
    "split_axes",
    "halo_sizes",
    "root",
]


def statement(number, vector, dialect):
    """The op that a vector is about, of argument `number`."""
    given, made = (
        f"tensor<{''.join(f'{n}x' for n in x.shape[1:])}{mlir_name(x.dtype)}>" for x in (vector.given, vector.expected)
    )
    kwargs = {name: value for name, value in vector.kwargs.items() if name != "dtype"}
    axes = {"mesh": "mesh_axes", "shard": "grid_axes"}[dialect]

    def op(name, of, parameters, result, types):
        keys = dict.fromkeys(key for key in (*ORDER, *parameters) if key in parameters)
        said = " ".join(f"{axes if key == 'mesh_axes' else key} = {parameters[key]}" for key in keys)
        rotate = " rotate" if kwargs.get("rotate") else ""
        return f"  {result} = {dialect}.{name} {of} on @m {said}{rotate} : {types}"

    of, result = f"%x{number}", f"%y{number}"
    if vector.op == "send_recv":
        end = f"({given}) -> {made}"
        sent = {"mesh_axes": kwargs["mesh_axes"], "destination": kwargs["destination"]}
        received = {"mesh_axes": kwargs["mesh_axes"], "source": kwargs["source"]}
        return "\n".join([op("send", of, sent, f"%s{number}", end), op("recv", of, received, result, end)]), given, made
    kwargs_said = {name: value for name, value in kwargs.items() if name != "rotate"}
    if vector.op == "update_halo":
        return op("update_halo", of, kwargs_said, result, made), given, made
    rooted = "root" in kwargs
    return (
        op(vector.op, of, kwargs_said, result, f"({given}) -> {made}" if rooted else f"{given} -> {made}"),
        given,
        made,
    )


def program(sizes, vectors, dialect):
    lines, givens, mades = zip(*(statement(i, v, dialect) for i, v in enumerate(vectors)), strict=True)
    mesh = {"mesh": "mesh.mesh", "shard": "shard.grid"}[dialect]
    arguments = ", ".join(f"%x{i}: {given}" for i, given in enumerate(givens))
    returned = ", ".join(f"%y{i}" for i in range(len(mades)))
    return "\n".join(
        [
            f"{mesh} @m(shape = {'x'.join(map(str, sizes))})",
            f"func.func @main({arguments}) -> ({', '.join(mades)}) {{",
            *lines,
            f"  return {returned} : {', '.join(mades)}",
            "}",
        ]
    )


@pytest.mark.dear
@pytest.mark.parametrize("dialect", ["mesh", "shard"])
@pytest.mark.parametrize("sizes", sorted({v.sizes for v in VECTORS}), ids=lambda sizes: "x".join(map(str, sizes)))
def test_the_value_tables(sizes, dialect):
    vectors = [vector for vector in VECTORS if vector.sizes == sizes]
    results = runnable(program(sizes, vectors, dialect))(*(vector.given for vector in vectors))
    results = results if isinstance(results, tuple) else (results,)
    for vector, result in zip(vectors, results, strict=True):
        np.testing.assert_array_equal(np.asarray(result), vector.expected, vector.name)
        assert result.dtype == vector.expected.dtype


# What devices compute of themselves.

QUERIES = """
mesh.mesh @m(shape = 2x3)
func.func @main() -> (index, tensor<2xindex>, tensor<2xindex>, index, index) {
  %linear = mesh.process_linear_index on @m : index
  %multi:2 = mesh.process_multi_index on @m axes = [1, 0] : index, index
  %place = tensor.from_elements %multi#0, %multi#1 : tensor<2xindex>
  %shape:2 = mesh.mesh_shape @m axes = [1, 0] : index, index
  %sizes = tensor.from_elements %shape#0, %shape#1 : tensor<2xindex>
  %down, %up = mesh.neighbors_linear_indices on @m[%multi#1, %multi#0] split_axes = [1] : index, index
  return %linear, %place, %sizes, %down, %up : index, tensor<2xindex>, tensor<2xindex>, index, index
}"""


def test_queries():
    linear, place, sizes, down, up = runnable(QUERIES)()
    assert linear.tolist() == [0, 1, 2, 3, 4, 5]
    assert place.tolist() == [[0, 0], [1, 0], [2, 0], [0, 1], [1, 1], [2, 1]]
    assert sizes.tolist() == [[3, 2]] * 6
    assert down.tolist() == [-1, 0, 1, -1, 3, 4]
    assert up.tolist() == [1, 2, -1, 4, 5, -1]


RING = """
mesh.mesh @m(shape = ?)
func.func @main(%x: tensor<1xi32>) -> tensor<1xi32> {
  %one = arith.constant 1 : index
  %n = mesh.mesh_shape @m : index
  %me = mesh.process_multi_index on @m : index
  %after = arith.addi %me, %one : index
  %next = arith.remsi %after, %n : index
  %wrapped = arith.addi %me, %n : index
  %before = arith.subi %wrapped, %one : index
  %previous = arith.remsi %before, %n : index
  %sent = mesh.send %x on @m mesh_axes = [0] destination = [%next] : (tensor<1xi32>, index) -> tensor<1xi32>
  %y = mesh.recv %x on @m mesh_axes = [0] source = [%previous] : (tensor<1xi32>, index) -> tensor<1xi32>
  return %y : tensor<1xi32>
}"""


@pytest.mark.parametrize("count", [4, 8])
def test_a_ring_of_devices_that_compute_their_neighbours(count):
    ring = runnable(RING, mesh=grid_mesh((count,)))
    x = np.arange(count, dtype=np.int32)[:, None]
    np.testing.assert_array_equal(ring(x), np.roll(x, 1, 0))
    lowered = jax.jit(ring).lower(x).as_text()
    assert "collective_permute" in lowered
    assert "all_gather" not in lowered


def test_an_exchange_that_only_the_run_decides():
    text = """
    mesh.mesh @m(shape = 2x3)
    func.func @main(%x: tensor<1xi32>, %to: index, %from: index) -> tensor<1xi32> {
      %sent = mesh.send %x on @m mesh_axes = [1] destination = [%to] : (tensor<1xi32>, index) -> tensor<1xi32>
      %y = mesh.recv %x on @m mesh_axes = [1] source = [%from] : (tensor<1xi32>, index) -> tensor<1xi32>
      return %y : tensor<1xi32>
    }"""
    x = np.arange(1, 7, dtype=np.int32)[:, None]
    to, source = np.array([1, 2, 0, 2, 5, 0], np.int32), np.array([2, 0, 1, 2, 1, 0], np.int32)
    assert runnable(text)(x, to, source)[:, 0].tolist() == [3, 1, 2, 6, 0, 4]


def test_who_waits_for_no_device_receives_zeros():
    """Everyone sends to the next one around the ring; the first waits for the one before it, which there is not."""
    text = """
    mesh.mesh @m(shape = 4)
    func.func @main(%x: tensor<1xi32>, %from: index) -> (tensor<1xi32>, tensor<1xi32>) {
      %c1 = arith.constant 1 : index
      %c4 = arith.constant 4 : index
      %me = mesh.process_linear_index on @m : index
      %up = arith.addi %me, %c1 : index
      %to = arith.remsi %up, %c4 : index
      %down = arith.subi %me, %c1 : index
      %0 = mesh.send %x on @m mesh_axes = [0] destination = [%to] : (tensor<1xi32>, index) -> tensor<1xi32>
      %1 = mesh.recv %x on @m mesh_axes = [0] source = [%down] : (tensor<1xi32>, index) -> tensor<1xi32>
      %2 = mesh.send %x on @m mesh_axes = [0] destination = [%to] : (tensor<1xi32>, index) -> tensor<1xi32>
      %3 = mesh.recv %x on @m mesh_axes = [0] source = [%from] : (tensor<1xi32>, index) -> tensor<1xi32>
      return %1, %3 : tensor<1xi32>, tensor<1xi32>
    }"""
    x = np.arange(1, 5, dtype=np.int32)[:, None]
    known, told = runnable(text)(x, np.array([-1, 0, 1, 0], np.int32))
    assert known[:, 0].tolist() == [0, 1, 2, 3]
    assert told[:, 0].tolist() == [0, 1, 2, 0]


def exchange(destination):
    return f"""
mesh.mesh @m(shape = 4)
func.func @main(%a: tensor<2xi32>, %d: index) -> tensor<2xi32> {{
  %i = mesh.process_linear_index on @m : index
  %c1 = arith.constant 1 : index
  %c4 = arith.constant 4 : index
  %sum = arith.addi %i, %c1 : index
  %next = arith.remui %sum, %c4 : index
  %s = mesh.send %a on @m mesh_axes = [0] destination = [{destination}] : (tensor<2xi32>, index) -> tensor<2xi32>
  %r = mesh.recv %a on @m mesh_axes = [0] : (tensor<2xi32>) -> tensor<2xi32>
  return %r : tensor<2xi32>
}}""".replace("(tensor<2xi32>, index) ->", "(tensor<2xi32>) ->" if destination == "1" else "(tensor<2xi32>, index) ->")


def test_a_recv_without_a_source_gets_what_is_sent_to_it():
    given = np.arange(8, dtype=np.int32).reshape(4, 2)
    got = runnable(exchange("%next"))(given, np.zeros(4, np.int32))
    np.testing.assert_array_equal(got, np.roll(given, 1, axis=0))


@pytest.mark.parametrize(
    ("destination", "message"),
    [
        ("1", "mesh.recv: recv needs a source: devices 0, 1, 2, 3 all send to device 1"),
        ("%d", "mesh.recv: recv needs a source: destinations that are computed in the run do not say who sends"),
    ],
)
def test_a_recv_needs_a_source_where_nothing_else_says_who_sends(destination, message):
    function = runnable(exchange(destination))
    with pytest.raises(sdy.SdyError) as caught:
        function(np.zeros((4, 2), np.int32), np.zeros(4, np.int32))
    assert str(caught.value) == f'{message} (at "-":10:8)'


def test_what_is_valid_but_cannot_run():
    generic = runnable("""
mesh.mesh @m(shape = 4)
func.func @main(%a: tensor<2xi32>) -> tensor<2xi32> {
  %r = mesh.all_reduce %a on @m mesh_axes = [0] reduction = generic : tensor<2xi32> -> tensor<2xi32>
  return %r : tensor<2xi32>
}""")
    with pytest.raises(sdy.SdyError, match=r'^mesh.all_reduce: reduction = generic names no .* \(at "-":4:8\)'):
        generic(np.zeros((4, 2), np.int32))
    with pytest.raises(sdy.SdyError, match=r"^argument 1 is of type !mesh.sharding, which no array is; to fix: state"):
        runnable("""
mesh.mesh @m(shape = 4)
func.func @main(%a: tensor<2xi32>, %s: !mesh.sharding) -> tensor<2xi32> {
  %r = mesh.all_reduce %a on @m mesh_axes = [0] : tensor<2xi32> -> tensor<2xi32>
  return %r : tensor<2xi32>
}""")


def test_groups_may_exchange_differently():
    """The first row rotates; in the second, everyone waits for somebody who sends to another."""
    text = """
    mesh.mesh @m(shape = 2x3)
    func.func @main(%x: tensor<1xi32>) -> tensor<1xi32> {
      %row, %me = mesh.process_multi_index on @m : index, index
      %c1 = arith.constant 1 : index
      %c2 = arith.constant 2 : index
      %c3 = arith.constant 3 : index
      %step = arith.addi %row, %c1 : index
      %sum = arith.addi %me, %step : index
      %to = arith.remsi %sum, %c3 : index
      %back = arith.addi %me, %c2 : index
      %from = arith.remsi %back, %c3 : index
      %sent = mesh.send %x on @m mesh_axes = [1] destination = [%to] : (tensor<1xi32>, index) -> tensor<1xi32>
      %y = mesh.recv %x on @m mesh_axes = [1] source = [%from] : (tensor<1xi32>, index) -> tensor<1xi32>
      return %y : tensor<1xi32>
    }"""
    x = np.arange(1, 7, dtype=np.int32)[:, None]
    assert runnable(text)(x)[:, 0].tolist() == [3, 1, 2, 0, 0, 0]


def test_what_constants_say_is_known_before_the_run():
    text = """
    mesh.mesh @m(shape = 4)
    func.func @main(%x: tensor<1xi32>) -> tensor<1xi32> {
      %one = arith.constant 1 : index
      %n = mesh.mesh_shape @m : index
      %last = arith.subi %n, %one : index
      %sent = mesh.send %x on @m mesh_axes = [0] destination = [%one] : (tensor<1xi32>, index) -> tensor<1xi32>
      %y = mesh.recv %x on @m mesh_axes = [0] source = [%last] : (tensor<1xi32>, index) -> tensor<1xi32>
      return %y : tensor<1xi32>
    }"""
    function = runnable(text)
    x = np.array([[5], [6], [7], [8]], np.int32)
    assert function(x)[:, 0].tolist() == [0, 8, 0, 0]
    lowered = jax.jit(function).lower(x).as_text()
    assert "collective_permute" in lowered
    assert "all_gather" not in lowered


def test_pairs_of_sends_and_receives_in_their_order():
    text = """
    mesh.mesh @m(shape = 2)
    func.func @main(%x: tensor<1xi32>, %y: tensor<1xi32>) -> (tensor<1xi32>, tensor<1xi32>, tensor<1xi32>) {
      %a = mesh.send %x on @m mesh_axes = [0] destination = [1] : (tensor<1xi32>) -> tensor<1xi32>
      %b = mesh.send %y on @m mesh_axes = [0] destination = [0] : (tensor<1xi32>) -> tensor<1xi32>
      %c = mesh.recv %x on @m mesh_axes = [0] source = [0] : (tensor<1xi32>) -> tensor<1xi32>
      %d = mesh.recv %x on @m mesh_axes = [0] source = [1] : (tensor<1xi32>) -> tensor<1xi32>
      return %a, %c, %d : tensor<1xi32>, tensor<1xi32>, tensor<1xi32>
    }"""
    a, c, d = runnable(text)(np.array([[1], [2]], np.int32), np.array([[3], [4]], np.int32))
    assert (a[:, 0].tolist(), c[:, 0].tolist(), d[:, 0].tolist()) == ([1, 2], [0, 1], [4, 0])


def test_the_shape_of_a_shard():
    text = """
    mesh.mesh @m(shape = 2x2)
    shard.grid @g(shape = 2x2)
    func.func @main() -> (index, index, index, index) {
      %d = mesh.process_linear_index on @m : index
      %s = mesh.sharding @m split_axes = [[0], [1]] sharded_dims_offsets = [0, 24, 32, 0, 20, 32] : !mesh.sharding
      %a:3 = mesh.shard_shape ?x32x32 %s %d : index, index, index
      %h = shard.sharding @g split_axes = [[0, 1]] halo_sizes = [2, 1] : !shard.sharding
      %zero = arith.constant 0 : index
      %b = shard.shard_shape dims = [8] sharding = %h device = [%zero, 1] : index
      return %a#0, %a#1, %a#2, %b : index, index, index, index
    }"""
    rows, columns, depth, halo = runnable(text)()
    assert rows.tolist() == [24, 24, 8, 8]
    assert columns.tolist() == [20, 12, 20, 12]
    assert depth.tolist() == [32] * 4
    assert halo.tolist() == [5] * 4


# Arithmetic.

ARITHMETIC = """
mesh.mesh @m(shape = 2)
func.func @main(%a: index, %b: index) -> (tensor<9xindex>, tensor<9xindex>) {
  %me = mesh.process_linear_index on @m : index
  %c7 = arith.constant -7 : index
  %c2 = arith.constant 2 : index
  %k0 = arith.divsi %c7, %c2 : index
  %k1 = arith.remsi %c7, %c2 : index
  %k2 = arith.floordivsi %c7, %c2 : index
  %k3 = arith.ceildivsi %c7, %c2 : index
  %k4 = arith.maxsi %c7, %c2 : index
  %kp = arith.cmpi slt, %c7, %c2 : index
  %k5 = arith.select %kp, %c7, %c2 : index
  %kw = arith.index_cast %c7 : index to i8
  %ks = arith.muli %kw, %kw : i8
  %ke = arith.addi %ks, %ks : i8
  %kf = arith.addi %ke, %ke : i8
  %k6 = arith.index_cast %kf : i8 to index
  %ku = arith.trunci %kf : i8 to i1
  %k7 = arith.index_castui %ku : i1 to index
  %k8 = scf.if %kp -> index {
    scf.yield %c7 : index
  } else {
    scf.yield %c2 : index
  }
  %known = tensor.from_elements %k0, %k1, %k2, %k3, %k4, %k5, %k6, %k7, %k8 : tensor<9xindex>
  %t0 = arith.divsi %a, %b : index
  %t1 = arith.remsi %a, %b : index
  %t2 = arith.floordivsi %a, %b : index
  %t3 = arith.ceildivsi %a, %b : index
  %t4 = arith.maxsi %a, %b : index
  %tp = arith.cmpi slt, %a, %b : index
  %t5 = arith.select %tp, %a, %b : index
  %tw = arith.index_cast %a : index to i8
  %ts = arith.muli %tw, %tw : i8
  %te = arith.addi %ts, %ts : i8
  %tf = arith.addi %te, %te : i8
  %t6 = arith.index_cast %tf : i8 to index
  %tu = arith.trunci %tf : i8 to i1
  %t7 = arith.index_castui %tu : i1 to index
  %t8 = scf.if %tp -> index {
    scf.yield %a : index
  } else {
    scf.yield %b : index
  }
  %traced = tensor.from_elements %t0, %t1, %t2, %t3, %t4, %t5, %t6, %t7, %t8 : tensor<9xindex>
  return %known, %traced : tensor<9xindex>, tensor<9xindex>
}"""


def test_arithmetic_is_the_same_before_the_run_and_in_it():
    known, traced = runnable(ARITHMETIC)(np.array([-7, -7], np.int32), np.array([2, 2], np.int32))
    assert known[0].tolist() == [-3, -1, -4, -3, 2, -7, -60, 0, -7]
    assert traced.tolist() == known.tolist()


SIGNS = """
mesh.mesh @m(shape = 2)
func.func @main(%a: index, %b: index, %p: i1, %q: i1) -> (tensor<9xindex>, tensor<9xindex>) {
  %me = mesh.process_linear_index on @m : index
  %c3 = arith.constant -3 : index
  %c5 = arith.constant 5 : index
  %yes = arith.constant true
  %no = arith.constant false
OPS(known, %c3, %c5, %yes, %no)
OPS(traced, %a, %b, %p, %q)
  return %known, %traced : tensor<9xindex>, tensor<9xindex>
}"""


def ops_with_signs(match):
    """Ops to which it matters whether a number has a sign; of one bit, a true is -1."""
    name, a, b, p, q = match[1].split(", ")
    lines = [f"arith.{op} {a}, {b} : index" for op in ("remui", "divui", "minui", "maxui")]
    bits = [f"arith.{op} {p}, {q} : i1" for op in ("minsi", "maxui", "addi", "cmpi slt,")]
    lines = [f"%{name}{i} = {line}" for i, line in enumerate(lines)]
    for i, bit in enumerate(bits, 4):
        lines += [f"%{name}b{i} = {bit}", f"%{name}{i} = arith.index_cast %{name}b{i} : i1 to index"]
    lines += [f"%{name}w = arith.extsi {p} : i1 to i8", f"%{name}8 = arith.index_cast %{name}w : i8 to index"]
    values = ", ".join(f"%{name}{i}" for i in range(9))
    return "\n".join([*lines, f"%{name} = tensor.from_elements {values} : tensor<9xindex>"])


def test_signs_are_the_same_before_the_run_and_in_it():
    text = re.sub(r"OPS\((.*)\)", ops_with_signs, SIGNS)
    given = (np.array([n, n], dtype) for n, dtype in ((-3, np.int32), (5, np.int32), (True, bool), (False, bool)))
    known, traced = runnable(text)(*given)
    top = 2**32 - 3
    assert known[0].tolist() == [top % 5, top // 5, 5, -3, -1, -1, -1, -1, -1]
    assert traced.tolist() == known.tolist()


def test_loops_and_calls():
    text = """
    mesh.mesh @m(shape = 4)
    func.func private @shifted(%x: tensor<1xi32>) -> tensor<1xi32> {
      %y = mesh.shift %x on @m mesh_axes = [0] shift_axis = 0 offset = 1 rotate : tensor<1xi32> -> tensor<1xi32>
      return %y : tensor<1xi32>
    }
    func.func @main(%x: tensor<1xi32>) -> tensor<1xi32> {
      %zero = arith.constant 0 : index
      %one = arith.constant 1 : index
      %n = mesh.mesh_shape @m : index
      %zeros = stablehlo.constant dense<0> : tensor<1xi32>
      %r:2 = scf.for %i = %zero to %n step %one iter_args(%sum = %zeros, %at = %x) -> (tensor<1xi32>, tensor<1xi32>) {
        %next = stablehlo.add %sum, %at : tensor<1xi32>
        %moved = func.call @shifted(%at) : (tensor<1xi32>) -> tensor<1xi32>
        scf.yield %next, %moved : tensor<1xi32>, tensor<1xi32>
      }
      return %r#0 : tensor<1xi32>
    }"""
    assert runnable(text)(np.array([[1], [2], [3], [4]], np.int32))[:, 0].tolist() == [10] * 4


# Sizes that the text leaves open.

OPEN = """
mesh.mesh @m(shape = 2x?)
func.func @main(%x: tensor<?x2xf32>) -> tensor<?x?xf32> {
  %0 = mesh.all_gather %x on @m mesh_axes = [1] gather_axis = 0 : tensor<?x2xf32> -> tensor<?x2xf32>
  %1 = stablehlo.tanh %0 : tensor<?x2xf32>
  %2 = mesh.all_to_all %1 on @m mesh_axes = [0] split_axis = 1 concat_axis = 0 : tensor<?x2xf32> -> tensor<?x?xf32>
  return %2 : tensor<?x?xf32>
}"""


def test_sizes_come_from_the_devices_and_the_arguments():
    x = np.arange(16, dtype=np.float32).reshape(8, 1, 2)
    result = runnable(OPEN)(x)
    assert result.shape == (8, 8, 1)
    np.testing.assert_allclose(result[5][:, 0], np.tanh(x.reshape(8, 2)[:, 1]), rtol=1e-6)
    assert runnable(OPEN, mesh=grid_mesh((2, 2)))(x[:4]).shape == (4, 4, 1)


def test_rules_are_checked_when_sizes_are_known():
    text = """
    mesh.mesh @m(shape = ?)
    func.func @main(%x: tensor<?xf32>) -> tensor<?xf32> {
      %0 = mesh.all_slice %x on @m mesh_axes = [0] slice_axis = 0 : tensor<?xf32> -> tensor<?xf32>
      return %0 : tensor<?xf32>
    }"""
    function = runnable(text, mesh=grid_mesh((4,)))
    assert function(np.ones((4, 8), np.float32)).shape == (4, 2)
    with pytest.raises(sdy.SdyError, match="dimension 0 of size 6 does not split into 4 equal pieces"):
        function(np.ones((4, 6), np.float32))


def test_operands_whose_open_sizes_differ():
    text = """
    mesh.mesh @m(shape = 4)
    func.func @main(%x: tensor<?xf32>, %y: tensor<?xf32>) -> tensor<?xf32> {
      %0 = mesh.all_reduce %x on @m mesh_axes = [0] : tensor<?xf32> -> tensor<?xf32>
      %1 = stablehlo.add %0, %y : tensor<?xf32>
      return %1 : tensor<?xf32>
    }"""
    with pytest.raises(sdy.SdyError, match=r"stablehlo\.add"):
        runnable(text)(np.ones((4, 2), np.float32), np.ones((4, 3), np.float32))


@pytest.mark.parametrize(
    ("shape", "count", "sizes"),
    [((2, None), 8, (2, 4)), ((None,), 7, (7,)), ((2, 2), 8, (2, 2)), ((None, 3, 1), 6, (2, 3, 1))],
)
def test_the_sizes_of_a_mesh(shape, count, sizes):
    assert resolved_sizes(DeviceMesh("mesh", "m", shape), count) == sizes


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, None), "7 devices do not fill @m = 2x?"),
        ((2, 4), "@m = 2x4 needs 8 devices, 7 are at hand; to fix: try it on virtual ones"),
        ((None, None), "@m = ?x? has several unknown sizes; pass a mesh"),
        ((2, 0), "axis 1 of @m has size 0"),
    ],
)
def test_meshes_that_devices_do_not_fill(shape, message):
    with pytest.raises(sdy.SdyError) as error:
        resolved_sizes(DeviceMesh("mesh", "m", shape), 7)
    assert message in str(error.value)


SUM = """
mesh.mesh @m(shape = {shape})
func.func @main(%x: tensor<2xf32>) -> tensor<2x{type}> {{
  %0 = mesh.all_reduce %x on @m mesh_axes = [0] : tensor<2xf32> -> tensor<2x{type}>
  return %0 : tensor<2x{type}>
}}"""


def test_a_mesh_that_the_devices_do_not_form():
    with pytest.raises(sdy.SdyError, match="@m is 2x4, the devices form 4x2"):
        runnable(SUM.format(shape="2x4", type="f32"), mesh=grid_mesh((4, 2)))


def test_types_that_jax_would_cut():
    with pytest.raises(sdy.SdyError, match=r"mesh\.all_reduce: result element type f64 needs jax_enable_x64"):
        runnable(SUM.format(shape="2x4", type="f64"))
    with jax.enable_x64(True):
        result = runnable(SUM.format(shape="2x4", type="f64"))(np.ones((8, 2), np.float32))
    assert (result.dtype, result.tolist()) == (np.float64, [[2, 2]] * 8)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (np.ones((4, 2), np.float32), r"argument 0 has shape \(4, 2\); expected \(8, ...\): tensor<2xf32> per device"),
        (np.ones((8, 3), np.float32), r"argument 0 has shape \(3,\) on each device, expected tensor<2xf32>"),
        (np.ones((8, 2), np.int32), "argument 0 has elements of int32, expected float32 for tensor<2xf32>"),
    ],
)
def test_arguments_that_do_not_fit(argument, message):
    with pytest.raises(sdy.SdyError, match=message):
        runnable(SUM.format(shape="2x4", type="f32"))(argument)
    with pytest.raises(sdy.SdyError, match="got 0 arguments, the program takes 1"):
        runnable(SUM.format(shape="2x4", type="f32"))()


def test_arguments_of_other_widths():
    text = """
mesh.mesh @m(shape = 8)
func.func @main(%x: tensor<2xi32>, %root: TYPE) -> tensor<2xi32> {
  %y = mesh.all_reduce %x on @m : tensor<2xi32> -> tensor<2xi32>
  return %y : tensor<2xi32>
}"""
    x = np.ones((8, 2), np.int32)
    with pytest.raises(sdy.SdyError, match=r"^argument 1 has elements of float32, expected int32 for index\b"):
        runnable(text.replace("TYPE", "index"))(x, np.ones(8, np.float32))
    to_fix = "expected int64 for i64; to fix: jax.config.update('jax_enable_x64', True)"
    with pytest.raises(sdy.SdyError, match=re.escape(f"argument 1 has elements of int32, {to_fix}")):
        runnable(text.replace("TYPE", "i64"))(x, np.ones(8, np.int64))


def test_specs_say_how_arrays_lie_on_the_mesh():
    function = runnable(
        SUM.format(shape="2x4", type="f32"), mesh=grid_mesh((2, 4)), in_specs=[P(("m0", "m1"))], out_specs=P("m1")
    )
    x = np.arange(16, dtype=np.float32)
    np.testing.assert_array_equal(function(x), x.reshape(2, 8).sum(0))


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (
            "%s = mesh.sharding @m split_axes = [[0]] sharded_dims_offsets = [0, %n, 9] : !mesh.sharding\n"
            "%d = mesh.process_linear_index on @m : index\n"
            "%l = mesh.shard_shape 9 %s %d : index\n%y = stablehlo.tanh %x : tensor<4xf32>",
            "offsets must be known before the run",
        ),
    ],
)
def test_what_must_be_known_before_the_run(op, message):
    text = f"""
    mesh.mesh @m(shape = 2)
    func.func @main(%x: tensor<4xf32>, %i: i64) -> tensor<4xf32> {{
      %c1 = arith.constant 1 : i64
      %p = mesh.process_linear_index on @m : index
      %q = arith.index_cast %p : index to i64
      %n = arith.addi %i, %q : i64
      {op}
      return %y : tensor<4xf32>
    }}"""
    with jax.enable_x64(True), pytest.raises(sdy.SdyError, match=message):
        runnable(text)(np.ones((2, 4), np.float32), np.ones(2, np.int64))


SEVERAL = """
mesh.mesh @m(shape = 2x4)
shard.grid @n(shape = {shape})
mesh.mesh @unused(shape = 3x5)
mesh.mesh @open(shape = ?x?)
func.func @main(%x: tensor<2xi32>) -> (tensor<2xi32>, tensor<{length}xi32>, tensor<2xi32>) {{
  %0 = mesh.shift %x on @m mesh_axes = [1] shift_axis = 1 offset = 1 rotate : tensor<2xi32> -> tensor<2xi32>
  %1 = shard.all_gather %x on @n grid_axes = {axes} gather_axis = 0 : tensor<2xi32> -> tensor<{length}xi32>
  %2 = shard.shift %x on @n grid_axes = [0] shift_axis = 0 offset = 1 rotate : tensor<2xi32> -> tensor<2xi32>
  return %0, %1, %2 : tensor<2xi32>, tensor<{length}xi32>, tensor<2xi32>
}}"""


@pytest.mark.parametrize(
    ("shape", "axes"), [((8,), [0]), ((4, "?"), [1]), ((4, 2), [1]), ((2, 2, 2), [2, 0]), ((4, 1, 2), [1, 0])]
)
@pytest.mark.parametrize("specs", [{}, {"in_specs": P(("m0", "m1")), "out_specs": P(("m0", "m1"))}])
def test_meshes_of_several_shapes_are_the_same_devices(shape, axes, specs):
    text_shape, shape = "x".join(map(str, shape)), tuple(2 if size == "?" else size for size in shape)
    length = 2 * int(np.prod([shape[axis] for axis in axes]))
    text = SEVERAL.format(shape=text_shape, axes=axes, length="?" if "?" in text_shape else length)
    x = np.arange(16, dtype=np.int32).reshape(8, 2)
    given = x.ravel() if specs else x
    results = [np.asarray(y).reshape(8, -1) for y in runnable(text, mesh=grid_mesh((2, 4)), **specs)(given)]
    np.testing.assert_array_equal(results[0], model.shift(x, (2, 4), shift_axis=1, offset=1, rotate=True))
    np.testing.assert_array_equal(results[1], model.all_gather(x, shape, grid_axes=axes, gather_axis=0))
    np.testing.assert_array_equal(results[2], model.shift(x, shape, shift_axis=0, offset=1, rotate=True))


@pytest.mark.parametrize(
    ("shape", "message"),
    [("4", "@n has 4 devices, the program's mesh 8; one program runs on one set of devices")],
)
def test_meshes_that_are_not_the_same_devices(shape, message):
    with pytest.raises(sdy.SdyError, match=message):
        runnable(SEVERAL.format(shape=shape, axes="[0]", length=8))


def test_axes_that_are_no_parts_of_each_other():
    text = """
    mesh.mesh @m(shape = 2x3)
    mesh.mesh @n(shape = 3x2)
    func.func @main(%x: tensor<2xi32>) -> tensor<2xi32> {
      %0 = mesh.all_reduce %x on @m mesh_axes = [0] : tensor<2xi32> -> tensor<2xi32>
      %1 = mesh.all_reduce %0 on @n mesh_axes = [0] : tensor<2xi32> -> tensor<2xi32>
      return %1 : tensor<2xi32>
    }"""
    with pytest.raises(sdy.SdyError, match="@n is 3x2, the devices form 2x3: no axes of one are parts of the other's"):
        runnable(text)


def test_ops_that_cannot_run_here():
    text = """
    mesh.mesh @m(shape = 2)
    func.func @main(%x: f32) -> f32 {
      %0 = mesh.process_linear_index on @m : index
      %1 = math.sqrt %x : f32
      return %1 : f32
    }"""
    with pytest.raises(sdy.SdyError, match=r"math\.sqrt at .* cannot be run in a local program"):
        runnable(text)(np.ones(2, np.float32))


def test_which_programs_are_local():
    assert is_local(read(SUM.format(shape="2x4", type="f32")))
    assert is_local(read(QUERIES))
    assert not is_local(read(IN_MANUAL))
    assert not is_local(read("func.func @main(%x: tensor<f32>) -> tensor<f32> { return %x : tensor<f32> }"))


# Inside manual computations of a global program.

IN_MANUAL = """
sdy.mesh @m = <["data"=2, "model"=4]>
mesh.mesh @m(shape = 2x4)
func.func @main(%x: tensor<8x12xf32> {sdy.sharding = #sdy.sharding<@m, [{"data"}, {"model"}]>}) -> tensor<8x12xf32> {
  %0 = sdy.manual_computation(%x) in_shardings=[<@m, [{"data"}, {"model"}]>] out_shardings=[<@m, [{"data"}, {"model"}]>]
      manual_axes={"data", "model"} (%a: tensor<4x3xf32>) {
    %i:2 = mesh.process_multi_index on @m : index, index
    %sent = mesh.send %a on @m mesh_axes = [1] destination = [2] : (tensor<4x3xf32>) -> tensor<4x3xf32>
    %got = mesh.recv %a on @m mesh_axes = [1] source = [1] : (tensor<4x3xf32>) -> tensor<4x3xf32>
    %rot = mesh.shift %a on @m mesh_axes = [0] shift_axis = 0 offset = 1 rotate : tensor<4x3xf32> -> tensor<4x3xf32>
    %sum = stablehlo.add %got, %rot : tensor<4x3xf32>
    %root = mesh.broadcast %sum on @m mesh_axes = [0] root = [%i#0] : (tensor<4x3xf32>, index) -> tensor<4x3xf32>
    %one = mesh.broadcast %sum on @m mesh_axes = [0, 1] root = [1, 2] : (tensor<4x3xf32>) -> tensor<4x3xf32>
    sdy.return %one : tensor<4x3xf32>
  } : (tensor<8x12xf32>) -> tensor<8x12xf32>
  return %0 : tensor<8x12xf32>
}"""


def test_inside_a_manual_computation():
    x = np.arange(96, dtype=np.float32).reshape(8, 12)
    blocks = x.reshape(2, 4, 4, 3).transpose(0, 2, 1, 3)  # data, model, rows, columns
    received = np.zeros_like(blocks)
    received[:, 2] = blocks[:, 1]
    expected = (received + blocks[::-1])[1, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("error", sdy.PartitionWarning)
        result = sdy.partition(sdy.load(IN_MANUAL.encode()))(x)
    np.testing.assert_array_equal(result, np.tile(expected, (2, 4)))


PARTLY = """
sdy.mesh @m = <["data"=2, "model"=4]>
shard.grid @m(shape = 2x4)
func.func @main(%x: tensor<8x12xf32> {{sdy.sharding = #sdy.sharding<@m, [{{"data"}}, {{"model"}}]>}})
    -> tensor<8x12xf32> {{
  %0 = sdy.manual_computation(%x) in_shardings=[<@m, [{{?}}, {{"model", ?}}]>]
      out_shardings=[<@m, [{{?}}, {{"model", ?}}]>] manual_axes={{"model"}} (%a: tensor<8x3xf32>) {{
    {op}
    sdy.return %b : tensor<8x3xf32>
  }} : (tensor<8x12xf32>) -> tensor<8x12xf32>
  return %0 : tensor<8x12xf32>
}}"""


def shift_of(axis):
    return (
        f"%b = shard.shift %a on @m grid_axes = [{axis}] shift_axis = {axis} offset = 1 rotate "
        ": tensor<8x3xf32> -> tensor<8x3xf32>"
    )


GATHERED = """%g = shard.all_gather %a on @m grid_axes = [1] gather_axis = 1 : tensor<8x3xf32> -> tensor<8x12xf32>
    %b = shard.reduce_scatter %g on @m grid_axes = [1] reduction = max scatter_axis = 1
      : tensor<8x12xf32> -> tensor<8x3xf32>"""
EXCHANGED = """%g = shard.all_to_all %a on @m grid_axes = [1] split_axis = 0 concat_axis = 1
      : tensor<8x3xf32> -> tensor<2x12xf32>
    %b = shard.all_to_all %g on @m grid_axes = [1] split_axis = 1 concat_axis = 0
      : tensor<2x12xf32> -> tensor<8x3xf32>"""
ROOTED = """%r = arith.constant 2 : index
    %g = shard.gather %a on @m grid_axes = [1] gather_axis = 1 root = [%r]
      : (tensor<8x3xf32>, index) -> tensor<8x12xf32>
    %b = shard.scatter %g on @m grid_axes = [1] scatter_axis = 1 root = [2] : (tensor<8x12xf32>) -> tensor<8x3xf32>"""
SENT = """%s = shard.send %a on @m grid_axes = [1] destination = [3] : (tensor<8x3xf32>) -> tensor<8x3xf32>
    %b = shard.recv %a on @m grid_axes = [1] source = [0] : (tensor<8x3xf32>) -> tensor<8x3xf32>"""


@pytest.mark.parametrize("sizes", [(1, 2), (0, 1), (2, 0), (0, 0), (2, 2)])
def test_halos_of_sizes_that_only_the_run_knows(sizes):
    text = """
mesh.mesh @m(shape = 2x4)
func.func @main(%x: tensor<6x5xi32>, %lo: i64, %hi: i64) -> (tensor<6x5xi32>, tensor<6x5xi32>) {{
  %c1 = arith.constant 1 : i64
  %two = arith.addi %c1, %c1 : i64
  %y = mesh.update_halo %x on @m split_axes = [[0], [1]] halo_sizes = [{}, {}, 1, %two] : tensor<6x5xi32>
  %z = mesh.update_halo %x on @m split_axes = [[1, 0]] halo_sizes = [{}, {}] : tensor<6x5xi32>
  return %y, %z : tensor<6x5xi32>, tensor<6x5xi32>
}}"""
    x = np.random.default_rng(3).integers(0, 100, (8, 6, 5), dtype=np.int32)
    with jax.enable_x64(True):
        given = x, *(np.full(8, size, np.int64) for size in sizes)
        got = runnable(text.format("%lo", "%hi", "%lo", "%hi"))(*given)
        expected = runnable(text.format(*sizes, *sizes))(*given)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_halos_in_memory():
    text = """
mesh.mesh @m(shape = 4)
func.func private @inner(%x: TYPE) -> TYPE {
  %y = mesh.update_halo %x on @m split_axes = [[0]] halo_sizes = [1, 1] : TYPE
  return %x : TYPE
}
func.func @main(%x: TYPE) -> (TYPE, TYPE) {
  %y = mesh.update_halo %x on @m split_axes = [[0]] halo_sizes = [1, 0] : TYPE
  %z = call @inner(%x) : (TYPE) -> TYPE
  %s = mesh.all_reduce %x on @m mesh_axes = [0] : TYPE -> TYPE
  return %z, %s : TYPE, TYPE
}"""
    x = np.arange(16, dtype=np.int32).reshape(4, 4)
    once = x.copy()
    once[1:, 0] = x[:-1, 3]  # halo_sizes = [1, 0]: what the device before owns last
    twice = once.copy()
    twice[1:, 0], twice[:-1, 3] = once[:-1, 2], once[1:, 1]
    for type_ in ("memref<4xi32>", "memref<?xi32>"):
        got, total = runnable(text.replace("TYPE", type_))(x)
        np.testing.assert_array_equal(got, twice)
        np.testing.assert_array_equal(total, [twice.sum(0)] * 4)
    apart = runnable(text.replace("TYPE", "tensor<4xi32>"))(x)[0]
    np.testing.assert_array_equal(apart, x)  # tensors are values


@pytest.mark.parametrize(
    ("type_", "body", "message"),
    [
        (
            "memref<4xi32, strided<[2]>>",
            "%y = mesh.update_halo %x on @m split_axes = [[0]] halo_sizes = [1, 1] : T",
            "a memref of type memref<4xi32, strided<[2]>> cannot be run; arrays have no layouts and memory spaces",
        ),
        (
            "memref<4xi32>",
            "%b = arith.constant true\nscf.if %b {\n"
            "%y = mesh.update_halo %x on @m split_axes = [[0]] halo_sizes = [1, 1] : T\n}",
            "mesh.update_halo at -:5 updates a memref of the code around; use tensors",
        ),
    ],
)
def test_memory_that_no_array_is(type_, body, message):
    text = f"mesh.mesh @m(shape = 4)\nfunc.func @main(%x: T) -> T {{\n{body}\nreturn %x : T\n}}"
    with pytest.raises(sdy.SdyError, match=re.escape(message)):
        runnable(re.sub(r"\bT\b", type_, text))


HALO = "%b = shard.update_halo %a on @m split_axes = [[], [1]] halo_sizes = [1, 0] : tensor<8x3xf32>"


def halo_of(x):
    filled = x.copy()
    filled[:, 3::3] = x[:, 2:-1:3]
    return filled


@pytest.mark.parametrize(
    ("op", "expected", "exchanges_rows"),
    [
        (shift_of(1), lambda x: np.roll(x, 3, axis=1), False),
        (GATHERED, lambda x: x, False),
        (EXCHANGED, lambda x: x, True),
        (ROOTED, lambda x: x, True),
        (SENT, lambda x: np.concatenate([np.zeros_like(x[:, 3:]), x[:, :3]], axis=1), True),
        (HALO, halo_of, False),
    ],
)
def test_along_the_manual_axes_of_a_computation_that_is_split_along_others(op, expected, exchanges_rows):
    x = np.arange(96, dtype=np.float32).reshape(8, 12)
    function = sdy.partition(sdy.load(PARTLY.format(op=op).encode()), on_unknown="ignore")
    np.testing.assert_array_equal(function(x), expected(x))
    if not exchanges_rows:
        records = function.plan(x).collectives
        assert {record.origin for record in records} == {"user"}  # the rows stay split along "data"


def test_axes_that_the_code_is_not_written_per_device_along():
    with pytest.raises(sdy.SdyError, match=r'shard.shift works on per-device arrays, but .* per device along "data"=2'):
        sdy.partition(sdy.load(PARTLY.format(op=shift_of(0)).encode()))(np.zeros((8, 12), np.float32))


def test_text_is_run_by_one_call():
    x = np.ones((8, 2), np.float32)
    total = sdy.shard.run_local(SUM.format(shape="2x4", type="f32"))
    np.testing.assert_array_equal(total(x), 2 * x)
    program = sdy.load(SUM.format(shape="2x4", type="f32").encode())
    np.testing.assert_array_equal(sdy.shard.run_local(program)(x), 2 * x)
    same = sdy.Program.from_text(str(program.module))
    assert isinstance(same, sdy.Program) and isinstance(program, sdy.Program)
    np.testing.assert_array_equal(same.run_local()(x), 2 * x)
    with pytest.raises(sdy.SdyError, match=r"<text>:4:\d+: error: mesh\.all_reduce: no mesh named @n"):
        sdy.shard.run_local(SUM.format(shape="2x4", type="f32").replace("on @m", "on @n"))


@pytest.mark.parametrize(
    ("op", "rule"),
    [
        (shift_of(1), "([i, j])->([i, j]) {i=8, j=3}"),
        (HALO, "([i, j])->([i, j]) {i=8, j=3} need_replication={j}"),
        (GATHERED.split("\n")[0], "([i, j])->([i, k]) {i=8, j=3, k=12} need_replication={j, k}"),
        (EXCHANGED.partition(" %b")[0], "([i, k])->([j, l]) {i=8, j=2, k=3, l=12} need_replication={i, j, k, l}"),
    ],
)
def test_sharding_rules_keep_what_is_exchanged_whole(op, rule):
    text = f"shard.grid @m(shape = 2x4)\nfunc.func @main(%a: tensor<8x3xf32>) {{\n {op}\n return\n}}"
    module = read(text)
    assert str(RuleBook().rule_of(Graph(module).main.blocks[0].ops[0])) == rule


def reduced_on(shape, dialect="mesh"):
    text = f"""
sdy.mesh @named = <["a"=2, "b"=4]>
mesh.mesh @m(shape = {shape})
func.func @main(%x: tensor<8x16xf32>) -> tensor<8x16xf32> {{
  %y = sdy.manual_computation(%x)
      in_shardings=[<@named, [{{"a"}}, {{"b"}}]>] out_shardings=[<@named, [{{"a"}}, {{"b"}}]>]
      manual_axes={{"a", "b"}} (%l: tensor<4x4xf32>) {{
    %r = mesh.all_reduce %l on @m mesh_axes = [0] : tensor<4x4xf32> -> tensor<4x4xf32>
    sdy.return %r : tensor<4x4xf32>
  }} : (tensor<8x16xf32>) -> tensor<8x16xf32>
  return %y : tensor<8x16xf32>
}}"""
    text = text if dialect == "mesh" else in_shard(text)
    return sdy.partition(sdy.loads(text), mesh=jax.make_mesh((2, 4), ("a", "b")), on_unknown="ignore")


def test_programs_whose_meshes_have_one_name_run_in_one_function():
    x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    programs = [reduced_on("2x4"), reduced_on("8"), reduced_on("2x4"), reduced_on("8", "shard")]
    blocks = x.reshape(2, 4, 4, 4)
    rows, total = np.tile(blocks.sum(0, keepdims=True), (2, 1, 1, 1)), blocks.sum((0, 2), keepdims=True)
    wanted = [rows.reshape(8, 16), np.tile(total, (2, 1, 4, 1)).reshape(8, 16)]
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        chosen = [programs[i] for i in order]
        found = sdy.partition(lambda x: [f(x) for f in chosen], mesh=mesh, on_unknown="ignore")(x)  # noqa: B023
        for i, y in zip(order, found, strict=True):
            np.testing.assert_allclose(y, wanted[i % 2], rtol=1e-5, atol=1e-5)
