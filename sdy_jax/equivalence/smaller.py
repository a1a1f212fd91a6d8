"""Arguments that fit a mesh that is scaled down: what is for 256 devices would keep four busy for long.

Sizes shrink one by one, largest first, each wherever arguments have it, as long as the function still takes them: a
function may say its sizes itself, or that one is a product of two others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from sdy_jax.calls.partitioned_function import PartitionedFunction
from sdy_jax.calls.traced_programs import size_of_mesh, traced_program
from sdy_jax.equivalence.job import Trial
from sdy_jax.equivalence.meshes import MOST_DEVICES
from sdy_jax.lowering.costs.cost_model import CostModel

_LEAST = 16
"""Sizes that are not shrunk below this. Chosen: they are still split in several ways."""

_MOST = 1 << 8
"""Sizes from which arguments of large meshes are shrunk. Chosen: products of smaller ones run at once."""


@dataclass(frozen=True)
class Smaller:
    """The arguments of a call, some of whose sizes are smaller: `sizes` has new ones by old ones."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sizes: dict[int, int]
    share: float = 1.0
    """How many of the elements are left."""

    @property
    def notes(self) -> list[str]:
        """What is to be said of it."""
        said = ", ".join(f"{old} as {new}" for old, new in self.sizes.items())
        return [f"arguments are made up with smaller sizes: {said}"] if said else []

    def trial(self, trial: Trial) -> Trial:
        """The trial by costs that fit: what does not depend on the size of arrays is less by as much as these are."""
        costs = trial.costs
        if costs is None or self.share == 1.0:
            return trial
        return replace(trial, costs=_scaled(costs, self.share))


def smaller_arguments(
    function: PartitionedFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Smaller:
    """The arguments of a function, smaller ones if its mesh is large and it takes them; of arrays the first elements,
    or types, where integers may be indices."""
    devices = size_of_mesh(function, args, kwargs)
    found = Smaller(args, kwargs, {})
    if devices <= MOST_DEVICES:
        return found
    leaves, tree = jax.tree.flatten((args, kwargs))
    sizes = sorted({n for leaf in leaves for n in _shape(leaf) if n >= _MOST}, reverse=True)
    for size in sizes:
        other = max(_LEAST, size * MOST_DEVICES // devices)
        changed = [_resized(leaf, size, other) for leaf in jax.tree.leaves((found.args, found.kwargs))]
        new_args, new_kwargs = jax.tree.unflatten(tree, changed)
        if _takes(function, new_args, new_kwargs):
            found = Smaller(new_args, new_kwargs, {**found.sizes, size: other})
    share = _elements(jax.tree.leaves((found.args, found.kwargs))) / max(_elements(leaves), 1)
    return replace(found, share=share)


def _takes(function: PartitionedFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        traced_program(function, args, kwargs)
    except Exception:  # what a function raises for sizes that it does not take is its own
        return False
    return True


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(getattr(leaf, "shape", ()))


def _elements(leaves: Sequence[Any]) -> float:
    return float(sum(np.prod(_shape(leaf)) for leaf in leaves))


def _resized(leaf: Any, size: int, other: int) -> Any:
    shape = _shape(leaf)
    if size not in shape:
        return leaf
    new = tuple(other if n == size else n for n in shape)
    if isinstance(leaf, jax.ShapeDtypeStruct) or not jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact):
        return jax.ShapeDtypeStruct(new, leaf.dtype)
    return np.asarray(leaf)[tuple(slice(0, n) for n in new)]


def _scaled(costs: CostModel, share: float) -> CostModel:
    per_axis = {name: _times(getattr(costs, name), share) for name in ("latency", "start")}
    return replace(costs, launch=costs.launch * share, product_launch=costs.product_launch * share, **per_axis)


def _times(rate: Any, share: float) -> Any:
    return rate * share if isinstance(rate, (int, float)) else {axis: value * share for axis, value in rate}
