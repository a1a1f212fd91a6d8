"""Programs on devices whose memory is known: it is the limit of plans, and what does not fit says so."""

import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.ir.jax_shardings import bytes_text
from sdy_jax.plan.page.page import page_of
from sdy_jax.plan.record.recorded_plan import RecordedLayouts

CHIP = 15.75 * 2**30
"""The memory of a TPU v5e."""

MESH = AbstractMesh((16,), ("fsdp",), abstract_device=AbstractDevice("TPU v5 lite", 1, "tpu"))
LAYERS, WIDTH = 24, 16384
WEIGHTS = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
"""24 GiB; 1.5 on each of 16 chips."""

X = jax.ShapeDtypeStruct((16 * 8192, WIDTH), jnp.bfloat16)
"""A quarter of a GiB on each."""


def layer(h, w):
    return jnp.tanh(h @ w.astype(jnp.bfloat16)), None


def loss(weights, x):
    return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, weights)[0].astype(jnp.float32) ** 2)


def step(weights, momentum, x):
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, jax.grad(loss)(weights, x))
    return weights - 0.01 * momentum, momentum


def plan_of(fun=step, arguments=(WEIGHTS, WEIGHTS, X), specs=(P(None, "fsdp"), P(None, "fsdp"), P("fsdp")), **options):
    options = {"donate_argnums": (0, 1), "out_shardings": specs[:2]} | options
    return sdy.partition(fun, mesh=MESH, in_shardings=specs, **options).plan(*arguments)


def test_layers_are_gathered_in_loops_though_nothing_is_said_of_memory():
    """All at once they would take twelve GiB, rounded."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", sdy.PartitionWarning)
        plan = plan_of()
    assert plan.memory.available == CHIP and plan.memory.fits and plan.memory.peak < 0.8 * CHIP
    assert {record.times for record in plan.collectives if record.kind == "all_gather"} == {LAYERS}
    assert f"holds     {bytes_text(plan.memory.peak)} of 15.8 GiB at most" in str(plan)
    assert "does not fit" not in str(plan)


LARGE = jax.ShapeDtypeStruct((1 << 16, 16 * 6144), jnp.float32)
"""24 GiB."""


def replicated(x):
    return jnp.tanh(x)


def test_what_does_not_fit_is_planned_and_says_so():
    said = r"replicated: does not fit: arguments and results alone hold 48.0 GiB of 15.8 GiB on each device"
    with pytest.warns(sdy.PartitionWarning, match=said + r".*24.0 GiB of x: .*by in_shardings and out_shardings"):
        plan = plan_of(replicated, (LARGE,), (P(),), donate_argnums=(), out_shardings=P())
    assert not plan.memory.fits
    first, _, second = str(plan).splitlines()[:3]
    assert first.startswith("plan of replicated on mesh fsdp=16 (16 devices): does not fit: 48.0 GiB of 15.8 GiB; 0 ")
    assert second.startswith("does not fit: arguments and results alone hold 48.0 GiB of 15.8 GiB. To fit: split them")


def test_what_fits_but_for_its_temporaries_says_which():
    def called_back(x):
        jax.debug.callback(print, x)  # with all of it
        return jnp.tanh(x)

    said = (
        r"called_back: does not fit: .* on each device, the least that was found. The largest: 24.0 GiB of .* at .*py"
    )
    with pytest.warns(sdy.PartitionWarning, match=said):
        plan = plan_of(called_back, (LARGE,), (P("fsdp"),), donate_argnums=(), out_shardings=P("fsdp"))
    second = str(plan).splitlines()[2]
    assert second.startswith("does not fit: holds ") and "no plan found holds less" in second


def test_what_is_slower_than_op_by_op_says_what_that_would_hold():
    record = plan_of(replicated, (LARGE,), (P("fsdp"),), donate_argnums=(), out_shardings=P("fsdp")).record()
    costs = {"exposed": 3.0, "baseline_exposed": 2.0, "baseline_held": 48.0 * 2**30}
    layouts = RecordedLayouts(3.0, 2.0, 3.0, 2.0, None, **costs)
    line = page_of(replace(record, layouts=layouts)).splitlines()[2]
    assert "1.50 of the time: these would hold 48.0 GiB of 15.8 GiB, this plan 3.0 GiB" in line


def test_what_does_not_fit_a_stated_limit_is_an_error():
    with pytest.raises(sdy.MemoryLimitError, match="memory"):
        plan_of(replicated, (LARGE,), (P(),), donate_argnums=(), out_shardings=P(), memory="14GiB")


def test_a_stated_limit_replaces_that_of_the_device():
    plan = plan_of(replicated, (LARGE,), (P(),), donate_argnums=(), out_shardings=P(), memory="50GiB")
    assert plan.memory.available == 50 * 2**30 and plan.memory.fits and "does not fit" not in str(plan)


def test_changes_that_make_it_fit_are_offered():
    """Though they send no less."""
    with pytest.warns(sdy.PartitionWarning, match="does not fit"):
        plan = plan_of(replicated, (LARGE,), (P(),), donate_argnums=(), out_shardings=sdy.AUTO)
    assert any(fix.memory > 8 * 2**30 for fix in plan.fixes), plan.fixes
