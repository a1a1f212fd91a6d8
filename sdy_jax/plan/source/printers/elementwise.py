"""Element-wise primitives: operators where Python has one, functions of jnp where these do the same."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from sdy_jax.plan.source.expressions import ADD, AND, COMPARE, MUL, OR, POWER, UNARY, XOR, Expr, dtype_text, infix
from sdy_jax.plan.source.printers.registry import Call, materialized, printer, typed_number

_OPERATORS: dict[str, tuple[str, int]] = {
    "add": ("+", ADD),
    "add_any": ("+", ADD),
    "sub": ("-", ADD),
    "mul": ("*", MUL),
    "div": ("/", MUL),
    "and": ("&", AND),
    "or": ("|", OR),
    "xor": ("^", XOR),
    "lt": ("<", COMPARE),
    "le": ("<=", COMPARE),
    "gt": (">", COMPARE),
    "ge": (">=", COMPARE),
    "eq": ("==", COMPARE),
    "ne": ("!=", COMPARE),
}

_SWAPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
"""Comparisons with the operands the other way round: numbers stand on the right."""

_FUNCTIONS = {
    "exp": "jnp.exp",
    "exp2": "jnp.exp2",
    "log": "jnp.log",
    "log1p": "jnp.log1p",
    "expm1": "jnp.expm1",
    "tanh": "jnp.tanh",
    "sin": "jnp.sin",
    "cos": "jnp.cos",
    "tan": "jnp.tan",
    "asin": "jnp.arcsin",
    "acos": "jnp.arccos",
    "atan": "jnp.arctan",
    "sinh": "jnp.sinh",
    "cosh": "jnp.cosh",
    "asinh": "jnp.arcsinh",
    "acosh": "jnp.arccosh",
    "atanh": "jnp.arctanh",
    "sqrt": "jnp.sqrt",
    "rsqrt": "lax.rsqrt",
    "cbrt": "jnp.cbrt",
    "abs": "jnp.abs",
    "floor": "jnp.floor",
    "ceil": "jnp.ceil",
    "is_finite": "jnp.isfinite",
    "logistic": "lax.logistic",
    "erf": "lax.erf",
    "erfc": "lax.erfc",
    "erf_inv": "lax.erf_inv",
    "lgamma": "lax.lgamma",
    "digamma": "lax.digamma",
    "bessel_i1e": "lax.bessel_i1e",
    "square": "lax.square",
    "sign": "lax.sign",
    "clz": "lax.clz",
    "population_count": "lax.population_count",
    "real": "lax.real",
    "imag": "lax.imag",
    "conj": "lax.conj",
}

_PAIRS = {"max": "jnp.maximum", "min": "jnp.minimum", "atan2": "jnp.arctan2"}
"""Functions of two operands that broadcast as NumPy does."""

_LAX_PAIRS = {
    "pow": "pow",
    "rem": "rem",
    "nextafter": "nextafter",
    "shift_left": "shift_left",
    "shift_right_logical": "shift_right_logical",
    "shift_right_arithmetic": "shift_right_arithmetic",
    "complex": "complex",
    "polygamma": "polygamma",
    "zeta": "zeta",
    "igamma": "igamma",
    "igammac": "igammac",
}
"""Functions of lax, whose operands must have one shape and dtype."""

ELEMENTWISE = frozenset(
    {*_OPERATORS, *_FUNCTIONS, *_PAIRS, *_LAX_PAIRS, "neg", "not", "select_n", "convert_element_type", "integer_pow"}
)
"""What may be part of a longer expression."""


def broadcasting(call: Call) -> list[Expr]:
    """The operands, as NumPy broadcasts them to the result: one of them is an array of the result's dtype."""
    operands = [call.operand(i) for i in range(len(call.inputs))]
    if all(expr.is_number for expr in operands):
        operands[0] = typed_number(operands[0], call.inputs[0].dtype)
    shape = np.broadcast_shapes(*(expr.shape for expr in operands))
    if shape != call.out.shape:
        largest = max(range(len(operands)), key=lambda i: (not operands[i].is_number, len(operands[i].shape)))
        operands[largest] = materialized(operands[largest], call.inputs[largest])
    return operands


@printer(*_OPERATORS)
def _operator(call: Call) -> Expr:
    name = call.step.primitive
    if name in ("eq", "ne") and call.inputs[0] is call.inputs[1] and jnp.issubdtype(call.inputs[0].dtype, jnp.floating):
        is_nan = f"jnp.isnan({call.array(0).text})"
        return call.result(is_nan) if name == "ne" else call.result(f"~{is_nan}", UNARY)
    symbol, power = _OPERATORS[name]
    if name in ("eq", "ne") and call.inputs[1].dtype == np.bool_ and call.operand(1).is_number:
        is_same = (name == "eq") == (call.operand(1).text == "True")
        return call.operand(0) if is_same else call.result(f"~{call.operand(0).within(UNARY)}", UNARY)
    if (name == "div" and not jnp.issubdtype(call.out.dtype, jnp.inexact)) or _is_arithmetic_of_bits(call, power):
        return call.result(f"lax.{name}({call.arrays()})")
    left, right = broadcasting(call)
    if left.is_number and symbol in _SWAPPED:
        left, symbol, right = right, _SWAPPED[symbol], left
    return call.result(infix(left, symbol, right, power), power)


def _is_arithmetic_of_bits(call: Call, power: int) -> bool:
    return power in (ADD, MUL) and call.out.dtype == np.bool_


@printer(*_FUNCTIONS)
def _function(call: Call) -> Expr:
    if call.params.get("accuracy") is not None:
        raise call.refused("it asks for an accuracy")
    return call.result(f"{_FUNCTIONS[call.step.primitive]}({call.array(0).text})")


@printer(*_PAIRS)
def _pair(call: Call) -> Expr:
    left, right = broadcasting(call)
    return call.result(f"{_PAIRS[call.step.primitive]}({left.text}, {right.text})")


@printer(*_LAX_PAIRS)
def _pair_of_lax(call: Call) -> Expr:
    return call.result(f"lax.{_LAX_PAIRS[call.step.primitive]}({call.arrays()})")


@printer("neg")
def _negative(call: Call) -> Expr:
    return call.result(f"-{call.array(0).within(UNARY)}", UNARY)


@printer("not")
def _inverted(call: Call) -> Expr:
    return call.result(f"~{call.array(0).within(UNARY)}", UNARY)


@printer("integer_pow")
def _power(call: Call) -> Expr:
    return call.result(f"{call.array(0).within(POWER + 1)} ** {call.params['y']}", POWER)


@printer("round")
def _rounded(call: Call) -> Expr:
    method = call.params["rounding_method"].name
    return call.result(f"lax.round({call.array(0).text}, lax.RoundingMethod.{method})")


@printer("select_n")
def _chosen(call: Call) -> Expr:
    which = call.inputs[0]
    if which.dtype != np.bool_ or len(call.inputs) != 3:
        return call.result(f"lax.select_n({call.arrays()})")
    condition, when_false, when_true = (call.operand(i) for i in range(3))
    shape = np.broadcast_shapes(condition.shape, when_false.shape, when_true.shape)
    if when_false.is_number and when_true.is_number and call.out.dtype != np.bool_:
        when_true = typed_number(when_true, call.out.dtype)
    if shape != call.out.shape:
        when_true = materialized(when_true, call.inputs[2])
    return call.result(f"jnp.where({condition.text}, {when_true.text}, {when_false.text})")


@printer("convert_element_type")
def _converted(call: Call) -> Expr:
    operand, dtype = call.inputs[0], call.out.dtype
    if np.issubdtype(operand.dtype, np.complexfloating) and not np.issubdtype(dtype, np.complexfloating):
        return call.result(f"lax.convert_element_type({call.array(0).text}, {dtype_text(dtype)})")
    expr = call.operand(0)
    source = call.array(0) if expr.is_number else expr
    return Expr(f"{source.atom}.astype({dtype_text(dtype)})", source.shape)


@printer("clamp")
def _clamped(call: Call) -> Expr:
    return call.result(f"lax.clamp({call.arrays()})")


@printer("reduce_precision")
def _less_precise(call: Call) -> Expr:
    bits = f"exponent_bits={call.params['exponent_bits']}, mantissa_bits={call.params['mantissa_bits']}"
    return call.result(f"lax.reduce_precision({call.array(0).text}, {bits})")
