"""The strips that ops read along a split dimension: slices, joins, rolls, reshapes, windows, and several at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from sdy_jax.lowering.reshard.strips import Source, StripPlan, Want, Wants, block_length, plan_strips

# What windows read along a split dimension: reduce_window, convolutions, pads, slices.
#
# A `Window` says how along one dimension; `window_reads` what that is for each shard. A 3-point stencil over 8
# elements on 4 shards, padded by one on both sides:
#
#     window_reads(Window(8, window=3, low=1, high=1), 4)
#
# has result blocks of 2 elements, for which a shard reads 4: two of its own and one of each neighbour. On the wire is
# one element per direction; at the ends the fill value stands for what is not there. A pad is a window of one
# element, a slice one with negative padding; base dilation (interior padding) puts holes between the elements after
# they came.


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


# The strips that ops want along a split dimension: slices, concatenations, rolls, reversals, reshapes, relayouts.
#
# Dimensions of size N over g shards have blocks of ceil(N / g) elements, in operands and results alike; what lies
# beyond N is padding and is never read. Every function here is memoised and returns a plan of strips, whose
# `wire_elements` times the size of a row is what a device sends (`reshard/strips.py`);
# `ops/shards.py` runs them. What windows want is above.


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
class StridedSlice:
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
def slice_plan(size: int, shards: int, start: int, limit: int, stride: int = 1) -> StridedSlice:
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
    return StridedSlice(stride, phases, count, plan, plan_strips((source,), own, length))


# Several results that are made of pieces of the same operands, from what is fetched once.
#
# A 3-point stencil reads `x[:-2]`, `x[1:-1]` and `x[2:]`. One by one the last two bring one and two elements from the
# right neighbour; but what the last one brings holds what the other one needs. So a device fetches what all results
# want into one block, in which every result is an interval at the same place on all devices:
#
#     x of 8 elements on 2 shards, results x[0:6], x[1:7], x[2:8], blocks of 3
#     shard 0 fetches x0 x1 x2 x3 x4, shard 1 x3 x4 x5 x6 x7; the results start at 0, 1 and 2
#
# Results that do not fit together so lie side by side: their strips share rounds at least.

Pieces = tuple[Piece, ...]
"""A result as pieces of operands and of the fill value, one after the other."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """`plan` brings a block in which the block of result i, of `lengths[i]` elements, is at `starts[i]` everywhere."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    plan: StripPlan


@lru_cache(maxsize=1024)
def joint_fetch(sources: tuple[Source, ...], results: tuple[Pieces, ...], shards: int) -> Fetch:
    """What brings the blocks of all results."""
    lengths = tuple(block_length(_size(pieces), shards) for pieces in results)
    runs = [_runs(pieces, shards, length) for pieces, length in zip(results, lengths, strict=True)]
    starts = _common_starts(runs, shards)
    wants = _wants(runs, starts) if starts is not None else None
    if starts is None or wants is None or _end(starts, lengths) > sum(lengths):
        starts = (0, *accumulate(lengths[:-1]))
        wants = _wants(runs, starts)
    assert wants is not None, "blocks side by side do not overlap"
    return Fetch(starts, lengths, plan_strips(sources, wants, _end(starts, lengths)))


def _end(starts: Sequence[int], lengths: Sequence[int]) -> int:
    return max(start + length for start, length in zip(starts, lengths, strict=True))


class _Run(NamedTuple):
    """Elements from local index `start` on: of an operand, from the index `source` on at local index 0; or the fill
    value, which has no operand."""

    start: int
    length: int
    operand: int | None
    source: int

    @property
    def end(self) -> int:
        return self.start + self.length


def _wants(runs: Sequence[Sequence[Sequence[_Run]]], starts: Sequence[int]) -> Wants | None:
    """What the shards want of results that begin there; None where two results want different elements in one place."""
    found = []
    for of_shard in zip(*runs, strict=True):
        moved = [_moved(run, start) for of, start in zip(of_shard, starts, strict=True) for run in of]
        merged = _merged(moved)
        if merged is None:
            return None
        found.append(tuple(_want(run) for run in merged if run.operand is not None))
    return tuple(found)


def _want(run: _Run) -> Want:
    assert run.operand is not None
    return Want(run.operand, run.source + run.start, run.start, run.length)


def _size(pieces: Pieces) -> int:
    return sum(piece.length for piece in pieces)


def _runs(pieces: Pieces, shards: int, block: int) -> list[list[_Run]]:
    """What each block of a result consists of."""
    if not block:
        return [[] for _ in range(shards)]
    wanted: Wants = joined_wants(pieces, shards, block)
    runs = [[_Run(w.start, w.length, w.operand, w.source - w.start) for w in wants] for wants in wanted]
    for shard, of in enumerate(runs):
        of += _filled(of, min(block, _size(pieces) - shard * block))
    return runs


def _filled(runs: Sequence[_Run], length: int) -> list[_Run]:
    """The gaps between runs of a block of `length` elements."""
    found, begin = [], 0
    for run in (*sorted(runs), _Run(max(length, 0), 0, None, 0)):
        if run.start > begin:
            found.append(_Run(begin, run.start - begin, None, 0))
        begin = run.end
    return found


def _common_starts(runs: Sequence[Sequence[Sequence[_Run]]], shards: int) -> tuple[int, ...] | None:
    """Where the results begin relative to each other, read off a shard in which all have elements of one operand."""
    for shard in sorted(range(shards), key=lambda t: abs(2 * t - shards)):
        for operand in sorted({run.operand for run in runs[0][shard] if run.operand is not None}):
            origins = [next((r.source for r in of[shard] if r.operand == operand), None) for of in runs]
            known = [origin for origin in origins if origin is not None]
            if len(known) == len(origins):
                return tuple(origin - min(known) for origin in known)
    return None


def _moved(run: _Run, start: int) -> _Run:
    source = run.source if run.operand is None else run.source - start
    return run._replace(start=run.start + start, source=source)


def _merged(runs: Iterable[_Run]) -> list[_Run] | None:
    """Runs that say the same of where they overlap, joined; None where two of them contradict each other."""
    merged: list[_Run] = []
    for run in sorted(runs, key=lambda r: (r.start, r.end)):
        last = merged[-1] if merged else None
        if last is None or run.start > last.end or (run.start == last.end and not _agree(run, last)):
            merged.append(run)
        elif not _agree(run, last):
            return None
        else:
            merged[-1] = last._replace(length=max(last.end, run.end) - last.start)
    return merged


def _agree(run: _Run, other: _Run) -> bool:
    return (run.operand, run.source) == (other.operand, other.source)
