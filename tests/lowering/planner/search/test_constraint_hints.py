"""Constraints as hints: the program is planned with and without them, and what takes less runs."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
SPECS = {"up": P(None, "model"), "down": P("model")}
ROWS, WIDTH, HIDDEN = 64, 128, 256
WHOLE, BY_ROWS, BY_HIDDEN = P("data", None), P(("data", "model")), P("data", "model")


def held(x, spec):
    return x if spec is None else jax.lax.with_sharding_constraint(x, NamedSharding(MESH, spec))


def loss(weights, x, inside=None, after=None):
    """That of a layer, with constraints on what its products make."""
    hidden = held(jnp.tanh(x @ weights["up"]), inside)
    return jnp.sum(held(jnp.sin(hidden) @ weights["down"], after) ** 2)


def step(weights, x, **constraints):
    return jax.value_and_grad(partial(loss, **constraints))(weights, x)


def arguments():
    rng = np.random.default_rng(0)
    weights = {"up": rng.normal(0, 0.1, (WIDTH, HIDDEN)), "down": rng.normal(0, 0.1, (HIDDEN, WIDTH))}
    return jax.tree.map(np.float32, weights), rng.normal(size=(ROWS, WIDTH)).astype(np.float32)


def partitioned(how, **constraints):
    return sdy.partition(
        partial(step, **constraints),
        mesh=MESH,
        in_shardings=(SPECS, P("data")),
        out_shardings=(P(), SPECS),
        constraints=how,
    )


@pytest.mark.parametrize("inside", [WHOLE, BY_ROWS, BY_HIDDEN])
@pytest.mark.parametrize("after", [None, WHOLE, BY_ROWS])
def test_numbers_are_those_of_the_function_and_no_plan_is_dearer_than_with_constraints(inside, after):
    args = arguments()
    kept, hints = (partitioned(how, inside=inside, after=after) for how in ("kept", "hints"))
    assert hints.plan(*args).time.total <= kept.plan(*args).time.total * (1 + 1e-9)
    for mine, plain in zip(jax.tree.leaves(hints(*args)), jax.tree.leaves(step(*args)), strict=True):
        np.testing.assert_allclose(mine, plain, rtol=2e-4, atol=2e-4)


def test_a_dear_constraint_is_not_paid_for():
    """Values that are stated whole are gathered only where they are."""
    args = arguments()
    plain, kept = (partitioned("kept", inside=spec, after=spec).plan(*args) for spec in (None, P()))
    assert kept.wire_bytes > 1.05 * plain.wire_bytes
    assert partitioned("hints", inside=P(), after=P()).plan(*args).wire_bytes == plain.wire_bytes


def test_what_is_said_of_the_border_stays():
    args = arguments()
    _, gradients = partitioned("hints", inside=WHOLE)(*args)
    assert {name: leaf.sharding.spec for name, leaf in gradients.items()} == SPECS


def test_a_constraint_without_which_the_plan_is_dearer_is_kept():
    """Layouts are propagated from them: what a hint splits is split, though arguments and results say nothing."""
    x = jax.ShapeDtypeStruct((ROWS, ROWS), jnp.float32)
    function = sdy.partition(lambda x: held(jnp.sin(x) @ x.T, BY_HIDDEN), mesh=MESH, constraints="hints")
    assert function.plan(x).output_specs == BY_HIDDEN


def test_a_plan_without_them_is_saved_and_pinned(tmp_path):
    args, function = arguments(), partitioned("hints", inside=P(), after=P())
    plan = function.plan(*args)
    plan.save(tmp_path / "plan.json")
    pinned = sdy.partition(
        partial(step, inside=P(), after=P()),
        mesh=MESH,
        in_shardings=(SPECS, P("data")),
        out_shardings=(P(), SPECS),
        plan=tmp_path / "plan.json",
    )
    assert "constraints='hints'" in plan.record().options
    assert pinned.plan(*args).mlir("partitioned") == plan.mlir("partitioned")
