"""How propagation gave values their axes, step by step: see `record.py`."""

from __future__ import annotations

from dataclasses import dataclass

from sdy_jax.plan.record.border import RecordedPlace


@dataclass(frozen=True, slots=True)
class RecordedStart:
    """A value whose layout was stated: its type before propagation, and the way to the annotation in words."""

    value: str
    type: str
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordedSpread:
    """A value got an axis.

    Attributes:
        step: the number of the step, in which one op propagates; from 0.
        value, dim, axis: what got it, and where.
        type: of the value after the step.
        source, source_dim: the value and dimension that had the axis; an empty name where no single value had it.
        op, place: the op that propagated.
        level, priority: the op priority (0 to 4) and the user priority.
    """

    step: int
    value: str
    dim: int
    axis: str
    type: str
    source: str
    source_dim: int
    op: str
    place: RecordedPlace
    level: int = 0
    priority: int = 0


@dataclass(frozen=True, slots=True)
class RecordedPropagation:
    """What values began with, and what each step gave them, in order."""

    starts: tuple[RecordedStart, ...] = ()
    spreads: tuple[RecordedSpread, ...] = ()
