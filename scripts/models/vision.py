"""Models of images: a vision transformer whose tokens do not divide, and a diffusion U-Net on images split in space."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

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
class VisionTransformer:
    """A transformer over patches of `patch` x `patch` pixels and one token of the class."""

    layers: int
    d: int
    heads: int
    mlp: int
    patch: int
    image: int
    classes: int

    def weights(self) -> Tree:
        d, tokens = self.d, (self.image // self.patch) ** 2 + 1
        norm = {"scale": Array((d,), (None,)), "bias": Array((d,), (None,))}
        layer = {
            "first": norm,
            "second": norm,
            "qkv": Array((d, 3, d), ("embed", None, "heads")),
            "o": Array((d, d), ("heads", "embed")),
            "up": Array((d, self.mlp), ("embed", "mlp")),
            "down": Array((self.mlp, d), ("mlp", "embed")),
        }
        return {
            "patches": Array((self.patch * self.patch * 3, d), (None, "embed")),
            "class": Array((1, 1, d), (None, None, "embed")),
            "places": Array((1, tokens, d), (None, None, "embed")),
            "layers": stacked(self.layers, layer),
            "norm": norm,
            "head": Array((d, self.classes), ("embed", None)),
        }

    def flops(self, batch: int) -> float:
        """The operations of the loss: 2 N T, and 4 layers d s^2 of attention to all tokens."""
        patches = (self.image // self.patch) ** 2
        tokens = patches + 1
        layers = self.layers * (2 * (4 * self.d**2 + 2 * self.d * self.mlp) * tokens + 4 * self.d * tokens**2)
        return batch * (layers + 2 * self.d * (3 * self.patch**2 * patches + self.classes))

    def layer(self, x: jax.Array, weights: Tree, layout: Layout) -> jax.Array:
        weights = jax.tree.map(lambda w: w.astype(x.dtype), weights)
        split = jnp.einsum("bsd,dce->cbse", layer_norm(x, **weights["first"]), weights["qkv"])
        q, k, v = (part.reshape(*x.shape[:2], self.heads, -1) for part in split)
        x = layout(x + attention(q, k, v, None).reshape(x.shape) @ weights["o"], "batch", None, None)
        inner = layout(jax.nn.gelu(layer_norm(x, **weights["second"]) @ weights["up"]), "batch", None, "mlp")
        return layout(x + inner @ weights["down"], "batch", None, None)

    def loss(self, weights: Tree, images: jax.Array, labels: jax.Array, *, layout: Layout) -> jax.Array:
        count, side = images.shape[0], self.image // self.patch
        cut = images.reshape(count, side, self.patch, side, self.patch, 3).transpose(0, 1, 3, 2, 4, 5)
        x = cut.reshape(count, side * side, -1).astype(bf16) @ weights["patches"].astype(bf16)
        first = jnp.broadcast_to(weights["class"].astype(bf16), (count, 1, self.d))
        x = layout(jnp.concatenate([first, x], 1) + weights["places"].astype(bf16), "batch", None, None)
        x = layers_of(partial(self.layer, layout=layout), x, weights["layers"], True, True)
        return cross_entropy(layer_norm(x[:, 0], **weights["norm"]) @ weights["head"].astype(bf16), labels)


@dataclass(frozen=True)
class ParallelTransformer(VisionTransformer):
    """Attention and MLP of a layer beside each other, of the same normalized input, and normalized queries and keys
    (Dehghani et al. 2023, "Scaling Vision Transformers to 22 Billion Parameters", arXiv 2302.05442). ViT-22B has 48
    layers of 6144, 48 heads and MLPs of 24576, on 224 x 224 pixels in patches of 14. Here the class is read from a
    token of its own, as in `VisionTransformer`, and not by an attention over all of them."""

    def weights(self) -> Tree:
        found = super().weights()
        layers, width = found["layers"], self.d // self.heads
        kept = {name: layers[name] for name in ("qkv", "o", "up", "down")}
        scales = {name: Array((self.layers, width), (None, None)) for name in ("q_scale", "k_scale")}
        biases = {
            "up_bias": Array((self.layers, self.mlp), (None, "mlp")),
            "down_bias": Array((self.layers, self.d), (None, None)),
        }
        norm = {"scale": Array((self.layers, self.d), (None, None))}
        return found | {"layers": {**kept, **scales, **biases, **norm}}

    def layer(self, x: jax.Array, weights: Tree, layout: Layout) -> jax.Array:
        weights = jax.tree.map(lambda w: w.astype(x.dtype), weights)
        h = layer_norm(x, weights["scale"], 0)
        split = jnp.einsum("bsd,dce->cbse", h, weights["qkv"])
        q, k, v = (part.reshape(*x.shape[:2], self.heads, -1) for part in split)
        q, k = layer_norm(q, weights["q_scale"], 0), layer_norm(k, weights["k_scale"], 0)
        attended = attention(q, k, v, None).reshape(x.shape) @ weights["o"]
        inner = layout(jax.nn.gelu(h @ weights["up"] + weights["up_bias"]), "batch", None, "mlp")
        return layout(x + attended + inner @ weights["down"] + weights["down_bias"], "batch", None, None)


def trained_on_images(model: VisionTransformer, layout: Layout, batch: int) -> Program:
    """A training step on labelled images."""
    images = Array((batch, model.image, model.image, 3), ("batch", None, None, None), f32)
    labels = Array((batch,), ("batch",), i32)
    return training(partial(model.loss, layout=layout), model.weights(), (images, labels), model.flops(batch))


@dataclass(frozen=True)
class UNet:
    """A diffusion model's U-Net, one block per level on the way down and up, with attention at the lowest.

    Attributes:
        channels: those of the levels; each next one has half the rows and columns.
        image: rows and columns of what is denoised.
        depth: channels of that.
    """

    channels: tuple[int, ...]
    image: int
    depth: int
    groups: int = 32
    heads: int = 8

    def weights(self) -> Tree:
        down, up, before = [], [], self.channels[0]
        for wide in self.channels:
            down.append(self._block(before, wide))
            before = wide
        for wide, above in zip(reversed(self.channels), [*reversed(self.channels[:-1]), self.channels[0]], strict=True):
            up.append(self._block(2 * wide, above))
        lowest = self.channels[-1]
        return {
            "in": _conv(self.depth, self.channels[0]),
            "down": down,
            "attention": {
                "norm": Array((2, lowest), (None, None)),
                "qkv": Array((lowest, 3, lowest), ("embed", None, None)),
                "o": Array((lowest, lowest), (None, "embed")),
            },
            "up": up,
            "out": _conv(self.channels[0], self.depth, split="before"),
        }

    def _block(self, before: int, after: int) -> Tree:
        return {
            "norm": Array((2, before), (None, None)),
            "conv": _conv(before, after),
            "norm2": Array((2, after), (None, None)),
            "conv2": _conv(after, after),
            "skip": Array((1, 1, before, after), (None, None, None, "embed")),
        }

    def block(self, x: jax.Array, weights: Tree, layout: Layout) -> jax.Array:
        h = convolved(jax.nn.silu(group_norm(x, weights["norm"], self.groups)), weights["conv"])
        h = convolved(jax.nn.silu(group_norm(h, weights["norm2"], self.groups)), weights["conv2"])
        return layout(convolved(x, weights["skip"]) + h, "batch", "rows", None, None)

    def attend(self, x: jax.Array, weights: Tree) -> jax.Array:
        count, rows, columns, wide = x.shape
        flat = group_norm(x, weights["norm"], self.groups).reshape(count, rows * columns, wide)
        split = jnp.einsum("bsd,dce->cbse", flat, weights["qkv"].astype(x.dtype))
        q, k, v = (part.reshape(count, rows * columns, self.heads, -1) for part in split)
        return x + (attention(q, k, v, None).reshape(flat.shape) @ weights["o"].astype(x.dtype)).reshape(x.shape)

    def loss(self, weights: Tree, noisy: jax.Array, noise: jax.Array, *, layout: Layout) -> jax.Array:
        x, kept = convolved(noisy.astype(bf16), weights["in"]), []
        for number, level in enumerate(weights["down"]):
            if number:
                x = x.reshape(x.shape[0], x.shape[1] // 2, 2, x.shape[2] // 2, 2, -1).mean((2, 4))
            x = jax.checkpoint(partial(self.block, layout=layout))(x, level)
            kept.append(x)
        x = self.attend(x, weights["attention"])
        for number, level in enumerate(weights["up"]):
            if number:
                x = x.repeat(2, 1).repeat(2, 2)
            x = jax.checkpoint(partial(self.block, layout=layout))(jnp.concatenate([x, kept.pop()], -1), level)
        return jnp.mean((convolved(jax.nn.silu(x), weights["out"]).astype(f32) - noise) ** 2)


def denoised(model: UNet, layout: Layout, batch: int) -> Program:
    """A training step that takes noise away from images."""
    shape = (batch, model.image, model.image, model.depth)
    images = Array(shape, ("batch", "rows", None, None), f32)
    return training(partial(model.loss, layout=layout), model.weights(), (images, images))


@dataclass(frozen=True)
class Segmenter:
    """A U-Net of one level, of wide kernels: strided on the way down, dilated below, transposed on the way up.

    Attributes:
        channels: those of the upper level; the lower one has twice as many.
        image: rows and columns of an image.
        depth: channels of images and of what is found in them.
    """

    channels: int
    image: int
    depth: int
    kernel: int = 5

    def weights(self) -> Tree:
        upper, lower = self.channels, 2 * self.channels
        ends = {
            "in": (self.depth, upper),
            "down": (upper, lower),
            "dilated": (lower, lower),
            "up": (lower, upper),
            "joined": (lower, upper),
            "out": (upper, self.depth),
        }
        return {name: Array((self.kernel,) * 2 + pair, (None,) * 4) for name, pair in ends.items()}

    def loss(self, weights: Tree, images: jax.Array, wanted: jax.Array, *, layout: Layout) -> jax.Array:
        kept = layout(jax.nn.relu(convolved(images.astype(bf16), weights["in"])), "batch", "rows", None, None)
        low = jax.nn.relu(convolved(kept, weights["down"], stride=2))
        low = layout(jax.nn.relu(convolved(low, weights["dilated"], dilation=2)), "batch", "rows", None, None)
        up = jax.lax.conv_transpose(low, weights["up"].astype(low.dtype), (2, 2), "SAME", dimension_numbers=_NHWC)
        x = jax.nn.relu(convolved(jnp.concatenate([kept, jax.nn.relu(up)], -1), weights["joined"]))
        return jnp.mean((convolved(x, weights["out"]).astype(f32) - wanted) ** 2)


def segmented(model: Segmenter, layout: Layout, batch: int) -> Program:
    """A training step on images that are split by rows."""
    images = Array((batch, model.image, model.image, model.depth), ("batch", "rows", None, None), f32)
    return training(partial(model.loss, layout=layout), model.weights(), (images, images))


def _conv(before: int, after: int, split: str = "after") -> Array:
    return Array((3, 3, before, after), (None, None, *(("embed", None) if split == "before" else (None, "embed"))))


_NHWC: Any = ("NHWC", "HWIO", "NHWC")
"""Channels last."""


def convolved(x: jax.Array, kernel: jax.Array, stride: int = 1, dilation: int = 1) -> jax.Array:
    """Same size, or that over the stride."""
    strides, dilations = (stride,) * 2, (dilation,) * 2
    return jax.lax.conv_general_dilated(
        x, kernel.astype(x.dtype), strides, "SAME", rhs_dilation=dilations, dimension_numbers=_NHWC
    )


def group_norm(x: jax.Array, scale_and_bias: jax.Array, groups: int) -> jax.Array:
    count, rows, columns, wide = x.shape
    grouped = x.astype(f32).reshape(count, rows, columns, groups, wide // groups)
    grouped = grouped - grouped.mean((1, 2, 4), keepdims=True)
    grouped = grouped * jax.lax.rsqrt((grouped**2).mean((1, 2, 4), keepdims=True) + 1e-5)
    return (grouped.reshape(x.shape) * scale_and_bias[0] + scale_and_bias[1]).astype(x.dtype)
