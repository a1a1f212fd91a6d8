"""BERT, and a language model of LSTMs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from models.common import (
    Array,
    Layout,
    Program,
    Tree,
    attention,
    bf16,
    cross_entropy,
    f32,
    i32,
    layer_norm,
    layers_of,
    stacked,
    training,
)


@dataclass(frozen=True)
class Bert:
    """A bidirectional transformer that guesses words; the embedding is the last product's weights, too."""

    layers: int
    d: int
    heads: int
    mlp: int
    vocabulary: int

    def weights(self, sequence: int) -> Tree:
        d = self.d
        norm = {"scale": Array((d,), (None,)), "bias": Array((d,), (None,))}
        layer = {
            "first": norm,
            "second": norm,
            **{name: Array((d, d), ("embed", "heads")) for name in ("q", "k", "v")},
            "o": Array((d, d), ("heads", "embed")),
            "up": Array((d, self.mlp), ("embed", "mlp")),
            "down": Array((self.mlp, d), ("mlp", "embed")),
            "bias": Array((self.mlp,), ("mlp",)),
        }
        return {
            "embedding": Array((self.vocabulary, d), ("vocabulary", "embed")),
            "places": Array((sequence, d), (None, "embed")),
            "norm": norm,
            "layers": stacked(self.layers, layer),
        }

    def flops(self, batch: int, sequence: int) -> float:
        """The operations of the loss: 2 N T of its N weights that are multiplied with tokens, and 4 layers d s^2 of
        attention, which is not causal."""
        products = self.layers * (4 * self.d**2 + 2 * self.d * self.mlp) + self.d * self.vocabulary
        return batch * (2 * products * sequence + 4 * self.layers * self.d * sequence**2)

    def layer(self, x: jax.Array, weights: Tree, layout: Layout) -> jax.Array:
        weights = jax.tree.map(lambda w: w.astype(x.dtype), weights)
        q, k, v = ((x @ weights[name]).reshape(*x.shape[:2], self.heads, -1) for name in ("q", "k", "v"))
        x = layer_norm(x + attention(q, k, v, None).reshape(x.shape) @ weights["o"], **weights["first"])
        x = layout(x, "batch", None, None)
        inner = layout(jax.nn.gelu(x @ weights["up"] + weights["bias"]), "batch", None, "mlp")
        return layout(layer_norm(x + inner @ weights["down"], **weights["second"]), "batch", None, None)

    def loss(self, weights: Tree, tokens: jax.Array, targets: jax.Array, *, layout: Layout) -> jax.Array:
        embedding = weights["embedding"].astype(bf16)
        x = layer_norm(embedding[tokens] + weights["places"].astype(bf16), **weights["norm"])
        x = layers_of(
            partial(self.layer, layout=layout), layout(x, "batch", None, None), weights["layers"], True, False
        )
        return cross_entropy(layout(x @ embedding.T, "batch", None, "vocabulary"), targets)


def trained_bert(model: Bert, layout: Layout, batch: int, sequence: int) -> Program:
    """A training step."""
    tokens = Array((batch, sequence), ("batch", None), i32)
    loss = partial(model.loss, layout=layout)
    return training(loss, model.weights(sequence), (tokens, tokens), model.flops(batch, sequence))


@dataclass(frozen=True)
class Lstm:
    """Layers of LSTM cells of `hidden` units, projected to `d`, over a vocabulary."""

    layers: int
    d: int
    hidden: int
    vocabulary: int

    def weights(self) -> Tree:
        cell = {
            "x": Array((self.d, 4, self.hidden), ("embed", None, "mlp")),
            "h": Array((self.d, 4, self.hidden), ("embed", None, "mlp")),
            "bias": Array((4, self.hidden), (None, "mlp")),
            "project": Array((self.hidden, self.d), ("mlp", "embed")),
        }
        return {
            "embedding": Array((self.vocabulary, self.d), ("vocabulary", "embed")),
            "cells": [cell] * self.layers,
            "out": Array((self.d, self.vocabulary), ("embed", "vocabulary")),
        }

    def flops(self, batch: int, sequence: int) -> float:
        """The operations of the loss: 2 N T."""
        products = self.layers * 9 * self.d * self.hidden + self.d * self.vocabulary
        return 2.0 * products * batch * sequence

    def cells(self, xs: jax.Array, weights: Tree, layout: Layout) -> jax.Array:
        """`xs` (sequence, batch, d) through one layer."""
        weights = jax.tree.map(lambda w: w.astype(xs.dtype), weights)
        given = jnp.einsum("sbd,dgh->sbgh", xs, weights["x"]) + weights["bias"]

        def step(state: tuple[jax.Array, jax.Array], now: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            h, c = state
            gates = (now + jnp.einsum("bd,dgh->bgh", h, weights["h"])).astype(f32)
            i, f, g, o = (gates[:, n] for n in range(4))
            c = layout(jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g), "batch", "mlp")
            h = layout((jax.nn.sigmoid(o) * jnp.tanh(c)).astype(xs.dtype) @ weights["project"], "batch", None)
            return (h, c), h

        start = jnp.zeros(xs.shape[1:], xs.dtype), jnp.zeros((xs.shape[1], self.hidden), f32)
        return jax.lax.scan(step, start, given)[1]

    def loss(self, weights: Tree, tokens: jax.Array, targets: jax.Array, *, layout: Layout) -> jax.Array:
        x = weights["embedding"].astype(bf16)[tokens.T]
        for cell in weights["cells"]:
            x = x + self.cells(x, cell, layout)
        return cross_entropy(layout(x @ weights["out"].astype(bf16), None, "batch", "vocabulary"), targets.T)


def trained_lstm(model: Lstm, layout: Layout, batch: int, sequence: int) -> Program:
    """A training step."""
    tokens = Array((batch, sequence), ("batch", None), i32)
    loss = partial(model.loss, layout=layout)
    return training(loss, model.weights(), (tokens, tokens), model.flops(batch, sequence))
