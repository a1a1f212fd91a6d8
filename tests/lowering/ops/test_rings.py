"""Products in rings, on blocks of eight devices, beside gathering and scattering."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.ir.jax_shardings import mesh_from_jax
from sdy_jax.ir.meshes import AxisRef
from sdy_jax.lowering.ops.collectives.movement import Gathered, Numbers, Product, Ring
from sdy_jax.plan.profile import collectives_in_hlo, totals
from sdy_jax.runtime.meshes import RefinedMesh

RNG = np.random.default_rng(0)
# batch, then rows, then what is contracted; and batch, what is contracted, columns
NUMBERS = Numbers(((2,), (1,)), ((0,), (0,)))
X = RNG.normal(size=(16, 16, 16)).astype(np.float32)
W = RNG.normal(size=(16, 16, 16)).astype(np.float32)


def multiply(x, w):
    return lax.dot_general(x, w, (NUMBERS.contracting, NUMBERS.batching))


def on_shards(mesh, run, in_specs, out_specs):
    whole = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(whole)(X, W)


def ring_of(mesh, names):
    axes = [AxisRef(name) for name in names]
    return Ring(axes, RefinedMesh.of(mesh_from_jax(mesh), axes))


def split(dim, names):
    return P(*(names if d == dim else None for d in range(3)))


@pytest.mark.parametrize("names", [("data",), ("model",), ("data", "model"), ("model", "data")])
@pytest.mark.parametrize("operand", [0, 1])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_gathered(mesh, names, operand, dim):
    ring = ring_of(mesh, names)

    def run(x, w):
        block, other = (w, x) if operand else (x, w)
        return Gathered(block, dim, ring).times(other, operand, NUMBERS, multiply)

    specs = [P(), P()]
    specs[operand] = split(dim, names)
    np.testing.assert_allclose(on_shards(mesh, run, tuple(specs), P()), X @ W, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("names", [("data",), ("model",), ("data", "model"), ("model", "data")])
@pytest.mark.parametrize("dim", [1, 2])
def test_scattered(mesh, names, dim):
    ring = ring_of(mesh, names)

    def run(x, w):
        return Product(x, w, NUMBERS, multiply).scattered(dim, ring)

    specs = split(2, names), split(1, names)
    found = on_shards(mesh, run, specs, split(dim, names))
    np.testing.assert_allclose(found, X @ W, rtol=1e-4, atol=1e-4)


def test_blocks_of_odd_sizes_go_one_way(mesh):
    ring = ring_of(mesh, ("data", "model"))

    def run(x, w):
        return Product(x[:, :8], w, NUMBERS, multiply).scattered(1, ring)

    specs = split(2, ("data", "model")), split(1, ("data", "model"))
    found = on_shards(mesh, run, specs, split(1, ("data", "model")))
    np.testing.assert_allclose(found, (X[:, :8] @ W), rtol=1e-4, atol=1e-4)


def test_nothing_but_permutes_is_sent(mesh):
    ring = ring_of(mesh, ("data", "model"))

    def run(x, w):
        return Gathered(x, 1, ring).times(w, 0, NUMBERS, multiply)

    whole = jax.shard_map(run, mesh=mesh, in_specs=(split(1, ("data", "model")), P()), out_specs=P(), check_vma=False)
    text = jax.jit(whole).lower(jnp.asarray(X), jnp.asarray(W)).as_text()
    assert text.count("stablehlo.collective_permute") == 7
    assert "all_gather" not in text


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_nothing_is_written_before_the_parts_of_a_product(mesh, platform):
    ring = ring_of(mesh, ("data", "model"))

    def run(x, w):
        return Gathered(x, 1, ring).times(w, 0, NUMBERS, multiply)

    whole = jax.shard_map(run, mesh=mesh, in_specs=(split(1, ("data", "model")), P()), out_specs=P(), check_vma=False)
    text = jax.jit(whole).trace(jnp.asarray(X), jnp.asarray(W)).lower(lowering_platforms=(platform,)).as_text()
    assert text.count("AllocateBuffer") == 1
    assert "dense<0.000000e+00>" not in text


FAST = sdy.CostModel(latency=1e-7, flop=1e-11, bandwidth={"data": 1e9, "model": 1e9}, memory=1e-13)
"""A machine on which products take about as long as sending what they take."""

ROWS = jnp.asarray(RNG.normal(size=(128, 64)), jnp.float32)
FIRST, UP, DOWN = (
    jnp.asarray(RNG.normal(size=shape) / np.sqrt(shape[-2]), jnp.float32)
    for shape in ((64, 64), (3, 64, 1024), (3, 1024, 64))
)


def rings_of(plan):
    return [record.kind for record in plan.collectives if record.hidden]


def layer(x, up, down):
    return jnp.tanh(x @ up) @ down


def layered(mesh, costs):
    """A tensor-parallel layer of rows that are split along its axis before and after, as between two of them."""
    return sdy.partition(
        lambda x, around, up, down: layer(jnp.tanh(x @ around), up, down) @ around,
        mesh=mesh,
        in_shardings=(P("model"), P(), P(None, "model"), P("model")),
        out_shardings=P("model"),
        costs=costs,
    )


def test_a_layer_whose_rows_are_gathered_and_scattered(mesh):
    args = ROWS, FIRST, UP[0], DOWN[0]
    f = layered(mesh, FAST)
    plan = f.plan(*args)
    assert rings_of(plan) == ["all_gather", "reduce_scatter"]
    assert "in a ring with it" in str(plan)
    assert plan.time.hidden == sum(record.hidden for record in plan.collectives) > 0
    assert plan.time.total == plan.time.compute + plan.time.communication - plan.time.hidden
    assert " of it hidden)" in plan.headline
    np.testing.assert_allclose(f(*args), f.__wrapped__(*args), rtol=1e-4, atol=1e-4)
    text = f.lower(*args).compile().as_text()
    assert totals(collectives_in_hlo(text)).wire_bytes == plan.wire_bytes
    assert "collective-permute" in text and "reduce-scatter" not in text


def test_rings_inside_of_loops_and_derivatives(mesh):
    def loss(weights, x):
        return jnp.sum(jax.lax.scan(lambda x, weights: (x + layer(x, *weights), None), x, weights)[0] ** 2)

    specs = (P(None, None, "model"), P(None, "model")), P("model")
    f = sdy.partition(jax.grad(loss), mesh=mesh, in_shardings=specs, costs=FAST)
    assert "reduce_scatter" in rings_of(f.plan((UP, DOWN), ROWS))
    for found, wanted in zip(f((UP, DOWN), ROWS), jax.grad(loss)((UP, DOWN), ROWS), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("costs", "why"),
    [
        (sdy.CostModel(), "bytes know no time"),
        (sdy.CostModel(latency=1.0, flop=1e-11, bandwidth={"data": 1e9, "model": 1e9}), "every hop takes long"),
    ],
)
def test_no_ring_where_it_saves_nothing(mesh, costs, why):
    assert not rings_of(layered(mesh, costs).plan(ROWS, FIRST, UP[0], DOWN[0])), why


def test_what_nothing_waits_for_is_left_to_the_scheduler(mesh):
    """Rows of arguments that are gathered, and those of results that are scattered."""
    f = sdy.partition(
        layer, mesh=mesh, in_shardings=(P("model"), P(None, "model"), P("model")), out_shardings=P("model"), costs=FAST
    )
    plan = f.plan(ROWS, UP[0], DOWN[0])
    assert {"all_gather", "reduce_scatter"} <= {record.kind for record in plan.collectives}
    assert not rings_of(plan)


def in_a_loop(rows, x, up, down):
    return jax.lax.fori_loop(0, 5, lambda _, x: x / 2 + layer(rows, up * x.mean(), down), x)


def in_a_branch(rows, x, up, down):
    return jax.lax.cond(x[0, 0] < 0, lambda: layer(rows, up, down), lambda: x)


@pytest.mark.parametrize("user", [in_a_loop, in_a_branch])
def test_what_is_gathered_before_a_loop_or_branch_is_sent_there(mesh, user):
    f = sdy.partition(
        lambda x, around, up, down: user(jnp.tanh(x @ around), x, up, down) @ around,
        mesh=mesh,
        in_shardings=(P("model"), P(), P(None, "model"), P("model")),
        out_shardings=P("model"),
        costs=FAST,
    )
    args = ROWS, FIRST, UP[0], DOWN[0]
    plan = f.plan(*args)
    assert "all_gather" in {record.kind for record in plan.collectives if record.depth == 0}
    assert "all_gather" not in rings_of(plan)
    np.testing.assert_allclose(f(*args), f.__wrapped__(*args), rtol=1e-4, atol=1e-4)
