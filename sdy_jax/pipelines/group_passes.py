"""What runs of a group of layers on one microbatch: a scan over the layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from sdy_jax.pipelines.buffers import added, at, put
from sdy_jax.pipelines.layer_passes import Inputs, LayerPasses, Leaves

Carry = TypeVar("Carry")


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

    What is read and written of each layer is a part of a buffer that the loop over the layers carries, so that no pass
    stacks what another takes apart.

    Args:
        passes: those of a layer.
        grouping: the layers of a group.
        given: what all layers on the stage read: constants, weights of shape (rounds, depth, ...), extra inputs of
            shape (microbatches, ...), and a key or none.
    """

    def __init__(self, passes: LayerPasses, grouping: Grouping, given: Inputs):
        self._passes, self._grouping, self._given = passes, grouping, given

    def forward(self, cell: Cell, x: Leaves, aux: Leaves, kept: Leaves) -> tuple[Leaves, Leaves, Leaves]:
        """The activations, and buffers with auxiliary results, by round, microbatch and layer, and with what is kept,
        by slot and layer. Neither is written where there are no buffers."""

        def step(carry: tuple[Leaves, Leaves, Leaves], depth: Any) -> tuple[Leaves, Leaves, Leaves]:
            x, aux, kept = carry
            outs, new = self._passes.forward(x, self._inputs(cell, depth))
            is_meant = self._is_meant(cell, depth)
            aux = put(aux, outs[len(x) :] if aux else [], is_meant, cell.round, cell.microbatch, depth)
            kept = put(kept, new if kept else [], is_meant, cell.kept, depth)
            return self._chosen(cell, depth, outs[: len(x)], x), aux, kept

        return self._through(step, (x, aux, kept), False)

    def backward(self, cell: Cell, y: Leaves, sums: Inputs, kept: Leaves, aux: Leaves) -> tuple[Leaves, Inputs]:
        """Cotangents of the activations, and sums with those of the inputs added."""

        def step(carry: tuple[Leaves, Inputs], depth: Any) -> tuple[Leaves, Inputs]:
            (y, sums), inputs = carry, self._inputs(cell, depth)
            x, found = self._passes.backward(inputs, *self._read(cell, depth, y, kept, aux))
            return self._chosen(cell, depth, x, y), self._added(cell, depth, sums, found)

        return self._through(step, (y, sums), True)

    def backward_alone(
        self, cell: Cell, y: Leaves, deferred: Leaves, kept: Leaves, aux: Leaves
    ) -> tuple[Leaves, Leaves]:
        """Cotangents of the activations, and buffers with what `weights` reads, by slot and layer."""

        def step(carry: tuple[Leaves, Leaves], depth: Any) -> tuple[Leaves, Leaves]:
            (y, deferred), inputs = carry, self._inputs(cell, depth)
            x, new = self._passes.backward_alone(inputs, *self._read(cell, depth, y, kept, aux))
            deferred = put(deferred, new, self._is_meant(cell, depth), cell.kept, depth)
            return self._chosen(cell, depth, x, y), deferred

        return self._through(step, (y, deferred), True)

    def weights(self, cell: Cell, sums: Inputs, deferred: Leaves) -> Inputs:
        """Sums with the cotangents of the inputs added."""

        def step(sums: Inputs, depth: Any) -> Inputs:
            parts = [at(leaf, cell.read, depth) for leaf in deferred]
            return self._added(cell, depth, sums, self._passes.weights(self._inputs(cell, depth), parts))

        return self._through(step, sums, True)

    def _through(self, step: Callable[[Carry, Any], Carry], carry: Carry, reverse: bool) -> Carry:
        depths = jnp.arange(self._grouping.depth, dtype=jnp.int32)
        carry, _ = lax.scan(lambda carry, depth: (step(carry, depth), None), carry, depths, reverse=reverse)
        return carry

    def _read(self, cell: Cell, depth: Any, y: Leaves, kept: Leaves, aux: Leaves) -> tuple[Leaves, Leaves]:
        """What was kept of a layer, and the cotangents of its results."""
        ends = [at(leaf, cell.round, cell.microbatch, depth) for leaf in aux]
        return [at(leaf, cell.read, depth) for leaf in kept], [*y, *ends]

    def _layer(self, cell: Cell, depth: Any) -> Any:
        return cell.group * self._grouping.depth + depth

    def _inputs(self, cell: Cell, depth: Any) -> Inputs:
        weights = [at(leaf, cell.round, depth) for leaf in self._given.weights]
        extra = [at(leaf, cell.microbatch) for leaf in self._given.extra]
        layer, fold = self._layer(cell, depth), jax.random.fold_in
        key = [fold(fold(key, layer), cell.microbatch) for key in self._given.key]
        return Inputs(self._given.constants, weights, extra, key)

    @property
    def _is_full(self) -> bool:
        return self._grouping.layers == self._grouping.depth * self._grouping.groups

    def _is_meant(self, cell: Cell, depth: Any) -> Any:
        """Whether the stage does anything, and there is such a layer."""
        return cell.active if self._is_full else cell.active & (self._layer(cell, depth) < self._grouping.layers)

    def _chosen(self, cell: Cell, depth: Any, new: Leaves, old: Leaves) -> Leaves:
        """What a layer makes, or what it was given where there is no such layer."""
        if self._is_full:
            return new
        exists = self._layer(cell, depth) < self._grouping.layers
        return [jnp.where(exists, x, y) for x, y in zip(new, old, strict=True)]

    def _added(self, cell: Cell, depth: Any, sums: Inputs, found: Inputs) -> Inputs:
        is_meant = self._is_meant(cell, depth)
        constants = added(sums.constants, found.constants, is_meant)
        weights = added(sums.weights, found.weights, is_meant, cell.round, depth)
        return Inputs(constants, weights, added(sums.extra, found.extra, is_meant, cell.microbatch), [])
