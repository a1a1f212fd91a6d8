"""Reporting the notes of a plan by `on_unknown`: not at all, as a warning per op and source line, or as an error."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from sdy_jax.errors import PartitionWarning, UnsupportedError
from sdy_jax.ir.hidden_frames import users_stack_level
from sdy_jax.lowering.interface.notes import Note
from sdy_jax.plan.held import TO_HOLD_LESS
from sdy_jax.representation.type_text import bytes_text

if TYPE_CHECKING:
    from sdy_jax.plan.plan import Plan

_LISTED = 5
"""Lines of a warning. Chosen: for a reader."""


def report_notes(notes: Sequence[Note], on_unknown: str) -> None:
    """Reports the notes of a plan as `on_unknown` asks: "warn", "error" or "ignore".

    Raises:
        UnsupportedError: there are notes, and `on_unknown` is "error".
    """
    if on_unknown == "error" and notes:
        raise UnsupportedError("cannot be split, and on_unknown='error':\n" + "\n".join(map(str, notes)))
    if on_unknown == "warn":
        warn_of(map(str, notes))


def too_large(plan: Plan) -> Iterator[str]:
    """What is said of a plan that takes more memory than its devices have."""
    given = plan.planned_with
    if given is None or not given.available:  # what fits anyhow is not counted
        return
    if 0 < plan.counted_peak <= given.available or plan.memory.fits:
        return
    held = plan.memory
    largest = [f"{bytes_text(value.bytes)} of {value.type} at {value.source}" for value in held.largest[:_LISTED]]
    yield (
        f"{plan.source}: {plan.name}: does not fit: {bytes_text(held.peak)} of {bytes_text(held.available)} on each "
        f"device, the least that was found. The largest values at the peak: {'; '.join(largest)}; {TO_HOLD_LESS}"
    )


def warn_of(texts: Iterable[str]) -> None:
    """Warns of each once, at the user's line that called us."""
    level = users_stack_level()
    for text in dict.fromkeys(texts):
        warnings.warn(text, PartitionWarning, stacklevel=level)
