"""Programs in text that leave sizes open: each call resolves them, as for files of `jax.export`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.cli.main import main
from sdy_jax.errors import SdyError

TEXT = """
sdy.mesh @mesh = <["a"=2, "b"=4]>
func.func @main(%x: tensor<?x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}, {}]>}, %w: tensor<16x?xf32>)
    -> (tensor<?x?xf32> {sdy.sharding = #sdy.sharding<@mesh, [{?}, {"b"}]>}, tensor<?x16xf32>) {
  %0 = sdy.all_gather [{"a"}, {}] %x out_sharding=<@mesh, [{}, {}]> : tensor<?x16xf32>
  %1 = sdy.sharding_constraint %0 <@mesh, [{"a"}, {?}]> : tensor<?x16xf32>
  %2 = func.call @product(%1, %w) : (tensor<?x16xf32>, tensor<16x?xf32>) -> tensor<?x?xf32>
  %3 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{}, {"b"}]>] out_shardings=[<@mesh, [{}, {"b"}]>]
      manual_axes={"b"} (%y: tensor<?x4xf32>) {
    %4 = stablehlo.negate %y : tensor<?x4xf32>
    sdy.return %4 : tensor<?x4xf32>
  } : (tensor<?x16xf32>) -> tensor<?x16xf32>
  return %2, %3 : tensor<?x?xf32>, tensor<?x16xf32>
}
func.func private @product(%x: tensor<?x16xf32>, %w: tensor<16x?xf32>) -> tensor<?x?xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
      : (tensor<?x16xf32>, tensor<16x?xf32>) -> tensor<?x?xf32>
  return %0 : tensor<?x?xf32>
}
"""


def normal(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize(("rows", "columns"), [(8, 12), (4, 4), (6, 5), (2, 128)])
def test_each_call_has_its_sizes(rows, columns):
    run = sdy.partition(sdy.loads(TEXT), on_unknown="ignore")
    for x, w in ((normal(rows, 16), normal(16, columns)), (normal(2 * rows, 16), normal(16, columns))):
        product, negated = run(x, w)
        np.testing.assert_allclose(product, x @ w, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(negated, -x)
        assert jax.eval_shape(run, x, w)[0].shape == (len(x), columns)


def test_a_plan_has_the_sizes_and_the_lines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.mlir").write_text(TEXT)
    plan = sdy.partition(sdy.load("m.mlir")).plan(normal(8, 16), normal(16, 12))
    assert [value.type for value in plan.arguments] == ["f32[8@a,16]", "f32[16,12@b]"]
    assert "m.mlir:5" in [c.source for c in plan.collectives]
    assert "stablehlo.convert" not in plan.mlir("traced")
    assert "m.mlir:16" in str(plan.why("result[0]"))


def test_sizes_that_do_not_fit_are_errors():
    run = sdy.partition(sdy.loads(TEXT))
    with pytest.raises(SdyError, match=r"`arg0` is f32\[8,3\], the program takes f32\[\?,16\]"):
        run(normal(8, 3), normal(16, 4))
    sums = (
        TEXT[: TEXT.index("func.func")]
        + """
      func.func @main(%x: tensor<?xf32>, %y: tensor<?xf32>) -> tensor<?xf32> {
        %0 = stablehlo.add %x, %y : tensor<?xf32>
        return %0 : tensor<?xf32>
      }"""
    )
    run = sdy.partition(sdy.loads(sums))
    np.testing.assert_array_equal(run(jnp.ones(8), jnp.ones(8)), 2)
    with pytest.raises(SdyError, match=r"tensor<8xf32>, tensor<4xf32> do not fit the program: "):
        run(jnp.ones(8), jnp.ones(4))


def test_sizes_that_are_computed():
    text = """
      func.func @main(%x: tensor<?x16xf32>) -> tensor<?x16xf32> {
        %size = stablehlo.get_dimension_size %x, dim = 0 : (tensor<?x16xf32>) -> tensor<i32>
        %rows = stablehlo.reshape %size : (tensor<i32>) -> tensor<1xi32>
        %columns = stablehlo.constant dense<16> : tensor<1xi32>
        %shape = stablehlo.concatenate %rows, %columns, dim = 0 : (tensor<1xi32>, tensor<1xi32>) -> tensor<2xi32>
        %one = stablehlo.constant dense<1.0> : tensor<f32>
        %ones = stablehlo.dynamic_broadcast_in_dim %one, %shape, dims = []
            : (tensor<f32>, tensor<2xi32>) -> tensor<?x16xf32>
        %0 = stablehlo.add %x, %ones : tensor<?x16xf32>
        return %0 : tensor<?x16xf32>
      }"""
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    run = sdy.partition(sdy.loads(text), mesh=mesh, in_shardings=P("a"))
    x = normal(16, 16)
    np.testing.assert_allclose(run(x), x + 1)
    np.testing.assert_allclose(jax.grad(lambda x: run(x).sum())(x), jnp.ones_like(x))


def test_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.mlir").write_text(TEXT)
    x, w = normal(8, 16), normal(16, 12)
    np.savez("in.npz", arg0=x, arg1=w)
    assert main(["run", "m.mlir", "--inputs", "in.npz", "--outputs", "out.npz"]) == 0
    np.testing.assert_allclose(np.load("out.npz")["out0"], x @ w, rtol=1e-5, atol=1e-5)
    assert main(["plan", "m.mlir", "--args", "f32[8,16], f32[16,12]"]) == 0
    assert "f32[16,12@b]" in capsys.readouterr().out
    assert main(["plan", "m.mlir"]) == 1
    assert (
        "the program takes f32[?,16], f32[16,?]; to fix: give the types with sizes as --args" in capsys.readouterr().err
    )
    assert main(["run", "m.mlir", "--random", "0"]) == 1
    assert "--args" in capsys.readouterr().err
    assert main(["run", "m.mlir", "--random", "0", "--args", "f32[8,16], f32[16,12]"]) == 0
