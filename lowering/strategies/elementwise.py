"""Element-wise ops: shardings change nothing but the shapes.

The tables name, per op, the lax function that lowers to exactly that op for the element types in `_PLAIN`. Where lax
would expand the op instead (complex numbers, sub-byte types, ...) the op is re-emitted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from sdy_jax.lowering.generic import numpy_dtype, re_emit
from sdy_jax.lowering.strategies.registry import LocalOp, emitter

_INTEGERS = frozenset(["i8", "i16", "i32", "i64", "ui8", "ui16", "ui32", "ui64"])
_FLOATS = frozenset(["f16", "bf16", "f32", "f64"])
_PLAIN = _INTEGERS | _FLOATS

_ANY: dict[str, Callable[..., jax.Array]] = {
    "stablehlo.abs": lax.abs,
    "stablehlo.add": lax.add,
    "stablehlo.and": lax.bitwise_and,
    "stablehlo.clamp": lax.clamp,
    "stablehlo.count_leading_zeros": lax.clz,
    "stablehlo.divide": lax.div,
    "stablehlo.is_finite": lax.is_finite,
    "stablehlo.maximum": lax.max,
    "stablehlo.minimum": lax.min,
    "stablehlo.multiply": lax.mul,
    "stablehlo.negate": lax.neg,
    "stablehlo.not": lax.bitwise_not,
    "stablehlo.or": lax.bitwise_or,
    "stablehlo.popcnt": lax.population_count,
    "stablehlo.remainder": lax.rem,
    "stablehlo.select": lax.select,
    "stablehlo.shift_left": lax.shift_left,
    "stablehlo.shift_right_arithmetic": lax.shift_right_arithmetic,
    "stablehlo.shift_right_logical": lax.shift_right_logical,
    "stablehlo.subtract": lax.sub,
    "stablehlo.xor": lax.bitwise_xor,
}
"""Exact for integers and floats."""

_FLOAT_ONLY: dict[str, Callable[..., jax.Array]] = {
    "stablehlo.atan2": lax.atan2,
    "stablehlo.cbrt": lax.cbrt,
    "stablehlo.ceil": lax.ceil,
    "stablehlo.complex": lax.complex,
    "stablehlo.cosine": lax.cos,
    "stablehlo.exponential": lax.exp,
    "stablehlo.exponential_minus_one": lax.expm1,
    "stablehlo.floor": lax.floor,
    "stablehlo.log": lax.log,
    "stablehlo.log_plus_one": lax.log1p,
    "stablehlo.power": lax.pow,
    "stablehlo.round_nearest_afz": lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
    "stablehlo.round_nearest_even": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    "stablehlo.rsqrt": lax.rsqrt,
    "stablehlo.sign": lax.sign,
    "stablehlo.sine": lax.sin,
    "stablehlo.sqrt": lax.sqrt,
    "stablehlo.tan": lax.tan,
    "stablehlo.tanh": lax.tanh,
    "chlo.acos": lax.acos,
    "chlo.acosh": lax.acosh,
    "chlo.asinh": lax.asinh,
    "chlo.atan": lax.atan,
    "chlo.atanh": lax.atanh,
    "chlo.bessel_i1e": lax.bessel_i1e,
    "chlo.cosh": lax.cosh,
    "chlo.digamma": lax.digamma,
    "chlo.erf": lax.erf,
    "chlo.erf_inv": lax.erf_inv,
    "chlo.erfc": lax.erfc,
    "chlo.next_after": lax.nextafter,
    "chlo.polygamma": lax.polygamma,
    "chlo.sinh": lax.sinh,
    "chlo.square": lax.square,
    "chlo.zeta": lax.zeta,
}
"""Exact for floats; other element types are re-emitted."""

_LOGICAL = frozenset(["stablehlo.and", "stablehlo.or", "stablehlo.xor", "stablehlo.not", "stablehlo.select"])
"""Also exact for booleans; `select` looks at its cases, not its predicate."""

_RE_EMITTED = (
    "stablehlo.logistic",
    "stablehlo.real",
    "stablehlo.imag",
    "chlo.acosh_kernel",
    "chlo.asin",
    "chlo.conj",
    "chlo.is_inf",
    "chlo.is_neg_inf",
    "chlo.is_pos_inf",
    "chlo.lgamma",
    "chlo.mulhi",
    "chlo.tan",
)
"""Element-wise as well, but lax expands them or lowers to another op."""

ELEMENTWISE = (
    *_ANY,
    *_FLOAT_ONLY,
    *_RE_EMITTED,
    "stablehlo.compare",
    "stablehlo.convert",
    "stablehlo.reduce_precision",
)
"""Every element-wise op."""


@emitter(*_ANY, *_FLOAT_ONLY)
def _by_table(local: LocalOp, *operands: jax.Array) -> Any:
    op = local.op
    dtype = op.results[0].dtype if op.name == "stablehlo.select" else op.operands[-1].dtype
    function = _ANY.get(op.name)
    if function is None:
        function, known = _FLOAT_ONLY[op.name], dtype in _FLOATS
    else:
        known = dtype in _PLAIN or (dtype == "i1" and op.name in _LOGICAL)
    if not known or _wants_accuracy(local):
        return re_emit(local, *operands)
    return function(*operands)


def _wants_accuracy(local: LocalOp) -> bool:
    """A `result_accuracy` other than the default, which lax functions are not given."""
    accuracy = local.op.attributes.get("result_accuracy")
    return accuracy is not None and "DEFAULT" not in str(accuracy)


@emitter("stablehlo.convert")
def _convert(local: LocalOp, operand: jax.Array) -> Any:
    source, target = local.op.operands[0].dtype, local.op.results[0].dtype
    if source not in _PLAIN or target not in _PLAIN:
        return re_emit(local, operand)
    converted = lax.convert_element_type(operand, numpy_dtype(target))
    # JAX without 64-bit mode would silently give 32 bits.
    return converted if converted.dtype == numpy_dtype(target) else re_emit(local, operand)


_COMPARISONS = {"EQ": lax.eq, "NE": lax.ne, "GE": lax.ge, "GT": lax.gt, "LE": lax.le, "LT": lax.lt}


@emitter("stablehlo.compare")
def _compare(local: LocalOp, lhs: jax.Array, rhs: jax.Array) -> Any:
    if local.op.text("compare_type") == "TOTALORDER" or local.op.operands[0].dtype not in _PLAIN:
        return re_emit(local, lhs, rhs)
    return _COMPARISONS[local.op.text("comparison_direction")](lhs, rhs)


@emitter("stablehlo.reduce_precision")
def _reduce_precision(local: LocalOp, operand: jax.Array) -> jax.Array:
    return lax.reduce_precision(operand, local.op.int("exponent_bits"), local.op.int("mantissa_bits"))
