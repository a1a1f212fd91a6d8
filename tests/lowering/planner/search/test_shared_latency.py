"""What waits for a collective does not run with it, and small programs are planned by what they take when placed."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from planned_steps import Program, shapes

import sdy_jax as sdy
from sdy_jax.lowering.planner.search import layout_search

MESH = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
COSTS = sdy.CostModel.of_machine("tpu v5e", MESH)


def sending(function):
    """What the collectives of a function of a split vector cost, as it is propagated."""
    return Program(function, shapes((4096,)), MESH, P(("data", "model")), costs=COSTS).baseline.sending


def test_collectives_that_wait_for_each_other_share_no_latency():
    def after_each_other(x):
        centred = x - jnp.sum(x) / x.size
        return jnp.sum(centred * centred)

    def at_once(x):
        return jnp.sum(x) + jnp.max(x) * jnp.sum(x * x)

    once = sending(jnp.sum)
    assert sending(after_each_other) == pytest.approx(2 * once, rel=1e-3)
    assert sending(at_once) < 2.5 * once  # both sums as one, and the maximum


def orthogonalized(g, stated=None):
    """Newton-Schulz steps, as Muon takes them."""
    x = g if stated is None else jax.lax.with_sharding_constraint(g, NamedSharding(MESH, stated))
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x


def trained(weights, x, y, stated=None):
    """A step of a perceptron, whose hidden values may be stated."""

    def loss(weights):
        hidden = jax.nn.relu(x @ weights[0])
        if stated is not None:
            hidden = jax.lax.with_sharding_constraint(hidden, NamedSharding(MESH, stated))
        return jnp.mean((hidden @ weights[1] - y) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def repeated(weights, x, stated=None):
    """A scan over layers so small that to gather them and repeat some work is quicker than to share it out."""
    if stated is not None:
        weights = jax.lax.with_sharding_constraint(weights, NamedSharding(MESH, stated))
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0]


BOTH = P("data", "model")
PROGRAMS = {
    "Newton-Schulz": (orthogonalized, shapes((256, 256)), (BOTH,), [P(), BOTH]),
    "perceptron": (
        trained,
        [tuple(shapes((128, 512), (512, 128))), *shapes((256, 128), (256, 128))],
        (BOTH, P("data"), P("data")),
        [P(), P("data"), P("model"), P(None, "model")],
    ),
    "scanned": (repeated, shapes((32, 64, 64), (128, 64)), (P(None, *BOTH), BOTH), [P()]),
}


def times(name):
    """The time of a program as it is, and with each of some statements, by the plan."""
    function, arguments, given, statements = PROGRAMS[name]
    for stated in (None, *statements):
        run = sdy.partition(
            lambda *args, stated=stated: function(*args, stated=stated), mesh=MESH, in_shardings=given, costs=COSTS
        )
        yield run.plan(*arguments).time.total


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_statement_makes_a_small_program_quicker(name):
    free, *stated = times(name)
    assert free <= 1.01 * min(stated)


@pytest.mark.parametrize("name", ["Newton-Schulz", "perceptron"])
def test_without_latencies_of_their_own_a_statement_would(name, monkeypatch):
    free = next(times(name))
    monkeypatch.setattr(layout_search, "_FEW", 0)
    assert next(times(name)) > 1.02 * free
