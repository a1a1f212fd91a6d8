"""Random pipelines: layers, trees, stages, schedules and meshes, each beside the scan that it equals."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from machine_models import small_costs

import sdy_jax as sdy

WIDTH = 4
MESHES = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (8, 1, 1), (2, 2, 1), (4, 1, 2), (2, 2, 2), (3, 2, 1)]
"""Sizes of `stage`, `data` and `model`."""


AXES = ("stage", "data", "model")
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = [(AUTO,) * 3, (EXPLICIT,) * 3, (AUTO, EXPLICIT, AUTO), (EXPLICIT, AUTO, EXPLICIT)]


def mesh_of(case: Case) -> jax.sharding.Mesh:
    devices = np.array(jax.devices()[: int(np.prod(case.sizes))]).reshape(case.sizes)
    return jax.sharding.Mesh(devices, AXES, axis_types=case.kinds)


@dataclass
class Case:
    """One pipeline; `options` are those of `sdy.pipeline`."""

    seed: int
    sizes: tuple[int, ...]
    layers: int
    batch: int
    dtype: Any
    has_extra: bool
    has_aux: bool
    has_loss: bool
    has_key: bool
    has_counter: bool
    is_checkpointed: bool
    is_jitted: bool
    is_partitioned: bool
    options: dict[str, Any] = field(default_factory=dict)
    loss_has_aux: bool = False
    aux_moves: bool = True
    """Whether auxiliary results have cotangents."""
    kinds: tuple[Any, ...] = KINDS[0]
    machine: str = ""
    """By whose rates it is planned; by what is sent where it is empty."""


def draw(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    flip = lambda share=0.5: bool(rng.random() < share)  # noqa: E731
    schedule = str(rng.choice(["gpipe", "1f1b", "interleaved", "zero_bubble"]))
    microbatches = int(rng.integers(1, 7))
    options: dict[str, Any] = {"schedule": schedule, "microbatches": microbatches}
    if schedule == "interleaved":
        options["rounds"] = int(rng.integers(1, 4))
    has_loss = flip()
    case = Case(
        seed=seed,
        sizes=MESHES[rng.integers(len(MESHES))],
        layers=int(rng.integers(1, 10)),
        batch=microbatches * int(rng.integers(1, 5)),
        dtype=[jnp.float64, jnp.float32, jnp.bfloat16][int(rng.choice(3, p=[0.6, 0.2, 0.2]))],
        has_extra=flip(),
        has_aux=not has_loss and flip(),
        has_loss=has_loss,
        has_key=flip(0.3),
        has_counter=flip(0.3),
        is_checkpointed=flip(),
        is_jitted=flip(0.3),
        is_partitioned=flip(),
        options=options,
    )
    case.has_aux |= has_loss and flip()
    case.loss_has_aux, case.aux_moves = has_loss and flip(), flip()
    case.kinds = KINDS[int(rng.choice(len(KINDS), p=[0.5, 0.3, 0.1, 0.1]))]
    return case


def options_of(case: Case) -> dict[str, Any]:
    """What may matter of a case together with another option.

    Of counts that is whether they are one or more; of layers also whether stages have as many of them, some or none.
    """
    found = {each.name: getattr(case, each.name) for each in fields(case) if each.name not in ("seed", "options")}
    microbatches, stages = case.options["microbatches"], case.sizes[0]
    layers = "fewer" if case.layers < stages else "even" if case.layers % stages == 0 else "uneven"
    counts = {"microbatches": min(microbatches, 2), "rounds": min(case.options.get("rounds", 0), 2)}
    sizes = (min(stages, 2), *case.sizes[1:])
    return found | case.options | counts | {"layers": layers, "sizes": sizes, "batch": case.batch // microbatches}


def cost_of(case: Case) -> float:
    """For the choice of few cases: how long one takes, beside the quickest (measured, 2026-11)."""
    return 1 + case.is_partitioned * (1 + (case.options["schedule"] == "interleaved") + case.has_key / 2)


def arrays(case: Case) -> dict[str, Any]:
    rng = np.random.default_rng(case.seed + 1)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape) * 0.5, case.dtype)  # noqa: E731
    x = {"h": normal(case.batch, WIDTH), "gate": normal(case.batch, 1)}
    if case.has_counter:
        x["passed"] = jnp.asarray(rng.integers(0, 5, case.batch))
    return {
        "weights": {
            "up": normal(case.layers, WIDTH, 8),
            "down": normal(case.layers, 8, WIDTH),
            "id": jnp.arange(case.layers),
        },
        "x": x,
        "extra": {"shift": normal(case.batch, WIDTH), "mask": jnp.asarray(rng.integers(0, 2, (case.batch, WIDTH)))},
        "shared": normal(WIDTH),
        "head": normal(WIDTH),
        "targets": normal(case.batch),
    }


def layer_of(case: Case, shared: Any) -> Callable[..., Any]:
    """A layer that closes over an array, with what the case asks for."""

    def layer(w: Any, x: Any, *rest: Any) -> Any:
        given = list(rest)
        h = x["h"] * shared
        if case.has_extra:
            extra = given.pop(0)
            h = jnp.where(extra["mask"] > 0, h + extra["shift"], h)
        if case.has_key:
            h = h * jax.random.bernoulli(given.pop(0), 0.8, h.shape).astype(h.dtype)
        inner = jnp.tanh(h @ w["up"]) * (1 + w["id"].astype(h.dtype) / 8)
        made = x | {"h": x["h"] + (inner @ w["down"]) * jnp.tanh(x["gate"])}
        if case.has_counter:
            made["passed"] = x["passed"] + w["id"]
        aux = {"norm": jnp.mean(inner**2), "count": jnp.sum(inner > 0)}
        return (made, aux) if case.has_aux else made

    made = jax.jit(layer) if case.is_jitted else layer
    return jax.checkpoint(made) if case.is_checkpointed else made


def loss(case: Case, head: Any, y: Any, targets: Any) -> Any:
    logits = y["h"] @ head
    value = jnp.mean((logits - targets) ** 2)
    value = value.astype(jnp.float32) if value.dtype == jnp.bfloat16 else value
    return (value, {"top": jnp.sum(logits**2), "right": jnp.sum(logits > targets)}) if case.loss_has_aux else value


def parts(tree: Any, microbatches: int) -> Any:
    """The rows of each microbatch, which takes every so many, along a new first dimension."""
    return jax.tree.map(lambda x: x.reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1), tree)


def plain(case: Case, key: Any, given: dict[str, Any]) -> Any:
    """The same by a scan over the layers for each microbatch in turn, and their results as the pipeline has them."""
    count, layer = case.options["microbatches"], layer_of(case, given["shared"])

    def run(microbatch: Any) -> Any:
        m, x, extra, targets = microbatch

        def step(x: Any, xs: Any) -> Any:
            w, index = xs
            keys = [jax.random.fold_in(jax.random.fold_in(key, index), m)] * case.has_key
            made = layer(w, x, *[extra] * case.has_extra, *keys)
            return made if case.has_aux else (made, None)

        y, aux = lax.scan(step, x, (given["weights"], jnp.arange(case.layers)))
        return (loss(case, given["head"], y, targets) if case.has_loss else y), aux

    out, aux = lax.map(run, (jnp.arange(count), *(parts(given[name], count) for name in ("x", "extra", "targets"))))
    made = [jax.tree.map(lambda x: x.swapaxes(0, 1), aux)] * case.has_aux
    if case.has_loss:
        if case.loss_has_aux:
            out, beside = out
            made.append(beside)
        mean = jnp.sum(out) / count
        return (mean, made[0] if len(made) == 1 else tuple(made)) if made else mean
    y = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), out)
    return (y, *made) if made else y


def piped(case: Case, key: Any, given: dict[str, Any]) -> Any:
    options = dict(case.options, has_aux=case.has_aux, key=key if case.has_key else None)
    if case.has_loss:
        options |= {"loss": partial(loss, case, given["head"]), "targets": given["targets"]}
        options["loss_has_aux"] = case.loss_has_aux
    extra = given["extra"] if case.has_extra else None
    if not case.is_partitioned:
        options["mesh"] = mesh_of(case)
    return sdy.pipeline(layer_of(case, given["shared"]), given["weights"], given["x"], extra, **options)


def number(out: Any) -> Any:
    """One number that depends on all of a function's results."""
    leaves = [x for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return sum(
        jnp.sum(jnp.sin(x.astype(jnp.float32 if x.dtype == jnp.bfloat16 else x.dtype)) * (i + 1))
        for i, x in enumerate(leaves)
    )


def _on_types(case: Case, moving: Any, given: Any, fun: Callable[..., Any]) -> Any:
    """What a function makes of arrays whose types are split as far as they can be."""
    mesh, (stages, data, _) = mesh_of(case), case.sizes
    rows = case.batch // case.options["microbatches"]
    batch, stack = P("data" if rows % data == 0 else None), P("stage" if case.layers % stages == 0 else None)
    specs = {"weights": stack, "x": batch, "extra": batch, "targets": batch, "shared": P(), "head": P()}
    for_all = lambda tree: {name: jax.device_put(tree[name], NamedSharding(mesh, specs[name])) for name in tree}  # noqa: E731
    run = sdy.partition(fun, **asked_of(case)) if case.is_partitioned else jax.jit(fun)
    with jax.set_mesh(mesh) if case.is_partitioned else nullcontext():
        return run(for_all(moving), for_all(given))


def asked_of(case: Case) -> dict[str, Any]:
    """What `partition` is asked for beside its borders."""
    return {"costs": small_costs(case.machine, AXES)} if case.machine else {}


def compare(case: Case) -> None:
    """Values and derivatives with respect to all arrays are those of the scan."""
    given, key = arrays(case), jax.random.key(case.seed)
    is_inexact = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)  # noqa: E731
    moving = jax.tree.map(lambda x: x if is_inexact(x) else None, given)

    def both(fun: Callable[..., Any], moving: Any, given: Any) -> Any:
        def of(moving: Any) -> Any:
            whole = jax.tree.map(lambda a, b: b if a is None else a, moving, given, is_leaf=lambda x: x is None)
            out = fun(case, key, whole)
            moves = case.aux_moves or not (case.has_aux or case.loss_has_aux)
            return number(out if moves else out[0]), out

        return jax.grad(of, has_aux=True)(moving)

    wanted = jax.jit(partial(both, plain))(moving, given)
    if EXPLICIT in case.kinds:
        found = _on_types(case, jax.tree.map(np.asarray, moving), jax.tree.map(np.asarray, given), partial(both, piped))
    elif case.is_partitioned:
        specs = {name: P("data") for name in given} | {"weights": P("stage"), "shared": P(), "head": P()}
        made = sdy.partition(partial(both, piped), mesh=mesh_of(case), in_shardings=(specs, specs), **asked_of(case))
        found = made(moving, given)
    else:
        found = jax.jit(partial(both, piped))(moving, given)
    tolerance = {jnp.float64: 1e-9, jnp.float32: 1e-4, jnp.bfloat16: 0.06}[case.dtype]
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(wanted)[0], jax.tree.leaves(found), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, (path, a, b)
        a, b = np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)
        scale = 1 + np.max(np.abs(a), initial=0)
        assert np.max(np.abs(a - b), initial=0) <= tolerance * scale, (path, np.max(np.abs(a - b)), scale)
