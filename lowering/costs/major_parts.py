"""Major parts of mesh axes that have rates of their own.

An axis `data` of 16 over two slices of 8 devices reaches the other slice over the network, and the 8 over the links of
a slice. Mappings from axes to rates say so by `data:(1)2`, SDY's name of that part, beside `data`, which stands for the
rest. Collectives along the whole axis may then be cut there: a reduce-scatter within the slices, an all-reduce between
them, an all-gather within.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise

from sdy_jax.representation.mesh import AxisRef, Mesh

_PART = re.compile(r"(?P<name>.*):\(1\)(?P<size>\d+)")


def part_name(axis: str, size: int) -> str:
    """What mappings call a major part.

    >>> part_name("data", 2)
    'data:(1)2'
    """
    return f"{axis}:(1){size}"


def major_parts(names: Iterable[str]) -> dict[str, int]:
    """The sizes of the parts among the names of axes and parts.

    >>> major_parts(["model", "data", "data:(1)2"])
    {'data': 2}
    """
    found = (_PART.fullmatch(name) for name in names)
    return {match["name"]: int(match["size"]) for match in found if match}


def with_cuts(edges: Mapping[str, set[int]], parts: Mapping[str, int]) -> dict[str, set[int]]:
    """The positions at which axes are cut, with those behind major parts, as far as digits of the axes allow."""

    def cuts(name: str, own: set[int]) -> set[int]:
        at = parts.get(name, 1)
        return own | {at} if min(own) < at < max(own) and all(e % at == 0 or at % e == 0 for e in own) else own

    return {name: cuts(name, own) for name, own in edges.items()}


def cut(axis: AxisRef, mesh: Mesh, parts: Mapping[str, int]) -> list[AxisRef]:
    """An axis, or a part of one, as what lies in its major part and what does not."""
    if axis.name not in parts:
        return [axis]
    edges = with_cuts({axis.name: {axis.pre_size, axis.next_pre_size(mesh)}}, parts)[axis.name]
    return [AxisRef.canonical(axis.name, low, high // low, mesh) for low, high in pairwise(sorted(edges))]
