"""Several results that are made of pieces of the same operands, from what is fetched once.

A 3-point stencil reads `x[:-2]`, `x[1:-1]` and `x[2:]`. One by one the last two bring one and two elements from the
right neighbour; but what the last one brings holds what the other one needs. So a device fetches what all results want
into one block, in which every result is an interval at the same place on all devices:

    x of 8 elements on 2 shards, results x[0:6], x[1:7], x[2:8], blocks of 3
    shard 0 fetches x0 x1 x2 x3 x4, shard 1 x3 x4 x5 x6 x7; the results start at 0, 1 and 2

Results that do not fit together so lie side by side: their strips share rounds at least.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from sdy_jax.lowering.strips.strip_plan import Source, StripPlan, Want, Wants, block_length
from sdy_jax.lowering.strips.strips import plan_strips
from sdy_jax.lowering.strips.wants import Piece, joined_wants

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
