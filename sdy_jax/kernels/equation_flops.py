"""The floating-point operations of one equation of a kernel's body.

A product of m x k and k x n elements performs 2 m n k; arithmetic and transcendental functions one per element of the
result, reductions one per element of the operand. Integers count in products alone: what else there is of them is the
arithmetic of indices and masks.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

PRODUCT = "dot_general"


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


TRANSCENDENTAL = _names(
    "atan2 cos cosh erf erf_inv erfc exp exp2 expm1 lgamma log log1p logistic pow sin sinh tan tanh"
)

_ARITHMETIC = _names(
    "abs add add_any ceil clamp cbrt div floor integer_pow max min mul neg reciprocal rem round rsqrt sign sqrt square "
    "sub"
)

_REDUCTIONS = _names(
    "argmax argmin cumlogsumexp cummax cummin cumprod cumsum reduce_max reduce_min reduce_prod reduce_sum"
)

UNKNOWN_PRODUCTS = _names("matmul_acc_lhs matmul_push_rhs tcgen05_mma wgmma")
"""Products of a machine's own, of which a body says no shapes that are those of the product."""


def flops_of(equation: Any) -> float:
    """The operations of an equation; 0 of those that only move data."""
    name = equation.primitive.name
    if name == PRODUCT:
        (contracted, _), _ = equation.params["dimension_numbers"]
        lhs = equation.invars[0].aval.shape
        return 2.0 * _size(equation.outvars[0]) * float(math.prod(lhs[d] for d in contracted))
    if name == "addupdate":
        return float(_size(equation.invars[1]))
    if name in _REDUCTIONS:
        return float(_size(equation.invars[0])) if _is_inexact(equation.invars[0]) else 0.0
    if name in _ARITHMETIC or name in TRANSCENDENTAL:
        return float(_size(equation.outvars[0])) if _is_inexact(equation.outvars[0]) else 0.0
    return 0.0


def _size(x: Any) -> int:
    return math.prod(x.aval.shape)


def _is_inexact(x: Any) -> bool:
    return bool(jnp.issubdtype(x.aval.dtype, jnp.inexact))
