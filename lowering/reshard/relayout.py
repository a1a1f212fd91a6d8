"""Relayouts of a dimension whose blocks neither join to blocks nor are cut into blocks: strips are sent.

65 rows in 8 blocks of 9 are no parts of 2 blocks of 33. Every device knows which rows it holds and which it wants; what
it lacks comes in strips from who holds it.

Where devices want the same block, each first gets a part of it, which it then sends to the others, if that sends less:
of the 65 rows, the one block of 9 that reaches into both halves would go to all devices otherwise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from sdy_jax.lowering.reshard.strips import Source, StripPlan, Want, block_length, plan_strips

Atoms = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Relayout:
    """`stages` one after the other, among the devices along the atoms of `group`, the first one major."""

    group: Atoms
    stages: tuple[StripPlan, ...]

    @property
    def wire_elements(self) -> int:
        """What a device sends, in elements along the dimension."""
        return sum(stage.wire_elements for stage in self.stages)

    @property
    def rounds(self) -> int:
        """The number of permutes."""
        return sum(len(stage.rounds) for stage in self.stages)


@lru_cache(maxsize=4096)
def relayout(size: int, sizes: tuple[int, ...], have: Atoms, want: Atoms) -> Relayout:
    """From blocks along the atoms `have` to blocks along the atoms `want`, of a dimension of `size` elements.

    Args:
        size: the number of elements.
        sizes: the size of each atom.
        have, want: numbers of atoms, major to minor.
    """
    group = (*have, *(atom for atom in want if atom not in have))
    devices = list(itertools.product(*(range(sizes[atom]) for atom in group)))
    shards, wanted = (math.prod(sizes[atom] for atom in atoms) for atoms in (have, want))
    block = block_length(size, wanted)
    digits = [[device[group.index(atom)] for atom in want] for device in devices]
    indices = [_index(place, [sizes[atom] for atom in want]) for place in digits]
    wants = tuple(_want(min(i * block, size), min((i + 1) * block, size)) for i in indices)
    source = Source.split(size, shards)
    source = Source(source.bounds, source.block, len(devices) // shards)
    direct = Relayout(group, (plan_strips((source,), wants, block),))
    if want != have[: len(want)]:
        return direct
    parts = _parts(size, block, len(devices) // wanted, len(devices))
    first = plan_strips((source,), tuple(map(_want, parts.bounds, parts.bounds[1:])), parts.block)
    by_parts = Relayout(group, (first, plan_strips((parts,), wants, block)))
    return min(direct, by_parts, key=lambda found: (found.wire_elements, found.rounds))


def _index(place: Sequence[int], sizes: Sequence[int]) -> int:
    """A position along several atoms as one number."""
    index = 0
    for digit, size in zip(place, sizes, strict=True):
        index = index * size + digit
    return index


def _want(first: int, last: int) -> tuple[Want, ...]:
    return (Want(0, first, 0, last - first),) if last > first else ()


def _parts(size: int, block: int, count: int, devices: int) -> Source:
    """Every block in `count` parts of equal length, as far as it reaches; one per device."""
    part = block_length(block, count)
    places = (divmod(device, count) for device in range(devices))
    bounds = (min(i * block + min(part * j, block), size) for i, j in places)
    return Source((*bounds, size), part)
