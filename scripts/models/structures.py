"""Small steps whose structure is rich: tiny widths, but all that trainers have around their layers. What planning them
takes is what a first step waits for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from models import rows
from models.common import Array, Layout, Program, Tree, bf16, cross_entropy, i32, is_array, training
from models.experts import ByCapacity, Dropless
from models.llama import Llama, trained

_TINY = Llama(4, 128, 4, 2, 32, 512, 512)
_MIXED = replace(_TINY, experts=4, chosen=2, routing=ByCapacity(1.25))
_MIXTRAL = replace(_TINY, layers=2, experts=8, chosen=2, routing=Dropless(jax.lax.ragged_dot))

MICROBATCHES = 4
STAGED: rows.Rows = {**rows.FSDP, "stage": "stage"}


def pipelined(model: Llama, layout: Layout, batch: int, sequence: int, stages: int = 2) -> Program:
    """A step of stages side by side, each of some layers under `vmap`: in each trip of a loop a stage takes what the
    one before it made, by a concatenation, and the first one the next microbatch."""
    per_stage = model.layers // stages
    small = (batch // MICROBATCHES, sequence, model.d)
    names = ("stage", "batch", "seq", None)

    def stage(x: jax.Array, weights: Tree) -> jax.Array:
        plain = replace(layout, constrained=False)
        for number in range(per_stage):
            x = model.layer(x, jax.tree.map(lambda w, number=number: w[number], weights), plain)
        return x

    def loss(weights: Tree, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        x = weights["embedding"].astype(bf16)[tokens].reshape(MICROBATCHES, *small)
        staged = jax.tree.map(lambda w: w.reshape(stages, per_stage, *w.shape[1:]), weights["layers"])
        trips = MICROBATCHES + stages - 1

        def trip(carry: tuple[jax.Array, jax.Array], number: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
            state, done = carry
            first = jax.lax.dynamic_index_in_dim(x, jnp.minimum(number, MICROBATCHES - 1))
            state = layout(jnp.concatenate([first, state[:-1]]), *names)
            state = layout(jax.vmap(jax.checkpoint(stage))(state, staged), *names)
            place = jnp.maximum(number - stages + 1, 0)
            return (state, jax.lax.dynamic_update_index_in_dim(done, state[-1], place, 0)), None

        start = layout(jnp.zeros((stages, *small), bf16), *names), jnp.zeros_like(x)
        (_, done), _ = jax.lax.scan(trip, start, jnp.arange(trips))
        return cross_entropy(model.logits(done.reshape(batch, sequence, -1), weights, layout), targets)

    given = model.weights()
    layers = jax.tree.map(lambda w: Array(w.shape, ("stage", *w.names[1:])), given["layers"], is_leaf=is_array)
    tokens = Array((batch, sequence), ("batch", "seq"), i32)
    return training(loss, {**given, "layers": layers}, (tokens, tokens), model.flops(batch, sequence))


@dataclass(frozen=True)
class Structure:
    """A step on a mesh of eight devices. `most`: CPU seconds that planning may take."""

    make: Callable[[Layout], Program]
    axes: dict[str, int]
    rules: rows.Rows
    most: float


STRUCTURES = {
    "fsdp and tensor": Structure(
        partial(trained, _TINY, batch=8, sequence=64), {"fsdp": 4, "model": 2}, rows.MEGATRON, 4
    ),
    "experts": Structure(partial(trained, _MIXED, batch=8, sequence=64), {"fsdp": 4, "expert": 2}, rows.EXPERTS, 4),
    "context": Structure(partial(trained, _TINY, batch=4, sequence=128), {"fsdp": 4, "seq": 2}, rows.LONG, 4),
    "experts in shard_map": Structure(
        partial(trained, _MIXTRAL, batch=8, sequence=64), {"fsdp": 4, "expert": 2}, rows.EXPERTS, 20
    ),
    "pipeline": Structure(partial(pipelined, _TINY, batch=16, sequence=64), {"stage": 2, "fsdp": 4}, STAGED, 10),
}


@dataclass(frozen=True)
class Planned:
    """CPU seconds of planning, and of jit's lowering and compilation of the same step; infinite where CPUs cannot."""

    name: str
    plan: float
    jit: float
    most: float

    @property
    def is_late(self) -> bool:
        """Whether planning takes longer than it may, or than three times what jit takes, of what that takes 2 s for."""
        return self.plan > self.most or (self.jit > 2 and self.plan > 3 * self.jit)

    def __str__(self) -> str:
        return f"{self.name:<22}{self.plan:10.2f}{self.jit:10.2f}{self.plan / self.jit:8.2f}{self.most:8.0f}"


HEAD = f"{'structure':<22}{'planned':>10}{'jit':>10}{'ratio':>8}{'most':>8}"


def measured(forget: Callable[[], None]) -> Iterator[Planned]:
    """What all structures take; `forget` empties all caches."""
    for name, structure in STRUCTURES.items():
        mesh = jax.make_mesh(tuple(structure.axes.values()), tuple(structure.axes), (AxisType.Auto,) * 2)
        program = structure.make(layout := Layout(mesh, structure.rules, constrained=True))
        function = program.partitioned(layout, on_unknown="ignore")
        forget()
        plan = _seconds(lambda function=function, program=program: function.plan(*program.arguments))
        forget()
        yield Planned(name, plan, _by_jit(program, layout), structure.most)


def _by_jit(program: Program, layout: Layout) -> float:
    step = program.jitted(layout)
    try:
        return _seconds(lambda: step.lower(*program.arguments).compile())
    except jax.errors.JaxRuntimeError:  # ragged_all_to_all, which CPUs do not have
        return float("inf")


def _seconds(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start
