"""The value tables of the dialects' ops, read from `shard_vectors.txt`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Vector(NamedTuple):
    """One op on one mesh, with stacks of what devices hold before and after."""

    name: str
    sizes: tuple[int, ...]
    op: str
    kwargs: dict[str, Any]
    given: np.ndarray
    expected: np.ndarray


def _parsed(line: str) -> Vector:
    name, sizes, call, given, expected = line.split(" | ")
    op, *parameters = call.split()
    kwargs = {key: json.loads(value) for key, value in (parameter.split("=") for parameter in parameters)}
    return Vector(name, tuple(map(int, sizes.split("x"))), op, kwargs, _array(given), _array(expected))


def _array(text: str) -> np.ndarray:
    dtype, values = text.split(" ", 1)
    return np.array(json.loads(values), dtype)


_LINES = Path(__file__).with_suffix(".txt").read_text().splitlines()
VECTORS = [_parsed(line) for line in _LINES if not line.startswith("#")]
