"""Relayouts of a dimension whose blocks neither join to blocks nor are cut into blocks: strips are sent.

65 rows in 8 blocks of 9 are no parts of 2 blocks of 33. Every device knows which rows it holds and which it wants; what
it lacks comes in strips from who holds it.

Where devices want the same block, each first gets a part of it, which it then sends to the others, if that sends less:
of the 65 rows, the one block of 9 that reaches into both halves would go to all devices otherwise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from sdy_jax.ir.collectives import leads_to_blocks
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


class Relaid(NamedTuple):
    """A dimension in other blocks: see `relayout`."""

    size: int
    sizes: tuple[int, ...]
    have: Atoms
    want: Atoms
    cut: Atoms = ()
    joined: Atoms = ()

    @property
    def group(self) -> Atoms:
        """The atoms along which devices send to each other, the first one major."""
        return tuple(dict.fromkeys((*self.joined, *self.have, *self.want)))

    def count(self, atoms: Atoms) -> int:
        """The devices along some atoms."""
        return math.prod([self.sizes[atom] for atom in atoms])


class StripTotals(NamedTuple):
    """What a device sends, in elements along the dimension, and the number of permutes."""

    elements: int
    rounds: int


class DimChange(NamedTuple):
    """How dimensions change: `dim` is relaid. Atoms that it gives away, or takes, may begin or cease to split `other`,
    whose blocks are cut, or joined, in `chunks`."""

    dim: int
    relaid: Relaid
    other: int | None = None
    chunks: int = 1
    is_cut: bool = False

    @property
    def relayout(self) -> Relayout:
        """The strips."""
        return relayout(*self.relaid)


Dims = Sequence[Atoms]


def change(shape: Sequence[int], sizes: tuple[int, ...], before: Dims, after: Dims) -> DimChange | None:
    """The change from some blocks to others that strips can make; None where it is no such change."""
    moved = [dim for dim in range(len(shape)) if before[dim] != after[dim]]
    relaid = [dim for dim in moved if is_relaid(shape[dim], sizes, before[dim], after[dim])]
    if len(relaid) != 1 or len(moved) > 2:
        return None
    ((dim,), others) = relaid, [dim for dim in moved if dim not in relaid]
    ends = before[dim], after[dim]
    if not others:
        return DimChange(dim, Relaid(shape[dim], sizes, *ends))
    (other,) = others
    few, many = sorted((before[other], after[other]), key=len)
    part, is_cut = many[len(few) :], many == after[other]
    given, taken = ends if is_cut else ends[::-1]
    if many[: len(few)] != few or not set(part) <= set(given) - set(taken):
        return None
    counts = (math.prod(sizes[atom] for atom in atoms) for atoms in (few, many))
    if not leads_to_blocks(shape[other], *counts):
        return None
    found = Relaid(shape[dim], sizes, *ends, *((part, ()) if is_cut else ((), part)))
    return DimChange(dim, found, other, math.prod(sizes[atom] for atom in part), is_cut)


def is_relaid(size: int, sizes: Sequence[int], have: Atoms, want: Atoms) -> bool:
    """Whether it takes strips to lead from blocks of a dimension to others.

    Other steps do so where blocks are equal, and where they are joined to blocks or cut into blocks.
    """
    shards = [math.prod(sizes[atom] for atom in atoms) for atoms in (have, want)]
    if 1 in shards or have == want or not any(size % n for n in shards):
        return False
    short, long = sorted((have, want), key=len)
    return long[: len(short)] != short or not leads_to_blocks(size, *shards)


_LISTED = 16
"""Devices up to which strips are listed for their price. Among more it is read off the pattern of blocks. Measured
(2026-11): to list those of 256 devices takes milliseconds, and a search prices hundreds."""

_APART = 1.4
"""What rounds send beside the strips of the busiest device, where blocks end at different places. Guessed: with less,
strips are taken where a gather is cheaper."""


@lru_cache(maxsize=1 << 16)
def sent(relaid: Relaid) -> StripTotals:
    """What a relayout sends: of few devices as it is planned, of many by the pattern of overlaps.

    A device receives its block in as many strips as that overlaps with others, and each of those that hold a block
    sends its share of what all want of it; blocks that do not end at the same places share rounds badly. Where devices
    want the same block, they pass parts of it on. Where blocks are cut into others, nearly, most of them is there.
    """
    if relaid.count(relaid.group) <= _LISTED:
        found = relayout(*relaid)
        return StripTotals(found.wire_elements, found.rounds)
    held, wanted, parts = map(relaid.count, (relaid.have, relaid.want, relaid.joined))
    devices, is_whole = relaid.count(relaid.group), not (relaid.cut or relaid.joined)
    have, want = block_length(relaid.size, held), block_length(relaid.size, wanted)
    if is_whole and relaid.have == relaid.want[: len(relaid.have)]:
        return StripTotals(min(want, held * (wanted // held * want - have)), _overlaps(want, have, held))
    receivers, holders = devices // wanted, devices // (parts * held)
    copies = 1 if is_whole and relaid.want == relaid.have[: len(relaid.want)] else receivers
    takers = block_length(_overlaps(have, want, wanted) * copies, holders)
    elements = max(parts * min(want, relaid.size), block_length(have * copies, holders))
    apart = 1.0 if max(have, want) % min(have, want) == 0 else _APART
    return StripTotals(round(apart * elements), max(parts * _overlaps(want, have, held), takers))


def _overlaps(length: int, block: int, count: int) -> int:
    """How many of `count` blocks overlap at most with one of a length, of several such ones side by side."""
    return min(block_length(length - math.gcd(length, block), block) + 1, count)


@lru_cache(maxsize=4096)
def relayout(
    size: int, sizes: tuple[int, ...], have: Atoms, want: Atoms, cut: Atoms = (), joined: Atoms = ()
) -> Relayout:
    """From blocks along the atoms `have` to blocks along the atoms `want`, of a dimension of `size` elements.

    Args:
        size: the number of elements.
        sizes: the size of each atom.
        have, want: numbers of atoms, major to minor.
        cut: atoms that begin to split another dimension: the plan's operands are the parts into which a device's block
            of that one is cut, of which everybody wants one.
        joined: atoms that cease to split another dimension: the result's block has one part after the other for each of
            its parts, which devices along these atoms have.
    """
    group = tuple(dict.fromkeys((*joined, *have, *want)))
    devices = _Devices(group, sizes)
    wanted, shards, parts = map(devices.count, (want, have, joined))
    block, count = block_length(size, wanted), devices.count(group)
    held = Source.split(size, shards)
    bounds = (part * size + bound for part in range(parts) for bound in held.bounds[:-1])
    source = Source((*bounds, parts * size), held.block, count // (parts * shards))
    places = zip(devices.places(cut), devices.places(want), strict=True)
    wants = tuple(
        tuple(Want(operand, part * size + w.source, part * block, w.length) for part in range(parts) for w in wanting)
        for operand, place in places
        for wanting in [_want(min(place * block, size), min((place + 1) * block, size))]
    )
    direct = Relayout(group, (plan_strips((source,) * devices.count(cut), wants, parts * block),))
    if cut or joined or want != have[: len(want)]:
        return direct
    share = _parts(size, block, count // wanted, count)
    first = plan_strips((source,), tuple(map(_want, share.bounds, share.bounds[1:])), share.block)
    by_parts = Relayout(group, (first, plan_strips((share,), wants, block)))
    return min(direct, by_parts, key=lambda found: (found.wire_elements, found.rounds))


@dataclass(frozen=True, slots=True)
class _Devices:
    """The devices along the atoms of a group, the first one major."""

    group: Atoms
    sizes: tuple[int, ...]

    def count(self, atoms: Atoms) -> int:
        """How many there are along some atoms."""
        return math.prod(self.sizes[atom] for atom in atoms)

    def places(self, atoms: Atoms) -> list[int]:
        """The position of each device along some of the atoms."""
        digits = itertools.product(*(range(self.sizes[atom]) for atom in self.group))
        return [self._place(dict(zip(self.group, of_device, strict=True)), atoms) for of_device in digits]

    def _place(self, digits: Mapping[int, int], atoms: Atoms) -> int:
        place = 0
        for atom in atoms:
            place = place * self.sizes[atom] + digits[atom]
        return place


def _want(first: int, last: int) -> tuple[Want, ...]:
    return (Want(0, first, 0, last - first),) if last > first else ()


def _parts(size: int, block: int, count: int, devices: int) -> Source:
    """Every block in `count` parts of equal length, as far as it reaches; one per device."""
    part = block_length(block, count)
    places = (divmod(device, count) for device in range(devices))
    bounds = (min(i * block + min(part * j, block), size) for i, j in places)
    return Source((*bounds, size), part)
