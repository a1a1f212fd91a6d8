"""Gemma 3: layers of local and global attention in turn, a large vocabulary, and the embedding as the last weights."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from models.common import Array, Layout, Program, Tree, bf16, cross_entropy, i32, rms_norm, rotary, stacked, training
from models.kernels import Attention, written_out


@dataclass(frozen=True)
class Gemma:
    """Five layers that attend to `window` tokens, then one that attends to all, and so on (Gemma 3 Technical Report,
    arXiv 2503.19786). The 27B model has 62 layers of 5376, 32 heads of 128 with 16 of keys, MLPs of 21504, a window of
    1024 and 262,144 words; keys and queries are normalized, and each half of a layer before and after.

    Attributes:
        attention: that of global layers; that of the others is the same with a `window`.
    """

    layers: int
    d: int
    heads: int
    kv_heads: int
    width: int
    ffn: int
    vocabulary: int
    window: int
    cycle: int = 6
    attention: Attention = written_out

    @property
    def local(self) -> Attention:
        """The attention of local layers."""
        if self.attention is written_out:
            return partial(written_out, window=self.window)
        return dataclasses.replace(self.attention, window=self.window)  # type: ignore[type-var]

    def weights(self) -> Tree:
        d, ffn = self.d, self.ffn
        norms = ("before_attention", "after_attention", "before_mlp", "after_mlp")
        layer = {
            **{name: Array((d,), (None,)) for name in norms},
            **{name: Array((self.width,), (None,)) for name in ("q_norm", "k_norm")},
            "q": Array((d, self.heads, self.width), ("embed", "heads", None)),
            "kv": Array((2, d, self.kv_heads, self.width), (None, "embed", "kv_heads", None)),
            "o": Array((self.heads, self.width, d), ("heads", None, "embed")),
            "gate": Array((d, ffn), ("embed", "mlp")),
            "up": Array((d, ffn), ("embed", "mlp")),
            "down": Array((ffn, d), ("mlp", "embed")),
        }
        cycles, rest = divmod(self.layers, self.cycle)
        return {
            "embedding": Array((self.vocabulary, d), ("vocabulary", "embed")),
            "norm": Array((d,), (None,)),
            "cycles": [stacked(cycles, layer)] * self.cycle,
            "rest": [layer] * rest,
        }

    def flops(self, batch: int, sequence: int) -> float:
        """As `Llama.flops`; a local layer has `window` pairs for each token, less those before the first."""
        products = self.d * self.width * 2 * (self.heads + self.kv_heads) + 3 * self.d * self.ffn
        cut = min(self.window, sequence)
        pairs = sequence * cut - cut**2 / 2, sequence**2 / 2
        whole = self.layers // self.cycle
        attended = 4 * self.heads * self.width * ((self.layers - whole) * pairs[0] + whole * pairs[1])
        return batch * (2 * sequence * (self.layers * products + self.d * self.vocabulary) + attended)

    def layer(self, x: jax.Array, weights: Tree, layout: Layout, whole: bool) -> jax.Array:
        weights = jax.tree.map(lambda w: w.astype(x.dtype), weights)
        h = rms_norm(x, weights["before_attention"])
        q = jnp.einsum("bsd,dhk->bshk", h, weights["q"])
        k, v = jnp.einsum("bsd,cdhk->cbshk", h, weights["kv"])
        q, k = rms_norm(q, weights["q_norm"]), rms_norm(k, weights["k_norm"])
        attend, base = (self.attention, 1e6) if whole else (self.local, 1e4)
        q, k = (rotary(part, base=base) for part in (q, k))
        found = jnp.einsum("bshk,hkd->bsd", attend(q, k, v, layout), weights["o"])
        x = layout(x + rms_norm(found, weights["after_attention"]), "batch", "seq", None)
        h = rms_norm(x, weights["before_mlp"])
        inner = layout(jax.nn.gelu(h @ weights["gate"]) * (h @ weights["up"]), "batch", "seq", "mlp")
        return layout(x + rms_norm(inner @ weights["down"], weights["after_mlp"]), "batch", "seq", None)

    def loss(self, weights: Tree, tokens: jax.Array, targets: jax.Array, *, layout: Layout) -> jax.Array:
        embedding = weights["embedding"].astype(bf16)
        x = layout(embedding[tokens] * self.d**0.5, "batch", "seq", None)
        kinds = [number == self.cycle - 1 for number in range(self.cycle)]

        def cycle(x: jax.Array, layers: list[Tree], scanned: bool) -> jax.Array:
            for layer, whole in zip(layers, kinds, strict=False):
                made = partial(self.layer, layout=layout, whole=whole)
                x = jax.checkpoint(made, prevent_cse=not scanned)(x, layer)
            return x

        if self.layers >= self.cycle:
            x = jax.lax.scan(lambda x, layers: (cycle(x, layers, True), None), x, weights["cycles"])[0]
        x = cycle(x, weights["rest"], False)
        logits = layout(rms_norm(x, weights["norm"]) @ embedding.T, "batch", "seq", "vocabulary")
        return cross_entropy(logits, targets)


def trained_gemma(model: Gemma, layout: Layout, batch: int, sequence: int) -> Program:
    """A training step in bfloat16 over float32 weights, on `batch` sequences."""
    tokens = Array((batch, sequence), ("batch", "seq"), i32)
    loss = partial(model.loss, layout=layout)
    return training(loss, model.weights(), (tokens, tokens), model.flops(batch, sequence))
