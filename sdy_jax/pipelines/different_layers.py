"""Layers that are different functions, as one that chooses, with their weights packed in one tree of arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sdy_jax.errors import ArgumentError, UnsupportedError
from sdy_jax.pipelines.jaxprs import types_of
from sdy_jax.pipelines.local_rows import LocalRows
from sdy_jax.pipelines.region import Region, entries_of
from sdy_jax.pipelines.user_functions import check_same_length, check_same_types, leaves_of, strong

# Weights of layers that differ, as one tree of arrays with the layers first.


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


# Layers that are different functions, as one that chooses.

Layer = Callable[..., Any]


def as_one(
    layer: Layer | Sequence[Layer], weights: Any, has_aux: bool, has_key: bool, region: Region
) -> tuple[Layer, Any]:
    """One layer and a stack of weights, of a function, or of one per layer.

    Args:
        layer, weights, has_aux: as the user gave them.
        has_key: whether the last argument of functions is a random key.
        region: where they run.

    Raises:
        ArgumentError: there are not as many functions as layers, or they return other types than each other.
        UnsupportedError: functions differ, a stage has several devices, and the axes are Explicit, or functions return
            auxiliary results.
    """
    packed = isinstance(weights, PackedLayers)
    if callable(layer):
        if packed:
            raise ArgumentError(
                "pipeline: weights are packed, and layer is one function; expected a function per layer"
            )
        return layer, weights
    count = len(weights.trees) if packed else check_same_length(leaves_of(weights, "weights"), "the number of layers")
    if len(layer) != count:
        raise ArgumentError(f"pipeline: layer has {len(layer)} functions, and weights are of {count} layers")
    every = [(each, weights.trees[n] if packed else None) for n, each in enumerate(layer)]
    distinct = list(dict.fromkeys(every))
    if len(distinct) == 1 and not packed:
        return layer[0], weights
    if len(distinct) > 1 and not region.alone:
        _check_several_devices(has_aux, region)
    firsts = [every.index(each) for each in distinct]
    branches = [_Branch(f"layer[{n}]", *each, has_aux) for n, each in zip(firsts, distinct, strict=True)]
    chosen = np.array([distinct.index(each) for each in every], np.int32)
    return _Chosen(branches, has_key, region), (chosen, weights.arrays if packed else weights)


def _check_several_devices(has_aux: bool, region: Region) -> None:
    """
    Raises:
        UnsupportedError: functions that differ cannot run on the devices of a stage.
    """
    start = "pipeline: layers are different functions, a stage has several devices, each with its rows, and "
    if has_aux:
        raise UnsupportedError(
            f"{start}has_aux=True: how auxiliary results of parts of the rows are to be joined is not known; to fix: "
            "let activations carry them, in an array with the batch first"
        )
    if region.around is not None:
        raise UnsupportedError(
            f"{start}the mesh has Explicit axes; to fix: make it with axis_types=(AxisType.Auto, ...)"
        )


class _Branch:
    """One of the functions, of its own weights among those of all.

    Args:
        name: what errors call it.
        function: the user's.
        tree: how its weights are packed, if they are.
        has_aux: whether it returns auxiliary results as well.
    """

    def __init__(self, name: str, function: Layer, tree: PackedTree | None, has_aux: bool):
        self.name, self._function, self._tree, self._has_aux = name, function, tree, has_aux

    def __call__(self, weights: Any, x: Any, *rest: Any) -> Any:
        return self._function(weights if self._tree is None else self._tree.of(weights), x, *rest)

    def check(self, x: Any, made: Any) -> None:
        """
        Raises:
            ArgumentError: what it makes of the activations is of other types.
        """
        pair = self._has_aux and isinstance(made, tuple) and len(made) == 2
        check_same_types(x, made[0] if pair else made, self.name)


class _Chosen:
    """A layer that runs one of some functions.

    Its backward pass runs the function once more, from the activations: what a branch keeps is copied, weights too, and
    a place is kept for what each of the functions does.
    """

    def __init__(self, branches: Sequence[_Branch], has_key: bool, region: Region):
        self._branches, self._has_key, self._region = branches, has_key, region

    def __call__(self, weights: tuple[Any, Any], x: Any, *rest: Any) -> Any:
        own = weights[1]
        if len(self._branches) == 1:
            return self._branches[0](own, x, *rest)
        made = [types_of(branch, own, x, *rest) for branch in self._branches]
        for branch, each in zip(self._branches, made, strict=True):
            branch.check(x, each)
            if jax.tree.map(_type, each) != jax.tree.map(_type, made[0]):
                raise ArgumentError(
                    f"pipeline: {branch.name} and {self._branches[0].name} return auxiliary results of different types"
                )
        return jax.checkpoint(self._run)(weights, x, *rest)

    def _run(self, weights: tuple[Any, Any], x: Any, *rest: Any) -> Any:
        if self._region.alone:
            return self._switch(weights, x, rest)
        count = len(rest) - self._has_key
        extra, keys = list(rest[:count]), list(rest[count:])
        rows = LocalRows.of(jax.tree.leaves(x)[0].shape[0], self._region.axis)
        for branch in self._branches:
            rows.check(branch.name, _of_lists(branch), weights[1], x, extra, keys)
        whole = lambda weights, x, extra, keys: self._switch(weights, x, (*extra, *keys))  # noqa: E731
        return rows.run(whole, weights, x, extra, keys)

    def _switch(self, weights: tuple[Any, Any], x: Any, rest: Sequence[Any]) -> Any:
        chosen, own = weights
        return lax.switch(chosen, [_with_strong_results(branch) for branch in self._branches], own, x, *rest)


def _of_lists(branch: _Branch) -> Layer:
    return lambda weights, x, extra, keys: branch(weights, x, *extra, *keys)


def _type(x: Any) -> tuple[Any, ...]:
    return x.shape, x.dtype, entries_of(x)


def _with_strong_results(branch: _Branch) -> Layer:
    return lambda *args: strong(branch(*args))
