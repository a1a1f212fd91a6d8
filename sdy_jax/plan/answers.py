"""All that a plan says: its figures, and its answers to questions."""

from __future__ import annotations

from dataclasses import dataclass

from sdy_jax.plan.figures import Figures
from sdy_jax.plan.questions import Questions


@dataclass(frozen=True, repr=False)
class Answers(Questions, Figures):
    """A plan before it is recorded: what records are made of."""
