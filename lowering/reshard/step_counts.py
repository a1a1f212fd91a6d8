"""How many collectives reshards take at least: a reduction, a gather, and a move from dimension to dimension."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.sharding import TensorSharding

_ABSENT, _UNREDUCED = -1, -2


def steps_between(layouts: Sequence[TensorSharding], mesh: Mesh) -> NDArray[np.int64]:
    """From each of some layouts (rows) to each of them; 1 where none of the three is needed, as for a permutation.

    >>> from sdy_jax.representation.mesh import AxisRef
    >>> x, y = (AxisRef("x"),), (AxisRef("y"),)
    >>> layouts = [TensorSharding.closed("m", *of) for of in (([y], x), ([()], x), ([()],))]
    >>> steps_between(layouts, Mesh.of(x=2, y=4))[:, 2].tolist()
    [2, 1, 1]
    """
    places = np.array([[_place(layout, axis.name) for axis in mesh.axes] for layout in layouts])
    source, target = places[:, None, :], places[None, :, :]
    reduced = (source == _UNREDUCED) & (target != _UNREDUCED)
    gathered = (source >= 0) & (target == _ABSENT)
    moved = (source >= 0) & (target >= 0) & (source != target)
    return np.maximum(1, sum(kind.any(axis=2).astype(np.int64) for kind in (reduced, gathered, moved)))


def _place(layout: TensorSharding, name: str) -> int:
    """The dimension that an axis splits, or the first that a part of it does."""
    lists = [*layout.axes, layout.unreduced_axes]
    found = next((place for place, axes in enumerate(lists) if any(axis.name == name for axis in axes)), _ABSENT)
    return _UNREDUCED if found == len(layout.axes) else found
