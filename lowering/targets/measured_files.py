"""What files of measurements have in common: a version, numbers that can be measured, and how they are refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, TypeVar

from sdy_jax.errors import SdyError

T = TypeVar("T")


def held_in(text: str, version: int) -> dict[str, Any]:
    """What a file of a version holds.

    Raises:
        ValueError: the text is none of a file of this version.
    """
    found = json.loads(text)
    if not isinstance(found, dict) or found.get("version") != version:
        raise ValueError(f"version {found.get('version') if isinstance(found, dict) else None!r}, not {version}")
    return found


def number_of(value: Any, what: str) -> float:
    """A number that is finite and not negative.

    Raises:
        ValueError: it is none; `what` says what it is not.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is no {what}")
    return float(value)


def parsed(parse: Callable[[], T], what: str, fix: str) -> T:
    """What a file holds.

    Args:
        parse: reads its text.
        what: what it should be: "x.json is no calibration".
        fix: what to do where it is not.

    Raises:
        SdyError: it is not.
    """
    try:
        return parse()
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise SdyError(f"{what} of this version: {why}; to fix: {fix}") from None
