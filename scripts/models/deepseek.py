"""DeepSeek-V3 as trained: latent attention, and experts of which one is shared by all tokens."""

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
    bf16,
    cross_entropy,
    i32,
    layers_of,
    rms_norm,
    rotary,
    stacked,
    training,
)
from models.experts import ByCapacity
from models.kernels import Attention, written_out


@dataclass(frozen=True)
class DeepSeek:
    """Queries, keys and values are made of small latent vectors; keys have a part with rotary positions that all heads
    share. The first layers have MLPs, the others experts with sigmoid scores, whose shares are normalized, and one that
    all tokens take (DeepSeek-V3 Technical Report, arXiv 2412.19437). The 671B model has 61 layers of 7168, 3 of them
    dense with 18432, 128 heads, 256 experts of 2048 of which tokens take 8, and 129,280 words. What is left out: the
    prediction of further tokens, and that a token's experts are of four groups of eight.

    Attributes:
        layers: those with experts; `dense` more come before.
        queries, latent: the widths of what queries, and keys with values, are made of.
        width, turned: those of a head's keys without and with positions; values have `width`, too.
        routing: how tokens reach their experts.
    """

    layers: int
    d: int
    heads: int
    queries: int
    latent: int
    width: int
    turned: int
    ffn: int
    expert_ffn: int
    experts: int
    chosen: int
    vocabulary: int
    routing: ByCapacity
    dense: int = 3
    attention: Attention = written_out

    def _layer(self) -> Tree:
        d, keys = self.d, self.width + self.turned
        return {
            "attention_norm": Array((d,), (None,)),
            "mlp_norm": Array((d,), (None,)),
            "q_norm": Array((self.queries,), (None,)),
            "kv_norm": Array((self.latent,), (None,)),
            "q_down": Array((d, self.queries), ("embed", None)),
            "q_up": Array((self.queries, self.heads, keys), ("embed", "heads", None)),
            "kv_down": Array((d, self.latent + self.turned), ("embed", None)),
            "kv_up": Array((self.latent, self.heads, 2 * self.width), ("embed", "heads", None)),
            "o": Array((self.heads, self.width, d), ("heads", None, "embed")),
        }

    def _mlp(self, ffn: int, of: int = 0) -> Tree:
        count, expert = ((of,), ("expert",)) if of else ((), ())
        wide = Array((*count, self.d, ffn), (*expert, "embed", "mlp"))
        return {"gate": wide, "up": wide, "down": Array((*count, ffn, self.d), (*expert, "mlp", "embed"))}

    def weights(self) -> Tree:
        d, layer = self.d, self._layer()
        router = {"router": Array((d, self.experts), ("embed", None)), "bias": Array((self.experts,), (None,))}
        mixed = {"experts": self._mlp(self.expert_ffn, self.experts) | router, "shared": self._mlp(self.expert_ffn)}
        return {
            "embedding": Array((self.vocabulary, d), ("vocabulary", "embed")),
            "norm": Array((d,), (None,)),
            "dense": stacked(self.dense, layer | {"mlp": self._mlp(self.ffn)}),
            "layers": stacked(self.layers, layer | mixed),
            "out": Array((d, self.vocabulary), ("embed", "vocabulary")),
        }

    def flops(self, batch: int, sequence: int) -> float:
        """As `Llama.flops`; a head's query and key have `width + turned` numbers, a value `width`."""
        keys = self.width + self.turned
        projected = self.d * (self.queries + self.latent + self.turned + self.heads * self.width)
        projected += self.heads * (self.queries * keys + self.latent * 2 * self.width)
        mixed = self.d * (3 * self.expert_ffn * (self.chosen + 1) + self.experts)
        layers = self.dense + self.layers
        products = layers * projected + self.dense * 3 * self.d * self.ffn + self.layers * mixed
        attended = layers * self.heads * 2 * (keys + self.width) * sequence**2 / 2
        return batch * (2 * sequence * (products + self.d * self.vocabulary) + attended)

    def attend(self, x: jax.Array, weights: Tree, layout: Layout) -> jax.Array:
        h = rms_norm(x, weights["attention_norm"])
        q = jnp.einsum("bsr,rhk->bshk", rms_norm(h @ weights["q_down"], weights["q_norm"]), weights["q_up"])
        latent, turned = jnp.split(h @ weights["kv_down"], [self.latent], -1)
        kv = jnp.einsum("bsr,rhk->bshk", rms_norm(latent, weights["kv_norm"]), weights["kv_up"])
        k, v = jnp.split(kv, 2, -1)
        plain, q_turned = jnp.split(q, [self.width], -1)
        shared = jnp.broadcast_to(rotary(turned[:, :, None]), (*k.shape[:-1], self.turned))
        q, k = jnp.concatenate([plain, rotary(q_turned)], -1), jnp.concatenate([k, shared], -1)
        return jnp.einsum("bshk,hkd->bsd", self.attention(q, k, v, layout), weights["o"])

    def mlp(self, h: jax.Array, weights: Tree, layout: Layout) -> jax.Array:
        inner = layout(jax.nn.silu(h @ weights["gate"]) * (h @ weights["up"]), "batch", "seq", "mlp")
        return inner @ weights["down"]

    def mix(self, h: jax.Array, weights: Tree, layout: Layout) -> jax.Array:
        given = weights["experts"]
        scores = jax.nn.sigmoid((h @ given["router"]).astype(jnp.float32))
        _, experts = jax.lax.top_k(scores + given["bias"], self.chosen)
        shares = jnp.take_along_axis(scores, experts, -1)
        routed = self.routing.sent(self, h, experts, shares / shares.sum(-1, keepdims=True), given, layout)
        return routed + self.mlp(h, weights["shared"], layout)

    def layer(self, x: jax.Array, weights: Tree, layout: Layout) -> jax.Array:
        weights = jax.tree.map(lambda w: w.astype(x.dtype), weights)
        x = layout(x + self.attend(x, weights, layout), "batch", "seq", None)
        h = rms_norm(x, weights["mlp_norm"])
        added = self.mlp(h, weights["mlp"], layout) if "mlp" in weights else self.mix(h, weights, layout)
        return layout(x + added, "batch", "seq", None)

    def loss(self, weights: Tree, tokens: jax.Array, targets: jax.Array, *, layout: Layout) -> jax.Array:
        x = layout(weights["embedding"].astype(bf16)[tokens], "batch", "seq", None)
        for stack in ("dense", "layers"):
            x = layers_of(partial(self.layer, layout=layout), x, weights[stack], True, True)
        logits = rms_norm(x, weights["norm"]) @ weights["out"].astype(x.dtype)
        return cross_entropy(layout(logits, "batch", "seq", "vocabulary"), targets)


def trained_deepseek(model: DeepSeek, layout: Layout, batch: int, sequence: int) -> Program:
    """A training step in bfloat16 over float32 weights, on `batch` sequences."""
    tokens = Array((batch, sequence), ("batch", "seq"), i32)
    loss = partial(model.loss, layout=layout)
    return training(loss, model.weights(), (tokens, tokens), model.flops(batch, sequence))
