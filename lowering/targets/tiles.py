"""What devices rearrange of what they send and receive, where arrays lie in tiles.

There an array lies in tiles of 8 rows of 128 elements of its last dimension, its lanes. A gather or a scatter of
whole tiles is sent as it lies, and of an all_to_all the blocks are put side by side once. A block of fewer lanes fills
a tile with padding, so that all of its elements change their lanes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations
from typing import NamedTuple

SUBLANES, LANES = 8, 128
"""The rows of a tile, and the elements of each, where nothing else is said. Published (XLA, "Tiled layout";
"How to Scale Your Model")."""


class Tiles(NamedTuple):
    """The rows and the lanes of a tile, in which two dimensions of an array lie; one with fewer rows has tiles of
    fewer."""

    rows: int = SUBLANES
    lanes: int = LANES

    def elements(self, shape: Sequence[int]) -> int:
        """The elements of a block in whole tiles, with those two dimensions in tiles of which it then has fewest, as
        the compiler chooses them.

        >>> [Tiles().elements(shape) for shape in ((32, 32, 64), (512, 64), (3, 128))]
        [131072, 32768, 512]
        """
        if len(shape) < 2:
            return math.prod(shape)
        if not all(shape):
            return 0
        padded = min(
            _whole(lanes, self.lanes) / lanes * _whole(rows, min(self.rows, _power(rows))) / rows
            for lanes, rows in permutations(shape, 2)
        )
        return round(math.prod(shape) * padded)


def _whole(size: int, tile: int) -> int:
    return -(-size // tile) * tile


def _power(size: int) -> int:
    """The least power of two that is no smaller."""
    return 1 << (size - 1).bit_length()


def in_lanes(shape: Sequence[int]) -> int:
    """The dimension that is in lanes: the last one, or the largest one that fills lanes where that does not.

    >>> in_lanes((8, 64, 512)), in_lanes((512, 3, 8, 64)), in_lanes((3, 5))
    (2, 0, 1)
    """
    last = len(shape) - 1
    filling = [dim for dim in range(len(shape)) if shape[dim] % LANES == 0]
    return last if not filling or last in filling else max(filling, key=shape.__getitem__)


class LastCut(NamedTuple):
    """What a collective cuts or joins along the last dimension: the size of the smaller blocks, the rank of the array,
    and whether blocks are joined."""

    block: int
    rank: int
    joins: bool = False


def last_cut(shape: Sequence[int], before: Sequence[int], after: Sequence[int]) -> LastCut | None:
    """What leads from some shard counts per dimension to others; None where the last dimension stays as it is.

    >>> last_cut((16, 512), (8, 1), (1, 8))
    LastCut(block=64, rank=2, joins=False)
    """
    if not shape or before[-1] == after[-1]:
        return None
    return LastCut(-(-shape[-1] // max(before[-1], after[-1])), len(shape), before[-1] > after[-1])


_MATRIX = 2
"""Given: the rank of a matrix."""

_SEVERAL = 4
"""The ops that rearrange narrow blocks, where it takes more than one: copies to rows of other sizes and back. Measured
(2026-11, libtpu 0.0.52): 3 to 7 microseconds beside 1.2 to 1.8 where it is one."""


class Copies(NamedTuple):
    """Seconds for each byte sent in which a device rearranges what it sends and receives.

    Attributes:
        sent: whatever is sent.
        exchanged: beside that, of an all_to_all.
        lanes: the elements of the last dimension in a tile; 0 where arrays do not lie in tiles.
        rows: beside these, of blocks that are no whole tiles, and of an all_to_all that joins the rows of a matrix.
        narrow: instead, of such blocks of an array of three dimensions, and where more are gathered.
        folded: instead, of an all_to_all of such blocks of more dimensions.
        launch: seconds of each op that rearranges blocks which are no whole tiles, however small these are.
    """

    sent: float = 0.0
    exchanged: float = 0.0
    lanes: int = 0
    rows: float = 0.0
    narrow: float = 0.0
    folded: float = 0.0
    launch: float = 0.0

    def of(self, kind: str, cut: LastCut | None) -> float:
        """Those of a kind of collective and what it cuts."""
        exchanges = kind == "all_to_all"
        rearranged = self._rearranged(kind, cut) if cut is not None and self.lanes else 0.0
        return self.sent + (self.exchanged if exchanges else 0.0) + rearranged

    def fixed(self, kind: str, cut: LastCut | None) -> float:
        """The seconds of a collective beside those for its bytes."""
        if cut is None or not self._is_narrow(cut):
            return 0.0
        return self.launch * (1 if _is_one_op(kind, cut.rank) else _SEVERAL)

    def _rearranged(self, kind: str, cut: LastCut) -> float:
        if self._is_narrow(cut):
            return self._of_narrow(kind, cut.rank)
        return self.rows if kind == "all_to_all" and cut.rank == _MATRIX and cut.joins else 0.0

    def _of_narrow(self, kind: str, rank: int) -> float:
        if _is_one_op(kind, rank):
            return self.rows
        return self.folded if kind == "all_to_all" and rank > _MATRIX + 1 else self.narrow

    def _is_narrow(self, cut: LastCut) -> bool:
        """Whether blocks are no whole tiles."""
        return self.lanes > 0 and cut.block % self.lanes > 0


def _is_one_op(kind: str, rank: int) -> bool:
    """Whether one op rearranges narrow blocks."""
    return rank <= _MATRIX or kind == "reduce_scatter"
