"""State-space models: Mamba-2, and a hybrid of such layers, attention and experts."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp

from models.common import (
    Array,
    Layout,
    Program,
    Tree,
    bf16,
    cross_entropy,
    f32,
    i32,
    layers_of,
    rms_norm,
    stacked,
    training,
)
from models.llama import Llama


@dataclass(frozen=True)
class Mixer:
    """A layer of Mamba-2: the state of a head, (width, state), decays and takes up outer products token by token, which
    is written as products within chunks and a loop over these (Dao and Gu 2024, arXiv 2405.21060, section 6).

    Attributes:
        heads, width: those of the inner values; heads of a group share what is written and read by.
        taps: tokens that the convolution before reaches.
        chunk: tokens of a chunk.
    """

    d: int
    heads: int
    width: int
    state: int
    groups: int
    taps: int = 4
    chunk: int = 256

    @property
    def inner(self) -> int:
        return self.heads * self.width

    def weights(self) -> Tree:
        shared = self.groups * self.state
        return {
            "norm": Array((self.d,), (None,)),
            "gate": Array((self.d, self.inner), ("embed", "heads")),
            "x": Array((self.d, self.inner), ("embed", "heads")),
            "write": Array((self.d, shared), ("embed", "groups")),
            "read": Array((self.d, shared), ("embed", "groups")),
            "step": Array((self.d, self.heads), ("embed", "heads")),
            "taps_x": Array((self.taps, self.inner), (None, "heads")),
            "taps_write": Array((self.taps, shared), (None, "groups")),
            "taps_read": Array((self.taps, shared), (None, "groups")),
            "rate": Array((self.heads,), ("heads",)),
            "bias": Array((self.heads,), ("heads",)),
            "skip": Array((self.heads,), ("heads",)),
            "inner_norm": Array((self.inner,), ("heads",)),
            "o": Array((self.inner, self.d), ("heads", "embed")),
        }

    def flops(self, sequence: int) -> float:
        """Those of the products of one sequence: weights, and within chunks scores, values, states in and out."""
        chunk = min(self.chunk, sequence)
        weights = 2 * self.d * (3 * self.inner + 2 * self.groups * self.state + self.heads)
        scores = self.groups * self.state * chunk + self.inner * chunk  # half of each chunk's pairs
        return sequence * (weights + scores + 4 * self.inner * self.state)

    def __call__(self, x: jax.Array, weights: Tree, layout: Layout) -> jax.Array:
        h = rms_norm(x, weights["norm"])
        count, length = x.shape[:2]
        convolved = {
            name: jax.nn.silu(_convolved(h @ weights[name], weights[f"taps_{name}"])) for name in ("x", "write", "read")
        }
        inner = convolved["x"].reshape(count, length, self.heads, self.width)
        write, read = (convolved[name].reshape(count, length, self.groups, -1) for name in ("write", "read"))
        step = jax.nn.softplus((h @ weights["step"]).astype(f32) + weights["bias"])
        decay = -step * jnp.exp(weights["rate"].astype(f32))
        found = self.recurrence(inner * step[..., None].astype(x.dtype), decay, write, read)
        found = found + inner * weights["skip"][:, None]
        gated = found.reshape(count, length, -1) * jax.nn.silu(h @ weights["gate"])
        gated = layout(gated, "batch", "seq", "heads").reshape(count, length, self.groups, -1)
        scale = weights["inner_norm"].reshape(self.groups, -1)
        return rms_norm(gated, scale).reshape(count, length, -1) @ weights["o"]

    def recurrence(self, x: jax.Array, decay: jax.Array, write: jax.Array, read: jax.Array) -> jax.Array:
        """What heads read of states that `x` is written to: (batch, sequence, heads, width)."""
        count, length, cut = *x.shape[:2], min(self.chunk, x.shape[1])
        chunks = (count, length // cut, cut)
        x = x.reshape(*chunks, self.groups, -1, self.width)  # batch, chunk, token, group, head of it, width
        write, read = (part.reshape(*chunks, self.groups, self.state) for part in (write, read))
        total = jnp.cumsum(decay.reshape(*chunks, self.groups, -1), 2)
        before = jnp.tril(jnp.ones((cut, cut), bool))[..., None, None]
        between = jnp.exp(jnp.where(before, total[:, :, :, None] - total[:, :, None], -jnp.inf)).astype(x.dtype)
        scores = jnp.einsum("bclgn,bcsgn->bclsg", read, write)
        within = jnp.einsum("bclsgr,bcsgrp->bclgrp", scores[..., None] * between, x)
        left = jnp.exp(total[:, :, -1:] - total).astype(x.dtype)
        added = jnp.einsum("bclgn,bclgrp->cbgrpn", write, x * left[..., None]).astype(f32)
        kept = jnp.exp(total[:, :, -1]).swapaxes(0, 1)[..., None, None]

        def carried(state: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return now[0] * state + now[1], state

        states = jax.lax.scan(carried, jnp.zeros(added.shape[1:], f32), (kept, added))[1].astype(x.dtype)
        across = jnp.einsum("bclgn,cbgrpn->bclgrp", read, states) * jnp.exp(total).astype(x.dtype)[..., None]
        return (within + across).reshape(count, length, self.heads, self.width)


def _convolved(x: jax.Array, taps: jax.Array) -> jax.Array:
    """Each channel of `x` (batch, sequence, channels) with its taps, over the tokens before."""
    channels = x.shape[-1]
    return jax.lax.conv_general_dilated(
        x,
        taps[:, None],
        (1,),
        [(taps.shape[0] - 1, 0)],
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=channels,
    )


@dataclass(frozen=True)
class Mamba:
    """Layers of Mamba-2 alone. Mamba-Codestral-7B has 64 layers of 4096, 128 heads of 64 in 8 groups, states of 128,
    and 32,768 words."""

    layers: int
    mixer: Mixer
    vocabulary: int

    def weights(self) -> Tree:
        return {
            "layers": stacked(self.layers, self.mixer.weights()),
            **_around(self.mixer.d, self.vocabulary),
        }

    def loss(self, weights: Tree, tokens: jax.Array, targets: jax.Array, *, layout: Layout) -> jax.Array:
        def layer(x: jax.Array, weights: Tree) -> jax.Array:
            weights = jax.tree.map(lambda w: w.astype(x.dtype), weights)
            return layout(x + self.mixer(x, weights, layout), "batch", "seq", None)

        x = layout(weights["embedding"].astype(bf16)[tokens], "batch", "seq", None)
        x = layers_of(layer, x, weights["layers"], True, True)
        return _loss(x, weights, targets, layout)

    def flops(self, batch: int, sequence: int) -> float:
        return batch * (self.layers * self.mixer.flops(sequence) + 2 * sequence * self.mixer.d * self.vocabulary)


@dataclass(frozen=True)
class Hybrid:
    """Of eight layers one has attention, without positions, and seven are Mamba's; every other one has experts in place
    of its MLP, as in Jamba (Lieber et al. 2024, arXiv 2403.19887), whose layers are Mamba-1's: 32 layers of 4096, 32
    heads with 8 of keys, MLPs and experts of 14336, of 16 experts two, and 65,536 words.

    Attributes:
        dense, mixed: a layer's attention and MLP, and attention and experts.
        place: the layer of a cycle that has attention.
    """

    layers: int
    mixer: Mixer
    dense: Llama
    mixed: Llama
    cycle: int = 8
    place: int = 4
    _attends: tuple[str, ...] = field(default=("attention_norm", "q", "k", "v", "o"), repr=False)

    def _layer(self, number: int) -> Tree:
        model = self.mixed if number % 2 else self.dense
        given = jax.tree.map(
            lambda a: Array(a.shape[1:], a.names[1:]),
            model.weights()["layers"],
            is_leaf=lambda leaf: isinstance(leaf, Array),
        )
        mlp = {name: weight for name, weight in given.items() if name not in self._attends}
        if number == self.place:
            return {"mlp": mlp, "attention": {name: given[name] for name in self._attends}}
        return {"mlp": mlp, "mixer": self.mixer.weights()}

    def weights(self) -> Tree:
        cycles = self.layers // self.cycle
        return {
            "layers": [stacked(cycles, self._layer(number)) for number in range(self.cycle)],
            **_around(self.mixer.d, self.dense.vocabulary),
        }

    def flops(self, batch: int, sequence: int) -> float:
        cycles, mixed = self.layers // self.cycle, self.cycle // 2
        d, attention = self.mixer.d, self.dense.heads + self.dense.kv_heads
        mlps = sum(3 * d * model.ffn * max(model.chosen, 1) + d * model.experts for model in (self.dense, self.mixed))
        attended = (
            4 * d * self.dense.width * attention * sequence + 2 * self.dense.heads * self.dense.width * sequence**2
        )
        layers = attended + (self.cycle - 1) * self.mixer.flops(sequence) + mixed * 2 * mlps * sequence
        return batch * (cycles * layers + 2 * sequence * d * self.dense.vocabulary)

    def layer(self, x: jax.Array, weights: Tree, layout: Layout, number: int) -> jax.Array:
        weights = jax.tree.map(lambda w: w.astype(x.dtype), weights)
        model = self.mixed if number % 2 else self.dense
        if number == self.place:
            given = weights["attention"]
            q, k, v = model.heads_of(rms_norm(x, given["attention_norm"]), given)
            added = model.attention(q, k, v, layout).reshape(*x.shape[:2], -1) @ given["o"]
        else:
            added = self.mixer(x, weights["mixer"], layout)
        x = layout(x + added, "batch", "seq", None)
        mlp = weights["mlp"]
        return layout(x + model.mlp(rms_norm(x, mlp["mlp_norm"]), mlp, layout), "batch", "seq", None)

    def loss(self, weights: Tree, tokens: jax.Array, targets: jax.Array, *, layout: Layout) -> jax.Array:
        def cycle(x: jax.Array, layers: list[Tree]) -> tuple[jax.Array, None]:
            for number, layer in enumerate(layers):
                x = jax.checkpoint(partial(self.layer, layout=layout, number=number), prevent_cse=False)(x, layer)
            return x, None

        x = layout(weights["embedding"].astype(bf16)[tokens], "batch", "seq", None)
        x = jax.lax.scan(cycle, x, weights["layers"])[0]
        return _loss(x, weights, targets, layout)


def _around(d: int, vocabulary: int) -> Tree:
    """The weights beside those of layers."""
    return {
        "embedding": Array((vocabulary, d), ("vocabulary", "embed")),
        "norm": Array((d,), (None,)),
        "out": Array((d, vocabulary), ("embed", "vocabulary")),
    }


def _loss(x: jax.Array, weights: Tree, targets: jax.Array, layout: Layout) -> jax.Array:
    logits = rms_norm(x, weights["norm"]) @ weights["out"].astype(x.dtype)
    return cross_entropy(layout(logits, "batch", "seq", "vocabulary"), targets)


def trained_states(model: Mamba | Hybrid, layout: Layout, batch: int, sequence: int) -> Program:
    """A training step in bfloat16 over float32 weights, on `batch` sequences."""
    tokens = Array((batch, sequence), ("batch", "seq"), i32)
    loss = partial(model.loss, layout=layout)
    return training(loss, model.weights(), (tokens, tokens), model.flops(batch, sequence))
