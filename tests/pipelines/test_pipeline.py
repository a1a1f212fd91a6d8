"""`sdy.pipeline` where random ones do not go: contexts, transformations, errors, memory, what is sent when."""

from __future__ import annotations

import re
from collections.abc import Callable
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
from sdy_jax.annotate.pipeline_schedules import SCHEDULES

WIDTH = 6
RNG = np.random.default_rng(3)
WEIGHTS = {"w": RNG.normal(size=(8, WIDTH, WIDTH)).astype(np.float32) / 2, "b": np.ones((8, WIDTH), np.float32) / 8}
X = RNG.normal(size=(16, WIDTH)).astype(np.float32)


def mesh_of(**sizes: int) -> jax.sharding.Mesh:
    devices = np.array(jax.devices()[: int(np.prod([*sizes.values()]))]).reshape(*sizes.values())
    return jax.sharding.Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


MESH = mesh_of(stage=4)


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w["w"] + w["b"])


def scanned(w: Any, x: Any, layer: Callable[..., Any] = layer) -> Any:
    return lax.scan(lambda x, w: (layer(w, x), None), x, w)[0]


def piped(w: Any, x: Any, **options: Any) -> Any:
    return sdy.pipeline(layer, w, x, **{"mesh": MESH, "microbatches": 4, **options})


def agree(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    jax.tree.map(partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance), found, wanted)


def squares(fun: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, x: jnp.sum(fun(w, x) ** 2)


def test_without_jit() -> None:
    agree(piped(WEIGHTS, X), scanned(WEIGHTS, X))
    agree(jax.grad(squares(piped))(WEIGHTS, X), jax.grad(squares(scanned))(WEIGHTS, X), 1e-4)


def test_in_the_context_of_a_mesh() -> None:
    with jax.set_mesh(mesh_of(stage=2, data=2)):
        agree(jax.jit(partial(piped, mesh=None))(WEIGHTS, X), scanned(WEIGHTS, X))


@pytest.mark.dear(cases=2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_transformations(schedule: str) -> None:
    """Of the function and of its gradient."""
    ours, theirs = squares(partial(piped, schedule=schedule)), squares(scanned)
    for change in (
        lambda f: jax.vmap(jax.grad(f), (None, 0)),
        lambda f: lambda w, x: jax.grad(jax.checkpoint(f))(w, x[0]),
        lambda f: lambda w, x: lax.map(lambda x: jax.grad(f)(w, x), x),
    ):
        agree(
            jax.jit(change(ours))(WEIGHTS, X[None] / [[[1.0]], [[2.0]]]),
            change(theirs)(WEIGHTS, X[None] / [[[1.0]], [[2.0]]]),
            1e-4,
        )


MAPPED = {
    "vmap of grad": lambda f: jax.vmap(jax.grad(f)),
    "grad of vmap": lambda f: jax.grad(lambda w, x: jnp.sum(jax.vmap(f)(w, x))),
}


@pytest.mark.parametrize("change", MAPPED)
def test_stages_of_mapped_pipelines_read_and_write_slices(change: str) -> None:
    """And send as often as one alone."""
    given = jax.tree.map(lambda x: np.stack([x, x / 2]), (WEIGHTS, X))
    alone = squares(partial(piped, mesh=mesh_of(stage=2), microbatches=2))
    ours = jax.jit(MAPPED[change](alone))
    text, single = ours.lower(*given).as_text(), jax.jit(jax.grad(alone)).lower(WEIGHTS, X).as_text()
    assert "stablehlo.gather" not in text and "stablehlo.scatter" not in text
    assert text.count("collective_permute") == single.count("collective_permute") > 0
    agree(ours(*given), MAPPED[change](squares(scanned))(*given), 1e-4)


@pytest.mark.more("second derivatives")
def test_second_derivatives() -> None:
    def twice(fun: Callable[..., Any]) -> Any:
        return jax.jit(jax.grad(lambda w: jnp.sum(jax.grad(squares(fun))(w, X)["b"] ** 2)))(WEIGHTS)

    agree(twice(piped), twice(scanned), 1e-3)


def test_layers_close_over_what_is_traced() -> None:
    """Floating-point numbers, which have derivatives, and integers."""

    def total(run: Callable[..., Any], w: Any, scale: Any, order: Any) -> Any:
        return jnp.sum(run(lambda w, x: layer(w, x[:, order]) * scale, w, X) ** 2)

    ours = partial(total, lambda f, w, x: sdy.pipeline(f, w, x, mesh=MESH, microbatches=2))
    theirs = partial(total, lambda f, w, x: scanned(w, x, f))
    given = WEIGHTS, jnp.ones(WIDTH) * 1.5, jnp.arange(WIDTH)[::-1]
    agree(jax.jit(jax.grad(ours, (0, 1)))(*given), jax.grad(theirs, (0, 1))(*given), 1e-3)


def test_a_layer_with_collectives_along_other_axes() -> None:
    """Permutes among them, in which all devices of the mesh take part."""
    mesh = mesh_of(stage=4, data=2)

    def shifted(w: Any, x: Any) -> Any:
        permute = partial(lax.ppermute, axis_name="data", perm=[(0, 1), (1, 0)])
        moved = jax.shard_map(permute, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})(x)
        return layer(w, moved)

    half = len(X) // 4 // 2
    order = np.r_[half : 2 * half, :half]
    wanted = jnp.stack([scanned(WEIGHTS, X[m::4], lambda w, x: layer(w, x[order])) for m in range(4)], 1)
    found = jax.jit(lambda w, x: sdy.pipeline(shifted, w, x, mesh=mesh, microbatches=4))(WEIGHTS, X)
    agree(found, wanted.reshape(X.shape))


def balanced(w: Any, x: Any) -> Any:
    return layer(w, x), {"size": jnp.mean(x**2), "positive": jnp.sum(x > 0)}


def with_metrics(w: Any, x: Any, **options: Any) -> Any:
    """The loss; auxiliary results of the layers, and of the loss."""
    loss = lambda y: (jnp.mean(y**2), {"top": y.max()})  # noqa: E731
    options = {"mesh": MESH, "microbatches": 4, "has_aux": True, "loss_has_aux": True, **options}
    return sdy.pipeline(balanced, w, x, loss=loss, **options)


def with_metrics_scanned(w: Any, x: Any) -> Any:
    parts = [lax.scan(lambda x, w: balanced(w, x), x[m::4], w) for m in range(4)]
    sizes, tops = jnp.stack([aux["size"] for _, aux in parts], 1), jnp.stack([y.max() for y, _ in parts])
    positive = jnp.stack([aux["positive"] for _, aux in parts], 1)
    return sum(jnp.mean(y**2) for y, _ in parts) / 4, ({"size": sizes, "positive": positive}, {"top": tops})


@pytest.mark.dear(cases=2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_auxiliary_results_beside_a_loss(schedule: str) -> None:
    """What jax.value_and_grad gives with has_aux, alone and with derivatives of what auxiliary results enter."""
    ours, theirs = partial(with_metrics, schedule=schedule), with_metrics_scanned
    agree(jax.jit(ours)(WEIGHTS, X), theirs(WEIGHTS, X))
    agree(*(jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(WEIGHTS, X) for f in (ours, theirs)), 1e-4)  # type: ignore[misc]

    def total(f: Callable[..., Any], w: Any, x: Any) -> Any:
        value, (layers, last) = f(w, x)
        return value + jnp.sum(layers["size"] ** 2) + jnp.sum(last["top"] ** 3)

    agree(*(jax.jit(jax.value_and_grad(partial(total, f), (0, 1)))(WEIGHTS, X) for f in (ours, theirs)), 1e-4)  # type: ignore[misc]


@pytest.mark.dear
@pytest.mark.parametrize("is_read", [False, True])
def test_auxiliary_results_without_derivatives_cost_no_second_run(is_read: bool) -> None:
    def step(w: Any, x: Any) -> Any:
        value, aux = with_metrics(w, x, mesh=None)
        return (value + jnp.sum(aux[0]["size"])) if is_read else value, aux

    run = sdy.partition(jax.value_and_grad(step, has_aux=True), mesh=MESH, in_shardings=(P("stage"), P()))
    assert len(run.plan(WEIGHTS, X).record().pipelines) == 1 + is_read


@pytest.mark.more("transformations of a rule that looks for zero cotangents")
def test_transformations_of_auxiliary_results() -> None:
    def total(f: Callable[..., Any], w: Any, x: Any) -> Any:
        value, (layers, _) = f(w, x)
        return value + jnp.sum(layers["size"])

    alone = lambda f: lambda w, x: f(w, x)[0]  # noqa: E731
    for change in (
        lambda f: jax.vmap(jax.grad(partial(total, f)), (None, 0)),
        lambda f: lambda w, x: jax.grad(jax.checkpoint(alone(f)))(w, x[0]),
        lambda f: lambda w, x: lax.map(lambda x: jax.grad(alone(f))(w, x), x),
    ):
        given = WEIGHTS, X[None] / [[[1.0]], [[2.0]]]
        agree(jax.jit(change(with_metrics))(*given), change(with_metrics_scanned)(*given), 1e-4)


def test_the_plan_has_what_stages_send() -> None:
    """Each link is crossed by each microbatch once each way; there are as many sends as rows in which some link is."""
    step = jax.value_and_grad(lambda w, x: piped(w, x, mesh=None, loss=lambda y: jnp.mean(y**2)))
    activations = X.nbytes // 4 // 2
    for stages in (2, 4):
        mesh = mesh_of(stage=stages, data=2)
        plan = sdy.partition(step, mesh=mesh, in_shardings=(P("stage"), P("data"))).plan(WEIGHTS, X)
        permutes = [each for each in plan.collectives if each.kind == "collective_permute"]
        assert {str(axis) for each in permutes for axis in each.axes} == {'"stage"'}
        assert sum(each.total_wire_bytes for each in permutes) == 2 * (4 + stages - 2) * activations
        (found,) = plan.record().pipelines
        assert found.sent == 2 * 4 * activations and found.forward_bytes == found.backward_bytes == activations


def temporaries(schedule: str, microbatches: int, **options: Any) -> int:
    def total(w: Any, x: Any) -> Any:
        return piped(w, x, schedule=schedule, microbatches=microbatches, loss=lambda y: jnp.mean(y**2), **options)

    w = {name: jax.ShapeDtypeStruct((8, *shape), jnp.float32) for name, shape in (("w", (64, 64)), ("b", (64,)))}
    x = jax.ShapeDtypeStruct((microbatches * 32, 64), jnp.float32)
    stats = jax.jit(jax.grad(total)).lower(w, x).compile().memory_analysis()
    assert stats is not None
    return int(stats.temp_size_in_bytes)


@pytest.mark.more("what XLA holds")
def test_1f1b_holds_no_more_for_more_microbatches() -> None:
    """But for the batch itself, cut into them, and its cotangents."""
    grown = 24 * 32 * 64 * 4
    growth = {name: (temporaries(name, 32) - temporaries(name, 8)) / grown for name in SCHEDULES}
    assert growth["gpipe"] > 5
    for name in ("1f1b", "interleaved", "zero_bubble"):
        assert growth[name] < 2, growth


WRONG = {
    "pipeline: axis is 'stages'; did you mean 'stage'? the axes of the mesh are stage=4": {"axis": "stages"},
    "schedule is 'zerobubble'; did you mean 'zero_bubble'?": {"schedule": "zerobubble"},
    "pipeline: rounds is 2, and '1f1b' has one; to fix: schedule='interleaved'": {"rounds": 2},
    "pipeline: rounds is 0; expected a positive integer": {"rounds": 0},
    "pipeline: microbatches is 0; expected a positive integer": {"microbatches": 0},
    "the batch of 16 in `x` does not divide into 5 microbatches; to fix: microbatches=4 or 8": {"microbatches": 5},
    "`extra['mask']` of shape (8,) and `x` of shape (16, 6) have different first dimensions, which are the batch": {
        "extra": {"mask": np.ones(8)}
    },
    "pipeline: loss returns f32[4,6]; expected one floating-point number": {"loss": lambda y: y},
    "pipeline: loss_has_aux without a loss": {"loss_has_aux": True},
    "with loss_has_aux=True loss returns a tuple of a number": {"loss": jnp.sum, "loss_has_aux": True},
    "with has_aux=True layer returns a tuple of activations and auxiliary results": {"has_aux": True},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_options(message: str) -> None:
    with pytest.raises(sdy.SdyError, match=re.escape(message)):
        piped(WEIGHTS, X, **WRONG[message])


def test_wrong_stacks() -> None:
    with pytest.raises(
        sdy.ArgumentError, match=re.escape("`weights['w']` of shape (7, 6, 6) and `weights['b']` of shape (8, 6)")
    ):
        piped(WEIGHTS | {"w": WEIGHTS["w"][1:]}, X)
    with pytest.raises(sdy.ArgumentError, match="`weights` is a scalar; its first dimension should be the number of"):
        piped(3.0, X)
    with pytest.raises(sdy.ArgumentError, match="there is no array whose first dimension is the number of layers"):
        piped({}, X)
    with pytest.raises(sdy.ArgumentError, match=re.escape("`weights['name']` is a str; expected an array")):
        piped(WEIGHTS | {"name": "up"}, X)


def test_activations_of_another_type() -> None:
    said = "layer takes `x['h']` as f32[4,6] and returns it as f16[4,6], per microbatch"
    with pytest.raises(sdy.ArgumentError, match=re.escape(said)):
        sdy.pipeline(lambda w, x: {"h": x["h"].astype(jnp.float16)}, WEIGHTS, {"h": X}, mesh=MESH, microbatches=4)
    with pytest.raises(sdy.ArgumentError, match="layer takes activations of the structure"):
        sdy.pipeline(lambda w, x: (x, x), WEIGHTS, X, mesh=MESH, microbatches=4)


def test_keys() -> None:
    """In weights and extra inputs, where scans have them; not as activations."""
    keys = jax.random.split(jax.random.key(0), 8)

    def dropping(w: Any, x: Any) -> Any:
        return layer(w[0], x) * jax.random.bernoulli(w[1], 0.5, (WIDTH,))

    found = sdy.pipeline(dropping, (WEIGHTS, keys), X, mesh=MESH, microbatches=4)
    agree(found, scanned((WEIGHTS, keys), X, dropping))
    with pytest.raises(sdy.ArgumentError, match=re.escape("`x[1]` holds random keys, which no layer changes")):
        sdy.pipeline(lambda w, x: x, WEIGHTS, (X, jax.random.split(jax.random.key(0), 16)), mesh=MESH)


def test_wrong_meshes() -> None:
    with pytest.raises(
        sdy.ShardingError, match=r"there is no mesh; to fix: pass mesh=, or call it under jax\.set_mesh"
    ):
        piped(WEIGHTS, X, mesh=None)
    with pytest.raises(sdy.ShardingError, match="pipeline: axis is 'stage', on which the code around is manual"):
        jax.jit(jax.shard_map(partial(piped, mesh=None), mesh=MESH, in_specs=P(), out_specs=P()))(WEIGHTS, X)
    with pytest.raises(sdy.ShardingError, match="pipeline on"):
        sdy.partition(piped, mesh=mesh_of(stage=2))(WEIGHTS, X)


def test_there_are_no_forward_mode_derivatives() -> None:
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda w: piped(w, X), (WEIGHTS,), (WEIGHTS,))
