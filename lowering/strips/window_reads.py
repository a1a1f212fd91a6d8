"""What windows read along a split dimension: reduce_window, convolutions, pads, slices.

A `Window` says how along one dimension; `window_reads` what that is for each shard. A 3-point stencil over 8 elements
on 4 shards, padded by one on both sides:

    window_reads(Window(8, window=3, low=1, high=1), 4)

has result blocks of 2 elements, for which a shard reads 4: two of its own and one of each neighbour. On the wire is
one element per direction; at the ends the fill value stands for what is not there. A pad is a window of one element,
a slice one with negative padding; base dilation (interior padding) puts holes between the elements after they came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from sdy_jax.lowering.strips.strip_plan import Source, StripPlan, Want, block_length
from sdy_jax.lowering.strips.strips import plan_strips


@dataclass(frozen=True, slots=True)
class Window:
    """How an op reads one dimension of `size` elements, in the terms of StableHLO's windows.

    `base_dilation` - 1 fill values are put between neighbouring elements, `low` and `high` before and after them
    (negative ones take elements away); a window of `window` elements, `window_dilation` apart, moves by `stride`.
    `is_reversed`: what a window's elements meet has them in reverse order, as a kernel may.
    """

    size: int
    window: int = 1
    stride: int = 1
    low: int = 0
    high: int = 0
    base_dilation: int = 1
    window_dilation: int = 1
    is_reversed: bool = False

    @property
    def span(self) -> int:
        """From a window's first element to behind its last one."""
        return (self.window - 1) * self.window_dilation + 1

    @property
    def result_size(self) -> int:
        dilated = (self.size - 1) * self.base_dilation + 1 if self.size else 0
        return max((dilated + self.low + self.high - self.span) // self.stride + 1, 0)


@dataclass(frozen=True, slots=True)
class Reads:
    """What the shards read for their windows.

    `of` is how the op reads the whole operand. `plan` brings the elements, without dilation. Dilated by `dilation` and
    cut to `length` elements from its phase on, they are what a device runs its windows over, without padding, for
    `block` results.

    An op that dilates by itself does not compute with the fill values. It runs over what `plan` brings with its own
    base dilation and `padding`, and `block` of its results from the shard's entry of `starts` on are the wanted ones.
    Both are None where the phases of the shards differ by less than a stride.
    """

    of: Window
    block: int
    window: int
    length: int
    phases: tuple[int, ...]
    plan: StripPlan

    @property
    def stride(self) -> int:
        return self.of.stride

    @property
    def dilation(self) -> int:
        return self.of.base_dilation

    @property
    def starts(self) -> tuple[int, ...] | None:
        later = [phase - min(self.phases) for phase in self.phases]
        return None if any(n % self.stride for n in later) else tuple(n // self.stride for n in later)

    @property
    def padding(self) -> tuple[int, int] | None:
        if self.starts is None:
            return None
        end = max(self.phases) + self.length
        return -min(self.phases), end - (self.plan.length - 1) * self.dilation - 1


@lru_cache(maxsize=1024)
def window_reads(window: Window, shards: int) -> Reads:
    """What each of `shards` reads of an operand that is split over them, for its block of the result."""
    results = window.result_size
    block = block_length(results, shards)
    counts = [max(0, min(block, results - t * block)) for t in range(shards)]
    length, *lengths = [(n - 1) * window.stride + window.span if n else 0 for n in (block, *counts)]
    read = [(t * block * window.stride * (n > 0) - window.low, n) for t, n in enumerate(lengths)]
    return _reads(window, block, window.window, length, read)


@lru_cache(maxsize=1024)
def contracted_reads(window: Window, shards: int, is_whole: bool = False) -> Reads:
    """What each of `shards` reads where the elements of the windows are split over them as the operand is, or while all
    have the whole operand: every shard has a term of all results."""
    results, block = window.result_size, block_length(window.window, shards)
    counts = [max(0, min(block, window.window - t * block)) for t in range(shards)]
    if window.is_reversed:  # the last block, which may not be full, is the first of the window; its padding comes first
        firsts, counts = [window.window - (t + 1) * block for t in range(shards)], [block * (n > 0) for n in counts]
    else:
        firsts = [t * block for t in range(shards)]
    begins = [first * window.window_dilation * (n > 0) - window.low for first, n in zip(firsts, counts, strict=True)]
    spans = [(n - 1) * window.window_dilation + 1 if n and results else 0 for n in (block, *counts)]
    length, *lengths = [(results - 1) * window.stride + span if span else 0 for span in spans]
    return _reads(window, results, block, length, list(zip(begins, lengths, strict=True)), is_whole)


def _reads(
    window: Window,
    block: int,
    local_window: int,
    length: int,
    read: Sequence[tuple[int, int]],
    is_whole: bool = False,
) -> Reads:
    """What shards `read` of the dilated operand: each from where on, and how many of `length` elements."""
    dilation = window.base_dilation
    firsts, phases = zip(*(divmod(begin, dilation) for begin, _ in read), strict=True)
    width = max(block_length(phase + length, dilation) for phase in phases)
    wants = tuple(
        _clipped(block_length(begin, dilation), (begin + n - 1) // dilation + 1 if n else 0, first, window.size)
        for (begin, n), first in zip(read, firsts, strict=True)
    )
    source = Source.whole(window.size) if is_whole else Source.split(window.size, len(read))
    plan = plan_strips((source,), wants, width)
    return Reads(window, block, local_window, length, phases, plan)


@dataclass(frozen=True, slots=True)
class Scattered:
    """What the shards read to scatter to their own block of the operand (`select_and_scatter`).

    A device computes all windows that touch its block, from what `operand` brings of the selected operand and `source`
    of the scattered values, without padding: `block` elements of the result, from the shard's entry of `starts` on, are
    its own.
    """

    block: int
    starts: tuple[int, ...]
    operand: StripPlan
    source: StripPlan


@lru_cache(maxsize=1024)
def scattered_reads(window: Window, shards: int) -> Scattered:
    """What each of `shards` reads; `window.size` is that of the operand, and it is not dilated."""
    size, stride, low = window.size, window.stride, window.low
    block = block_length(size, shards)
    begins = [min(t * block, size) for t in range(shards)]
    ends = [min((t + 1) * block, size) for t in range(shards)]
    firsts = [min(block_length(b + low - window.window + 1, stride), (b + low) // stride) for b in begins]
    lasts = [max((e - 1 + low) // stride, first - 1) for e, first in zip(ends, firsts, strict=True)]
    starts = tuple(b - (first * stride - low) for b, first in zip(begins, firsts, strict=True))
    count = max(last - first + 1 for first, last in zip(firsts, lasts, strict=True))
    count = max(count, *(block_length(start + block - window.window, stride) + 1 for start in starts))
    windows = [(max(first, 0), min(last + 1, window.result_size)) for first, last in zip(firsts, lasts, strict=True)]
    source = _intervals(window.result_size, firsts, windows, count)
    spans = [(a * stride - low, (b - 1) * stride - low + window.window if b > a else -low) for a, b in windows]
    origins = [first * stride - low for first in firsts]
    operand = _intervals(size, origins, spans, (count - 1) * stride + window.window)
    return Scattered(block, starts, operand, source)


def _intervals(size: int, origins: Sequence[int], intervals: Sequence[tuple[int, int]], length: int) -> StripPlan:
    """Blocks of `length` elements from `origins[t]` on, of which shard t reads those in its interval."""
    wants = tuple(_clipped(low, high, origin, size) for origin, (low, high) in zip(origins, intervals, strict=True))
    return plan_strips((Source.split(size, len(origins)),), wants, length)


def _clipped(first: int, last: int, origin: int, size: int) -> tuple[Want, ...]:
    """What there is from `first` to `last`, kept relative to `origin`."""
    first, last = max(first, 0), min(last, size)
    return (Want(0, first, first - origin, last - first),) if last > first else ()
