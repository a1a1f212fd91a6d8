"""One step of propagation by one factor: the axes that a tensor got, and from where."""

from __future__ import annotations

from dataclasses import dataclass

from sdy_jax.representation.mesh import AxisRef


@dataclass(frozen=True, slots=True)
class Spread:
    """A factor of one of an op's tensors got axes: it had `before`, now `axes`.

    Tensors are numbered operands first, then results; `dim` is the target's dimension that the factor belongs to.
    `source` is the first tensor that had all of `axes` already, None if no single one had.
    """

    factor: int
    dim: int
    before: tuple[AxisRef, ...]
    axes: tuple[AxisRef, ...]
    source: int | None
    target: int
