"""Reporting the notes of a plan by `on_unknown`: not at all, as a warning per op and source line, or as an error."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from sdy_jax.errors import UnsupportedError
from sdy_jax.ir.hidden_frames import users_stack_level
from sdy_jax.lowering.placement.report import Note


class PartitionWarning(UserWarning):
    """Something moves or is computed whole because it cannot be split, or an argument is moved because it lies
    otherwise than stated; it names the op or the argument, and the source line."""


def report_notes(notes: Sequence[Note], on_unknown: str) -> None:
    """Reports the notes of a plan as `on_unknown` asks: "warn", "error" or "ignore".

    Raises:
        UnsupportedError: there are notes, and `on_unknown` is "error".
    """
    if on_unknown == "error" and notes:
        raise UnsupportedError("cannot be split, and on_unknown='error':\n" + "\n".join(map(str, notes)))
    if on_unknown == "warn":
        warn_of(map(str, notes))


def warn_of(texts: Iterable[str]) -> None:
    """Warns of each once, at the user's line that called us."""
    level = users_stack_level()
    for text in dict.fromkeys(texts):
        warnings.warn(text, PartitionWarning, stacklevel=level)
