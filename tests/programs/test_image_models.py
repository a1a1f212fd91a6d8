"""Models of images that are split over rows: numbers, and what their plans send."""

import jax
import numpy as np
import pytest
from comparing import largest_difference, mesh_of
from workloads import unet, vision_transformer

import sdy_jax as sdy


def drawn(shape_dtype):
    rng = np.random.default_rng(0)
    if shape_dtype.dtype == np.int32:
        return rng.integers(0, 16, shape_dtype.shape).astype(np.int32)
    return rng.normal(0, 0.2, shape_dtype.shape).astype(np.float32)


def gradient_bytes(weights, devices):
    """The all-reduce of all gradients."""
    return 2 * (devices - 1) / devices * sum(4 * np.prod(leaf.shape) for leaf in jax.tree.leaves(weights))


@pytest.mark.dear
@pytest.mark.parametrize("make", [lambda: vision_transformer(d=16, layers=1), unet], ids=["vit", "unet"])
def test_numbers_and_that_neither_images_nor_activations_are_gathered(make):
    workload, name = make(), "8"
    mesh, arguments = mesh_of(name), jax.tree.map(drawn, workload.arguments)
    ins, outs = workload.shardings(name)
    step = sdy.partition(workload.step(mesh, name), mesh=mesh, in_shardings=ins, out_shardings=outs)
    assert largest_difference(step(*arguments), jax.jit(workload.plain_step())(*arguments)) < 1e-5
    plan = step.plan(*arguments)
    assert not plan.notes
    kinds = plan.totals.by_kind()
    if workload.name == "unet":
        reduced = sum(sent for kind, (_, sent) in kinds.items() if kind != "collective_permute")
        assert reduced == pytest.approx(gradient_bytes(workload.arguments[0], 8), rel=0.01)
    else:
        op_by_op = sdy.partition(
            workload.step(mesh, name), mesh=mesh, in_shardings=ins, out_shardings=outs, layouts="local"
        ).plan(*arguments)
        keys_and_values = [c for c in op_by_op.collectives if c.kind == "all_gather"]
        assert all(c.shape[1] == 65 for c in keys_and_values)
        assert plan.wire_bytes < 0.5 * op_by_op.wire_bytes
    assert plan.repeated_flops < 0.02 * sum(w.flops * w.runs.times for w in plan.work)
