"""The element-wise ops of StableHLO and CHLO, one line each: all that any room knows of them by name.

A new element-wise op is a line here. Its rule has a factor per dimension, it runs on shards as it is, and it is
rematerialized where that is cheaper than moving its result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import jax
from jax import lax

from sdy_jax.op_rules.linearity import Linear

INTEGERS = frozenset({"i8", "i16", "i32", "i64", "ui8", "ui16", "ui32", "ui64"})
FLOATS = frozenset({"f16", "bf16", "f32", "f64"})
NUMBERS = INTEGERS | FLOATS
BITS = NUMBERS | {"i1"}


@dataclass(frozen=True, slots=True)
class Elementwise:
    """What is known of an element-wise op.

    Attributes:
        lax: the function that lowers to exactly this op for the element types in `exact`, those of the last operand
            (of `select`: of its cases). Without one, and for other types, the op itself is emitted again: lax would
            expand it (complex numbers, sub-byte types, ...).
        exact: those element types.
        in_shardy: whether Shardy has a rule for it. `compat="shardy"` switches others off.
        early: whether propagation prefers it, as it does all element-wise ops that Shardy knows to be so.
        passes: how unreduced values pass through it, by the kind of their reduction; "*" for any.
    """

    lax: Callable[..., jax.Array] | None = None
    exact: frozenset[str] = frozenset()
    in_shardy: bool = True
    early: bool = True
    passes: Mapping[str, Linear] = field(default_factory=dict)


def _round_away_from_zero(x: jax.Array) -> jax.Array:
    return lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO)


def _round_to_even(x: jax.Array) -> jax.Array:
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


ELEMENTWISE: Mapping[str, Elementwise] = {
    "stablehlo.abs": Elementwise(lax.abs, NUMBERS),
    "stablehlo.add": Elementwise(lax.add, NUMBERS, passes={"sum": Linear.SUMMANDS}),
    "stablehlo.and": Elementwise(lax.bitwise_and, BITS),
    "stablehlo.atan2": Elementwise(lax.atan2, FLOATS),
    "stablehlo.cbrt": Elementwise(lax.cbrt, FLOATS),
    "stablehlo.ceil": Elementwise(lax.ceil, FLOATS),
    "stablehlo.clamp": Elementwise(lax.clamp, NUMBERS),
    "stablehlo.compare": Elementwise(),
    "stablehlo.complex": Elementwise(lax.complex, FLOATS, passes={"sum": Linear.EVERY}),
    "stablehlo.convert": Elementwise(passes={"sum": Linear.WIDENED}),
    "stablehlo.cosine": Elementwise(lax.cos, FLOATS),
    "stablehlo.count_leading_zeros": Elementwise(lax.clz, NUMBERS),
    "stablehlo.divide": Elementwise(lax.div, NUMBERS, passes={"sum": Linear.NUMERATOR}),
    "stablehlo.exponential": Elementwise(lax.exp, FLOATS),
    "stablehlo.exponential_minus_one": Elementwise(lax.expm1, FLOATS),
    "stablehlo.floor": Elementwise(lax.floor, FLOATS),
    "stablehlo.imag": Elementwise(passes={"sum": Linear.DATA}),
    "stablehlo.is_finite": Elementwise(lax.is_finite, NUMBERS),
    "stablehlo.log": Elementwise(lax.log, FLOATS),
    "stablehlo.log_plus_one": Elementwise(lax.log1p, FLOATS),
    "stablehlo.logistic": Elementwise(),
    "stablehlo.map": Elementwise(in_shardy=False, early=False),
    "stablehlo.maximum": Elementwise(lax.max, NUMBERS, passes={"max": Linear.EVERY}),
    "stablehlo.minimum": Elementwise(lax.min, NUMBERS, passes={"min": Linear.EVERY}),
    "stablehlo.multiply": Elementwise(lax.mul, NUMBERS, passes={"sum": Linear.ONE_FACTOR}),
    "stablehlo.negate": Elementwise(lax.neg, NUMBERS, passes={"sum": Linear.DATA}),
    "stablehlo.not": Elementwise(lax.bitwise_not, BITS),
    "stablehlo.or": Elementwise(lax.bitwise_or, BITS),
    "stablehlo.popcnt": Elementwise(lax.population_count, NUMBERS),
    "stablehlo.power": Elementwise(lax.pow, FLOATS),
    "stablehlo.real": Elementwise(passes={"sum": Linear.DATA}),
    "stablehlo.reduce_precision": Elementwise(),
    "stablehlo.remainder": Elementwise(lax.rem, NUMBERS),
    "stablehlo.round_nearest_afz": Elementwise(_round_away_from_zero, FLOATS),
    "stablehlo.round_nearest_even": Elementwise(_round_to_even, FLOATS),
    "stablehlo.rsqrt": Elementwise(lax.rsqrt, FLOATS),
    "stablehlo.select": Elementwise(lax.select, BITS, passes={"*": Linear.BRANCHES}),
    "stablehlo.shift_left": Elementwise(lax.shift_left, NUMBERS),
    "stablehlo.shift_right_arithmetic": Elementwise(lax.shift_right_arithmetic, NUMBERS),
    "stablehlo.shift_right_logical": Elementwise(lax.shift_right_logical, NUMBERS),
    "stablehlo.sign": Elementwise(lax.sign, FLOATS),
    "stablehlo.sine": Elementwise(lax.sin, FLOATS),
    "stablehlo.sqrt": Elementwise(lax.sqrt, FLOATS),
    "stablehlo.subtract": Elementwise(lax.sub, NUMBERS, passes={"sum": Linear.SUMMANDS}),
    "stablehlo.tan": Elementwise(lax.tan, FLOATS),
    "stablehlo.tanh": Elementwise(lax.tanh, FLOATS),
    "stablehlo.xor": Elementwise(lax.bitwise_xor, BITS),
    "chlo._asin_acos_kernel": Elementwise(in_shardy=False),
    "chlo.acos": Elementwise(lax.acos, FLOATS, in_shardy=False),
    "chlo.acosh": Elementwise(lax.acosh, FLOATS, in_shardy=False),
    "chlo.asin": Elementwise(in_shardy=False),
    "chlo.asinh": Elementwise(lax.asinh, FLOATS, in_shardy=False),
    "chlo.atan": Elementwise(lax.atan, FLOATS, in_shardy=False),
    "chlo.atanh": Elementwise(lax.atanh, FLOATS, in_shardy=False),
    "chlo.bessel_i1e": Elementwise(lax.bessel_i1e, FLOATS, in_shardy=False),
    "chlo.conj": Elementwise(in_shardy=False),
    "chlo.constant_like": Elementwise(in_shardy=False),
    "chlo.cosh": Elementwise(lax.cosh, FLOATS, in_shardy=False),
    "chlo.digamma": Elementwise(lax.digamma, FLOATS, in_shardy=False),
    "chlo.erf": Elementwise(lax.erf, FLOATS, in_shardy=False),
    "chlo.erf_inv": Elementwise(lax.erf_inv, FLOATS, in_shardy=False),
    "chlo.erfc": Elementwise(lax.erfc, FLOATS, in_shardy=False),
    "chlo.is_inf": Elementwise(in_shardy=False),
    "chlo.is_neg_inf": Elementwise(in_shardy=False),
    "chlo.is_pos_inf": Elementwise(in_shardy=False),
    "chlo.lgamma": Elementwise(in_shardy=False),
    "chlo.mulhi": Elementwise(in_shardy=False, early=False),
    "chlo.next_after": Elementwise(lax.nextafter, FLOATS, in_shardy=False, early=False),
    "chlo.polygamma": Elementwise(lax.polygamma, FLOATS, in_shardy=False, early=False),
    "chlo.sinh": Elementwise(lax.sinh, FLOATS, in_shardy=False),
    "chlo.square": Elementwise(lax.square, FLOATS, in_shardy=False),
    "chlo.tan": Elementwise(in_shardy=False),
    "chlo.zeta": Elementwise(lax.zeta, FLOATS, in_shardy=False, early=False),
}
