"""Which of many drawn cases show together what all of them show, two options at a time."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from itertools import combinations

Options = Mapping[str, Hashable]


def covering(drawn: Mapping[int, Options]) -> list[int]:
    """The numbers of cases among which each two options have each pair of values that they have in any case.

    >>> covering({0: {"a": 1, "b": 2}, 1: {"a": 1, "b": 3}, 2: {"a": 1, "b": 2}})
    [0, 1]
    """
    pairs = {number: _pairs(options.items()) for number, options in drawn.items()}
    left, chosen = set[Hashable]().union(*pairs.values()), list[int]()
    while left:
        best = max(pairs, key=lambda number: (len(pairs[number] & left), -number))
        left -= pairs[best]
        chosen.append(best)
    return sorted(chosen)


def _pairs(items: Iterable[tuple[str, Hashable]]) -> set[Hashable]:
    return set(combinations(sorted(items, key=lambda item: item[0]), 2))
