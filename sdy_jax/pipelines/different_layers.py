"""Layers that are different functions, as one that chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from sdy_jax.errors import ArgumentError, UnsupportedError
from sdy_jax.pipelines.checks import check_same_length, check_same_types, leaves_of
from sdy_jax.pipelines.explicit_types import entries_of
from sdy_jax.pipelines.jaxprs import types_of
from sdy_jax.pipelines.local_rows import LocalRows
from sdy_jax.pipelines.packed_layers import PackedLayers, PackedTree
from sdy_jax.pipelines.region import Region
from sdy_jax.pipelines.user_functions import strong

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
