"""FFI calls under `jax.vmap`: the dimensions that it puts in front are split, whatever is called."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.testing import assert_same

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
X = np.random.default_rng(0).standard_normal((4, 8, 8, 8)).astype(np.float32)


@pytest.fixture(scope="module", autouse=True)
def lapack() -> None:
    """jax looks for the library's functions when it first calls one of them."""
    jnp.linalg.inv(jnp.eye(3))


def factored(x: jax.Array, method: str = "broadcast_all") -> Any:
    """An LU decomposition by LAPACK."""
    n = x.shape[-1]
    types = [((n, n), x.dtype), ((n,), jnp.int32), ((), jnp.int32)]
    results = [jax.ShapeDtypeStruct(x.shape[:-2] + shape, dtype) for shape, dtype in types]
    layouts = {"input_layouts": [(0, 1)], "output_layouts": [(0, 1), (0,), ()]}
    return jax.ffi.ffi_call("lapack_sgetrf_ffi", tuple(results), vmap_method=method, **layouts)(x)


def filtered(*xs: Any, method: str) -> jax.Array:
    """A target of which nothing is known."""
    result = jax.ShapeDtypeStruct(xs[0].shape, xs[0].dtype)
    found: jax.Array = jax.ffi.ffi_call("row_filter", result, vmap_method=method)(*xs)
    return found


@pytest.mark.parametrize("spec", [P("model"), P(("data", "model"))])
def test_a_mapped_dimension_is_split(spec: P) -> None:
    plan = assert_same(jax.vmap(factored), X[0], mesh=MESH, in_shardings=spec)
    assert not plan.collectives and not plan.notes, plan


def test_each_vmap_adds_one() -> None:
    plan = assert_same(jax.vmap(jax.vmap(factored)), X, mesh=MESH, in_shardings=P("data", "model"))
    assert not plan.collectives
    inner_last = jax.vmap(jax.vmap(factored, in_axes=1), in_axes=1)  # the mapped dimensions are moved to the front
    assert not assert_same(inner_last, X.transpose(2, 0, 1, 3), mesh=MESH, in_shardings=P()).notes


def test_matrix_dimensions_of_mapped_calls_stay_whole() -> None:
    plan = assert_same(jax.vmap(factored), X[0], mesh=MESH, in_shardings=P(None, "model"))
    assert "cannot be split along dim 1" in str(plan.notes[0])


@pytest.mark.parametrize("method", ["broadcast_all", "expand_dims"])
def test_so_it_is_with_targets_of_which_nothing_is_known(method: str) -> None:
    mapped = jax.vmap(lambda x, y: filtered(x, y, method=method), in_axes=(0, None))
    plan = sdy.partition(mapped, mesh=MESH, in_shardings=(P("model"), P())).plan(X[0], X[0, 0])
    assert not [c for c in plan.collectives if c.wire_bytes] and not plan.notes, plan


def test_calls_that_nobody_maps_are_whole() -> None:
    step = sdy.partition(lambda x: filtered(x, method="broadcast_all"), mesh=MESH, in_shardings=P("model"))
    assert "has no sharding rule" in str(step.plan(X[0]).notes[0])


def test_a_method_that_maps_in_a_loop_needs_nothing() -> None:
    assert_same(jax.vmap(lambda x: factored(x, "sequential")), X[0], mesh=MESH, in_shardings=P("model"))


def test_jit_does_not_see_the_difference() -> None:
    mapped = jax.jit(jax.vmap(factored))
    for ours, jits in zip(jax.jit(mapped)(X[0]), map(np.stack, zip(*map(factored, X[0]), strict=True)), strict=True):
        np.testing.assert_array_equal(ours, jits)
