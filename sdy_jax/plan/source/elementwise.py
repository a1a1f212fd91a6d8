"""Element-wise primitives, arrays made from nothing, the same elements in another shape, slices and sorts."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from sdy_jax.plan.source.expressions import (
    ADD,
    AND,
    COMPARE,
    MUL,
    OR,
    POWER,
    UNARY,
    XOR,
    Expr,
    PrimitiveCall,
    dtype_text,
    infix,
    materialized,
    number_text,
    param_text,
    printer,
    shape_text,
    tuple_text,
    typed_number,
)
from sdy_jax.plan.source.steps import LOOKUP

# Element-wise primitives: operators where Python has one, functions of jnp where these do the same.

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


def broadcasting(call: PrimitiveCall) -> list[Expr]:
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
def _operator(call: PrimitiveCall) -> Expr:
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


def _is_arithmetic_of_bits(call: PrimitiveCall, power: int) -> bool:
    return power in (ADD, MUL) and call.out.dtype == np.bool_


@printer(*_FUNCTIONS)
def _function(call: PrimitiveCall) -> Expr:
    if call.params.get("accuracy") is not None:
        raise call.refused("it asks for an accuracy")
    return call.result(f"{_FUNCTIONS[call.step.primitive]}({call.array(0).text})")


@printer(*_PAIRS)
def _pair(call: PrimitiveCall) -> Expr:
    left, right = broadcasting(call)
    return call.result(f"{_PAIRS[call.step.primitive]}({left.text}, {right.text})")


@printer(*_LAX_PAIRS)
def _pair_of_lax(call: PrimitiveCall) -> Expr:
    return call.result(f"lax.{_LAX_PAIRS[call.step.primitive]}({call.arrays()})")


@printer("neg")
def _negative(call: PrimitiveCall) -> Expr:
    return call.result(f"-{call.array(0).within(UNARY)}", UNARY)


@printer("not")
def _inverted(call: PrimitiveCall) -> Expr:
    return call.result(f"~{call.array(0).within(UNARY)}", UNARY)


@printer("integer_pow")
def _power(call: PrimitiveCall) -> Expr:
    return call.result(f"{call.array(0).within(POWER + 1)} ** {call.params['y']}", POWER)


@printer("round")
def _rounded(call: PrimitiveCall) -> Expr:
    method = call.params["rounding_method"].name
    return call.result(f"lax.round({call.array(0).text}, lax.RoundingMethod.{method})")


@printer("select_n")
def _chosen(call: PrimitiveCall) -> Expr:
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
def _converted(call: PrimitiveCall) -> Expr:
    operand, dtype = call.inputs[0], call.out.dtype
    if np.issubdtype(operand.dtype, np.complexfloating) and not np.issubdtype(dtype, np.complexfloating):
        return call.result(f"lax.convert_element_type({call.array(0).text}, {dtype_text(dtype)})")
    expr = call.operand(0)
    source = call.array(0) if expr.is_number else expr
    return Expr(f"{source.atom}.astype({dtype_text(dtype)})", source.shape)


@printer("clamp")
def _clamped(call: PrimitiveCall) -> Expr:
    return call.result(f"lax.clamp({call.arrays()})")


@printer("reduce_precision")
def _less_precise(call: PrimitiveCall) -> Expr:
    bits = f"exponent_bits={call.params['exponent_bits']}, mantissa_bits={call.params['mantissa_bits']}"
    return call.result(f"lax.reduce_precision({call.array(0).text}, {bits})")


# Arrays made from nothing, and the same elements in another shape.


@printer("iota")
def _counted(call: PrimitiveCall) -> Expr:
    dtype, shape, dim = dtype_text(call.out.dtype), call.out.shape, call.params["dimension"]
    if len(shape) == 1:
        return call.result(f"jnp.arange({shape[0]}, dtype={dtype})")
    return call.result(f"lax.broadcasted_iota({dtype}, {shape_text(shape)}, {dim})")


@printer("broadcast_in_dim")
def _broadcast(call: PrimitiveCall) -> Expr:
    """The operand itself or a view of it, which NumPy broadcasts to the result."""
    operand, shape = call.operand(0), call.out.shape
    if operand.is_number or operand.shape == ():
        return operand
    dims = tuple(call.params["broadcast_dimensions"])
    own = call.inputs[0].shape
    if dims == tuple(range(len(shape) - len(own), len(shape))):
        return operand
    if operand.shape != own:
        operand = call.array(0)
    last = dims[-1] if dims else -1
    kept = dict(zip(dims, own, strict=True))
    first = next(iter(dims), 0)
    index = [":" if dim in kept else "None" for dim in range(first, len(shape))]
    viewed = tuple(kept.get(dim, 1) for dim in range(first, len(shape)))
    if last < len(shape) - 1 and first + len(own) - 1 == last and index.count(":") > 1:
        index = ["...", *("None" for _ in range(len(shape) - 1 - last))]
    return Expr(f"{operand.atom}[{', '.join(index)}]", viewed)


@printer("reshape")
def _reshaped(call: PrimitiveCall) -> Expr:
    if call.params.get("dimensions") is not None:
        raise call.refused("it reorders dimensions")
    return call.result(
        f"{call.array(0).atom}.reshape({shape_text(call.out.shape)})"
        if not call.out.shape
        else f"{call.array(0).atom}.reshape({', '.join(map(str, call.out.shape))})"
    )


@printer("squeeze")
def _squeezed(call: PrimitiveCall) -> Expr:
    """`x[:, 0]`."""
    dims = set(call.params["dimensions"])
    return call.result(
        f"{call.array(0).atom}[{_index(['0' if d in dims else ':' for d in range(len(call.inputs[0].shape))])}]"
    )


@printer("expand_dims")
def _expanded(call: PrimitiveCall) -> Expr:
    return call.result(f"lax.expand_dims({call.array(0).text}, {call.params['dimensions']})")


@printer("transpose")
def _transposed(call: PrimitiveCall) -> Expr:
    order, operand = tuple(call.params["permutation"]), call.array(0).atom
    if order == (1, 0):
        return call.result(f"{operand}.T")
    return call.result(f"{operand}.transpose({', '.join(map(str, order))})")


@printer("slice")
def _sliced(call: PrimitiveCall) -> Expr:
    """`x[:2, ::3]`."""
    starts, limits = call.params["start_indices"], call.params["limit_indices"]
    strides = call.params["strides"] or (1,) * len(starts)
    ranges = zip(starts, limits, strides, call.inputs[0].shape, strict=True)
    return call.result(f"{call.array(0).atom}[{_index([_range(*each) for each in ranges])}]")


def _range(start: int, limit: int, stride: int, size: int) -> str:
    text = f"{start or ''}:{limit if limit < size else ''}"
    return text if stride == 1 else f"{text}:{stride}"


def _index(dims: list[str]) -> str:
    """An index without trailing whole dimensions."""
    while len(dims) > 1 and dims[-1] == ":":
        dims.pop()
    return ", ".join(dims)


@printer("pad")
def _padded(call: PrimitiveCall) -> Expr:
    config = tuple(tuple(each) for each in call.params["padding_config"])
    return call.result(f"lax.pad({call.arrays()}, {config})")


@printer("concatenate")
def _joined(call: PrimitiveCall) -> Expr:
    return call.result(f"jnp.concatenate([{call.arrays()}], axis={call.params['dimension']})")


@printer("stack")
def _stacked(call: PrimitiveCall) -> Expr:
    return call.result(f"jnp.stack([{call.arrays()}], axis={call.params['axis']})")


@printer("unstack")
def _unstacked(call: PrimitiveCall) -> Expr:
    return call.many(f"jnp.unstack({call.array(0).text}, axis={call.params['axis']})")


@printer("rev")
def _reversed(call: PrimitiveCall) -> Expr:
    dims = set(call.params["dimensions"])
    steps = ["::-1" if d in dims else ":" for d in range(len(call.out.shape))]
    return call.result(f"{call.array(0).atom}[{_index(steps)}]")


@printer("split")
def _split(call: PrimitiveCall) -> Expr:
    return call.many(f"lax.split({call.array(0).text}, {tuple(call.params['sizes'])}, axis={call.params['axis']})")


@printer("bitcast_convert_type")
def _bits(call: PrimitiveCall) -> Expr:
    return call.result(f"lax.bitcast_convert_type({call.array(0).text}, {dtype_text(call.out.dtype)})")


@printer("layout_constraint")
def _laid_out(call: PrimitiveCall) -> Expr:
    """The order of dimensions in memory, which some ops of XLA for CPUs rely on."""
    order = tuple(call.params["layout"].major_to_minor)
    return call.result(f"with_layout_constraint({call.array(0).text}, Layout({order}))")


@printer("optimization_barrier")
def _barrier(call: PrimitiveCall) -> Expr:
    operands = [call.array(i).text for i in range(len(call.inputs))]
    if len(operands) == 1:
        return call.result(f"lax.optimization_barrier({operands[0]})")
    return call.many(f"lax.optimization_barrier(({', '.join(operands)}))")


# Slices, gathers, scatters and sorts whose positions are computed.


def _starts(call: PrimitiveCall, first: int) -> tuple[str, str]:
    """Start indices, and what says that negative ones do not count from the end: XLA clamps them."""
    values = call.inputs[first:]
    known = [number_text(v.constant) if v.is_scalar_literal and v.constant is not None else None for v in values]
    are_fixed = all(text is not None and not text.startswith("-") for text in known)
    if not are_fixed and (call.writer.is_wide or values[0].dtype != np.int32):  # numbers would have another dtype
        known = [None] * len(values)
    texts = [text or call.array(first + i).text for i, text in enumerate(known)]
    return tuple_text(texts), "" if are_fixed else ", allow_negative_indices=False"


@printer("dynamic_slice")
def _dynamic_slice(call: PrimitiveCall) -> Expr:
    starts, options = _starts(call, 1)
    sizes = shape_text(call.params["slice_sizes"])
    return call.result(f"lax.dynamic_slice({call.array(0).text}, {starts}, {sizes}{options})")


@printer(LOOKUP)
def _looked_up(call: PrimitiveCall) -> Expr:
    """`jnp.array([0, 2, 1], jnp.int32)[index]`."""
    table = call.array(0).text
    listed = "j" + table if table.startswith("np.array(") else f"jnp.asarray({table})"
    return call.result(f"{listed}[{call.array(1).text}]")


@printer("dynamic_update_slice")
def _updated(call: PrimitiveCall) -> Expr:
    starts, options = _starts(call, 2)
    return call.result(f"lax.dynamic_update_slice({call.arrays(0, 2)}, {starts}{options})")


@printer("gather")
def _gathered(call: PrimitiveCall) -> Expr:
    options = ["slice_sizes", "unique_indices", "indices_are_sorted", "mode", "fill_value"]
    numbers = param_text(call.params["dimension_numbers"])
    return call.result(f"lax.gather({call.arrays()}, {numbers}, {_keywords(call, options)})")


_SCATTERS = {
    "scatter": "scatter",
    "scatter-add": "scatter_add",
    "scatter_add": "scatter_add",
    "scatter-mul": "scatter_mul",
    "scatter_mul": "scatter_mul",
    "scatter-min": "scatter_min",
    "scatter_min": "scatter_min",
    "scatter-max": "scatter_max",
    "scatter_max": "scatter_max",
    "scatter-sub": "scatter_sub",
    "scatter_sub": "scatter_sub",
}


@printer(*_SCATTERS)
def _scattered(call: PrimitiveCall) -> Expr:
    numbers = param_text(call.params["dimension_numbers"])
    options = _keywords(call, ["indices_are_sorted", "unique_indices", "mode"])
    return call.result(f"lax.{_SCATTERS[call.step.primitive]}({call.arrays()}, {numbers}, {options})")


def _keywords(call: PrimitiveCall, names: list[str]) -> str:
    texts = {name: param_text(call.params[name]) for name in names}
    return ", ".join(f"{name}={text}" for name, text in texts.items() if text not in ("False", "None"))


@printer("sort")
def _sorted(call: PrimitiveCall) -> Expr:
    p = call.params
    options = f"dimension={p['dimension']}, is_stable={p['is_stable']}, num_keys={p['num_keys']}"
    if len(call.inputs) == 1:
        return call.result(f"lax.sort({call.array(0).text}, {options})")
    return call.many(f"lax.sort(({call.arrays()}), {options})")


@printer("top_k")
def _largest(call: PrimitiveCall) -> Expr:
    axis = call.params.get("axis", call.params.get("operand_axis", -1))
    return call.many(f"lax.top_k({call.array(0).text}, {call.params['k']}, axis={axis})")
