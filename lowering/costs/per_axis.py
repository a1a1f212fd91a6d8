"""Numbers that are the same for all mesh axes, or given by axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

PerAxis = float | Mapping[str, float] | tuple[tuple[str, float], ...]
"""One number for every mesh axis, or one by axis name."""


def of_axis(given: PerAxis, axis: str, default: float = 0.0) -> float:
    return given if isinstance(given, (int, float)) else dict(given).get(axis, default)


def numbers_of(given: PerAxis) -> Sequence[float]:
    return [given] if isinstance(given, (int, float)) else list(dict(given).values())
