"""Rules of ops whose result elements depend on the operands' elements at the same place."""

from __future__ import annotations

from sdy_jax.graph import Op
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.rules.builder import NEED_REPLICATION, RuleBuilder, result_shape, shape_of
from sdy_jax.rules.registry import names, rule

STABLEHLO_ELEMENTWISE = names(
    "stablehlo",
    """
    abs add and atan2 cbrt ceil count_leading_zeros compare complex convert cosine divide exponential
    exponential_minus_one floor imag is_finite log_plus_one log logistic maximum minimum multiply negate not or popcnt
    power real reduce_precision remainder round_nearest_even round_nearest_afz rsqrt shift_left shift_right_arithmetic
    shift_right_logical sign sine sqrt subtract tan tanh xor
    """,
)

CHLO_UNARY = names(
    "chlo",
    """
    _asin_acos_kernel acos acosh asin asinh atan atanh bessel_i1e conj constant_like cosh digamma erf erf_inv erfc
    is_inf is_neg_inf is_pos_inf lgamma sinh square tan
    """,
)

CHLO_BINARY = names("chlo", "mulhi next_after polygamma zeta")


@rule("sdy.sharding_constraint", *STABLEHLO_ELEMENTWISE)
def elementwise(op: Op, conservative: bool) -> OpShardingRule:
    """One factor per dimension of the result, shared by all tensors; scalars stay out."""
    return RuleBuilder.of(op).pointwise(result_shape(op)).build()


rule(*CHLO_UNARY, *CHLO_BINARY, "stablehlo.map", extra=True)(elementwise)


@rule("stablehlo.clamp", "stablehlo.select")
def with_scalars(op: Op, conservative: bool) -> OpShardingRule:
    """Like other element-wise ops; scalar bounds or predicates apply to all elements and are left out."""
    return elementwise(op, conservative)


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
