"""What plans of a function with several numbers of microbatches take, of which the best one is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sdy_jax.annotate.undecided import Decisions
from sdy_jax.errors import MemoryLimitError
from sdy_jax.plan.estimates.compared_meshes import rank_of
from sdy_jax.plan.estimates.estimated_time import EstimatedTime


class ComparedDecisions(NamedTuple):
    """What the plan with some decisions takes.

    Attributes:
        decisions: as they were tried.
        time, peak, fits: as of `ComparedMesh`.
    """

    decisions: Decisions
    time: EstimatedTime | None
    peak: float
    fits: bool

    @classmethod
    def refused(cls, decisions: Decisions, error: MemoryLimitError) -> ComparedDecisions:
        """Decisions with which nothing fits."""
        return cls(decisions, None, error.least, False)

    @property
    def rank(self) -> tuple[bool, float]:
        """By what they are compared, as meshes are."""
        return rank_of(self.time, self.peak, self.fits)


@dataclass(frozen=True, slots=True)
class Decided:
    """The decisions that a plan was made with, and all that were compared for that; none of a pinned plan."""

    decisions: Decisions = ()
    compared: tuple[ComparedDecisions, ...] = ()


NOTHING_DECIDED = Decided()
"""Of a function that leaves nothing to the planner but layouts."""
