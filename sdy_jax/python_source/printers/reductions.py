"""Reductions of dimensions and of windows, and running ones."""

from __future__ import annotations

import numpy as np

from sdy_jax.python_source.expressions import Expr, tuple_text
from sdy_jax.python_source.literals import dtype_text, param_text, shape_text
from sdy_jax.python_source.printers.registry import Call, Function, printer

_AS_NUMPY = {"reduce_sum": "sum", "reduce_prod": "prod", "reduce_max": "max", "reduce_min": "min"}
_OF_BITS = {"reduce_and": "all", "reduce_or": "any"}
_WIDE = frozenset(map(np.dtype, ("float32", "float64", "complex64", "complex128")))
"""The dtypes in which jnp adds and multiplies as they are; smaller ones it makes wider."""


@printer("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_xor")
def _reduced(call: Call) -> Expr:
    name, axes, dtype = call.step.primitive, tuple(call.params["axes"]), call.inputs[0].dtype
    short = _AS_NUMPY.get(name) if dtype in _WIDE else _OF_BITS.get(name) if dtype == np.bool_ else None
    operand = call.array(0)
    if short is None:
        return call.result(f"lax.{name}({operand.text}, {axes})")
    if len(axes) == len(call.inputs[0].shape):
        return call.result(f"{operand.atom}.{short}()")
    return call.result(f"{operand.atom}.{short}(axis={axes[0] if len(axes) == 1 else axes})")


@printer("argmax", "argmin")
def _position(call: Call) -> Expr:
    (axis,) = call.params["axes"]
    return call.result(
        f"lax.{call.step.primitive}({call.array(0).text}, {axis}, {dtype_text(call.params['index_dtype'])})"
    )


def _combining(call: Call) -> str:
    """The function of two elements, or of two tuples of elements."""
    (block,) = call.step.blocks
    count = len(block.inputs) // 2
    if count == 1:
        return call.writer.function(Function(block, "combined", block.inputs, block.outputs))
    pairs = (("left", block.inputs[:count]), ("right", block.inputs[count:]))
    return call.writer.function(Function(block, "combined", pairs, (block.outputs,)))


@printer("reduce")
def _reduced_by(call: Call) -> Expr:
    count, name = len(call.inputs) // 2, _combining(call)
    dims = tuple(call.params["dimensions"])
    if count == 1:
        return call.result(f"lax.reduce({call.arrays()}, {name}, {dims})")
    operands, initial = f"({call.arrays(0, count)})", f"({call.arrays(count)})"
    return call.many(f"lax.reduce({operands}, {initial}, {name}, {dims})")


_WINDOWS = {
    "reduce_window_sum": ("lax.add", 0),
    "reduce_window_max": ("lax.max", None),
    "reduce_window_min": ("lax.min", None),
}


@printer("reduce_window_sum", "reduce_window_max", "reduce_window_min")
def _windows(call: Call) -> Expr:
    by, start = _WINDOWS[call.step.primitive]
    initial = _start(call) if start is None else f"{dtype_text(call.out.dtype)}(0)".replace("jnp.float32", "np.float32")
    return call.result(f"lax.reduce_window({call.array(0).text}, {initial}, {by}, {_window_options(call)})")


def _start(call: Call) -> str:
    """What a running maximum or minimum starts from."""
    is_max, dtype = call.step.primitive.endswith("max"), call.out.dtype
    if dtype == np.bool_:
        return str(not is_max)
    if np.issubdtype(dtype, np.integer):
        return f"jnp.iinfo({dtype_text(dtype)}).{'min' if is_max else 'max'}"
    return "-jnp.inf" if is_max else "jnp.inf"


def _window_options(call: Call) -> str:
    p, rank = call.params, len(call.out.shape)
    padding = tuple(tuple(map(int, pair)) for pair in p["padding"])
    texts = [shape_text(p["window_dimensions"]), shape_text(p["window_strides"]), str(padding)]
    for name in ("base_dilation", "window_dilation"):
        if tuple(p[name]) != (1,) * rank:
            texts.append(f"{name}={shape_text(p[name])}")
    return ", ".join(texts)


@printer("reduce_window")
def _windows_by(call: Call) -> Expr:
    count, name = len(call.inputs) // 2, _combining(call)
    if count == 1:
        return call.result(f"lax.reduce_window({call.arrays()}, {name}, {_window_options(call)})")
    operands = [call.array(i).text for i in range(count)]
    initial = [call.array(i).text for i in range(count, 2 * count)]
    return call.many(
        f"lax.reduce_window({tuple_text(operands)}, {tuple_text(initial)}, {name}, {_window_options(call)})"
    )


@printer("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _running(call: Call) -> Expr:
    options = "".join(f", {name}={param_text(call.params[name])}" for name in ("reverse",) if call.params[name])
    return call.result(f"lax.{call.step.primitive}({call.array(0).text}, axis={call.params['axis']}{options})")
