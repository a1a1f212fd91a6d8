"""Two arrays that should be the same, compared by what errors of floating-point numbers allow."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TOLERANCE = {
    "bfloat16": 3e-2,
    "float16": 5e-3,
    "float32": 2e-5,
    "complex64": 2e-5,
    "float64": 1e-12,
    "complex128": 1e-12,
}
"""Relative tolerances by dtype. Guessed, some ten roundings of the type: what reassociating a reduction over a few
thousand terms of similar size can change. With less, right programs fail; with more, a wrong term among thousands
passes."""

_SMALLEST = 1e-30
"""Guessed: the scale of arrays of zeros, of which a relative error would say nothing."""

_AS_FAR = 8.0
"""How many times further from a more exact result than the plain program's a partitioned one may be. Guessed: rounding
errors of two orders of a sum differ by a few times; a wrong term is off by the size of the result."""


_NO_ROUNDING = 64.0
"""How many times further off than arguments that are rounded otherwise move it a plain result may be. Guessed: one
after the other, thousands of terms round worse than once each; what a compiler has wrong is off by its size."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far an array is from the one that it should be.

    Attributes:
        problem: what is wrong, as a sentence without a subject; empty if nothing is.
        largest, allowed: the largest error of an element, and what is allowed of it; both 0 where elements are compared
            exactly and are the same, and infinite where no number says it.
    """

    problem: str = ""
    largest: float = 0.0
    allowed: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problem


def compared(found: np.ndarray, wanted: np.ndarray, rtol: float | None = None, atol: float = 0.0) -> Difference:
    """How `found` differs from `wanted`.

    Integers and booleans must be equal; floating-point numbers may differ by `rtol` times the largest magnitude of
    `wanted` plus `atol`. NaNs and infinities must be at the same places.
    """
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        problem = f"is {found.dtype}{list(found.shape)}, expected {wanted.dtype}{list(wanted.shape)}"
        return Difference(problem, np.inf, 0.0)
    if wanted.dtype.name not in TOLERANCE:
        count = int(np.sum((found != wanted) & ~(_is_nan(found) & _is_nan(wanted))))
        return Difference(f"differs in {count} of {wanted.size} elements" if count else "", float(count), 0.0)
    a, b = _wide(found), _wide(wanted)
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return Difference("has NaN or infinity at other places", np.inf, 0.0)
    scale = float(np.abs(b[finite]).max(initial=0.0))
    largest = float(np.abs(a[finite] - b[finite]).max(initial=0.0))
    allowed = atol + (rtol if rtol is not None else TOLERANCE[wanted.dtype.name]) * max(scale, _SMALLEST)
    problem = f"differs by {largest:.3g}, allowed are {allowed:.3g}" if not largest <= allowed else ""
    return Difference(problem, largest, allowed)


def decided_by(found: np.ndarray, wanted: np.ndarray, exact: np.ndarray, moved: np.ndarray | None = None) -> Difference:
    """As `compared`, where the plain result is itself off by rounding: `exact` is what the plain program gives where it
    is computed more exactly, from which `found` may be a small multiple as far as `wanted` is; or as far as `moved` is
    from `wanted`, the plain result for arguments that are rounded otherwise."""
    plain = compared(found, wanted)
    if plain.ok or exact.shape != wanted.shape or not np.isfinite(plain.largest) or plain.allowed == 0:
        return plain
    ours, theirs = _largest(found, exact), _largest(wanted, exact)
    sway = np.inf if moved is None else _largest(moved, wanted)
    if theirs > _NO_ROUNDING * max(sway, plain.allowed):
        problem = f"{plain.problem}; the plain one is off by {theirs:.3g} of a more exact result, which is no rounding"
        return Difference(problem, plain.largest, plain.allowed)
    theirs = max(theirs, 0.0 if moved is None else sway)
    allowed = max(_AS_FAR * theirs, plain.allowed)
    if ours <= allowed:
        return Difference("", ours, allowed)
    return Difference(f"is off by {ours:.3g} of a more exact result, the plain one by {theirs:.3g}", ours, allowed)


def _largest(x: np.ndarray, y: np.ndarray) -> float:
    """The largest difference of elements that are finite in both."""
    a, b = _wide(x), _wide(y)
    finite = np.isfinite(a) & np.isfinite(b)
    return float(np.abs(a[finite] - b[finite]).max(initial=0.0))


def _is_nan(x: np.ndarray) -> np.ndarray:
    """Also of float8, of which numpy does not know that they are floats."""
    return np.asarray(np.isnan(x.astype(np.float32))) if x.dtype.kind in "fV" else np.zeros(x.shape, bool)


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
