"""The integer arithmetic of index maps and conditions, on NumPy arrays: what is known of a jaxpr's variables.

A variable whose value depends on what is not known has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

Known = dict[Any, np.ndarray]
"""The variables of a jaxpr whose values are known; arrays of one shape, or scalars."""


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Rounded towards zero, as `lax.div`."""
    whole: np.ndarray = np.abs(a) // np.where(b == 0, 1, np.abs(b)) * np.sign(a) * np.sign(b)
    return whole


_FUNCTIONS: Mapping[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "min": np.minimum,
    "max": np.maximum,
    "div": _quotient,
    "rem": lambda a, b: np.fmod(a, np.where(b == 0, 1, b)),
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "shift_left": np.left_shift,
    "shift_right_arithmetic": np.right_shift,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "select_n": lambda which, *cases: np.choose(np.asarray(which, np.int64), cases),
}


_KINDS = "biu"
"""Booleans and integers, signed or not: what this arithmetic is of."""


def value_of(x: Any, known: Known) -> np.ndarray | None:
    """The value of a variable or literal, if it is known."""
    return np.asarray(x.val) if isinstance(x, Literal) else known.get(x)


def evaluate(equation: Any, known: Known) -> None:
    """Adds the results of an equation to what is known, if they follow from it."""
    values = [value_of(x, known) for x in equation.invars]
    name = equation.primitive.name
    if name in ("jit", "pjit", "closed_call"):
        for x, found in zip(equation.outvars, _inside(equation.params["jaxpr"].jaxpr, values), strict=True):
            if found is not None:
                known[x] = found
        return
    if any(value is None or value.dtype.kind not in _KINDS for value in values):
        return
    if any(x.aval.shape for x in equation.outvars):
        return
    if name == "convert_element_type":
        found = np.asarray(values[0]).astype(equation.params["new_dtype"])
        if found.dtype.kind in _KINDS:
            known[equation.outvars[0]] = found
    elif name in _FUNCTIONS:
        known[equation.outvars[0]] = _FUNCTIONS[name](*values)


def _inside(jaxpr: Any, values: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
    known = {x: value for x, value in zip(jaxpr.invars, values, strict=True) if value is not None}
    for equation in jaxpr.eqns:
        evaluate(equation, known)
    return [value_of(x, known) for x in jaxpr.outvars]
