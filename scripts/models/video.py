"""A diffusion transformer of videos: many tokens that all attend to each other, and to a text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from models.common import Array, Layout, Program, Tree, bf16, f32, layers_of, rms_norm, stacked, training
from models.kernels import Attention


@dataclass(frozen=True)
class VideoTransformer:
    """A Llama's layers with attention in both directions, attention to a text between it and the MLP, and scales,
    shifts and gates by the time of the noise; positions are three learnt vectors of frame, row and column (Movie Gen,
    Polyak et al. 2024, arXiv 2410.13720). Its video model of 30B has 48 layers of 6144, 48 heads and MLPs of 16384, on
    73,728 tokens: 32 frames of 48 x 48 patches.

    Attributes:
        patch: numbers of a patch, 2 x 2 places of 16 channels.
        text: tokens of the text.
    """

    layers: int
    d: int
    heads: int
    ffn: int
    frames: int
    side: int
    attention: Attention
    patch: int = 64
    text: int = 512

    def weights(self) -> Tree:
        d = self.d
        square, back = Array((d, d), ("embed", "heads")), Array((d, d), ("heads", "embed"))
        layer = {
            **{name: Array((d,), (None,)) for name in ("norm", "text_norm", "mlp_norm")},
            "by_time": Array((6, d), (None, None)),
            "self": {"q": square, "k": square, "v": square, "o": back},
            "cross": {"q": square, "k": square, "v": square, "o": back},
            "gate": Array((d, self.ffn), ("embed", "mlp")),
            "up": Array((d, self.ffn), ("embed", "mlp")),
            "down": Array((self.ffn, d), ("mlp", "embed")),
        }
        return {
            "in": Array((self.patch, d), (None, "embed")),
            "frames": Array((self.frames, d), (None, "embed")),
            "rows": Array((self.side, d), (None, "embed")),
            "columns": Array((self.side, d), (None, "embed")),
            "time": Array((256, 6, d), (None, None, "embed")),
            "layers": stacked(self.layers, layer),
            "norm": Array((d,), (None,)),
            "out": Array((d, self.patch), ("embed", None)),
        }

    @property
    def tokens(self) -> int:
        return self.frames * self.side**2

    def flops(self, batch: int) -> float:
        """The operations of the loss: 2 N T, and 4 d for each pair of tokens, and of a token and one of the text."""
        s, d = self.tokens, self.d
        products = s * (6 * d * d + 3 * d * self.ffn) + 2 * self.text * d * d
        layers = self.layers * (2 * products + 4 * d * s * (s + self.text))
        return batch * (layers + 4 * s * d * self.patch)

    def attend(self, x: jax.Array, to: jax.Array, weights: Tree, layout: Layout) -> jax.Array:
        q, k, v = (
            (given @ weights[name]).reshape(*given.shape[:2], self.heads, -1)
            for given, name in ((x, "q"), (to, "k"), (to, "v"))
        )
        return self.attention(q, k, v, layout).reshape(x.shape) @ weights["o"]

    def layer(self, x: jax.Array, weights: Tree, text: jax.Array, time: jax.Array, layout: Layout) -> jax.Array:
        weights = jax.tree.map(lambda w: w.astype(x.dtype), weights)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = jnp.moveaxis(time + weights["by_time"], 1, 0)[:, :, None]
        h = rms_norm(x, weights["norm"]) * (1 + scale) + shift
        x = layout(x + gate * self.attend(h, h, weights["self"], layout), "batch", "seq", None)
        h = rms_norm(x, weights["text_norm"])
        x = layout(x + self.attend(h, text, weights["cross"], layout), "batch", "seq", None)
        h = rms_norm(x, weights["mlp_norm"]) * (1 + mlp_scale) + mlp_shift
        inner = layout(jax.nn.silu(h @ weights["gate"]) * (h @ weights["up"]), "batch", "seq", "mlp")
        return layout(x + mlp_gate * (inner @ weights["down"]), "batch", "seq", None)

    def loss(
        self, weights: Tree, noisy: jax.Array, flow: jax.Array, text: jax.Array, times: jax.Array, *, layout: Layout
    ) -> jax.Array:
        turns = times[:, None] * 1000.0 ** (-jnp.arange(128) / 128)
        time = jnp.concatenate([jnp.cos(turns), jnp.sin(turns)], -1).astype(bf16)
        time = jnp.einsum("bt,tcd->bcd", time, weights["time"].astype(bf16))
        frames, rows, columns = (weights[name].astype(bf16) for name in ("frames", "rows", "columns"))
        places = frames[:, None, None] + rows[:, None] + columns
        x = noisy.astype(bf16) @ weights["in"].astype(bf16) + places.reshape(-1, self.d)
        layer = partial(self.layer, text=text.astype(bf16), time=time, layout=layout)
        x = layers_of(layer, layout(x, "batch", "seq", None), weights["layers"], True, True)
        found = rms_norm(x, weights["norm"]) @ weights["out"].astype(x.dtype)
        return jnp.mean((found.astype(f32) - flow) ** 2)


def trained_on_videos(model: VideoTransformer, layout: Layout, batch: int) -> Program:
    """A training step that finds the flow from noise to videos."""
    video = Array((batch, model.tokens, model.patch), ("batch", "seq", None))
    text, times = Array((batch, model.text, model.d), ("batch", None, None), bf16), Array((batch,), ("batch",))
    loss = partial(model.loss, layout=layout)
    return training(loss, model.weights(), (video, video, text, times), model.flops(batch))
