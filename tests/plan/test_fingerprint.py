"""`Plan.fingerprint`: equal for equal plans in every process and run, and different for different collectives."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

PROGRAM = """
import os
os.environ["JAX_PLATFORMS"], os.environ["XLA_FLAGS"] = "cpu", "--xla_force_host_platform_device_count=8"
import jax, jax.numpy as jnp, sdy_jax as sdy
from jax.sharding import PartitionSpec as P
mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
def step(w, x):
    def layer(h, w):
        return jnp.tanh(h @ w["up"]) @ w["down"], h.sum()
    return jax.grad(lambda w: jax.lax.scan(layer, x, w)[0].sum())(w)
w = {"up": jnp.ones((3, 16, 32)), "down": jnp.ones((3, 32, 16))}
specs = {"up": P(None, "data", "model"), "down": P(None, "model")}
plan = sdy.partition(step, mesh=mesh, in_shardings=(specs, P("data"))).plan(w, jnp.ones((8, 16)))
print(plan.fingerprint(), len(plan.collectives), hash(plan.mlir()) == 0)
print(plan.mlir())
"""


@pytest.mark.more("two processes")
def test_it_is_the_same_in_every_run_and_for_every_seed_of_hashes() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM], env={**environment, "PYTHONHASHSEED": seed}, stdout=-1, stderr=-1
        )
        for seed in ("1", "2")
    ]
    first, second = (process.communicate(timeout=120) for process in running)
    assert first[0] == second[0] and int(first[0].split()[1]) > 3, first[1]


def plan_of(mesh: Mesh, fun: object = None, **options: object) -> sdy.Plan:
    options = {"in_shardings": P("data", "model"), "out_shardings": P(), **options}
    return sdy.partition(fun or (lambda x: x.sum(0)), mesh=mesh, **options).plan(jnp.ones((8, 16)))


def test_it_depends_on_kinds_axes_types_order_loops_and_mesh(mesh: Mesh) -> None:
    wide = Mesh(mesh.devices.reshape(4, 2), mesh.axis_names)

    def looped(times: int) -> sdy.Plan:
        return plan_of(mesh, lambda x: jax.lax.fori_loop(0, times, lambda _, s: s + x.sum(0) * s.mean(), jnp.ones(16)))

    plans = [
        plan_of(mesh),
        plan_of(wide),
        plan_of(mesh, in_shardings=P("data")),
        plan_of(mesh, lambda x: x.max(0)),
        plan_of(mesh, lambda x: (x.sum(0), x.max(0))),
        plan_of(mesh, lambda x: (x.max(0), x.sum(0))),
        plan_of(mesh, lambda x: x.astype(jnp.bfloat16).sum(0)),
        looped(3),
        looped(4),
    ]
    assert len({plan.fingerprint() for plan in plans}) == len(plans)
    assert len(plans[0].fingerprint()) == 32


def test_it_does_not_depend_on_lines_names_and_what_devices_compute_alone(mesh: Mesh) -> None:
    assert plan_of(mesh).fingerprint() == plan_of(mesh, lambda y: (3 * y).sum(0)).fingerprint()
