"""Where layouts may cut mesh axes: anywhere, or only where the program states parts of them.

A reshape of heads cuts the axes along which they do not divide. Each part is one more axis for the planner, and of
few ops' use; where there are too many, layouts are made of the axes as they are stated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

from sdy_jax.representation.mesh import Axes, Mesh
from sdy_jax.representation.sharding import TensorSharding

Cuts = Mapping[str, set[int]]
"""Per axis, the sizes of the leading parts behind which it may be cut, with 1 and its own."""


def cuts_of(shardings: Iterable[TensorSharding], mesh: Mesh) -> Cuts:
    """Where some shardings cut the axes of a mesh."""
    edges = {axis.name: {1, axis.size} for axis in mesh.axes}
    for sharding in shardings:
        for axis in chain(*sharding.axes, sharding.unreduced_axes):
            if axis.name in edges:
                edges[axis.name].update((axis.pre_size, axis.next_pre_size(mesh)))
    return edges


def leading_uncut(axes: Axes, cuts: Cuts | None, mesh: Mesh) -> Axes:
    """The leading ones of the axes that are cut nowhere else; all, where cuts are free.

    >>> from sdy_jax.representation.mesh import AxisRef
    >>> mesh = Mesh.of(x=16, y=4)
    >>> leading_uncut((AxisRef("y"), AxisRef.canonical("x", 1, 8, mesh)), cuts_of([], mesh), mesh)
    (AxisRef(name='y', sub_axis=None),)
    """
    if cuts is None:
        return axes
    for count, axis in enumerate(axes):
        if not {axis.pre_size, axis.next_pre_size(mesh)} <= cuts[axis.name]:
            return axes[:count]
    return axes
