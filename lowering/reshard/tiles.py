"""What devices rearrange of what they send and receive, where arrays lie in tiles.

On TPUs an array lies in tiles of 8 rows of 128 elements of its last dimension, its lanes. A gather or a scatter of
whole tiles is sent as it lies, and of an all_to_all the blocks are put side by side once. A block of fewer lanes fills
a tile with padding, so that all of its elements change their lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class LastCut(NamedTuple):
    """What a collective cuts or joins along the last dimension: the size of the smaller blocks, whether the array is a
    matrix, and whether blocks are joined."""

    block: int
    is_matrix: bool
    joins: bool = False


def last_cut(shape: Sequence[int], before: Sequence[int], after: Sequence[int]) -> LastCut | None:
    """What leads from some shard counts per dimension to others; None where the last dimension stays as it is.

    >>> last_cut((16, 512), (8, 1), (1, 8))
    LastCut(block=64, is_matrix=True, joins=False)
    """
    if not shape or before[-1] == after[-1]:
        return None
    return LastCut(-(-shape[-1] // max(before[-1], after[-1])), len(shape) == 2, before[-1] > after[-1])


class Copies(NamedTuple):
    """Seconds for each byte sent in which a device rearranges what it sends and receives.

    Attributes:
        sent: whatever is sent.
        exchanged: beside that, of an all_to_all.
        lanes: the elements of the last dimension in a tile; 0 where arrays do not lie in tiles.
        rows: beside these, of an all_to_all of a matrix whose blocks are no whole tiles, or whose rows are joined.
        narrow: likewise of an array of more dimensions whose blocks are no whole tiles.
    """

    sent: float = 0.0
    exchanged: float = 0.0
    lanes: int = 0
    rows: float = 0.0
    narrow: float = 0.0

    @classmethod
    def in_tiles(cls, memory: float) -> Copies:
        """Those of TPUs, whose memory takes so many seconds for a byte.

        By what the compiler for v5e states of single collectives over 4 and 8 chips (libtpu 0.0.52, 2026-11), in bytes
        of memory per byte sent: gathers and scatters 0, all_to_alls 0 to 3.5, but those that join the rows of a matrix
        9; of narrow blocks gathers and scatters 5 to 8, all_to_alls of matrices 8 to 8.5, of others 25 to 60. Gathers
        and scatters are taken to need none: what is gathered in narrow blocks mostly has to be.
        """
        return cls(0.0, 2 * memory, 128, 6 * memory, 40 * memory)

    def of(self, kind: str, cut: LastCut | None) -> float:
        """Those of a kind of collective and what it cuts."""
        if kind != "all_to_all":
            return self.sent
        return self.sent + self.exchanged + (self._rearranged(cut) if cut is not None and self.lanes else 0.0)

    def _rearranged(self, cut: LastCut) -> float:
        is_narrow = cut.block % self.lanes > 0
        if cut.is_matrix:
            return self.rows if is_narrow or cut.joins else 0.0
        return self.narrow if is_narrow else 0.0
