"""Plans for a machine on devices of another kind: of what jax lowers for the machine, run by the devices."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.base.jax_lowering import PORTABLE, rules_for

MESH = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
SIZES = np.array([10, 20, 30, 4], np.int32)


def well_posed(x: jax.Array) -> jax.Array:
    return x @ x.mT + 8 * jnp.eye(8)


def pooled(x: jax.Array) -> jax.Array:
    return jnp.sum(jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2), (1, 2, 2), "VALID") ** 2)


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "ragged_dot_general": (lambda x: jax.lax.ragged_dot(x, jnp.ones((4, 8, 16)), SIZES), (64, 8)),
    "threefry2x32": (lambda x: x + jax.random.uniform(jax.random.key(0), x.shape), (64, 8)),
    "random_gamma": (lambda x: jax.random.gamma(jax.random.key(0), jnp.abs(x) + 1), (64, 8)),
    "cholesky": (lambda x: jnp.linalg.cholesky(well_posed(x)), (16, 8, 8)),
    "triangular_solve": (
        lambda x: jax.scipy.linalg.solve_triangular(jnp.tril(well_posed(x)), x, lower=True),
        (16, 8, 8),
    ),
    "cumsum": (lambda x: jnp.cumsum(x, 1), (64, 8)),
    "fft": (lambda x: jnp.abs(jnp.fft.fft(x)), (64, 8)),
    "scatter-add": (lambda x: jnp.zeros((32, 8)).at[jnp.arange(64) % 32].add(x), (64, 8)),
    "select_and_scatter_add": (jax.grad(pooled), (8, 8, 8)),
}


@pytest.mark.parametrize("machine", ["tpu v5e", "h100"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_devices_run_what_a_machine_is_planned_for(name: str, machine: str) -> None:
    fun, shape = PROGRAMS[name]
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    costs = sdy.CostModel.of_machine(machine, MESH)
    step = sdy.partition(fun, mesh=MESH, in_shardings=P("x"), costs=costs)
    np.testing.assert_allclose(step(x), fun(x), rtol=1e-4, atol=1e-5)
    called = re.findall(r"custom_call @(\w+)", step.plan(x).mlir("traced"))
    assert not called or name not in PORTABLE["tpu" if machine.startswith("tpu") else "cuda"]


@pytest.mark.parametrize("platform", PORTABLE)
def test_a_portable_primitive_is_lowered_to_no_call_of_a_library(platform: str) -> None:
    named = [name for name in PORTABLE[platform] if name in PROGRAMS]
    assert len(named) >= 4
    for name in named:
        fun, shape = PROGRAMS[name]
        lowered = jax.jit(fun).trace(jnp.zeros(shape)).lower(lowering_platforms=(platform,)).as_text()
        assert "custom_call" not in lowered, name


def test_products_of_groups_cost_what_they_cost_on_the_machine() -> None:
    """Each row meets one matrix, not all as in the form that jax has for CPUs."""

    def experts(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(x, w, sizes)

    shapes = (8192, 512), (16, 512, 256), (16,)
    given = [jax.ShapeDtypeStruct(s, jnp.bfloat16 if len(s) > 1 else jnp.int32) for s in shapes]
    costs = sdy.CostModel.of_machine("tpu v5e", MESH)
    plan = sdy.partition(experts, mesh=MESH, in_shardings=(P("x"), P(), P()), costs=costs).plan(*given)
    (row,) = [row for row in plan.table("ops") if "ragged_dot" in row.op]
    assert row.flops == 2 * 8192 * 512 * 256 / 8
    assert sum(row.flops for row in plan.table("ops")) < 1.1 * row.flops


def test_devices_of_the_machines_own_platform_need_no_other_rules() -> None:
    assert rules_for("tpu", "tpu") == rules_for("", "cpu") == rules_for("cpu", "cpu") == ()
