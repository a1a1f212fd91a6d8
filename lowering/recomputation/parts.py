"""Where to cut a sequence of ops into parts, as into layers: where little passes from one to the next."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

_MIDDLE = (0.25, 0.75)
"""Where a part is cut, by what is needed of it. Guessed: nearer to its ends, parts are of unlike sizes; nearer to its
middle, no place may be narrow."""

_NARROW = 0.25
"""The share of what is needed of a part that may pass where it is cut: that has to be held beside what is recomputed of
one part. Guessed: with less, unrolled layers with wide residual streams are not cut; with more, parts save little."""


def parts_of(needed: Sequence[float], crossing: Sequence[float]) -> list[int]:
    """The numbers of the parts of ops.

    Args:
        needed: per op, the bytes of what is needed later of what it makes.
        crossing: per op, the bytes that it, or an op after it, takes of what is made before it.

    >>> parts_of([1, 9, 9, 1, 9, 9], [0, 1, 10, 1, 2, 10])
    [0, 0, 0, 1, 1, 1]
    """
    sums = [0.0, *accumulate(needed)]
    cuts, waiting = set[int](), [(0, len(needed))]
    while waiting:
        begin, end = waiting.pop()
        cut = _narrowest(sums, crossing, begin, end)
        if cut is not None:
            cuts.add(cut)
            waiting += [(begin, cut), (cut, end)]
    return list(accumulate(int(number in cuts) for number in range(len(needed))))


def _narrowest(sums: Sequence[float], crossing: Sequence[float], begin: int, end: int) -> int | None:
    """Where least passes in the middle of a part, by what is needed; None where that is not little."""
    whole = sums[end] - sums[begin]
    low, high = (bisect_left(sums, sums[begin] + share * whole, begin, end) for share in _MIDDLE)
    middle = range(max(low, begin + 1), min(high + 1, end))
    cut = min(middle, key=crossing.__getitem__, default=None)
    return cut if cut is not None and crossing[cut] < _NARROW * whole else None
