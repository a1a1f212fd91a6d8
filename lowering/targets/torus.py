"""How the axes of a mesh lie along the dimensions of a torus of chips.

See docs/explanation/costs.md#a-torus.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

from sdy_jax.ir.meshes import primes


class Torus(NamedTuple):
    """What a family of slices has in common.

    Attributes:
        dimensions: how many there are.
        around: the least size at which a dimension goes around, of which it is then a multiple; below it is a line.
        in_cubes: none goes around unless all do.
        as_rings: the chips of the slices up to which `jax.make_mesh` lays devices along a ring through all chips; each
            axis is then taken for a ring.
    """

    dimensions: int
    around: int = 1
    in_cubes: bool = False
    as_rings: int = 0

    def sizes(self, chips: int) -> tuple[int, ...]:
        """The dimensions of a slice of so many chips, as near to each other as they can be: so are the slices that one
        can have, up to the size of a pod.

        >>> Torus(2).sizes(128), Torus(3).sizes(128)
        ((8, 16), (4, 4, 8))
        """
        found = [1] * self.dimensions
        for prime in sorted(primes(chips), reverse=True):
            least = found.index(min(found))
            found[least] *= prime
        return tuple(sorted(found))

    def rings(self, sizes: Sequence[int]) -> tuple[bool, ...]:
        """Which dimensions of a slice go around."""
        found = tuple([size % self.around == 0 for size in sizes])
        return (all(found),) * len(found) if self.in_cubes else found


class Line(NamedTuple):
    """A piece of a mesh axis that lies along one dimension of a torus.

    Attributes:
        dimension: the number of that.
        size: the chips along it.
        far: how many neighbours on the next one is.
        around: the chips of its dimension if that goes around, else 0.
    """

    dimension: int
    size: int
    far: int = 1
    around: int = 0

    @property
    def is_ring(self) -> bool:
        """Whether the last chip is next to the first one."""
        return self.size * self.far == self.around

    @property
    def hops(self) -> float:
        """How many neighbours on the farthest chip is: it is reached from both sides of a ring."""
        return self.far * (self.size - 1) / (2 if self.is_ring else 1)

    @property
    def speed(self) -> float:
        """What a chip sends along it, beside what it sends along a ring of neighbours: at the ends of a line one of two
        links is idle, and lines side by side share the links of those between their chips."""
        return (1 if self.is_ring else 1 / 2) / self.far

    @property
    def turn(self) -> float:
        """The time of an all_to_all beside that in which a chip sends all that it has along a ring of neighbours: a
        block passes a quarter of the links on average."""
        return self.size / 4 / self.speed


SCATTERED_AT_ONCE = 8
"""Chips of which reduce-scatters stay what they are, however they lie. Measured (2026-11, libtpu 0.0.51, v5e:2x4): of
more, XLA makes all-reduces, which send twice the bytes."""

Lines = tuple[Line, ...]
"""Those of a mesh axis, major to minor."""


@lru_cache(maxsize=1 << 10)
def lines_of_axes(sizes: tuple[int, ...], torus: Torus | None) -> tuple[Lines, ...]:
    """How mesh axes of these sizes lie on a slice of as many chips as they have, as `jax.make_mesh` lays them: the last
    axis first, along whole dimensions where these make it up, as many as possible, else along parts of some. Where
    nothing is known of the torus, each axis is a ring.

    >>> lines_of_axes((4, 2), Torus(2, around=16))
    ((Line(dimension=1, size=4, far=1, around=0),), (Line(dimension=0, size=2, far=1, around=0),))
    >>> [[line.size for line in lines] for lines in lines_of_axes((64, 4), Torus(2, around=16))]
    [[4, 16], [4]]
    """
    if torus is None or math.prod(sizes) <= torus.as_rings:
        return tuple([(Line(dim if torus is None else 0, size, 1, size),) for dim, size in enumerate(sizes)])
    whole = torus.sizes(math.prod(sizes))
    rings, left, found = torus.rings(whole), list(whole), list[Lines]()
    for size in reversed(sizes):
        parts = _whole_dimensions(size, left) or list(_parts_of_dimensions(size, left))
        lines = []
        for dim, part in parts:
            lines.append(Line(dim, part, whole[dim] // left[dim], whole[dim] if rings[dim] else 0))
            left[dim] //= part
        found.append(tuple(reversed(lines)))
    return tuple(reversed(found))


def _whole_dimensions(size: int, left: Sequence[int]) -> list[tuple[int, int]]:
    """The most dimensions, of what is left of them, that make up an axis; none where there are no such."""
    dims = [dim for dim, count in enumerate(left) if count > 1]
    for count in range(len(dims), 0, -1):
        for chosen in combinations(dims, count):
            if math.prod([left[dim] for dim in chosen]) == size:
                return [(dim, left[dim]) for dim in reversed(chosen)]
    return []


def _parts_of_dimensions(size: int, left: Sequence[int]) -> Iterator[tuple[int, int]]:
    """As large parts of dimensions as there are, of the largest one first."""
    for dim in sorted(range(len(left)), key=lambda dim: -left[dim]):
        part = math.gcd(size, left[dim])
        if part > 1:
            yield dim, part
            size //= part


def cut_lines(lines: Iterable[Line], sizes: Sequence[int]) -> list[Lines]:
    """Lines of an axis cut into those of its parts of these sizes, both major to minor.

    >>> [[line[:3] for line in part] for part in cut_lines([Line(0, 8), Line(1, 4)], [4, 8])]
    [[(0, 4, 2)], [(0, 2, 1), (1, 4, 1)]]
    """
    rest, found = list(lines), list[Lines]()
    for size in reversed(sizes):
        parts = list[Line]()
        while size > 1 and rest:
            line = rest.pop()
            part = math.gcd(size, line.size)
            if part > 1:
                parts.append(line._replace(size=part))
                size //= part
            if part < line.size:
                rest.append(line._replace(size=line.size // part, far=line.far * part))
                if part == 1:
                    break
        found.append(tuple(reversed(parts)))
    return found[::-1]
