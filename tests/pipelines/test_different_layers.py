"""Stages that run different functions, with weights of their own shapes."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.pipelines.schedules.tables import SCHEDULES

WIDTH = 8
RNG = np.random.default_rng(5)
X = RNG.normal(size=(16, WIDTH)).astype(np.float32)


def drawn(*shape: int) -> Any:
    return (RNG.normal(size=shape) / 4).astype(np.float32)


def mlp(w: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def scaled(w: Any, x: Any) -> Any:
    return jnp.sin(x) * w["scale"] + w["shift"]


def rotated(w: Any, x: Any) -> Any:
    return x @ w[0] + w[1] * x


LAYERS = [mlp, scaled, mlp, rotated]
TREES: list[Any] = [
    {"up": drawn(WIDTH, 12), "down": drawn(12, WIDTH)},
    {"scale": drawn(WIDTH), "shift": drawn(1)},
    {"up": drawn(WIDTH, 20), "down": drawn(20, WIDTH)},
    [drawn(WIDTH, WIDTH), np.float32(0.5)],
]


def mesh_of(**sizes: int) -> jax.sharding.Mesh:
    devices = np.array(jax.devices()[: int(np.prod([*sizes.values()]))]).reshape(*sizes.values())
    return jax.sharding.Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def one_by_one(trees: Any, x: Any) -> Any:
    for layer, tree in zip(LAYERS, trees, strict=True):
        x = layer(tree, x)
    return jnp.mean(x**2)


def piped(packed: Any, x: Any, **options: Any) -> Any:
    return sdy.pipeline(LAYERS, packed, x, loss=lambda y: jnp.mean(y**2), microbatches=4, **options)


def agree(found: Any, wanted: Any) -> None:
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, wanted)


def test_packed_layers_are_what_was_packed() -> None:
    packed = sdy.pack_layers(TREES)
    assert [array.shape for array in packed.arrays] == [(4, 20, 8), (4, 8, 20), (4, 8), (4, 1), (4,)]
    for number, tree in enumerate(TREES):
        jax.tree.map(np.testing.assert_array_equal, packed.layer(number), tree)
    assert jax.tree.map(lambda x: 2 * x, packed).layer(3)[1] == 1.0


@pytest.mark.dear
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_values_and_gradients_are_those_of_the_layers_in_turn(schedule: str) -> None:
    """On as many stages as there are layers, and on fewer."""
    value, slopes = jax.value_and_grad(one_by_one)(TREES, X)
    packed = sdy.pack_layers(TREES)
    step = jax.value_and_grad(partial(piped, schedule=schedule))
    for stages in (2,) if schedule == "interleaved" else (2, 4):
        mesh = mesh_of(stage=stages)
        found, gradients = sdy.partition(step, mesh=mesh, in_shardings=(P("stage"), P()))(packed, X)
        agree(found, value)
        agree([gradients.layer(n) for n in range(len(TREES))], slopes)


def test_stacked_weights_of_functions_that_differ() -> None:
    """With auxiliary results; functions that are the same need no choice."""
    weights = drawn(4, WIDTH, WIDTH)
    functions = [lambda w, x: (x @ w, x.sum()), lambda w, x: (jnp.tanh(x @ w), x.max())] * 2
    run = partial(sdy.pipeline, mesh=mesh_of(stage=4), microbatches=2, has_aux=True)
    found, aux = run(functions, weights, X)
    halves = X.reshape(8, 2, WIDTH).swapaxes(0, 1)
    for half, each in enumerate(halves):
        for n in range(4):
            each, wanted = functions[n](weights[n], each)
            np.testing.assert_allclose(aux[n, half], wanted, rtol=1e-4)
        np.testing.assert_allclose(found[half::2], each, rtol=1e-4, atol=1e-5)
    same = jax.make_jaxpr(partial(sdy.pipeline, [mlp] * 4, mesh=mesh_of(stage=4, data=2)))
    assert "branches=" not in str(same({"up": drawn(4, WIDTH, 8), "down": drawn(4, 8, WIDTH)}, X))


WRONG = {
    "pipeline: layer has 3 functions, and weights are of 4 layers": (LAYERS[:3], sdy.pack_layers(TREES)),
    "pipeline: weights are packed, and layer is one function": (mlp, sdy.pack_layers(TREES)),
    "pipeline: layer[1] takes `x` as f32[2,8] and returns it as f32[2,4]": (
        [mlp, lambda w, x: x[:, :4], mlp, mlp],
        {"up": drawn(4, WIDTH, 8), "down": drawn(4, 8, WIDTH)},
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_refused(message: str) -> None:
    with pytest.raises(sdy.SdyError, match=re.escape(message)):
        jax.jit(partial(sdy.pipeline, WRONG[message][0], mesh=mesh_of(stage=4)))(WRONG[message][1], X)


def test_stages_of_several_devices_run_one_function() -> None:
    with pytest.raises(sdy.UnsupportedError, match="layers are different functions, and a stage has several devices"):
        piped(sdy.pack_layers(TREES), X, mesh=mesh_of(stage=4, data=2))


def test_what_cannot_be_packed() -> None:
    with pytest.raises(sdy.ArgumentError, match="there are no layers"):
        sdy.pack_layers([])
    with pytest.raises(sdy.ArgumentError, match=re.escape("`layers[1]['name']` is a str; expected an array")):
        sdy.pack_layers([{}, {"name": "up"}])
