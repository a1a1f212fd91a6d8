"""Arguments that are stated to be unreduced: arrays are their values, unless jax's type says that they are terms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.cli.main import main
from sdy_jax.errors import ShardingError
from sdy_jax.plan.profile import collectives_in_hlo, totals

AUTO = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
EXPLICIT = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
RNG = np.random.default_rng(4)
A, B, W = (RNG.standard_normal(shape, dtype=np.float32) for shape in ((8, 16), (16, 4), (4, 12)))
X = A @ B

TEXT = """
sdy.mesh @mesh = <["a"=2, "b"=4]>
func.func @main(%x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}, {}], unreduced={"b"}>},
                %w: tensor<4x12xf32>) -> tensor<8x12xf32> {
  %0 = BODY
  %1 = stablehlo.dot_general %0, %w, contracting_dims = [1] x [0]
      : (tensor<8x4xf32>, tensor<4x12xf32>) -> tensor<8x12xf32>
  return %1 : tensor<8x12xf32>
}
"""
BODIES = [
    "stablehlo.tanh %x : tensor<8x4xf32>",
    'sdy.all_reduce {"b"} %x out_sharding=<@mesh, [{"a"}, {}]> : tensor<8x4xf32>',
    'sdy.reduce_scatter [{}, {"b"}] %x out_sharding=<@mesh, [{"a"}, {"b"}]> : tensor<8x4xf32>',
    "stablehlo.add %x, %x : tensor<8x4xf32>",
]
NUMPY = [np.tanh, lambda x: x, lambda x: x, lambda x: 2 * x]


def terms():
    """`X`, of which devices hold partial sums along `b`."""
    a, b = jax.device_put(A, NamedSharding(EXPLICIT, P("a", "b"))), jax.device_put(B, NamedSharding(EXPLICIT, P("b")))
    with jax.set_mesh(EXPLICIT):
        return jax.jit(lambda a, b: jnp.dot(a, b, out_sharding=P("a", unreduced={"b"})))(a, b)


@pytest.mark.parametrize(("body", "plain"), list(zip(BODIES, NUMPY, strict=True)), ids=lambda b: str(b).split()[0])
@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_an_array_is_its_value(body, plain, mesh):
    run = sdy.partition(sdy.loads(TEXT.replace("BODY", body)), mesh=mesh)
    np.testing.assert_allclose(run(X, W), plain(X) @ W, rtol=1e-4, atol=1e-4)
    assert run.plan(X, W).arguments[0].type == "f32[8@a,4]"


@pytest.mark.parametrize(("body", "plain"), list(zip(BODIES, NUMPY, strict=True)), ids=lambda b: str(b).split()[0])
def test_terms_are_taken_as_they_are(body, plain):
    run = sdy.partition(sdy.loads(TEXT.replace("BODY", body)), mesh=EXPLICIT)
    x = terms()
    np.testing.assert_allclose(run(x, W), plain(X) @ W, rtol=1e-4, atol=1e-4)
    plan = run.plan(x, W)
    assert plan.arguments[0].type == "f32[8@a,4]{U:b}"
    found = totals(collectives_in_hlo(run.lower(x, W).compile().as_text()))
    assert found.wire_bytes == plan.wire_bytes
    assert run.plan(X, W).arguments[0].type == "f32[8@a,4]"


def test_python_functions_take_terms_too():
    run = sdy.partition(lambda x, w: jnp.tanh(reshard(x, P("a")) @ w), mesh=EXPLICIT)
    x = terms()
    np.testing.assert_allclose(run(x, W), np.tanh(X @ W), rtol=1e-4, atol=1e-4)
    assert [(c.kind, c.wire_bytes) for c in run.plan(x, W).collectives] == [("all_reduce", 96)]
    stated = sdy.partition(lambda x: x * 2, mesh=AUTO, in_shardings='[{"a"}, {}], unreduced={"b"}')
    np.testing.assert_array_equal(stated(X), 2 * X)
    with jax.set_mesh(EXPLICIT):
        gradient = jax.grad(lambda w: run(x, w).sum())(jnp.asarray(W))
        of_terms = jax.grad(lambda x: run(x, jnp.asarray(W)).sum())(x)
        tangent = jax.jvp(lambda x: run(x, jnp.asarray(W)), (x,), (x,))[1]
    np.testing.assert_allclose(gradient, jax.grad(lambda w: jnp.tanh(X @ w).sum())(W), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(of_terms, jax.grad(lambda x: jnp.tanh(x @ W).sum())(X), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(tangent, jax.jvp(lambda x: jnp.tanh(x @ W), (X,), (X,))[1], rtol=1e-4, atol=1e-4)


def test_terms_that_are_stated_to_be_a_value_are_an_error():
    for stated in (P("a"), '[{"a"}, {}], unreduced=max{"b"}', '[{}, {}], unreduced={"a", "b"}'):
        run = sdy.partition(lambda x: x * 2, mesh=EXPLICIT, in_shardings=stated)
        with pytest.raises(ShardingError, match="`x` holds terms of a sum along b, in_shardings says <"):
            run(terms())


def test_the_command_line_runs_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.mlir").write_text(TEXT.replace("BODY", BODIES[0]))
    np.savez("in.npz", arg0=X, arg1=W)
    assert main(["run", "m.mlir", "--inputs", "in.npz", "--outputs", "out.npz"]) == 0
    np.testing.assert_allclose(np.load("out.npz")["out0"], np.tanh(X) @ W, rtol=1e-4, atol=1e-4)
