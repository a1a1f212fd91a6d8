"""A pipeline as trainers write it: stages side by side, which hand on what they made in each trip of a loop."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from models.common import Array, Layout, Program, Tree, bf16, cross_entropy, i32, is_array, layers_of, training
from models.llama import Llama

MICROBATCHES = 4


def pipelined(
    model: Llama, layout: Layout, batch: int, sequence: int, stages: int = 2, scanned: bool = False
) -> Program:
    """A step of stages side by side, each of some layers under `vmap`: in each trip of a loop a stage takes what the
    one before it made, by a concatenation, and the first one the next microbatch. `scanned`: a stage's layers, too."""
    per_stage = model.layers // stages
    small = (batch // MICROBATCHES, sequence, model.d)
    names = ("stage", "batch", "seq", None)

    def stage(x: jax.Array, weights: Tree) -> jax.Array:
        plain = replace(layout, constrained=False)
        if scanned:
            return layers_of(partial(model.layer, layout=plain), x, weights, True, model.checkpointed)
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
