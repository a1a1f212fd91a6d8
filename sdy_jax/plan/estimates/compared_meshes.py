"""What the plans of a function take on several meshes, of which the best one is chosen."""

from __future__ import annotations

from typing import NamedTuple

from sdy_jax.errors import MemoryLimitError
from sdy_jax.plan.estimates.estimated_time import EstimatedTime
from sdy_jax.representation.mesh import Mesh


class ComparedMesh(NamedTuple):
    """What the plan on a mesh takes.

    Attributes:
        mesh: its axes.
        time: by the cost model; None where no plan was found that keeps within the memory.
        wire_bytes: that a device sends per call.
        peak: the bytes that a device holds at most, of what holds least where no plan fits.
        fits: whether a device has as much.
    """

    mesh: Mesh
    time: EstimatedTime | None
    wire_bytes: float
    peak: float
    fits: bool

    @classmethod
    def refused(cls, mesh: Mesh, error: MemoryLimitError) -> ComparedMesh:
        """A mesh on which nothing fits."""
        return cls(mesh, None, 0.0, error.least, False)

    @property
    def rank(self) -> tuple[bool, float]:
        """By what meshes are compared."""
        return rank_of(self.time, self.peak, self.fits)


def rank_of(time: EstimatedTime | None, peak: float, fits: bool) -> tuple[bool, float]:
    """By what plans are compared: first those that fit, what takes least; then what holds least."""
    return (False, time.total) if fits and time is not None else (True, peak)
