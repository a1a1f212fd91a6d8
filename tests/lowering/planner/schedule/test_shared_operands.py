"""Operands that several products would compute are arrays on TPUs, where that reads less."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE

import sdy_jax as sdy

MESH = AbstractMesh((8,), ("x",))
ROWS, DIM, WIDTH = 8192, 1024, 2048


def gated(x, weights):
    gate, up, down = weights
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def plain(x, weights):
    gate, _, down = weights
    return jax.nn.relu(x @ gate) @ down


def smooth(x, weights):
    """The gradient of its activation is computed of two arrays, for two products."""
    gate, _, down = weights
    return jax.nn.gelu(x @ gate) @ down


def gradient(function):
    return jax.grad(lambda x, weights: jnp.sum(function(x, weights).astype(jnp.float32)), (0, 1))


def arguments(rows=ROWS, dim=DIM, width=WIDTH, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct((rows, dim), dtype), tuple(
        jax.ShapeDtypeStruct(shape, dtype) for shape in ((dim, width), (dim, width), (width, dim))
    )


def shared(function, args, machine="tpu v5e", **options):
    """The types of what is an array for several products, in a plan for a machine."""
    costs = sdy.CostModel.of_machine(machine, MESH)
    f = sdy.partition(gradient(function), mesh=MESH, in_shardings=(P("x"), P()), costs=costs, **options)
    lines = f.plan(*args).mlir("partitioned").splitlines()
    return [
        line.split(" -> ")[-1].split(" loc")[0] for line in lines if "@sdy_jax.after(" in line and ", %" not in line
    ]


@pytest.mark.parametrize(("function", "count"), [(gated, 2), (smooth, 1), (plain, 0)])
def test_gradients_of_activations_are_written_once(function, count):
    assert shared(function, arguments()) == [f"tensor<{ROWS}x{WIDTH}xbf16>"] * count


def test_other_compilers_write_them_anyway():
    assert not shared(gated, arguments(), "h100")


def test_narrow_products_read_them_once():
    """As those of attention's heads do scores."""
    assert not shared(gated, arguments(dim=128))


def test_small_arrays_are_left_to_the_compiler():
    assert not shared(gated, arguments(rows=1024))


def test_large_arrays_are_not_held_for_it():
    assert shared(gated, arguments(rows=2**18)) and not shared(gated, arguments(rows=2**18), memory="6GiB")


def test_numbers_are_the_same():
    rng = np.random.default_rng(0)
    args = jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape) / 16, s.dtype), arguments(16384, 512, 512))
    costs = sdy.CostModel.of_machine("tpu v5e", LINE.axis_names)
    f = sdy.partition(gradient(gated), mesh=LINE, in_shardings=(P("x"), P()), costs=costs)
    assert "@sdy_jax.after(" in f.plan(*args).mlir("partitioned")
    for found, wanted in zip(*map(jax.tree.leaves, (f(*args), gradient(gated)(*args))), strict=True):
        np.testing.assert_allclose(np.float32(found), np.float32(wanted), rtol=0.1, atol=0.3)
