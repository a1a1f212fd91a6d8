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
    names = {axis.name for axis in mesh.axes}
    found = [_places(layout) for layout in layouts]
    reduced, gathered, moved = np.zeros((3, len(layouts), len(layouts)), bool)
    for name in sorted(names.intersection(set[str]().union(*found))):  # the others are absent everywhere
        places = np.array([each.get(name, _ABSENT) for each in found])
        source, target = places[:, None], places[None, :]
        reduced |= (source == _UNREDUCED) & (target != _UNREDUCED)
        gathered |= (source >= 0) & (target == _ABSENT)
        moved |= (source >= 0) & (target >= 0) & (source != target)
    return np.maximum(1, reduced.astype(np.int64) + gathered + moved)


def _places(layout: TensorSharding) -> dict[str, int]:
    """Per axis, the dimension that it splits, or the first that a part of it does."""
    found = {axis.name: _UNREDUCED for axis in layout.unreduced_axes}
    for place, axes in reversed(list(enumerate(layout.axes))):
        found.update({axis.name: place for axis in axes})
    return found
