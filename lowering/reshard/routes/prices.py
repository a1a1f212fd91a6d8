"""Prices of reshards between given layouts, from the shortest paths of their shape class."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import compress

import numpy as np

from sdy_jax.lowering.costs.cost_model import CostModel
from sdy_jax.lowering.reshard.planner import plan_reshard, strips_time
from sdy_jax.lowering.reshard.routes.classes import ShapeClass, times_between
from sdy_jax.lowering.reshard.routes.paths import Matrix
from sdy_jax.representation.axes import overlaps
from sdy_jax.representation.mesh import AxisRef, Mesh
from sdy_jax.representation.sharding import TensorSharding

PairPrice = Callable[[tuple[int, ...], float, TensorSharding, TensorSharding], float]


class RoutePrices:
    """What reshards cost on a mesh, as `plan_reshard` plans them, but for all pairs of layouts at once.

    Args:
        mesh_name: the mesh that layouts are on, as their shardings name it.
        mesh: its axes.
        costs: the cost model.
        pair: the price of one pair, asked for where blocks are padded and for shardings of other meshes; default: the
            cost of `plan_reshard`.

    >>> mesh = Mesh.of(x=2)
    >>> row, col = (TensorSharding.closed("m", axes) for axes in ([[AxisRef("x")], []], [[], [AxisRef("x")]]))
    >>> RoutePrices("m", mesh, CostModel()).matrix((16, 8), 4.0, [row, col], [row, col]).tolist()
    [[0.0, 128.0], [128.0, 0.0]]
    """

    def __init__(self, mesh_name: str, mesh: Mesh, costs: CostModel, pair: PairPrice | None = None):
        self._mesh_name, self._mesh, self._costs = mesh_name, mesh, costs
        self._pair = pair or self._planned
        self._of_byte: dict[object, float] = {}

    def matrix(
        self,
        shape: tuple[int, ...],
        itemsize: float,
        sources: Sequence[TensorSharding],
        targets: Sequence[TensorSharding],
    ) -> Matrix:
        """The time from each of some layouts (rows) to each of others; infinite where no reshard leads there.

        Args:
            shape, itemsize: the global shape of the tensor, and its bytes per element.
            sources, targets: closed shardings. The sub-axes of any of them are atoms for all.
        """
        rows = [self._is_known(shape, s) for s in sources]
        cols = rows if targets is sources else [self._is_known(shape, t) for t in targets]
        known = list(compress(sources, rows))
        ends = known, known if targets is sources else list(compress(targets, cols))
        found = np.full((len(sources), len(targets)), np.inf)
        if all(ends):
            shape_class = ShapeClass(shape, self._mesh, known if targets is sources else [*ends[0], *ends[1]])
            found[np.ix_(rows, cols)] = times_between(shape_class, self._costs, itemsize, *ends)
        for i, j in np.argwhere(~np.logical_and.outer(rows, cols)):
            found[i, j] = self._pair(shape, itemsize, sources[i], targets[j])
        others = [i for i, source in enumerate(sources) if not _adds(source)]
        for j, target in enumerate(targets):
            if target.unreduced_axes:
                asked = others if target.reduction == "sum" else range(len(sources))
                found[[i for i in asked if not may_become_unreduced(sources[i], target)], j] = np.inf
        return found

    def of_pair(self, shape: tuple[int, ...], itemsize: float, source: TensorSharding, target: TensorSharding) -> float:
        """The price of one step between blocks that neither join to blocks nor are cut into blocks; infinite where none
        leads there. Between meshes, that of all steps."""
        if not may_become_unreduced(source, target):
            return math.inf
        if source.mesh == target.mesh:
            return strips_time(shape, itemsize, source, target, self._mesh, self._costs)
        if not self._costs.is_default:
            return self._pair(shape, itemsize, source, target)
        key = shape, source.layout, target.layout
        if key not in self._of_byte:  # prices are bytes: tensors of all element types share them
            self._of_byte[key] = self._pair(shape, 1.0, source, target)
        return itemsize * self._of_byte[key]

    def _is_known(self, shape: Sequence[int], sharding: TensorSharding) -> bool:
        """Whether a layout is on the mesh, in blocks of one size."""
        _, axes, unreduced, _ = sharding.layout
        on_mesh = sharding.mesh == self._mesh_name or not (unreduced or any(axes))
        counts = sharding.shard_counts(self._mesh)
        return on_mesh and not any(n % count for n, count in zip(shape, counts, strict=True))

    def _planned(
        self, shape: tuple[int, ...], itemsize: float, source: TensorSharding, target: TensorSharding
    ) -> float:
        return plan_reshard(shape, itemsize, source, target, self._mesh, self._costs).cost


def _adds(sharding: TensorSharding) -> bool:
    """Whether further axes may become unreduced: there is nothing to combine yet, or it is a sum."""
    return not sharding.unreduced_axes or sharding.reduction == "sum"


def may_become_unreduced(source: TensorSharding, target: TensorSharding) -> bool:
    """Whether the axes along which the target is unreduced and the source is not may be so: terms of a sum may be zero,
    of another reduction none is."""
    if not target.unreduced_axes:
        return True
    if target.reduction == "sum":
        return _adds(source)
    have: tuple[AxisRef, ...] = source.unreduced_axes if source.reduction == target.reduction else ()
    return all(any(overlaps(a, b) for b in have) for a in target.unreduced_axes)
