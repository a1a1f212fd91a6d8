"""Models of text: Llama, BERT and an LSTM, as trained, prefilled and decoded."""

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
    rms_norm,
    rotary,
    stacked,
    training,
)
from models.experts import Routing, by_sorting
from models.kernels import Attention, written_out

# Language models like Llama and Gemma: grouped attention with rotary positions, gated MLPs or mixtures of experts.


@dataclass(frozen=True)
class Llama:
    """Sizes of a model.

    Attributes:
        tied: the embedding is the last product's weights, too.
        experts, chosen: a mixture of so many experts, of which each token takes some; 0 where MLPs are dense.
        routing: how tokens reach their experts.
        scanned, checkpointed: layers are a loop; their activations are computed again.
        attention: that of whole sequences.
    """

    layers: int
    d: int
    heads: int
    kv_heads: int
    width: int
    ffn: int
    vocabulary: int
    tied: bool = False
    experts: int = 0
    chosen: int = 0
    routing: Routing = by_sorting
    scanned: bool = True
    checkpointed: bool = True
    attention: Attention = written_out

    def weights(self) -> Tree:
        d, ffn = self.d, self.ffn
        projected = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}
        layer = {
            "attention_norm": Array((d,), (None,)),
            "mlp_norm": Array((d,), (None,)),
            **{name: Array((d, heads * self.width), ("embed", "heads")) for name, heads in projected.items()},
            "o": Array((self.heads * self.width, d), ("heads", "embed")),
        }
        if self.experts:
            layer["router"] = Array((d, self.experts), ("embed", None))
        of, expert = ((self.experts,), ("expert",)) if self.experts else ((), ())
        layer |= {name: Array((*of, d, ffn), (*expert, "embed", "mlp")) for name in ("gate", "up")}
        layer["down"] = Array((*of, ffn, d), (*expert, "mlp", "embed"))
        found = {
            "embedding": Array((self.vocabulary, d), ("vocabulary", "embed")),
            "norm": Array((d,), (None,)),
            "layers": stacked(self.layers, layer),
        }
        return found if self.tied else found | {"out": Array((d, self.vocabulary), ("embed", "vocabulary"))}

    def flops(self, batch: int, sequence: int, queries: int = 0, logits: int = 0) -> float:
        """The operations of `batch` sequences, forward, by hand.

        A token is multiplied with N weights, those of all layers, of experts the chosen ones; `logits` tokens with
        those of the vocabulary, too; a multiplication and an addition are two: 2 N T. Looking tokens up is no product.
        In attention a head's query is multiplied with a key, and their score with a value: 4 width. Of a sequence of s
        tokens half of the s x s pairs count, since attention is causal: 2 layers heads width s^2. With gradients, three
        times as much, this is 6 N T + 12 layers heads width s^2 batch / 2.

        Args:
            queries: tokens of each sequence that are computed, where those before them are in a cache, all of whose
                `sequence` places count; else all are.
            logits: tokens of each sequence whose logits are; all where it is 0.
        """
        products = self.d * self.width * 2 * (self.heads + self.kv_heads)
        products += 3 * self.d * self.ffn * max(self.chosen, 1) + self.d * self.experts
        tokens, out = queries or sequence, self.d * self.vocabulary * (logits or queries or sequence)
        pairs = queries * sequence if queries else sequence**2 / 2
        attention = 4 * self.heads * self.width * pairs
        return batch * (self.layers * (2 * products * tokens + attention) + 2 * out)

    def heads_of(self, h: jax.Array, weights: Tree) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values: (batch, sequence, heads, width)."""
        return tuple(  # type: ignore[return-value]
            (h @ weights[name]).reshape(*h.shape[:2], heads, self.width)
            for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
        )

    def mlp(self, h: jax.Array, weights: Tree, layout: Layout) -> jax.Array:
        if not self.experts:
            inner = layout(jax.nn.silu(h @ weights["gate"]) * (h @ weights["up"]), "batch", "seq", "mlp")
            return inner @ weights["down"]
        return self.routing(self, h, weights, layout)

    def layer(self, x: jax.Array, weights: Tree, layout: Layout) -> jax.Array:
        weights = jax.tree.map(lambda w: w.astype(x.dtype), weights)
        q, k, v = self.heads_of(rms_norm(x, weights["attention_norm"]), weights)
        found = self.attention(rotary(q), rotary(k), v, layout)
        x = layout(x + found.reshape(*x.shape[:2], -1) @ weights["o"], "batch", "seq", None)
        return layout(x + self.mlp(rms_norm(x, weights["mlp_norm"]), weights, layout), "batch", "seq", None)

    def logits(self, x: jax.Array, weights: Tree, layout: Layout) -> jax.Array:
        out = weights["embedding"].T if self.tied else weights["out"]
        return layout(rms_norm(x, weights["norm"]) @ out.astype(x.dtype), "batch", "seq", "vocabulary")

    def loss(self, weights: Tree, tokens: jax.Array, targets: jax.Array, *, layout: Layout) -> jax.Array:
        x = layout(weights["embedding"].astype(bf16)[tokens], "batch", "seq", None)
        layer = partial(self.layer, layout=layout)
        x = layers_of(layer, x, weights["layers"], self.scanned, self.checkpointed)
        return cross_entropy(self.logits(x, weights, layout), targets)


def trained(model: Llama, layout: Layout, batch: int, sequence: int) -> Program:
    """A training step in bfloat16 over float32 weights, on `batch` sequences."""
    tokens = Array((batch, sequence), ("batch", "seq"), i32)
    loss = partial(model.loss, layout=layout)
    return training(loss, model.weights(), (tokens, tokens), model.flops(batch, sequence))


# BERT, and a language model of LSTMs.


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
