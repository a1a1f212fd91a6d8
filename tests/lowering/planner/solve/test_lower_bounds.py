"""Bytes of compiled training steps beside what no partitioning can go below, or what experts would write by hand.

g devices, W bytes of weights, T bytes of one activation.
"""

import benchmarks  # noqa: F401 - makes the scripts importable
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE, PLANE

# isort: split
import training
from comparing import largest_difference
from workloads import Dims

import sdy_jax as sdy
from sdy_jax.plan.profile import collectives_in_hlo, totals

pytestmark = pytest.mark.filterwarnings("ignore:jax.nn.one_hot input")

G = LINE.size
SHARE = (G - 1) / G


def descent(loss):
    def step(weights, *batch):
        value, gradients = jax.value_and_grad(loss)(weights, *batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    return step


def size(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def specs(meanings):
    """What has a meaning is split over the mesh."""

    def spec(dims):
        return P(*["x" if meaning else None for meaning in dims])

    return jax.tree.map(spec, meanings, is_leaf=lambda leaf: isinstance(leaf, Dims))


def drawn(shapes):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.2, leaf.shape), leaf.dtype), shapes)


def sent(function, args, in_shardings, out_shardings=None, mesh=LINE, costs=None):
    """The collectives of a compiled function whose numbers are those of the plain one: in all, and by kind, their
    number and bytes."""
    limit = {"layouts": "global", "memory": "1GiB"}
    f = sdy.partition(function, mesh=mesh, in_shardings=in_shardings, out_shardings=out_shardings, costs=costs, **limit)
    compiled, values = f.lower(*args).compile(), drawn(args)
    assert largest_difference(compiled(*values), jax.jit(function)(*values), least=1e-6) < 1e-4
    return totals(collectives_in_hlo(compiled.as_text()))


def transformer(weights, x, y):
    for layer in weights:
        x = training.fused_block(x, layer, training.causal(x.shape[1]))
    return jnp.mean((x - y) ** 2)


@pytest.mark.dear
@pytest.mark.parametrize("which", ["replicated", "largest", "first", "last"])
def test_weights_are_gathered_once_and_gradients_reduced_once(which):
    """2 (g-1)/g W, in whatever dimension weights are split."""
    weights, x = [training.fused_layer(64, 8)[0]] * 2, training.f32(16, 32, 64)
    whole = training.nowhere(weights)
    spec = specs(whole if which == "replicated" else training.spread(weights, whole, which))
    found = sent(descent(transformer), (weights, x, x), (spec, P("x"), P("x")), (spec, P()))
    assert found.wire_bytes <= 1.02 * 2 * SHARE * size(weights)


def test_large_weights_split_as_by_megatron_stay_where_they_are():
    """4 all_reduces of T per layer, or as many bytes in other collectives: 8 (g-1)/g T."""
    layers, x = 2, training.f32(2, 8, 256)
    layer, meanings = training.fused_layer(256, 8)
    weights, spec = [layer] * layers, specs([meanings] * layers)
    found = sent(descent(transformer), (weights, x, x), (spec, P(), P()), (spec, P()))
    assert size(weights) > 100 * size(x)
    assert found.wire_bytes <= layers * 8 * SHARE * size(x)


@pytest.mark.dear
@pytest.mark.parametrize("dispatch", [training.one_hot_dispatch, training.sorting_dispatch])
def test_tokens_go_to_experts_and_back_twice(dispatch):
    """4 all_to_alls of the experts' slots per layer, and no weight of an expert."""
    layers, factor = 2, 2  # slots per token
    model = training.moe("experts", dispatch, layers=layers)
    spec, tokens = specs(model.tensor), size(model.batch[0])
    found = sent(descent(model.loss), (model.weights, *model.batch), (spec, P("x"), P("x")), (spec, P()))
    count, exchanged = found.by_kind["all-to-all"]
    assert count == 4 * layers
    assert exchanged <= 4 * layers * SHARE * factor * tokens / G
    shared = [{name: layer[name] for name in ("norm", "router")} for layer in model.weights["layers"]]
    assert found.wire_bytes - exchanged <= 1.02 * 2 * SHARE * size([shared, model.weights["head"]])


def exchanged_by_experts(x, weights):
    y = jnp.einsum("egcd,edf->egcf", x, weights["up"])
    return jnp.mean(jnp.einsum("egcf,efd->egcd", jnp.tanh(y), weights["down"]) ** 2)


def test_experts_on_an_inner_axis_run_one_per_device():
    """Their weights have copies along the outer axis: each device takes the tokens of one expert of its four, and its
    gradient is gathered, where reducing that of all would send twice as much. Fewer tokens all four would compute."""
    weights = {"up": training.f32(8, 256, 1024), "down": training.f32(8, 1024, 256)}
    tokens, spec = training.f32(8, 16, 32, 256), {"up": P("y"), "down": P("y")}
    costs = sdy.CostModel.of_machine("tpu v5e", ["x", "y"])  # op by op nothing is split along both axes, y first

    def step(weights, tokens):
        gradients = jax.grad(exchanged_by_experts, argnums=1)(tokens, weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    found = sent(step, (weights, tokens), (spec, P(None, ("x", "y"))), spec, PLANE, costs)
    assert found.by_kind["all-gather"] == (2, size(weights) / 8)
    assert found.wire_bytes <= size(weights) / 8 + 3 * SHARE * size(tokens) / G


def heads_of_sequences(weights, q, k, v):
    """A weighed sum of attention's results, split by heads inside and by positions outside."""

    def split(x, *axes):
        return jax.lax.with_sharding_constraint(x, NamedSharding(LINE, P(*axes)))

    mixed = training.mixed(*(split(x, None, None, "x") for x in (q, k, v)))
    return jnp.sum(jnp.tanh(split(mixed, None, "x")) * weights)


def test_heads_are_split_and_joined_seven_times():
    """3 all_to_alls to heads, 1 back, and 1 for each gradient."""
    x = training.f32(2, 64, 8, 16)
    sequence = P(None, "x")
    step = jax.value_and_grad(heads_of_sequences, argnums=(1, 2, 3))
    found = sent(step, (training.f32(16), x, x, x), (P(), *[sequence] * 3), (P(), (sequence,) * 3))
    count, exchanged = found.by_kind["all-to-all"]
    assert count <= 7 and exchanged <= 7 * SHARE * size(x) / G
    assert found.wire_bytes - exchanged < 100
