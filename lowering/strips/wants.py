"""The strips that ops want along a split dimension: slices, pads, windows, concatenations, rolls, reversals, relayouts.

Dimensions of size N over g shards have blocks of ceil(N / g) elements, in operands and results alike; what lies beyond
N is padding and is never read. Every function here is memoised and returns a plan of strips, whose `wire_elements`
times the size of a row is what a device sends (`strips/strips.py`); `redistribute.py` runs them.

Slices, pads, reduce_window and convolutions read windows. A `Window` says how along one dimension; `window_reads` what
that is for each shard. A 3-point stencil over 8 elements on 4 shards, padded by one on both sides:

    window_reads(Window(8, window=3, low=1, high=1), 4)

has result blocks of 2 elements, for which a shard reads 4: two of its own and one of each neighbour. On the wire is
one element per direction; at the ends the fill value stands for what is not there. A pad is a window of one element,
a slice one with negative padding; base dilation (interior padding) puts holes between the elements after they came.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from sdy_jax.lowering.strips.strips import Source, StripPlan, Want, Wants, block_length, plan_strips


class Piece(NamedTuple):
    """`length` elements of an operand from `start` on; of no operand (None) for the fill value."""

    operand: int | None
    start: int
    length: int


def joined_wants(pieces: Sequence[Piece], shards: int, block: int) -> Wants:
    """What the blocks of `block` elements want of a result that is these pieces one after the other."""
    wants: list[list[Want]] = [[] for _ in range(shards)]
    end = 0
    for operand, start, length in pieces:
        begin, end = end, end + length
        if operand is None or not length:
            continue
        for shard in range(begin // block, block_length(end, block)):
            first, last = max(begin, shard * block), min(end, (shard + 1) * block)
            wants[shard].append(Want(operand, start + first - begin, first - shard * block, last - first))
    return tuple(map(tuple, wants))


@lru_cache(maxsize=1024)
def joined_plan(sources: tuple[Source, ...], pieces: tuple[Piece, ...], shards: int) -> StripPlan:
    """A result of pieces of any operands, one after the other."""
    block = block_length(sum(piece.length for piece in pieces), shards)
    return plan_strips(sources, joined_wants(pieces, shards, block), block)


def concatenate_plan(sizes: Sequence[int], shards: int, whole: Sequence[bool] = ()) -> StripPlan:
    """A concatenation of operands of these sizes; those that are `whole` are not split."""
    kept = whole or [False] * len(sizes)
    sources = (Source.whole(n) if is_kept else Source.split(n, shards) for n, is_kept in zip(sizes, kept, strict=True))
    return joined_plan(tuple(sources), tuple(Piece(k, 0, n) for k, n in enumerate(sizes)), shards)


def roll_plan(size: int, shards: int, shift: int) -> StripPlan:
    """`jnp.roll` by `shift`: element i comes to (i + shift) mod `size`."""
    shift = shift % size if size else 0
    pieces = (Piece(0, size - shift, shift), Piece(0, 0, size - shift))
    return joined_plan((Source.split(size, shards),), pieces, shards)


@lru_cache(maxsize=1024)
def relayout_plan(size: int, shards: int, block: int, new_block: int) -> StripPlan:
    """From blocks of `block` elements to blocks of `new_block`."""
    wants = joined_wants((Piece(0, 0, size),), shards, new_block)
    return plan_strips((Source.split(size, shards, block),), wants, new_block)


class Level(NamedTuple):
    """A dimension of `size` elements among dimensions that are flattened together: the product of those before it, and
    of those after it."""

    major: int
    size: int
    minor: int


@lru_cache(maxsize=1024)
def reshape_plan(operand: Level, result: Level, shards: int) -> StripPlan:
    """The elements of a flattened group of dimensions, from blocks of one dimension to blocks of another one.

    The plan's operand p is what a device holds at major position p; its result's block has one part per major position.
    Example: [4, 65] split along the dimension of 65 to [260] is a concatenation of four operands.
    """
    row, block = operand.size * operand.minor, block_length(operand.size, shards) * operand.minor
    part = block_length(result.size, shards)
    wants: list[list[Want]] = [[] for _ in range(shards)]
    for shard, major in itertools.product(range(shards), range(result.major)):
        first, last = (min(n * part, result.size) + major * result.size for n in (shard, shard + 1))
        start = (major * part - first) * result.minor
        for p, begin, length in _by_row(first * result.minor, last * result.minor, row):
            wants[shard].append(Want(p, begin - p * row, start + begin, length))
    sources = (Source.split(row, shards, block),) * operand.major
    return plan_strips(sources, tuple(map(tuple, wants)), result.major * part * result.minor)


def _by_row(first: int, last: int, row: int) -> Iterator[tuple[int, int, int]]:
    """The parts of a range between multiples of `row`: their row, begin and length."""
    while first < last:
        stop = min(last, (first // row + 1) * row)
        yield first // row, first, stop - first
        first = stop


@lru_cache(maxsize=1024)
def reverse_plan(size: int, shards: int) -> StripPlan:
    """The blocks of a reversed dimension, each still in the order of the operand: the local result is to be reversed.

    A block that is not full stands at the end of its local array, and so comes to the start.
    """
    block = block_length(size, shards)
    blocks = [(min(t * block, size), min((t + 1) * block, size)) for t in range(shards)]
    wants = tuple((Want(0, size - last, block - (last - first), last - first),) for first, last in blocks)
    return plan_strips((Source.split(size, shards),), wants, block)


@dataclass(frozen=True, slots=True)
class Slice:
    """A slice with a stride: every device first takes from its block each `stride`-th element from its phase on,
    `count` of them, so that only elements of the result travel.

    `plan` makes the result's blocks; `own_part` the whole result, with only the elements that the device holds itself.
    """

    stride: int
    phases: tuple[int, ...]
    count: int
    plan: StripPlan
    own_part: StripPlan


@lru_cache(maxsize=1024)
def slice_plan(size: int, shards: int, start: int, limit: int, stride: int = 1) -> Slice:
    """`x[start:limit:stride]` of a dimension of `size` elements, for 0 <= start <= limit <= size."""
    block, length = block_length(size, shards), block_length(limit - start, stride)
    # Element j of the result is element start + j * stride of the operand; shards hold them by ranges of j, which
    # begin below 0 and end above `length` where the slice leaves something out.
    bounds = [block_length(u * block - start, stride) for u in range(shards)]
    bounds.append(max(bounds[-1], block_length(size - start, stride)))
    phases = tuple(start + bounds[u] * stride - u * block for u in range(shards))
    count = block_length(block, stride)
    wants = joined_wants((Piece(0, 0, length),), shards, block_length(length, shards))
    source = Source(tuple(bounds), count)
    plan = plan_strips((source,), wants, block_length(length, shards))
    own = tuple(_clipped(max(first, 0), min(last, length), 0, length) for first, last in pairwise(bounds))
    return Slice(stride, phases, count, plan, plan_strips((source,), own, length))


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

    `plan` brings the elements, without dilation. Dilated by `dilation` and cut to `length` elements from its phase on,
    they are what a device runs its windows over, without padding, for `block` results.

    An op that dilates by itself does not compute with the fill values. It runs over what `plan` brings with its own
    base dilation and `padding`, and `block` of its results from the shard's entry of `starts` on are the wanted ones.
    Both are None where the phases of the shards differ by less than a stride.
    """

    block: int
    window: int
    length: int
    stride: int
    dilation: int
    phases: tuple[int, ...]
    plan: StripPlan

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
    begins = [t * block * window.stride - window.low if n else -window.low for t, n in enumerate(counts)]
    length = (block - 1) * window.stride + window.span if block else 0
    lengths = [(n - 1) * window.stride + window.span if n else 0 for n in counts]
    return _reads(window, block, window.window, length, begins, lengths)


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
    return _reads(window, results, block, length, begins, lengths, is_whole)


def _reads(
    window: Window,
    block: int,
    local_window: int,
    length: int,
    begins: Sequence[int],
    lengths: Sequence[int],
    is_whole: bool = False,
) -> Reads:
    """Shard t reads `lengths[t]` of `length` elements of the dilated operand from `begins[t]` on."""
    dilation = window.base_dilation
    firsts, phases = zip(*(divmod(begin, dilation) for begin in begins), strict=True)
    width = max(block_length(phase + length, dilation) for phase in phases)
    wants = tuple(
        _clipped(block_length(begin, dilation), (begin + n - 1) // dilation + 1 if n else 0, first, window.size)
        for begin, first, n in zip(begins, firsts, lengths, strict=True)
    )
    source = Source.whole(window.size) if is_whole else Source.split(window.size, len(begins))
    plan = plan_strips((source,), wants, width)
    return Reads(block, local_window, length, window.stride, dilation, phases, plan)


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


def window_plan(size: int, shards: int, lows: Sequence[int], highs: Sequence[int]) -> StripPlan:
    """Shard t reads from index `lows[t]` up to `highs[t]`, which may lie outside; its block starts with `lows[t]`."""
    intervals = list(zip(lows, highs, strict=True))
    return _intervals(size, lows, intervals, max(0, *(high - low for low, high in intervals)))
