"""A transformer's training step whose sizes divide by any pod: fully sharded along `data`, by heads along `model`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from workloads import Tree, dims, i32, specs, train, transformer_loss, transformer_spec, transformer_weights

LAYOUT: Mapping[str, Any] = {"batch": ("data",), "weights": ("data",), "tensor": ("model",)}


def step() -> Callable[..., tuple[Tree, jax.Array]]:
    """`(weights, tokens, targets) -> (weights, loss)`: gradient descent."""
    return train(partial(transformer_loss, keep=lambda x: x))


def arguments(layers: int = 2, d: int = 1024, heads: int = 16, sequence: int = 128, batch: int = 1024) -> Tree:
    """The types of the step's arguments."""
    return transformer_weights(layers, d, heads, 32 * heads), i32(batch, sequence), i32(batch, sequence)


def shardings(layers: int = 2, layout: Mapping[str, Any] = LAYOUT) -> tuple[Tree, Tree]:
    """Those of arguments and results."""
    weights, tokens = transformer_spec(layers), dims("batch", None)
    return specs((weights, tokens, tokens), layout), specs((weights, dims()), layout)
