"""What of a program is computed again, so that it holds so many bytes less."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sdy_jax.ir.graph import Graph
from sdy_jax.lowering.interface.outcomes import Recomputed
from sdy_jax.lowering.prepare.dead_code import erase_dead_code
from sdy_jax.lowering.recomputation.loop_stacks import without_unread
from sdy_jax.lowering.recomputation.segment_prices import PricedSegment

_RANGE = 1e6
"""The prices of a byte that are tried: up to so many times what all ops take by all bytes, and down to that part.
Guessed, a guard: wide enough that one end saves nothing and the other all that can be."""

_STEPS = 24
"""How often the range of prices is halved, in the logarithm. Guessed: 24 leave a factor of 1 + 2e-6 of a range of 1e12;
each is a minimum cut."""


def recomputed(graph: Graph, segments: Sequence[PricedSegment], price: float) -> tuple[Graph, Recomputed] | None:
    """A program that computes again what costs less than it does to hold it.

    Args:
        graph: the program, which is rewritten.
        segments: what of it may run again.
        price: of holding a byte, in seconds.

    Returns:
        The program, and what is computed again; None where that is nothing.
    """
    found = [(segment, segment.again(price)) for segment in segments]
    saved = sum([segment.saved(again) for segment, again in found])
    if saved <= 0:
        return None
    what = Recomputed(
        tuple(value for segment, again in found for value in segment.not_held(again)),
        tuple(op for segment, again in found for op in segment.ran(again)),
        saved,
    )
    for segment, again in found:
        segment.run(again)
    return without_unread(erase_dead_code(Graph(graph.module))), what


def price_that_saves(segments: Sequence[PricedSegment], saving: float) -> float:
    """The least price of a byte at which so many bytes are held less; the highest one tried, if that is never."""

    def saved(price: float) -> float:
        return sum([segment.saved(segment.again(price)) for segment in segments])

    seconds, size = (sum([getattr(segment, name) for segment in segments]) for name in ("seconds", "bytes"))
    if not (seconds and size):
        return 0.0
    low, high = math.log(seconds / size / _RANGE), math.log(seconds / size * _RANGE)
    for _ in range(_STEPS if saved(math.exp(high)) >= saving else 0):
        half = (low + high) / 2
        low, high = (low, half) if saved(math.exp(half)) >= saving else (half, high)
    return math.exp(high)
