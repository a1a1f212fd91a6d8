"""Plans whose time is made of all that there is: loops, rings, a trip ahead, buckets, kernels, pipelines, branches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from planned_steps import stacked

import sdy_jax as sdy
from sdy_jax.plan.record.record import PlanRecord
from sdy_jax.plan.record.timeline import RecordedExecution, RecordedRun

WIDTH, ROWS = 512, 4096
LAYERS = 3
NETWORK = 25e9
"""Bytes per second between hosts."""


def mesh_of(**sizes: int) -> AbstractMesh:
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


MESH = mesh_of(data=2, model=4)
H100 = sdy.CostModel.of_machine("h100", MESH)
SPREAD = replace(sdy.CostModel.of_machine("h100", MESH, {"data": NETWORK}), network=())
"""As of libraries that send all bytes of a collective over both axes at the rate of the network."""
V5E = sdy.CostModel.of_machine("tpu v5e", MESH)


def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def layer(w: Any, x: Any) -> Any:
    with jax.named_scope("mlp"):
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


def unrolled(weights: Any, x: Any) -> Any:
    """The mean of what some layers make of rows, each layer in a scope."""
    for number, w in enumerate(weights):
        with jax.named_scope(f"layer_{number}"):
            x = layer(w, x)
    with jax.named_scope("loss"):
        return jnp.mean(x**2)


def scanned(weights: Any, x: Any) -> Any:
    """The same in a loop, activations computed again."""
    return jnp.mean(jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(w, x), None), x, weights)[0] ** 2)


def trained(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A step of gradient descent."""

    def step(weights: Any, x: Any) -> Any:
        gradients = jax.grad(loss)(weights, x)
        with jax.named_scope("optimizer"):
            return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    return step


def weights(*stacked: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {"up": shape(*stacked, WIDTH, 4 * WIDTH), "down": shape(*stacked, 4 * WIDTH, WIDTH)}


def specs(*stacked: None) -> dict[str, P]:
    return {"up": P(*stacked, "data", "model"), "down": P(*stacked, "model", "data")}


def step_of_layers(costs: sdy.CostModel | None, rows: int = ROWS, **options: Any) -> sdy.Plan:
    """Layers one by one, their weights over all devices."""
    split = [specs()] * LAYERS
    f = sdy.partition(
        trained(unrolled), mesh=MESH, in_shardings=(split, P("data")), out_shardings=split, **said(costs), **options
    )
    return f.plan([weights()] * LAYERS, shape(rows, WIDTH))


MANY = 64
"""Layers of a page that has to open soon."""


def many_layers() -> PlanRecord:
    """Many layers one by one, with the steps of propagation; op by op, so that planning is short."""
    split = [specs()] * MANY
    options: dict[str, Any] = {"costs": H100, "layouts": "local"}
    f = sdy.partition(trained(unrolled), mesh=MESH, in_shardings=(split, P("data")), out_shardings=split, **options)
    return f.plan([weights()] * MANY, shape(ROWS, WIDTH)).record(steps=True)


def step_in_a_loop(costs: sdy.CostModel | None, **options: Any) -> sdy.Plan:
    """Layers in a loop."""
    split = specs(None)
    f = sdy.partition(
        trained(scanned), mesh=MESH, in_shardings=(split, P("data")), out_shardings=split, **said(costs), **options
    )
    return f.plan(weights(LAYERS), shape(ROWS, WIDTH))


def said(costs: sdy.CostModel | None) -> dict[str, Any]:
    return {} if costs is None else {"costs": costs}


def pipelined() -> sdy.Plan:
    """A pipeline of two stages over a network, of which each trip is one of two branches."""
    mesh = mesh_of(stage=2, data=4)
    costs = sdy.CostModel.of_machine("tpu v5e", mesh, {"stage": 6.25e9})
    run = jax.value_and_grad(
        lambda w, x: sdy.pipeline(
            lambda w, x: jnp.tanh(x @ w), w, x, microbatches=4, loss=lambda y: jnp.mean(y**2), schedule="1f1b"
        )
    )
    f = sdy.partition(
        run, mesh=mesh, in_shardings=(P("stage"), P("data")), out_shardings=(P(), P("stage")), costs=costs
    )
    return f.plan(shape(4, 512, 512), shape(2048, 512))


def with_a_kernel() -> sdy.Plan:
    """An attention kernel between products."""
    heads = P("data", "model")

    def attend(x: Any, w: Any) -> Any:
        x = jnp.tanh(x @ w)
        return flash_attention(x, x, x, causal=True) @ w

    f = sdy.partition(attend, mesh=MESH, in_shardings=(heads, P()), out_shardings=heads, costs=V5E)
    return f.plan(shape(8, 4, 256, 128), shape(128, 128))


RINGS = sdy.CostModel(latency=1e-7, flop=1e-11, bandwidth={"data": 1e9, "model": 1e9}, memory=1e-13)
"""A machine on which products take about as long as sending what they take."""


def with_rings() -> sdy.Plan:
    """A layer whose rows are gathered before its products and scattered behind, around others."""

    def run(x: Any, around: Any, up: Any, down: Any) -> Any:
        return (jnp.tanh(jnp.tanh(x @ around) @ up) @ down) @ around

    f = sdy.partition(
        run,
        mesh=MESH,
        in_shardings=(P("model"), P(), P(None, "model"), P("model")),
        out_shardings=P("model"),
        costs=RINGS,
    )
    return f.plan(shape(128, 64), shape(64, 64), shape(64, 1024), shape(1024, 64))


def a_trip_ahead() -> sdy.Plan:
    """A loop that gathers layers one trip ahead, as a device may hold one layer more."""
    mesh, split = mesh_of(x=8), [P(None, "x"), P(None, None, "x")]
    costs = sdy.CostModel(latency=1e-7, flop=1e-11, bandwidth={"x": 1e9}, memory=1e-13)
    arguments = [shape(8, 64, 256), shape(8, 256, 64)], shape(512, 64), shape(512, 64)

    def planned(**options: Any) -> sdy.Plan:
        given = {"in_shardings": (split, P("x"), P("x")), "out_shardings": split, "recompute": False}
        return sdy.partition(stacked, mesh=mesh, **given, **options).plan(*arguments)

    return planned(costs=costs, memory=1.2 * planned(costs=sdy.CostModel()).memory.peak)


def ahead_of_others() -> sdy.Plan:
    """Loops that gather one weight of two a trip ahead, the other one and what is scattered beside the same products,
    none of which waits for less than its products take."""
    mesh, split = mesh_of(x=8), {"up": P(None, "x"), "down": P(None, None, "x")}
    costs, wide = sdy.CostModel.of_machine("h100", mesh, {"x": NETWORK}), 2 * WIDTH
    arguments = {"up": shape(12, wide, 4 * wide), "down": shape(12, 4 * wide, wide)}, shape(16 * ROWS, wide)

    def planned(**options: Any) -> sdy.Plan:
        given: dict[str, Any] = {"in_shardings": (split, P("x")), "out_shardings": split, "costs": costs}
        return sdy.partition(trained(scanned), mesh=mesh, **given, **options).plan(*arguments)

    return planned(memory=0.75 * planned().memory.peak)


def in_branches() -> sdy.Plan:
    """A conditional of which only one branch sends."""

    def run(which: Any, x: Any, w: Any) -> Any:
        return jax.lax.cond(which, lambda x: jnp.tanh(x @ w), lambda x: x + 1, x)

    f = sdy.partition(
        run, mesh=MESH, in_shardings=(P(), P("data", "model"), P("model")), out_shardings=P("data"), costs=H100
    )
    return f.plan(shape(dtype=jnp.bool_), shape(ROWS, WIDTH), shape(WIDTH, WIDTH))


def until_it_is_small() -> sdy.Plan:
    """A loop of which nobody knows the trips, of partial sums."""

    def run(x: Any, w: Any) -> Any:
        return jax.lax.while_loop(lambda x: jnp.max(x) > 1, lambda x: jnp.tanh(x @ w) @ w.T, x)

    f = sdy.partition(run, mesh=MESH, in_shardings=(P("data"), P(None, "model")), out_shardings=P("data"), costs=SPREAD)
    return f.plan(shape(ROWS, WIDTH), shape(WIDTH, 4 * WIDTH))


OFFLOAD = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=["x"], offload_src="device", offload_dst="pinned_host"
)


def offloading(costs: sdy.CostModel) -> sdy.Plan:
    """Layers in a loop whose inputs wait on the host for the backward pass, with momentum that lies there."""

    def kept(w: Any, x: Any) -> Any:
        return layer(w, checkpoint_name(x, "x"))

    def loss(weights: Any, x: Any) -> Any:
        run = jax.checkpoint(kept, policy=OFFLOAD)
        return jnp.mean(jax.lax.scan(lambda x, w: (run(w, x), None), x, weights)[0] ** 2)

    def step(weights: Any, momentum: Any, x: Any) -> Any:
        gradients, momentum = jax.grad(loss)(weights, x), jax.device_put(momentum, jax.memory.Space.Device)
        with jax.named_scope("optimizer"):
            momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
            weights = jax.tree.map(lambda w, m: w - 0.1 * m, weights, momentum)
        return weights, jax.device_put(momentum, jax.memory.Space.Host)

    split = specs(None)
    there = {name: NamedSharding(MESH, spec, memory_kind="pinned_host") for name, spec in split.items()}
    momentum = {
        name: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=there[name])
        for name, each in weights(LAYERS).items()
    }
    shardings = {"in_shardings": (split, there, P("data")), "out_shardings": (split, there)}
    f = sdy.partition(step, mesh=MESH, costs=costs, **shardings)
    return f.plan(weights(LAYERS), momentum, shape(ROWS, WIDTH))


TIMED: dict[str, Callable[[], sdy.Plan]] = {
    "layers, over a network": lambda: step_of_layers(SPREAD, 2 * ROWS),
    "layers, in buckets": lambda: step_of_layers(H100),
    "layers on TPUs": lambda: step_of_layers(V5E),
    "layers in bytes": lambda: step_of_layers(None),
    "a loop": lambda: step_in_a_loop(V5E),
    "a loop over a network": lambda: step_in_a_loop(SPREAD),
    "a loop in bytes": lambda: step_in_a_loop(None),
    "op by op": lambda: step_of_layers(V5E, layouts="local"),
    "a pipeline": pipelined,
    "a kernel": with_a_kernel,
    "rings": with_rings,
    "a trip ahead": a_trip_ahead,
    "a trip ahead of others": ahead_of_others,
    "branches": in_branches,
    "unknown trips": until_it_is_small,
}
"""What plans it, by name."""


def ran(record: PlanRecord) -> PlanRecord:
    """A record with a run of three times what was estimated, as `Plan.analyze` leaves one, and an op beside another."""
    slices = [
        RecordedExecution(
            each.lane, 3 * each.start, 3 * each.duration, f"op.{n}", "layer_0/mlp", False, each.collective
        )
        for n, each in enumerate(record.timeline.slices)
    ]
    first = slices[0]
    slices.insert(1, replace(first, instruction="beside", start=first.start + first.duration / 2))
    return replace(record, run=RecordedRun("cpu", 3 * record.time.total, record.timeline.lanes, tuple(slices)))
