"""Which values of a block the user's source has names for."""

from __future__ import annotations

from collections.abc import Callable

from sdy_jax.python_source.steps import Block, Step, Value

Statement = tuple[object, str]


def names_by_source(block: Block, statement: Callable[[Step], Statement]) -> dict[Value, str]:
    """The value that a statement of the user's ends with, by the name that the statement gives it.

    The statement's steps follow each other; the last of them that makes one value makes that one.
    """
    found: dict[Value, str] = {}
    last: tuple[Statement, Value] | None = None
    for step in block.steps:
        own = statement(step)
        if last is not None and last[0] != own and own[0]:
            _note(found, last)
            last = None
        if len(step.outputs) == 1 and own[0]:
            last = own, step.outputs[0]
    _note(found, last)
    return found


def _note(found: dict[Value, str], last: tuple[Statement, Value] | None) -> None:
    if last is not None and last[0][1]:
        found[last[1]] = last[0][1]
