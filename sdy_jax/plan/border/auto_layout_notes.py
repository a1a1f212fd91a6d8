"""What a plan says of the arguments and results that were left to the planner."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Measured:
    """What a plan takes in all beside what is hidden, and sends, by the cost model, and the bytes that a device
    holds."""

    cost: float
    sent: float
    peak: float


@dataclass(frozen=True, slots=True)
class AutomaticLayouts:
    """What the planner chose for the border.

    Attributes:
        arguments, results: the paths of those that were left to it.
        chosen: what the plan takes.
        usual: what plans with the usual layouts take, by their names, whatever memory that needs; along whole axes.
        limit: the bytes that a device may hold; infinite where nobody says.
    """

    arguments: frozenset[str]
    results: frozenset[str]
    chosen: Measured
    usual: dict[str, Measured]
    limit: float
