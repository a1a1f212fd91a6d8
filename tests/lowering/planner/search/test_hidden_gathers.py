"""Programs are compared by what is hidden: layers that loops gather beside their work, and whole stacks before them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

MESH = AbstractMesh((64,), ("fsdp",))
DIM, WIDTH, LAYERS = 4096, 14336, 32


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def layer(x, weights):
    up, down = (w.astype(x.dtype) for w in weights)
    return x + jax.nn.silu(x @ up) @ down


def loss(weights, x):
    x, _ = jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, weights)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def step(weights, x):
    return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, jax.grad(loss)(weights, x))


def plan(tokens, bandwidth=50e9, memory=None):
    """Fully sharded on 64 H100s, one sequence each; `bandwidth`: of each device."""
    specs = P(None, "fsdp"), P(None, None, "fsdp")
    function = sdy.partition(
        step,
        mesh=MESH,
        in_shardings=(specs, P("fsdp")),
        out_shardings=specs,
        donate_argnums=0,
        costs=sdy.CostModel.of_machine("h100", MESH, {"fsdp": bandwidth}),
        memory=memory,
    )
    weights = shape(LAYERS, DIM, WIDTH), shape(LAYERS, WIDTH, DIM)
    return function.plan(weights, shape(64, tokens, DIM, dtype=jnp.bfloat16))


def in_loops(found):
    return [record for record in found.collectives if record.kind == "all_gather" and record.depth]


@pytest.mark.parametrize(("tokens", "memory"), [(32768, "12GiB"), (65536, "28GiB")])
def test_less_memory_gives_no_faster_plan(tokens, memory):
    """Gathered before the loop nothing hides a layer; in it the layer before does."""
    free, limited = plan(tokens), plan(tokens, memory=memory)
    assert in_loops(free) and free.time.hidden > 0.4 * free.time.communication
    assert limited.memory.peak <= 1.0001 * free.memory.peak
    assert free.time.total <= limited.time.total


def test_what_nothing_hides_is_gathered_once():
    """Few tokens: a layer's work hides a tenth of its gather, so each weight is gathered for both passes."""
    assert not in_loops(plan(1024))
