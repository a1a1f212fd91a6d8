"""Buffers on a device: from when to when they are live, which take over the memory of others, and the most of them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from sdy_jax.ir.graph import Value


class HeldBuffer(NamedTuple):
    """A temporary on one device: its value, its bytes, and the first and last op while which it is live, by their place
    in `Peak.at`, or in a group of ops."""

    value: Value
    bytes: float
    first: int
    last: int


def live_at(count: int, held: Iterable[HeldBuffer]) -> list[float]:
    """The bytes that are live while each of so many ops runs."""
    changes = [0.0] * (count + 1)
    for _, size, first, last in held:
        changes[first] += size
        changes[last + 1] -= size
    return list(accumulate(changes[:-1]))


@dataclass(slots=True)
class Buffer:
    """The memory of a value, from when to when it is live, both included; `counts`: it is a temporary."""

    value: Value
    bytes: float
    start: float
    end: float
    counts: bool
    takes_over: bool
    is_taken: bool = False


def most_live(buffers: Sequence[Buffer]) -> tuple[list[Buffer], float]:
    """The buffers that are live when most bytes are, and these bytes."""
    _take_over(buffers)
    live, now, most, at = list[tuple[float, bool, int]](), 0.0, 0.0, -math.inf
    counted = [b for b in sorted(buffers, key=lambda b: b.start) if b.counts]
    for number, buffer in enumerate(counted):
        while live and (live[0][0] < buffer.start or (live[0][0] == buffer.start and not live[0][1])):
            now -= counted[heapq.heappop(live)[2]].bytes
        now += buffer.bytes
        heapq.heappush(live, (buffer.end, not buffer.is_taken, number))
        if now > most:
            most, at = now, buffer.start
    return [b for b in counted if b.start <= at and (b.end > at or (b.end == at and not b.is_taken))], most


def _take_over(buffers: Sequence[Buffer]) -> None:
    """Marks the buffers that another value takes over at their end."""
    dying: dict[tuple[float, float], list[Buffer]] = {}
    for buffer in buffers:
        if buffer.counts:
            dying.setdefault((buffer.end, buffer.bytes), []).append(buffer)
    for buffer in buffers:
        given = dying.get((buffer.start, buffer.bytes), []) if buffer.takes_over else []
        old = next((b for b in given if b.start < buffer.start and not b.is_taken), None)
        if old is not None:
            old.is_taken = True
