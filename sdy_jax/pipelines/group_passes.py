"""What runs of a group of layers on one microbatch: a scan over the layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sdy_jax.pipelines.layer_passes import Inputs, LayerPasses, Leaves, is_inexact


@dataclass(frozen=True)
class Cell:
    """A row's columns of one stage, as scalars."""

    active: Any
    microbatch: Any
    round: Any
    group: Any
    kept: Any
    read: Any
    result: Any


@dataclass(frozen=True)
class Grouping:
    """How layers are in groups.

    Attributes:
        layers: how many there are.
        depth: how many a group has; the last groups may have fewer.
        groups: how many groups there are.
    """

    layers: int
    depth: int
    groups: int


class GroupPasses:
    """The passes of a group.

    Args:
        passes: those of a layer.
        grouping: the layers of a group.
        given: what all layers on the stage read: constants, weights of shape (rounds, depth, ...), extra inputs of
            shape (microbatches, ...), and a key or none.
    """

    def __init__(self, passes: LayerPasses, grouping: Grouping, given: Inputs):
        self._passes, self._grouping, self._given = passes, grouping, given

    def forward(self, cell: Cell, x: Leaves) -> tuple[Leaves, Leaves, Leaves]:
        """The activations, auxiliary results and what is kept, the latter two of each layer."""

        def step(x: Leaves, xs: tuple[Leaves, Any]) -> tuple[Leaves, tuple[Leaves, Leaves]]:
            outs, kept = self._passes.forward(x, self._inputs(cell, *xs))
            return self._chosen(xs[1], outs[: len(x)], x), (outs[len(x) :], kept)

        y, (aux, kept) = lax.scan(step, x, (self._weights(cell), self._layers(cell)))
        return y, aux, kept

    def backward(self, cell: Cell, kept: Leaves, y: Leaves, aux: Leaves) -> tuple[Leaves, Inputs]:
        """Cotangents of the activations, and of the inputs: sums over the layers, of weights each layer's."""

        def step(carry: tuple[Leaves, Inputs], xs: Any) -> tuple[tuple[Leaves, Inputs], Leaves]:
            (y, sums), (weights, layer, kept, aux) = carry, xs
            x, found = self._passes.backward(self._inputs(cell, weights, layer), kept, [*y, *aux])
            sums, found_weights = self._added(layer, sums, found)
            return (self._chosen(layer, x, y), sums), found_weights

        xs = self._weights(cell), self._layers(cell), kept, aux
        (x, sums), weights = lax.scan(step, (y, self._zeros()), xs, reverse=True)
        return x, Inputs(sums.constants, weights, sums.extra, [])

    def backward_alone(self, cell: Cell, kept: Leaves, y: Leaves, aux: Leaves) -> tuple[Leaves, Leaves]:
        """Cotangents of the activations, and what `weights` reads of each layer."""

        def step(y: Leaves, xs: Any) -> tuple[Leaves, Leaves]:
            weights, layer, kept, aux = xs
            x, deferred = self._passes.backward_alone(self._inputs(cell, weights, layer), kept, [*y, *aux])
            return self._chosen(layer, x, y), deferred

        xs = self._weights(cell), self._layers(cell), kept, aux
        return lax.scan(step, y, xs, reverse=True)  # type: ignore[no-any-return]

    def weights(self, cell: Cell, deferred: Leaves) -> Inputs:
        """Cotangents of the inputs, as `backward` gives them."""

        def step(sums: Inputs, xs: Any) -> tuple[Inputs, Leaves]:
            weights, layer, deferred = xs
            return self._added(layer, sums, self._passes.weights(self._inputs(cell, weights, layer), deferred))

        sums, weights = lax.scan(step, self._zeros(), (self._weights(cell), self._layers(cell), deferred), reverse=True)
        return Inputs(sums.constants, weights, sums.extra, [])

    def _weights(self, cell: Cell) -> Leaves:
        return [at(w, cell.round) for w in self._given.weights]

    def _layers(self, cell: Cell) -> Any:
        return cell.group * self._grouping.depth + jnp.arange(self._grouping.depth)

    def _inputs(self, cell: Cell, weights: Leaves, layer: Any) -> Inputs:
        extra = [at(leaf, cell.microbatch) for leaf in self._given.extra]
        fold = jax.random.fold_in
        key = [fold(fold(key, layer), cell.microbatch) for key in self._given.key]
        return Inputs(self._given.constants, weights, extra, key)

    def _chosen(self, layer: Any, new: Leaves, old: Leaves) -> Leaves:
        """What a layer makes, or what it was given where there is no such layer."""
        if self._grouping.layers == self._grouping.depth * self._grouping.groups:
            return new
        return [jnp.where(layer < self._grouping.layers, x, y) for x, y in zip(new, old, strict=True)]

    def _added(self, layer: Any, sums: Inputs, found: Inputs) -> tuple[Inputs, Leaves]:
        """Sums with what a layer adds, and its weights' cotangents."""

        def plus(sums: Leaves, found: Leaves) -> Leaves:
            added = [total + each.astype(total.dtype) for total, each in zip(sums, found, strict=True)]
            return self._chosen(layer, added, sums)

        none = [jnp.zeros_like(each) for each in found.weights]
        weights = self._chosen(layer, found.weights, none)
        return Inputs(plus(sums.constants, found.constants), [], plus(sums.extra, found.extra), []), weights

    def _zeros(self) -> Inputs:
        given = self._given.inexact()
        return Inputs(list(map(sum_of, given.constants)), [], [sum_of(leaf[0]) for leaf in given.extra], [])


def at(stack: Any, index: Any) -> Any:
    """One part of a stack."""
    return stack[0] if stack.shape[0] == 1 else lax.dynamic_index_in_dim(stack, index, keepdims=False)


def sum_of(x: Any) -> Any:
    """Zeros to sum many arrays like `x` in: of types of 16 bits or fewer each sum would round what is added."""
    narrow = x.dtype.itemsize < jnp.dtype(jnp.float32).itemsize
    return jnp.zeros_like(x, dtype=jnp.float32 if narrow else x.dtype)


def inexact(leaves: Leaves) -> Leaves:
    """Those that have derivatives."""
    return list(filter(is_inexact, leaves))
