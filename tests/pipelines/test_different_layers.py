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
from sdy_jax.pipelines.different_layers import where_rows_mix

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


def mean_of_rows(w: Any, x: Any) -> Any:
    return x - x.mean(0)


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


@pytest.mark.dear(cases=2)
@pytest.mark.parametrize(
    ("schedule", "sizes"), [("1f1b", [2, 4]), ("gpipe", [4]), ("interleaved", [2]), ("zero_bubble", [2])]
)
def test_values_and_gradients_are_those_of_the_layers_in_turn(schedule: str, sizes: list[int]) -> None:
    """On as many stages as there are layers, and on fewer."""
    value, slopes = jax.jit(jax.value_and_grad(one_by_one))(TREES, X)
    packed = sdy.pack_layers(TREES)
    step = jax.value_and_grad(partial(piped, schedule=schedule))
    for stages in sizes:
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


@pytest.mark.dear(cases=1)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_stages_of_several_devices(schedule: str) -> None:
    """Each device runs the functions for its rows; gradients of weights are summed once, behind the loop."""
    wanted = jax.value_and_grad(one_by_one, (0, 1))(TREES, X)
    packed, mesh = sdy.pack_layers(TREES), mesh_of(stage=2, data=2, model=2)
    step = sdy.partition(
        jax.value_and_grad(partial(piped, schedule=schedule), (0, 1)), mesh=mesh, in_shardings=(P("stage"), P("data"))
    )
    value, (slopes, x) = step(packed, X)
    agree((value, ([slopes.layer(n) for n in range(4)], x)), wanted)
    sums = [each for each in step.plan(packed, X).collectives if "data" in str(each.axes)]
    large = [each for each in sums if each.total_wire_bytes > 8 * WIDTH * 4]
    assert {each.times for each in large} == {1}


@pytest.mark.more("what functions read beside the activations, on several devices")
@pytest.mark.parametrize("sizes", [{"stage": 4, "data": 2}, {"stage": 2, "other": 3}], ids=str)
def test_what_functions_read_on_several_devices(sizes: dict[str, int]) -> None:
    """Arrays that they close over, extra inputs; rows that an axis does not divide are computed on all of it."""
    weights, mask, scale = drawn(4, WIDTH, WIDTH), drawn(*X.shape), np.full(WIDTH, 1.5, np.float32)

    def total(run: Any, w: Any, x: Any, scale: Any, mask: Any) -> Any:
        first, second = lambda w, x, m: jnp.tanh(x @ w) * scale + m, lambda w, x, m: x * w[0] + m * scale
        return jnp.sum(run([first, second] * 2, w, x, mask) ** 2)

    def plain(layers: Any, w: Any, x: Any, mask: Any) -> Any:
        for n, each in enumerate(layers):
            x = each(w[n], x, mask)
        return x

    mesh, given = mesh_of(**sizes), (weights, X, scale, mask)
    ours = jax.value_and_grad(partial(total, partial(sdy.pipeline, microbatches=4, mesh=mesh)), (0, 1, 2, 3))
    wanted = jax.value_and_grad(partial(total, plain), (0, 1, 2, 3))(*given)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), jax.jit(ours)(*given), wanted)


def test_keys_on_several_devices() -> None:
    """Each part of the rows draws numbers of its own."""
    draw = lambda w, x, key: x + jax.random.uniform(key, x.shape)  # noqa: E731
    found = sdy.pipeline(
        [draw, lambda w, x, key: 2 * x], drawn(2, 1), X * 0, key=jax.random.key(0), microbatches=1,
        mesh=mesh_of(stage=2, data=4),
    )  # fmt: skip
    assert len(np.unique(found)) == X.size
    assert 0.8 < found.mean() < 1.2


SEVERAL: dict[str, tuple[Any, dict[str, Any]]] = {
    "layer[1] looks at several rows of a microbatch, or at their number, at": ([mlp, mean_of_rows, mlp, mlp], {}),
    "each with its rows, and has_aux=True": ([lambda w, x: (x, 0.0), lambda w, x: (x, 1.0)] * 2, {"has_aux": True}),
}


@pytest.mark.parametrize("message", SEVERAL)
def test_what_stages_of_several_devices_refuse(message: str) -> None:
    layers, options = SEVERAL[message]
    weights = {"up": drawn(4, WIDTH, 8), "down": drawn(4, 8, WIDTH)}
    run = partial(sdy.pipeline, layers, microbatches=4, mesh=mesh_of(stage=4, data=2), **options)
    with pytest.raises(sdy.UnsupportedError, match=re.escape(message)):
        jax.jit(run)(weights, X)
    explicit = jax.make_mesh((4, 2), ("stage", "data"))
    with jax.set_mesh(explicit), pytest.raises(sdy.UnsupportedError, match="the mesh has Explicit axes"):
        sdy.pipeline([mlp, mean_of_rows] * 2, weights, X, microbatches=4)


def test_what_cannot_be_packed() -> None:
    with pytest.raises(sdy.ArgumentError, match="there are no layers"):
        sdy.pack_layers([])
    with pytest.raises(sdy.ArgumentError, match=re.escape("`layers[1]['name']` is a str; expected an array")):
        sdy.pack_layers([{}, {"name": "up"}])


MIXING: dict[str, Any] = {
    "a Fourier transform": lambda w, x: jnp.fft.fft(x.T).T.real,
    "a decomposition": lambda w, x: jnp.linalg.qr(x)[0],
    "ragged groups": lambda w, x: jax.lax.ragged_dot(x, jnp.ones((2, x.shape[1], 3)), jnp.array([1, 3])),
    "a callback": lambda w, x: jax.pure_callback(np.cumsum, x, x),
    "a mean": mean_of_rows,
    "a product": lambda w, x: x @ x.T @ x,
    "a sum that goes on": lambda w, x: jnp.cumsum(x, 0),
    "their order": lambda w, x: x[::-1],
    "a sort": lambda w, x: jnp.sort(x, 0),
    "one of them": lambda w, x: x + x[0],
    "some of them": lambda w, x: x[jnp.zeros(x.shape[0], jnp.int32)],
    "one that is changed": lambda w, x: x.at[0].set(0.0),
    "one that is added to": lambda w, x: x.at[0].add(1.0),
    "one that is updated": lambda w, x: jax.lax.dynamic_update_slice(x, x[:1] * 0, (0, 0)),
    "their number": lambda w, x: x / x.shape[0],
    "their index": lambda w, x: x + jnp.arange(x.shape[0])[:, None],
    "a table of them": lambda w, x: x + np.arange(x.shape[0], dtype=np.float32)[:, None],
    "another shape": lambda w, x: x.reshape(2, -1, WIDTH).swapaxes(0, 1).reshape(x.shape),
    "those beside": lambda w, x: jnp.concatenate([x, x])[1 : x.shape[0] + 1],
    "a window": lambda w, x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (2, 1), (1, 1), "SAME"),
    "a loop": lambda w, x: jax.lax.scan(lambda c, row: (c + row, c), x[0] * 0, x)[1],
    "random numbers": lambda w, x: x * jax.random.uniform(jax.random.key(0), x.shape),
}
ALIKE: dict[str, Any] = {
    "a norm": lambda w, x: x / jnp.linalg.norm(x, axis=-1, keepdims=True),
    "attention": lambda w, x: jax.nn.softmax(jnp.einsum("bi,bj->bij", x, x)) @ jnp.ones(WIDTH),
    "a sort of each": lambda w, x: jnp.take_along_axis(x, jnp.argsort(x, -1), -1),
    "rows in one": lambda w, x: jnp.tanh(x.reshape(-1)).reshape(x.shape),
    "a number that is none": lambda w, x: jnp.where(x > 0, x, jnp.nan),
    "a lookup": lambda w, x: x + jnp.eye(WIDTH)[jnp.argmax(x, -1)],
    "a loop over features": lambda w, x: jax.lax.scan(lambda c, col: (c + col, c), x[:, 0], x.T)[1].T,
    "calls": lambda w, x: jax.jit(jax.nn.relu)(jax.checkpoint(jnp.sin)(x)) * jnp.where(x > 0, x, 0),
    "a convolution": lambda w, x: jax.lax.conv(x[:, None], jnp.ones((1, 1, 3)), (1,), "SAME")[:, 0],
}


@pytest.mark.parametrize("name", [*MIXING, *ALIKE])
def test_rows_that_are_looked_at_together_are_found(name: str) -> None:
    fun = {**MIXING, **ALIKE}[name]
    traced = (jax.make_jaxpr(fun)(None, jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)) for rows in (4, 8))
    assert (where_rows_mix(*traced, False) is not None) == (name in MIXING)
