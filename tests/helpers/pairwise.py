"""Which of many drawn cases show together what all of them show, two options at a time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import combinations

Options = Mapping[str, Hashable]


def covering(drawn: Mapping[int, Options], cost: Callable[[int], float] = lambda number: 1.0) -> list[int]:
    """The numbers of cases among which each two options have each pair of values that they have in any case.

    >>> covering({0: {"a": 1, "b": 2}, 1: {"a": 1, "b": 3}, 2: {"a": 1, "b": 2}})
    [0, 1]

    Args:
        cost: of running a case; cases that show more for it are preferred.
    """
    pairs = {number: pairs_of([options]) for number, options in drawn.items()}
    left, chosen = set[Hashable]().union(*pairs.values()), list[int]()
    while left:
        best = max(pairs, key=lambda number: (len(pairs[number] & left) / cost(number), -number))
        left -= pairs[best]
        chosen.append(best)
    for number in sorted(chosen, key=cost, reverse=True):  # what later ones have shown as well
        if pairs[number] <= set().union(*(pairs[other] for other in chosen if other != number)):
            chosen.remove(number)
    return sorted(chosen)


def pairs_of(cases: Iterable[Options]) -> set[Hashable]:
    """Each two options with their values, of any case."""
    ordered = (sorted(options.items(), key=lambda item: item[0]) for options in cases)
    return {pair for items in ordered for pair in combinations(items, 2)}
