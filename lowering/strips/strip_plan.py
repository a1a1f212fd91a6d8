"""Plans of strips as data: how operands are split, what result shards want, what is copied and what is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sdy_jax.errors import InternalError


@dataclass(frozen=True, slots=True)
class Source:
    """How an operand is split: shard `u` holds elements `bounds[u]` to `bounds[u + 1]`, the first one at local index 0.

    `block` is the length of the local array, whose rest is padding. An operand with a single range is whole on every
    device, and nothing of it is sent. Where the ranges are fewer than the devices, `replicas` devices in a row hold the
    same one.
    """

    bounds: tuple[int, ...]
    block: int
    replicas: int = 1

    @classmethod
    def split(cls, size: int, shards: int, block: int | None = None) -> Source:
        """Blocks of `block` elements, as many as are needed for `size`, the others empty; None for equal blocks."""
        block = block_length(size, shards) if block is None else block
        if block * shards < size:
            raise InternalError(f"{shards} blocks of {block} elements cannot hold {size}")
        return cls(tuple(min(u * block, size) for u in range(shards + 1)), block)

    @classmethod
    def whole(cls, size: int) -> Source:
        """Every device holds all elements."""
        return cls((0, size), size)

    @property
    def is_whole(self) -> bool:
        return len(self.bounds) == 2


class Want(NamedTuple):
    """A strip that a result shard is made of: `length` elements of an operand from global index `source` on, which it
    keeps from local index `start` on."""

    operand: int
    source: int
    start: int
    length: int


Wants = tuple[tuple[Want, ...], ...]
"""Per result shard, its strips; they do not overlap in the result."""


@dataclass(frozen=True, slots=True)
class Strips:
    """At most one strip per sender and per receiver, which move together.

    `length` is that of the longest, which all devices cut and send; `pairs` are (sender, receiver), equal ones for
    copies. By sender: `operands`, the operand from which it cuts, and `offsets`, where. By receiver: `starts`, where it
    keeps the strip, and `lengths`, of how many elements (0 for a device that receives none). Entries of devices that
    take no part are those of one that does, so that a table of equal numbers is recognised as a constant.
    """

    length: int
    pairs: tuple[tuple[int, int], ...]
    operands: tuple[int, ...]
    offsets: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def is_full(self) -> bool:
        """Whether every device receives `length` elements."""
        return min(self.lengths) == self.length


@dataclass(frozen=True, slots=True)
class StripPlan:
    """What makes the result's local blocks of `length` elements: `copies` within a device, and `rounds` on the wire."""

    length: int
    copies: tuple[Strips, ...]
    rounds: tuple[Strips, ...]

    @property
    def wire_elements(self) -> int:
        """What a device sends, in elements along the dimension. An all_gather sends (shards - 1) blocks."""
        return sum(strips.length for strips in self.rounds)


def block_length(size: int, shards: int) -> int:
    return -(-size // shards)


class Move(NamedTuple):
    """A strip that one shard holds and one wants."""

    sender: int
    receiver: int
    length: int
    operand: int
    offset: int
    start: int
