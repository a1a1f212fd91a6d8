"""Ops re-emitted as they are: any op, inside jit and shard_map, with its attributes, regions and called functions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

from sdy_jax.errors import UnsupportedError
from sdy_jax.ir.graph import Graph, Op
from sdy_jax.ir.meshes import AxisRef, Mesh, MeshAxis
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.ops.re_emission import numpy_dtype, re_emit
from sdy_jax.lowering.ops.registry import LocalOp
from sdy_jax.runtime.meshes import RefinedMesh

X = jnp.asarray(np.random.default_rng(1).normal(size=(8, 4)), jnp.float32)


def graph_of(function: Any, *args: Any) -> Graph:
    return Graph(jax.jit(function).lower(*args).compiler_ir().operation)


def parsed(text: str) -> Graph:
    with mlir.make_ir_context() as context:
        return Graph(ir.Module.parse(text, context).operation)


_ALIVE: list[Graph] = []
"""An op does not keep its module alive."""


def find(graph: Graph, name: str) -> Op:
    _ALIVE.append(graph)
    return next(op for f in graph.functions.values() for op in f.walk() if op.name == name)


def whole(op: Op) -> LocalOp:
    return LocalOp(op, RefinedMesh.of(Mesh(())), (None,) * len(op.operands), (None,) * len(op.results), None)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (jnp.tanh, "stablehlo.tanh"),
        (lambda x: lax.sort(x, 1), "stablehlo.sort"),
        (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (1, 1), "SAME"), "stablehlo.reduce_window"),
        (lambda x: lax.erf_inv(x / 9), "chlo.erf_inv"),
    ],
)
def test_an_op_runs_eagerly_and_jitted(function: Any, name: str) -> None:
    op = find(graph_of(function, X), name)
    operands = [X / 9 if name == "chlo.erf_inv" else X, *[jnp.float32(-jnp.inf)] * (len(op.operands) - 1)]
    eager = re_emit(whole(op), *operands)[0]
    jitted = jax.jit(lambda *xs: re_emit(whole(op), *xs)[0])(*operands)
    np.testing.assert_allclose(eager, function(X), 1e-6)
    np.testing.assert_allclose(jitted, function(X), 1e-6)


def test_an_op_is_mapped_over_some_of_its_operands() -> None:
    op = find(graph_of(jnp.arctan2, X, X), "stablehlo.atan2")
    both = jnp.stack([X, 2 * X, -X], axis=1)
    found = jax.vmap(lambda x: re_emit(whole(op), x, X)[0], in_axes=1)(both)
    np.testing.assert_allclose(found, jax.vmap(lambda x: jnp.arctan2(x, X), in_axes=1)(both), 1e-6)


def test_custom_calls_keep_their_layouts_and_configuration() -> None:
    spd = X.T @ X + jnp.eye(4)
    op = find(graph_of(jnp.linalg.eigh, spd), "stablehlo.custom_call")
    text = str(jax.jit(lambda x: re_emit(whole(op), x)).lower(spd).as_text())
    for name in ("call_target_name", "operand_layouts", "result_layouts"):
        assert str(op.attributes[name]).strip('"') in text
    assert "lapack_ssyevd" in text


def test_an_op_runs_on_local_shapes_inside_shard_map() -> None:
    devices = np.array(jax.devices()[:8]).reshape(2, 4)
    mesh = RefinedMesh.of(Mesh((MeshAxis("x", 2), MeshAxis("y", 4))))
    op = find(graph_of(lambda x: lax.sort(x, 1), X), "stablehlo.sort")
    rows = TensorSharding.closed("mesh", [[AxisRef("y"), AxisRef("x")], []])
    local = LocalOp(op, mesh, (rows,), (rows,), None)
    spec = mesh.spec(rows)
    run = jax.shard_map(
        lambda x: re_emit(local, x)[0], mesh=mesh.to_jax(devices), in_specs=spec, out_specs=spec, check_vma=False
    )
    np.testing.assert_array_equal(jax.jit(run)(X), np.sort(X, 1))
    assert spec == P(("y", "x"), None)


COMPOSITE = """
module {
  func.func private @double(%arg0: tensor<4xf32>) -> tensor<4xf32> {
    %0 = call @add(%arg0) : (tensor<4xf32>) -> tensor<4xf32>
    return %0 : tensor<4xf32>
  }
  func.func private @add(%arg0: tensor<4xf32>) -> tensor<4xf32> {
    %0 = stablehlo.add %arg0, %arg0 : tensor<4xf32>
    return %0 : tensor<4xf32>
  }
  func.func public @main(%arg0: tensor<4xf32>) -> tensor<4xf32> {
    %0 = stablehlo.composite "mine.double" %arg0 {decomposition = @double} : (tensor<4xf32>) -> tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}
"""


def test_called_functions_come_along() -> None:
    op = find(parsed(COMPOSITE), "stablehlo.composite")
    twice = jax.jit(lambda x: re_emit(whole(op), *re_emit(whole(op), x))[0])
    np.testing.assert_array_equal(twice(jnp.arange(4.0)), 4 * np.arange(4.0))


def test_shardings_of_the_global_program_are_dropped() -> None:
    text = """
    module {
      sdy.mesh @mesh = <["x"=2]>
      func.func public @main(%arg0: tensor<4xf32>) -> tensor<4xf32> {
        %0 = stablehlo.tanh %arg0 {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"x"}]>]>} : tensor<4xf32>
        return %0 : tensor<4xf32>
      }
    }
    """
    op = find(parsed(text), "stablehlo.tanh")
    assert "sdy" not in jax.jit(lambda x: re_emit(whole(op), x)).lower(jnp.ones(4)).as_text()


def test_element_types_without_arrays_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"got element type !quant"):
        numpy_dtype("!quant.uniform<i8:f32, 1.0>")
