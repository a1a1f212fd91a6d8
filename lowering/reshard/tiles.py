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
        rows: beside these, of blocks that are no whole tiles, and of an all_to_all that joins the rows of a matrix.
        narrow: instead, of an all_to_all of an array of more dimensions whose blocks are no whole tiles.
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
        9; of narrow blocks gathers and scatters 5 to 8, all_to_alls of matrices 8 to 8.5, of others 25 to 60.
        """
        return cls(0.0, 2 * memory, 128, 6 * memory, 40 * memory)

    def of(self, kind: str, cut: LastCut | None) -> float:
        """Those of a kind of collective and what it cuts."""
        exchanges = kind == "all_to_all"
        rearranged = self._rearranged(cut, exchanges) if cut is not None and self.lanes else 0.0
        return self.sent + (self.exchanged if exchanges else 0.0) + rearranged

    def _rearranged(self, cut: LastCut, exchanges: bool) -> float:
        if cut.block % self.lanes:
            return self.narrow if exchanges and not cut.is_matrix else self.rows
        return self.rows if exchanges and cut.is_matrix and cut.joins else 0.0
