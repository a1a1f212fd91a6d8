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
from sdy_jax.plan.profile import collectives_in_hlo, totals

MESH = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
RNG = np.random.default_rng(6)
X, W = RNG.standard_normal((64, 128), dtype=np.float32), RNG.standard_normal((128, 64), dtype=np.float32)


@pytest.fixture(autouse=True)
def in_context():
    """As jit, for bare specs."""
    with jax.set_mesh(MESH):
        yield


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


def trained(batch, split, sharded):
    """A step of a network in which products state their results: types of `up` are `[sharded, split]`."""

    def loss(params, x):
        h = jnp.tanh(jnp.einsum("bi,ij->bj", x, params["up"], out_sharding=P(batch, split)))
        return jnp.mean(jnp.einsum("bj,ji->bi", h, params["down"], out_sharding=P(batch)) ** 2)

    def step(params, x):
        value, slopes = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, slopes), value

    rng = np.random.default_rng(1)
    up, down = (rng.standard_normal(shape, dtype=np.float32) / 16 for shape in ((128, 256), (256, 128)))
    return step, {"up": on(up, sharded, split), "down": on(down, split, sharded)}, on(X, batch)


@pytest.mark.parametrize(
    "layouts", [(("a", "b"), None, None), ("a", "b", None), (("a", "b"), None, ("a", "b")), ("a", "b", "a")], ids=str
)
def test_steps_send_no_more_than_jits(layouts):
    with jax.set_mesh(MESH):
        step, *args = trained(*layouts)
        runs = [jit(step) for jit in (sdy.partition, jax.jit)]
        sent = [totals(collectives_in_hlo(run.lower(*args).compile().as_text())).wire_bytes for run in runs]
        ours, theirs = (run(*args) for run in runs)
    assert 0 < sent[0] <= sent[1] + 8  # the loss, a number, may be summed over more devices, which share the work
    for own, wanted in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert str(jax.typeof(own)) == str(jax.typeof(wanted))
        np.testing.assert_allclose(own, wanted, rtol=1e-4, atol=1e-6)


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


@pytest.mark.parametrize("layouts", ["global", "local", "propagated"])
def test_all_results_of_a_loop_have_their_types(layouts):
    """The gradient of a stack of layers is its second result, and unreduced, as the stack is reduced."""

    def loss(layers, x):
        return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0] ** 2)

    stack = on(np.stack([np.eye(128, dtype=np.float32) / 2] * 3))
    layers, x = reshard(stack, NamedSharding(MESH, P(reduced={"a"}))), on(X, "a")
    run = sdy.partition(jax.grad(loss), layouts=layouts)
    assert not [c for c in run.plan(layers, x).collectives if c.wire_bytes]
    slopes = run(layers, x)
    assert str(jax.typeof(slopes)) == "float32[3,128,128]{U:a}"
    np.testing.assert_allclose(
        reshard(slopes, NamedSharding(MESH, P())), jax.grad(loss)(np.asarray(stack), X), rtol=1e-4, atol=1e-4
    )
