"""Training steps of libraries on a mesh with Explicit axes: only the decorator is another than with `jax.jit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.plan.hlo import collectives_in_hlo, totals

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
RNG = np.random.default_rng(0)
X = RNG.standard_normal((8, 16), dtype=np.float32)

Step = tuple[Callable[..., Any], Any, Any]


def placed(shape: tuple[int, ...], *entries: Any) -> jax.Array:
    return jax.device_put(RNG.standard_normal(shape, dtype=np.float32) / 4, P(*entries))


def plain() -> Step:
    optax = pytest.importorskip("optax")
    optimizer = optax.adamw(1e-2)
    params = {"up": placed((16, 32), None, "model"), "down": placed((32, 16), "model"), "bias": placed((32,), "model")}

    def loss(params, x):
        h = jax.nn.gelu(x @ params["up"] + params["bias"])
        return ((jnp.dot(h, params["down"], out_sharding=P("data")) - x) ** 2).mean()

    def step(params, moments, x):
        value, slopes = jax.value_and_grad(loss)(params, x)
        updates, moments = optimizer.update(slopes, moments, params)
        return optax.apply_updates(params, updates), moments, value

    return step, params, optimizer.init(params)


def equinox() -> Step:
    eqx, optax = pytest.importorskip("equinox"), pytest.importorskip("optax")
    optimizer = optax.adamw(1e-2)

    class Net(eqx.Module):
        up: jax.Array
        down: jax.Array
        activation: Any = eqx.field(static=True)

        def __call__(self, x):
            return jnp.dot(self.activation(x @ self.up), self.down, out_sharding=P("data"))

    def step(net, moments, x):
        value, slopes = eqx.filter_value_and_grad(lambda net: ((net(x) - x) ** 2).mean())(net)
        updates, moments = optimizer.update(slopes, moments, net)
        return eqx.apply_updates(net, updates), moments, value

    net = Net(placed((16, 32), None, "model"), placed((32, 16), "model"), jax.nn.relu)
    return step, net, optimizer.init(net)


def nnx() -> Step:
    flax, optax = pytest.importorskip("flax.nnx"), pytest.importorskip("optax")
    optimizer, kernel = optax.adam(1e-2), flax.initializers.lecun_normal()

    class Net(flax.Module):
        def __init__(self, rngs):
            first, second = (flax.with_partitioning(kernel, axes) for axes in ((None, "model"), ("model", None)))
            self.up = flax.Linear(16, 32, use_bias=False, kernel_init=first, rngs=rngs)
            self.down = flax.Linear(32, 16, use_bias=False, kernel_init=second, rngs=rngs)

        def __call__(self, x):
            return self.down(flax.relu(self.up(x, out_sharding=P("data", "model"))), out_sharding=P("data", None))

    graph, state = flax.split(Net(flax.Rngs(0)))

    def step(state, moments, x):
        value, slopes = jax.value_and_grad(lambda s: ((flax.merge(graph, s)(x) - x) ** 2).mean())(state)
        updates, moments = optimizer.update(slopes, moments, state)
        return optax.apply_updates(state, updates), moments, value

    return step, state, optimizer.init(state)


@pytest.mark.parametrize("library", [plain, equinox, nnx], ids=lambda f: f.__name__)
def test_steps_are_jits_with_no_more_bytes(library: Callable[[], Step]) -> None:
    with jax.set_mesh(MESH):
        step, params, moments = library()
        x, found, sent = jax.device_put(X, P("data")), [], []
        for jit in (sdy.partition, jax.jit):
            run, state = jit(step), (params, moments)
            sent.append(totals(collectives_in_hlo(run.lower(*state, x).compile().as_text())).wire_bytes)
            for _ in range(3):
                *state, value = run(*state, x)
            found.append((state, value))
    assert 0 < sent[0] <= sent[1] + 8  # the loss, a number, may be summed over more devices, which share the work
    for own, wanted in zip(*map(jax.tree.leaves, found), strict=True):
        assert str(jax.typeof(own)) == str(jax.typeof(wanted)) and own.sharding == wanted.sharding
        np.testing.assert_allclose(own, wanted, rtol=1e-3, atol=1e-5)
