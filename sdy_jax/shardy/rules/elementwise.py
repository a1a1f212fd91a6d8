"""Element-wise ops: the table of all that is known of them by name, their rule, and that of random bit generators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import jax
from jax import lax
from jax.extend.mlir import ir

from sdy_jax.ir.attributes import shape_and_dtype
from sdy_jax.ir.graph import Op
from sdy_jax.ir.operations import CONSTRAINTS
from sdy_jax.ir.shardings import OpShardingRule
from sdy_jax.shardy.rules.registry import (
    NEED_REPLICATION,
    Linear,
    RuleBuilder,
    passes_unreduced,
    result_shape,
    rule,
    shape_of,
)

# The element-wise ops of StableHLO and CHLO, one line each: all that any room knows of them by name.
#
# A new element-wise op is a line here. Its rule has a factor per dimension, it runs on shards as it is, and it is
# rematerialized where that is cheaper than moving its result.

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


# What propagation asks about ops besides their rules.

_EARLY = frozenset(
    (*CONSTRAINTS, "sdy.propagation_barrier", *(name for name, known in ELEMENTWISE.items() if known.early))
)


def is_elementwise(op: Op | ir.Operation) -> bool:
    """Whether each result element depends on the operands' elements at its place, and on scalars.

    Propagation prefers such ops, and copies them when it splits constants. Collectives and ops that move elements are
    not among them, even where their rule is that of an element-wise op; nor are, as in Shardy, chlo's binary ops.
    """
    if op.name == "stablehlo.bitcast_convert":
        given, made = (shape_and_dtype(value.type)[0] for value in (op.operands[0], op.results[0]))
        return given == made
    return op.name in _EARLY


# Rules of ops whose result elements depend on the operands' elements at the same place.


def elementwise(op: Op, conservative: bool) -> OpShardingRule:
    """One factor per dimension of the result, shared by all tensors; scalars (bounds, predicates) stay out."""
    return RuleBuilder.of(op).pointwise(result_shape(op)).build()


rule("sdy.sharding_constraint", *(name for name, known in ELEMENTWISE.items() if known.in_shardy))(elementwise)
rule(*(name for name, known in ELEMENTWISE.items() if not known.in_shardy), extra=True)(elementwise)
for _name, _known in ELEMENTWISE.items():
    passes_unreduced(_name, _known.passes)


@rule("stablehlo.bitcast_convert")
def bitcast_convert(op: Op, conservative: bool) -> OpShardingRule:
    """Element-wise, but between widths the last dimension of one side holds the pieces of one element."""
    operand, result = shape_of(op), result_shape(op)
    common = min(len(operand), len(result))
    builder = RuleBuilder.of(op).pointwise(min(operand, result, key=len))
    if len(operand) > common:
        builder.add_operands(common, operand[common], NEED_REPLICATION)
    elif len(result) > common:
        builder.add_results(common, result[common], NEED_REPLICATION)
    return builder.build()


# The rule of random bit generators.


@rule("stablehlo.rng_bit_generator")
def rng_bit_generator(op: Op, conservative: bool) -> OpShardingRule:
    """The state goes in and out whole; the bits are sharded freely."""
    builder = RuleBuilder.of(op)
    for dim, size in enumerate(shape_of(op)):
        builder.add((dim,), (dim, None), size, NEED_REPLICATION, blocked=True)
    for dim, size in enumerate(result_shape(op, 1)):
        builder.add((None,), (None, dim), size)
    return builder.build()
