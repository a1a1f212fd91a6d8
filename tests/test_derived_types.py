"""Types on Explicit axes and the planner: what the user wrote is kept, what JAX's rules derived is a proposal."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

MESH = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
RNG = np.random.default_rng(6)
X, W = RNG.standard_normal((64, 128), dtype=np.float32), RNG.standard_normal((128, 64), dtype=np.float32)


def on(array, *entries, mesh=MESH):
    return jax.device_put(array, NamedSharding(mesh, P(*entries)))


def summed(x):
    """The sum has the type of whole rows on each device of `b`; what is stated of it is less."""
    return reshard(jnp.sin(x).sum(1), P(("a", "b")))


def test_a_derived_type_gives_way_to_what_sends_less():
    x = on(X, "a", "b")
    cheap, typed = (sdy.partition(summed, layouts=layouts).plan(x) for layouts in ("global", "propagated"))
    assert {c.kind for c in cheap.collectives} == {"reduce_scatter"}
    assert "all_reduce" in {c.kind for c in typed.collectives} and cheap.wire_bytes < typed.wire_bytes
    for layouts in ("global", "local", "propagated"):
        np.testing.assert_allclose(sdy.partition(summed, layouts=layouts)(x), np.sin(X).sum(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layouts", ["local", "propagated"])
def test_what_is_written_is_kept(layouts):
    """As `sdy.reshard` and constraints are on Auto axes."""
    run = sdy.partition(lambda x: reshard(reshard(x * 2, P()) + 1, P("a", "b")), layouts=layouts)
    x = on(X, "a", "b")
    assert {c.kind for c in run.plan(x).collectives if c.wire_bytes} == {"all_gather"}
    np.testing.assert_allclose(run(x), X * 2 + 1, rtol=1e-6)


def test_with_propagated_layouts_a_stated_sum_is_reduced_there():
    run = sdy.partition(
        lambda x: reshard(jnp.einsum("ij->i", x, out_sharding=P("a")), P(("a", "b"))), layouts="propagated"
    )
    x = on(X, "a", "b")
    assert {c.kind for c in run.plan(x).collectives if c.wire_bytes} == {"all_reduce"}
    np.testing.assert_allclose(run(x), X.sum(1), rtol=1e-4, atol=1e-5)


def test_types_of_carries_are_proposals_too():
    """Rows are split further in the loop, which saves work that all devices along `b` would repeat."""

    def looped(x, w):
        return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)[0].sum()

    plan = sdy.partition(looped).plan(on(X, "a", None), on(np.ones((128, 128), np.float32) / 128))
    assert "64@(a,b)" in str(plan) and not plan.repeated_flops


@pytest.mark.parametrize("layouts", ["global", "local", "propagated"])
def test_unreduced_values_stay_so(layouts):
    def f(x, w):
        terms = jnp.dot(x, w, out_sharding=P("a", unreduced={"b"}))
        return reshard(terms + terms, P("a"))

    run, args = sdy.partition(f, layouts=layouts), (on(X, "a", "b"), on(W, "b"))
    np.testing.assert_allclose(run(*args), 2 * X @ W, rtol=1e-4, atol=1e-4)
    assert [c.kind for c in run.plan(*args).collectives] == ["all_reduce"]


def test_why_names_the_ops_whose_rules_gave_a_type():
    def f(x, w):
        h = jnp.tanh(x @ w)
        return h.T

    plan = sdy.partition(f).plan(on(X, "a"), on(W, None, "b"))
    chain = plan.why("result").chains[0]
    assert [(link.kind, link.op) for link in chain.links] == [
        ("type", "func.return"),
        ("type", "stablehlo.transpose"),
        ("type", "stablehlo.tanh"),
        ("type", "stablehlo.dot_general"),
        ("annotation", ""),
    ]
    assert "operand 1 of dot_general" in chain.links[3].text and "JAX's rule" in chain.links[3].text
    assert chain.links[4].text == "the layout of the array passed as w: P(None, 'b')"


def test_why_names_what_is_written():
    plan = sdy.partition(lambda x: reshard(jnp.sin(x), P(None, "b"))).plan(on(X, "a"))
    assert "sharding constraint P(None, 'b')" in str(plan.why("result"))


def test_plans_on_auto_axes_know_nothing_of_types():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    plan = sdy.partition(lambda x, w: jnp.tanh(x @ w), mesh=mesh).plan(
        on(X, "a", mesh=mesh), on(W, None, "b", mesh=mesh)
    )
    assert "derived" not in plan.mlir("traced") and "sharding" not in plan.mlir("traced").split("{\n", 2)[2]
