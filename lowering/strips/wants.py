"""The strips that ops want along a split dimension: slices, concatenations, rolls, reversals, reshapes, relayouts.

Dimensions of size N over g shards have blocks of ceil(N / g) elements, in operands and results alike; what lies beyond
N is padding and is never read. Every function here is memoised and returns a plan of strips, whose `wire_elements`
times the size of a row is what a device sends (`strips/strips.py`); `redistribute.py` runs them. What windows want is
in `window_reads.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from sdy_jax.lowering.strips.strip_plan import Source, StripPlan, Want, Wants, block_length
from sdy_jax.lowering.strips.strips import plan_strips
from sdy_jax.lowering.strips.window_reads import _clipped


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
