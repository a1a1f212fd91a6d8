"""Ops through which unreduced values may pass before they are reduced.

If f is linear, the sum of f over partial sums is f of their sum: a product's partial sums may be negated, transposed,
scaled and added to others first, and reduced once, where it is cheapest. What only moves elements around lets unreduced
values of every kind pass. Each op's family says so beside its rule or strategy. Conversions to narrower types do not:
they would round each partial sum instead of the total.
See docs/explanation/strategies.md#partial-sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto


class Linear(Enum):
    """Which operands have to be unreduced together for the results to be so."""

    DATA = auto()
    """The first alone: the others say where to find it."""
    EVERY = auto()
    """All."""
    SUMMANDS = auto()
    """All but known zeros, which count any number of times."""
    BRANCHES = auto()
    """As `SUMMANDS`, without the first, which decides and must be whole."""
    ONE_FACTOR = auto()
    """Any one: linear in each operand, not in several at once."""
    NUMERATOR = auto()
    """The first, of numbers that are not rounded to integers."""
    UPDATED = auto()
    """The first two: what is updated, and by what."""
    WIDENED = auto()
    """The first, of floating-point numbers that are not rounded: converted to a type with more digits."""
    SUMMED = auto()
    """As `SUMMANDS`, of a reduction by the sum: an initial value that is not zero must count once."""


LINEAR: dict[str, Mapping[str, Linear]] = {}
"""Op -> kind of reduction, or "*" for any -> how unreduced values of the kind pass."""


def passes_unreduced(name: str, by_kind: Mapping[str, Linear]) -> None:
    """Registers how unreduced values pass through the ops of a name, by the kind of their reduction; "*" for any."""
    assert name not in LINEAR, f"{name} is registered twice"
    LINEAR[name] = by_kind
