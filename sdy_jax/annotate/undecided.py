"""What a function leaves to the planner that its trace depends on: it is traced and planned with each of the choices.

A decision is a part of what jit's caches of traces know, so that what is traced inside is traced again with another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax

from sdy_jax.errors import ArgumentError
from sdy_jax.ir.hidden_frames import caller_line


class Decision(NamedTuple):
    """What is taken where a line of the user's asks: one of several numbers."""

    line: str
    offered: tuple[int, ...]
    taken: int


Decisions = tuple[Decision, ...]
"""In the order in which a trace asks."""

_FIRST: Decisions = (Decision("", (), 0),)
"""Whatever is asked for, the first that is offered."""

_context = jax.make_user_context(default_value=())


class Undecided(ArgumentError):
    """A choice that was asked for where nothing was decided. Planning catches it; elsewhere it says what to write.

    Attributes:
        line: that asks.
        offered: of what one is to be taken.
    """

    def __init__(self, message: str, line: str, offered: tuple[int, ...]):
        super().__init__(message)
        self.line, self.offered = line, offered


def deciding(decisions: Decisions) -> AbstractContextManager[Any]:
    """Inside, these are decided."""
    return _context(decisions)  # type: ignore[no-any-return]


def taking_first() -> AbstractContextManager[Any]:
    """Inside, the first of what is offered is taken: for traces that ask for something else."""
    return deciding(_FIRST)


def decisions() -> Decisions:
    """Those in context."""
    return _context.value  # type: ignore[no-any-return]


def taken_of(offered: Sequence[int], message: str) -> int:
    """The number that is decided for the user's line that calls this.

    Raises:
        Undecided: with the message; none is.
    """
    line, numbers = caller_line(), tuple(offered)
    if decisions() == _FIRST:
        return numbers[0]
    for each in decisions():
        if (each.line, each.offered) == (line, numbers):
            return each.taken
    raise Undecided(message, line, numbers)


def all_decisions(traced: Callable[[], Any], fixed: Sequence[int] | None = None) -> Iterator[Decisions]:
    """All that may be decided for what a function asks, in the order of what is offered.

    Args:
        traced: traces it.
        fixed: the number to take each time it asks, where that is offered, so that there is one result.
    """
    open_ = [decisions()]
    while open_:
        found = open_.pop(0)
        try:
            with deciding(found):
                traced()
        except Undecided as asked:
            offered = asked.offered
            if fixed is not None:
                wanted = fixed[len(found) : len(found) + 1]
                offered = tuple(n for n in offered if n in wanted) or offered[:1]
            open_[:0] = [(*found, Decision(asked.line, asked.offered, n)) for n in offered]
        else:
            yield found
