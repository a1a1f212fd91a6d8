"""Latent attention with one shared head, as DeepSeek's: all heads read one small cache, their weights are by heads."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from models.common import Array, Layout, Program, Tree, bf16, i32, in_type, names, rms_norm, types


@dataclass(frozen=True)
class Latent:
    """`rank` numbers of a token are cached; a head has `width`, absorbed into products with the cache."""

    layers: int
    d: int
    heads: int
    width: int
    rank: int
    mlp: int
    vocabulary: int

    def weights(self) -> Tree:
        stack = (self.layers,)
        by_heads = (None, "heads", None, None)
        layers = {
            "norm": Array((*stack, self.d), (None, None)),
            "q": Array((*stack, self.d, self.heads, self.width), (None, "embed", "heads", None)),
            "down_cache": Array((*stack, self.d, self.rank), (None, "embed", None)),
            "up_keys": Array((*stack, self.heads, self.width, self.rank), by_heads),
            "up_values": Array((*stack, self.heads, self.rank, self.width), by_heads),
            "o": Array((*stack, self.heads, self.width, self.d), (None, "heads", None, "embed")),
            "gate": Array((*stack, self.d, self.mlp), (None, "embed", "mlp")),
            "down": Array((*stack, self.mlp, self.d), (None, "mlp", "embed")),
        }
        embedding = Array((self.vocabulary, self.d), ("vocabulary", "embed"))
        return {
            "embedding": embedding,
            "layers": layers,
            "out": Array((self.d, self.vocabulary), embedding.names[::-1]),
        }


def decoded_latent(model: Latent, layout: Layout, batch: int, sequence: int) -> Program:
    """`(weights, cache, position, tokens) -> (cache, next tokens)`: one token for each sequence."""

    def attention(x: jax.Array, weights: Tree, cache: jax.Array, position: jax.Array) -> jax.Array:
        query = jnp.einsum("bd,dhk->bhk", x, weights["q"])
        scores = jnp.einsum("bhk,hkr,btr->bht", query, weights["up_keys"], cache).astype(jnp.float32)
        scores = jnp.where(jnp.arange(sequence) <= position, scores * model.width**-0.5, -1e9)
        mixed = jnp.einsum("bht,btr->bhr", jax.nn.softmax(scores).astype(x.dtype), cache)
        return jnp.einsum("bhr,hrk,hkd->bd", mixed, weights["up_values"], weights["o"])

    def decode(weights: Tree, cache: jax.Array, position: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        def layer(x: jax.Array, given: tuple[Tree, jax.Array]) -> tuple[jax.Array, jax.Array]:
            weights, cache = given
            normed = rms_norm(x, weights["norm"])
            added = (normed @ weights["down_cache"])[:, None]
            cache = jax.lax.dynamic_update_slice_in_dim(cache, added, position, 1)
            x = layout(x + attention(normed, weights, cache, position), "batch", None)
            return layout(x + jax.nn.silu(x @ weights["gate"]) @ weights["down"], "batch", None), cache

        x = layout(weights["embedding"][tokens], "batch", None)
        x, cache = jax.lax.scan(layer, x, (weights["layers"], cache))
        return cache, jnp.argmax(x @ weights["out"], -1).astype(jnp.int32)

    cache = Array((model.layers, batch, sequence, model.rank), (None, "batch", "cache", None), bf16)
    given = (in_type(bf16, model.weights()), cache, Array((), (), i32), Array((batch,), ("batch",), i32))
    return Program(decode, tuple(map(types, given)), tuple(map(names, given)), (cache.names, ("batch",)), (1,), 0.0)
