"""What two plans have in common: entries matched by keys, the most exact ones first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def matched(
    before: Iterable[T], after: Iterable[T], keys: Sequence[Callable[[T], Hashable]]
) -> tuple[list[list[tuple[T, T]]], list[T], list[T]]:
    """The pairs that each key makes of what those before it left over, in order; and what is left in the end.

    >>> matched(["a1", "b2"], ["a1", "b3", "c4"], [str, lambda text: text[0]])
    ([[('a1', 'a1')], [('b2', 'b3')]], [], ['c4'])
    """
    pairs, left, right = [], list(before), list(after)
    for key in keys:
        found, left, right = _by_key(left, right, key)
        pairs.append(found)
    return pairs, left, right


def _by_key(
    before: Sequence[T], after: Sequence[T], key: Callable[[T], Hashable]
) -> tuple[list[tuple[T, T]], list[T], list[T]]:
    waiting: dict[Hashable, deque[T]] = {}
    for each in before:
        waiting.setdefault(key(each), deque()).append(each)
    pairs, right = [], []
    for each in after:
        found = waiting.get(key(each))
        if found:
            pairs.append((found.popleft(), each))
        else:
            right.append(each)
    return pairs, [each for group in waiting.values() for each in group], right
