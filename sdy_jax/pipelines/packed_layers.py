"""Weights of layers that differ, as one tree of arrays with the layers first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sdy_jax.errors import ArgumentError
from sdy_jax.pipelines.checks import leaves_of


class Slot(NamedTuple):
    """Where a leaf of a layer is: the index of the array, and the leaf's own shape in a part of it."""

    array: int
    shape: tuple[int, ...]


class PackedTree(NamedTuple):
    """How to make the tree of one layer from its parts of the arrays."""

    structure: Any
    slots: tuple[Slot, ...]

    def of(self, parts: Sequence[Any]) -> Any:
        """The tree."""
        return jax.tree.unflatten(self.structure, (_unpadded(parts[slot.array], slot.shape) for slot in self.slots))


def _unpadded(part: Any, shape: tuple[int, ...]) -> Any:
    return part if part.shape == shape else part[tuple(map(slice, shape))]


@partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["trees"])
@dataclass(frozen=True)
class PackedLayers:
    """What `pack_layers` makes: a tree of its `arrays`, to be split, updated and saved like other weights.

    Attributes:
        arrays: each with the layers first.
        trees: how each layer's weights are made of its parts of the arrays.

    Example:
        >>> packed = pack_layers([{"w": jnp.ones((2, 3))}, {"b": jnp.ones(4)}])
        >>> [array.shape for array in packed.arrays]
        [(2, 2, 3), (2, 4)]

    See also:
        `pack_layers`: makes it.
    """

    arrays: list[Any]
    trees: tuple[PackedTree, ...]

    def layer(self, number: int) -> Any:
        """The weights of a layer, as they were packed.

        Example:
            >>> pack_layers([{"w": jnp.ones((2, 3))}, {"b": jnp.ones(4)}]).layer(1)["b"].shape
            (4,)
        """
        return self.trees[number].of([array[number] for array in self.arrays])


def pack_layers(layers: Sequence[Any]) -> PackedLayers:
    """Makes one tree of the weights of layers that differ, for `pipeline` with a function per layer.

    Leaves of one rank and type are stacked in the order in which they stand in their trees; smaller ones are padded
    with zeros to the size of the largest, and layers that have fewer get zeros. So a stage holds as much as the largest
    leaves take: let large ones of different layers stand in the same order.

    Args:
        layers: a tree of arrays for each layer; any structures and shapes.

    Returns:
        The packed weights, whose arrays have the layers as their first dimension: `P("stage")` puts them on stages.

    Raises:
        ArgumentError: there are no layers, a leaf is no array, or random keys have different shapes.

    Example:
        >>> packed = pack_layers([{"w": jnp.ones((8, 16))}, {"up": jnp.ones((8, 8)), "scale": jnp.ones(8)}])
        >>> [array.shape for array in packed.arrays]
        [(2, 8, 16), (2, 8)]

    See also:
        `pipeline`: runs the layers.
    """
    if not layers:
        raise ArgumentError("pack_layers: there are no layers")
    named = [[leaf for _, leaf in leaves_of(layer, f"layers[{n}]")] for n, layer in enumerate(layers)]
    given = [[leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in leaves] for leaves in named]
    placed = [list(_placed(leaves)) for leaves in given]
    order = {key: n for n, key in enumerate(dict.fromkeys(key for keys in placed for key in keys))}
    arrays = [
        _stacked([dict(zip(keys, each, strict=True)).get(key) for keys, each in zip(placed, given, strict=True)])
        for key in order
    ]
    trees = (
        PackedTree(
            jax.tree.structure(layer),
            tuple(Slot(order[key], leaf.shape) for key, leaf in zip(keys, leaves, strict=True)),
        )
        for layer, keys, leaves in zip(layers, placed, given, strict=True)
    )
    return PackedLayers(arrays, tuple(trees))


Place = tuple[Any, int, int]
"""What leaves of different layers have in common that are in one array: type, rank, and which of these they are."""


def _placed(leaves: Sequence[Any]) -> Iterator[Place]:
    seen: dict[tuple[Any, int], int] = {}
    for leaf in leaves:
        key = leaf.dtype, leaf.ndim
        yield (*key, seen.setdefault(key, 0))
        seen[key] += 1


def _stacked(leaves: Sequence[Any]) -> Any:
    """A leaf per layer, padded to one shape; zeros where a layer has none."""
    there = [leaf for leaf in leaves if leaf is not None]
    shape = tuple(map(max, zip(*(leaf.shape for leaf in there), strict=True)))
    if jnp.issubdtype(there[0].dtype, jax.dtypes.prng_key):
        if any(leaf.shape != shape for leaf in there):
            raise ArgumentError("pack_layers: random keys have different shapes; to fix: give each layer as many")
        return jnp.stack([there[0] if leaf is None else leaf for leaf in leaves])
    return jnp.stack([_padded(leaf, shape, there[0].dtype) for leaf in leaves])


def _padded(leaf: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    if leaf is None:
        return jnp.zeros(shape, dtype)
    missing = [(0, size - own) for own, size in zip(np.shape(leaf), shape, strict=True)]
    return jnp.pad(leaf, missing) if shape else leaf
