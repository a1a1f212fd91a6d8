"""What is compiled in another form for CPUs: what an all_to_all sends is computed once, not once per receiver."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE, PLANE

import sdy_jax as sdy
from sdy_jax.ir.meshes import AxisRef, Mesh
from sdy_jax.lowering.ops.collectives import movement, reductions
from sdy_jax.lowering.ops.collectives.movement import computed_apart
from sdy_jax.lowering.targets.target import CPU
from sdy_jax.runtime.meshes import Forms, RefinedMesh

X = np.arange(64 * 16, dtype=np.float32).reshape(64, 16) / 1000

_FUSED = re.compile(r"^%?\w*fused_computation[\w.]* \(.*?^\}", re.DOTALL | re.MULTILINE)


def transformed(x):
    """What is computed of rows, then of columns."""
    y = jnp.tanh(x) * 2 + 1
    return jnp.cumsum(jnp.sin(y), 0) - y.max(0)


def moved(x):
    y = jax.lax.with_sharding_constraint(jnp.tanh(x) * 2 + 1, P(None, "x"))
    return jnp.cumsum(jnp.sin(y), 0) - y.max(0)


@pytest.mark.parametrize("mesh", [LINE, PLANE], ids=["8", "2x4"])
def test_each_slice_is_of_what_is_computed_before(mesh):
    step = sdy.partition(moved, mesh=mesh, in_shardings=P("x"))
    assert [c.kind for c in step.plan(X).collectives if c.wire_bytes] == ["all_to_all"]
    fused = _FUSED.findall(step.lower(X).compile().as_text())
    assert any("tanh" in text for text in fused)
    assert not [text for text in fused if " slice(" in text and ("tanh" in text or "multiply" in text)]
    np.testing.assert_allclose(step(X), transformed(X), rtol=1e-5)


def test_batches_and_derivatives_of_what_is_moved():
    step, batch = sdy.partition(moved, mesh=LINE, in_shardings=P("x")), np.stack([X, X + 1])
    np.testing.assert_allclose(jax.vmap(step)(batch), jax.vmap(transformed)(batch), rtol=1e-5)
    found = jax.jit(jax.grad(lambda x: step(x).sum()))(X)
    np.testing.assert_allclose(found, jax.grad(lambda x: transformed(x).sum())(X), rtol=1e-4, atol=1e-4)


def test_where_devices_are_not_known_nothing_is_in_between():
    assert "jit" not in str(jax.make_jaxpr(lambda x: computed_apart(x, Forms()))(X))
    assert "jit" in str(jax.make_jaxpr(lambda x: computed_apart(x, CPU.forms))(X))
    written = sdy.partition(moved, mesh=LINE, in_shardings=P("x")).plan(X).to_python()
    assert "lax.all_to_all" in written and "barrier" not in written


@pytest.mark.parametrize("dims", [("x", "y"), ("y", "x")])
def test_what_the_network_sends_is_smallest(dims):
    """Along the mesh's major axis blocks are gathered first and scattered last, whichever dimension that is of."""
    mesh = RefinedMesh.of(Mesh.of(x=2, y=4))
    axes = [(AxisRef(axis),) for axis in dims]
    whole = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)

    def moved(block):
        gathered = movement.all_gather(block, axes, mesh)
        return gathered, reductions.reduce_scatter(gathered, axes, "sum", mesh)

    found = jax.shard_map(moved, mesh=PLANE, in_specs=P(*dims), out_specs=(P(), P(*dims)), check_vma=False)
    sent = re.findall(r"(all_gather|reduce_scatter)\[.*?axis_name=\('(\w)',\)", str(jax.make_jaxpr(found)(whole)), re.S)
    assert sent == [("all_gather", "x"), ("all_gather", "y"), ("reduce_scatter", "y"), ("reduce_scatter", "x")]
    gathered, scattered = found(whole)
    np.testing.assert_array_equal(gathered, whole)
    np.testing.assert_array_equal(scattered, 8 * whole)
