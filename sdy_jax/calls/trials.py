"""Several plans of a call, of which it takes the best one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from sdy_jax.annotate.undecided import Decisions, deciding
from sdy_jax.errors import MemoryLimitError
from sdy_jax.plan.decided import ComparedDecisions, Decided
from sdy_jax.plan.plan import Plan


class Compared(Protocol):
    """What a plan takes."""

    @property
    def rank(self) -> tuple[bool, float]: ...


C = TypeVar("C", bound=Compared)


def best_of(
    count: int,
    planned: Callable[[int], Plan],
    compared: Callable[[int, Plan], C],
    refused: Callable[[int, MemoryLimitError], C],
) -> tuple[int, Plan, tuple[C, ...]]:
    """The number of the best plan, of equal ones the first, the plan, and what all of them take.

    Args:
        count: how many there are.
        planned: makes one of them. Only the best one is kept while others are made.
        compared: what one takes.
        refused: what one takes that does not fit.

    Raises:
        MemoryLimitError: none fits; that of the one that holds least.
    """
    best: tuple[int, Plan] | None = None
    found, problems = list[C](), list[MemoryLimitError]()
    for number in range(count):
        try:
            plan = planned(number)
        except MemoryLimitError as error:
            found.append(refused(number, error))
            problems.append(error.with_traceback(None))  # which keeps what it was raised in
        else:
            found.append(compared(number, plan))
            best = (number, plan) if best is None or found[-1].rank < found[best[0]].rank else best
            del plan
        gc.collect()  # what is left of a plan refers to itself
    if best is None:
        raise min(problems, key=lambda problem: problem.least)
    return *best, tuple(found)


def best_decided(choices: Sequence[Decisions], planned: Callable[[], Plan]) -> Plan:
    """The best plan with some of the decisions, of equal ones the first; it says what all of them take.

    Raises:
        MemoryLimitError: as of `best_of`.
    """

    def planned_with(number: int) -> Plan:
        with deciding(choices[number]):
            return planned()

    number, plan, compared = best_of(
        len(choices),
        planned_with,
        lambda number, plan: ComparedDecisions(choices[number], plan.time, plan.memory.peak, plan.memory.fits),
        lambda number, error: ComparedDecisions.refused(choices[number], error),
    )
    return replace(plan, decided=Decided(choices[number], compared))
