"""Pipelines on meshes with Explicit axes: types of what goes in, of what layers see, and of what comes out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

RNG = np.random.default_rng(7)
W = {
    "up": RNG.normal(size=(4, 8, 16)).astype(np.float32) / 3,
    "down": RNG.normal(size=(4, 16, 8)).astype(np.float32) / 4,
}
X = RNG.normal(size=(16, 8)).astype(np.float32)
MESH = jax.make_mesh((2, 2, 2), ("stage", "data", "model"))
SPLIT = {"up": P("stage", None, "model"), "down": P("stage", "model")}
STAGED = {"up": P("stage"), "down": P("stage")}
WHOLE = {"up": P(), "down": P()}


def plain(w: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def tensor_parallel(w: Any, x: Any) -> Any:
    return x + jnp.dot(jnp.tanh(x @ w["up"]), w["down"], out_sharding=P("data"))


def mapped(w: Any, x: Any) -> Any:
    whole = jax.tree.map(lambda _: P(), w)
    return jax.shard_map(plain, in_specs=(whole, P("data")), out_specs=P("data"), axis_names={"data"})(w, x)


def square(y: Any) -> Any:
    return jnp.mean(y**2)


def scanned(w: Any, x: Any) -> Any:
    return lax.scan(lambda x, w: (plain(w, x), None), x, w)[0]


def agree(found: Any, wanted: Any) -> None:
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, wanted)


def types(tree: Any) -> Any:
    return jax.tree.map(lambda x: str(jax.typeof(x)), tree)


def step(layer: Any, w: Any, x: Any, **options: Any) -> Any:
    run = lambda w, x: sdy.pipeline(layer, w, x, **{"microbatches": 4, "loss": square, **options})  # noqa: E731
    return jax.value_and_grad(run, (0, 1))(w, x)


def run(layer: Any, w: Any, x: Any, wrap: Callable[..., Any], mesh: jax.sharding.Mesh = MESH, **options: Any) -> Any:
    with jax.set_mesh(mesh):
        return wrap(partial(step, layer, **options))(jax.device_put(W, w), jax.device_put(X, x))


CASES = {
    "tensors inside of a stage": (tensor_parallel, SPLIT, P("data"), {}),
    "a shard_map over data in a layer": (mapped, STAGED, P("data"), {}),
    "layers that move to their rounds": (tensor_parallel, SPLIT, P("data"), {"schedule": "interleaved"}),
    "stages in other dimensions": (plain, {"up": P(None, "stage"), "down": P("data")}, P("stage"), {}),
    "rows split over all axes": (plain, WHOLE, P(("data", "model", "stage")), {}),
}


def wrapped() -> Iterator[Any]:
    """Each case in a partition, two under jit as well; the others there are slow."""
    for number, name in enumerate(CASES):
        yield pytest.param(name, sdy.partition, id=f"{name}, partition")
        yield pytest.param(name, jax.jit, id=f"{name}, jit", marks=[pytest.mark.slow] * (number > 1))


@pytest.mark.dear(cases=4)
@pytest.mark.parametrize(("name", "wrap"), list(wrapped()))
def test_a_step_has_the_values_of_the_scan_and_the_types_of_its_arguments(name: str, wrap: Callable[..., Any]) -> None:
    layer, w, x, options = CASES[name]
    value, slopes = run(layer, w, x, wrap, **options)
    agree((value, slopes), jax.value_and_grad(lambda w, x: square(scanned(w, x)), (0, 1))(W, X))
    with jax.set_mesh(MESH):
        assert types(slopes) == types((jax.device_put(W, w), jax.device_put(X, x)))


def test_layers_see_the_types_of_a_scan() -> None:
    seen: list[str] = []

    def layer(w: Any, x: Any) -> Any:
        seen.append(f"{jax.typeof(x)} {jax.typeof(w['up'])}")
        return tensor_parallel(w, x)

    run(layer, SPLIT, P("data"), jax.jit)
    assert set(seen) == {"float32[4@data,8] float32[8,16@model]"}
    with pytest.raises(Exception, match="Contracting dimensions are sharded and it is ambiguous"):
        run(plain, SPLIT, P("data"), jax.jit)


def test_results_and_auxiliary_ones_have_types() -> None:
    """Without `loss` too; what is auxiliary is split as stacks of layers are."""
    layer = lambda w, x: (plain(w, x), x)  # noqa: E731
    with jax.set_mesh(MESH):
        w, x = jax.device_put(W, STAGED), jax.device_put(X, P("data"))
        out, aux = jax.jit(lambda w, x: sdy.pipeline(layer, w, x, microbatches=4, has_aux=True))(w, x)
    assert types((out, aux)) == ("float32[16@data,8]", "float32[4@stage,4,4@data,8]")
    agree(out, scanned(W, X))
    agree(np.asarray(aux)[0], X.reshape(4, 4, 8).swapaxes(0, 1))


@pytest.mark.more("what layers close over")
def test_what_layers_and_losses_close_over() -> None:
    def total(w: Any, x: Any, scale: Any, head: Any) -> Any:
        layer = lambda w, x: plain(w, x * scale)  # noqa: E731
        return sdy.pipeline(layer, w, x, microbatches=4, loss=lambda y: square(y * head))

    def wanted(w: Any, x: Any, scale: Any, head: Any) -> Any:
        return square(lax.scan(lambda x, w: (plain(w, x * scale), None), x, w)[0] * head)

    given = np.full(8, 0.9, np.float32), np.linspace(1, 2, 8, dtype=np.float32)
    with jax.set_mesh(MESH):
        typed = jax.device_put(W, STAGED), jax.device_put(X, P("data")), *(jax.device_put(a, P()) for a in given)
        for wrap in (jax.jit, sdy.partition):
            agree(wrap(jax.grad(total, (2, 3)))(*typed), jax.grad(wanted, (2, 3))(W, X, *given))


@pytest.mark.more("transformations of casts between types")
def test_transformations() -> None:
    alone = lambda w, x: square(sdy.pipeline(plain, w, x, microbatches=4))  # noqa: E731
    other = lambda w, x: square(scanned(w, x))  # noqa: E731
    twice = lambda f: jax.grad(lambda w, x: jnp.sum(jax.grad(f)(w, x)["up"] ** 2))  # noqa: E731
    each = lambda f: jax.vmap(jax.grad(f), (None, 0))  # noqa: E731
    with jax.set_mesh(MESH):
        w, x = jax.device_put(W, STAGED), jax.device_put(X, P("data"))
        agree(jax.jit(twice(alone))(w, x), twice(other)(W, X))
        several = jax.device_put(np.stack([X, 2 * X]), P(None, "data"))
        agree(jax.jit(each(alone))(w, several), each(other)(W, np.stack([X, 2 * X])))


@pytest.mark.parametrize(
    "kinds", [(AxisType.Auto, AxisType.Explicit), (AxisType.Explicit, AxisType.Auto)], ids=["auto", "explicit"]
)
def test_axes_of_both_kinds(kinds: tuple[AxisType, ...]) -> None:
    mesh = jax.make_mesh((2, 4), ("stage", "data"), axis_types=kinds)
    for wrap in (jax.jit, sdy.partition):
        found = run(plain, STAGED, P("data"), wrap, mesh)
        agree(found, jax.value_and_grad(lambda w, x: square(scanned(w, x)), (0, 1))(W, X))


def test_without_jit_and_of_arrays_without_types() -> None:
    agree(sdy.pipeline(plain, W, X, microbatches=4, mesh=MESH), scanned(W, X))


REFUSED = {
    "the rows of `x` are split over data, model into 4, and a microbatch has 2 of them": (
        plain,
        WHOLE,
        {"x": P(("data", "model")), "microbatches": 8},
    ),
    "layer takes `x` as f32[4@data,8] and returns it as f32[4,8@model], per microbatch": (
        lambda w, x: jax.sharding.reshard(plain(w, x), P(None, "model")),
        WHOLE,
        {},
    ),
    "layer makes f32[4,8@stage] at": (
        lambda w, x: jax.sharding.reshard(jax.sharding.reshard(x, P(None, "stage")), P("data")),
        WHOLE,
        {},
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message: str) -> None:
    layer, w, options = REFUSED[message]
    options = dict(options)
    with pytest.raises(sdy.SdyError, match=re.escape(message)):
        run(layer, w, options.pop("x", P("data")), jax.jit, **options)


def test_arrays_that_are_refused() -> None:
    with jax.set_mesh(MESH):
        x, scale = jax.device_put(X, P("data")), jax.device_put(np.ones(8, np.float32), P("stage"))
        with pytest.raises(
            sdy.ShardingError, match=re.escape("layer closes over f32[8@stage], and 'stage' is the axis")
        ):
            jax.jit(lambda x, scale: sdy.pipeline(lambda w, x: x * scale, W, x))(x, scale)

        def waiting(w: Any, x: Any) -> Any:
            return sdy.pipeline(plain, jax.sharding.reshard(w, P(reduced={"data"})), x)

        with pytest.raises(sdy.UnsupportedError, match=re.escape("{R:data}, of a sum along data that waits")):
            jax.jit(waiting)(jax.device_put(W, P()), x)


@pytest.mark.more("plans of several numbers")
def test_a_range_has_numbers_whose_rows_divide() -> None:
    with jax.set_mesh(MESH):
        x = jax.device_put(X, P(("data", "model")))
        plan = sdy.partition(partial(step, plain, microbatches=range(2, 17))).plan(jax.device_put(W, STAGED), x)
    assert [each.microbatches for each in plan.record().tried] == [(2,), (4,)]
