"""Sums over dimensions, windows or devices: products, convolutions, reductions, and the collectives of lax."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters
from typing import Any

import numpy as np
from jax import lax

from sdy_jax.plan.source.expressions import (
    MUL,
    Expr,
    Function,
    PrimitiveCall,
    dtype_text,
    infix,
    names_text,
    param_text,
    printer,
    shape_text,
    tuple_text,
)

# Matrix products and convolutions.


@printer("dot_general")
def _product(call: PrimitiveCall) -> Expr:
    options = _options(call)
    if len(call.inputs[0].shape) + len(call.inputs[1].shape) > len(ascii_letters) or _is_of_bits(call):
        return _dot_general(call)
    if not options and _is_matmul(call):
        return call.result(infix(call.array(0), "@", call.array(1), MUL), MUL)
    text = ", ".join([f'"{_subscripts(call)}"', call.arrays(), *options])
    return call.result(f"jnp.einsum({text})")


def _is_of_bits(call: PrimitiveCall) -> bool:
    return any(value.dtype == np.bool_ for value in call.inputs)


def _options(call: PrimitiveCall) -> list[str]:
    """What a product asks for beside its defaults."""
    dtype, precision = call.params["preferred_element_type"], call.params["precision"]
    options = []
    if precision not in (None, (lax.Precision.DEFAULT, lax.Precision.DEFAULT)):
        options.append(f"precision={param_text(precision)}")
    if any(value.dtype != call.out.dtype for value in call.inputs) and dtype is not None:
        options.append(f"preferred_element_type={dtype_text(dtype)}")
    return options


def _is_matmul(call: PrimitiveCall) -> bool:
    """Whether it is what `@` does: the last dimension with the first but one, after equal leading ones if there are."""
    sums, batching = call.params["dimension_numbers"]
    ranks = [len(value.shape) for value in call.inputs]
    if any(len(dims) != 1 for dims in sums) or sums[0][0] != ranks[0] - 1:
        return False
    if not batching[0]:
        return ranks[1] <= 2 and sums[1][0] == 0
    leading = tuple(range(ranks[0] - 2))
    is_batched = tuple(batching[0]) == tuple(batching[1]) == leading
    return is_batched and ranks[0] == ranks[1] > 2 and bool(sums[1][0] == ranks[1] - 2)


def _subscripts(call: PrimitiveCall) -> str:
    """`ab,bc->ac`: batching dimensions first, then those of the left operand, then those of the right one."""
    (left_sums, right_sums), (left_batch, right_batch) = call.params["dimension_numbers"]
    left_rank, right_rank = (len(value.shape) for value in call.inputs)
    left = ascii_letters[:left_rank]
    fresh = iter(ascii_letters[left_rank:])
    shared = dict(zip([*right_sums, *right_batch], [left[d] for d in (*left_sums, *left_batch)], strict=True))
    right = [shared[d] if d in shared else next(fresh) for d in range(right_rank)]
    out = [left[d] for d in left_batch] + _free(left, left_sums, left_batch) + _free(right, right_sums, right_batch)
    return f"{left},{''.join(right)}->{''.join(out)}"


def _free(letters: Sequence[str], sums: Sequence[int], batch: Sequence[int]) -> list[str]:
    return [letter for d, letter in enumerate(letters) if d not in sums and d not in batch]


def _dot_general(call: PrimitiveCall) -> Expr:
    text = ", ".join([call.arrays(), str(call.params["dimension_numbers"]), *_options(call)])
    return call.result(f"lax.dot_general({text})")


@printer("conv_general_dilated")
def _convolved(call: PrimitiveCall) -> Expr:
    params, rank = dict(call.params), len(call.out.shape) - 2
    plain: dict[str, Any] = {
        "lhs_dilation": (1,) * rank,
        "rhs_dilation": (1,) * rank,
        "feature_group_count": 1,
        "batch_group_count": 1,
        "precision": None,
        "preferred_element_type": None,
        "out_sharding": None,
    }
    if params["preferred_element_type"] == call.out.dtype == call.inputs[0].dtype:
        params["preferred_element_type"] = None
    if isinstance(params["precision"], tuple) and set(params["precision"]) == {lax.Precision.DEFAULT}:
        params["precision"] = None
    said = {name: value for name, value in params.items() if name not in plain or value != plain[name]}
    options = ", ".join(f"{name}={param_text(value)}" for name, value in said.items())
    return call.result(f"lax.conv_general_dilated({call.arrays()}, {options})")


# Reductions of dimensions and of windows, and running ones.

_AS_NUMPY = {"reduce_sum": "sum", "reduce_prod": "prod", "reduce_max": "max", "reduce_min": "min"}
_OF_BITS = {"reduce_and": "all", "reduce_or": "any"}
_WIDE = frozenset(map(np.dtype, ("float32", "float64", "complex64", "complex128")))
"""The dtypes in which jnp adds and multiplies as they are; smaller ones it makes wider."""


@printer("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_xor")
def _reduced(call: PrimitiveCall) -> Expr:
    name, axes, dtype = call.step.primitive, tuple(call.params["axes"]), call.inputs[0].dtype
    short = _AS_NUMPY.get(name) if dtype in _WIDE else _OF_BITS.get(name) if dtype == np.bool_ else None
    operand = call.array(0)
    if short is None:
        return call.result(f"lax.{name}({operand.text}, {axes})")
    if len(axes) == len(call.inputs[0].shape):
        return call.result(f"{operand.atom}.{short}()")
    return call.result(f"{operand.atom}.{short}(axis={axes[0] if len(axes) == 1 else axes})")


@printer("argmax", "argmin")
def _position(call: PrimitiveCall) -> Expr:
    (axis,) = call.params["axes"]
    return call.result(
        f"lax.{call.step.primitive}({call.array(0).text}, {axis}, {dtype_text(call.params['index_dtype'])})"
    )


def _combining(call: PrimitiveCall) -> str:
    """The function of two elements, or of two tuples of elements."""
    (block,) = call.step.blocks
    count = len(block.inputs) // 2
    if count == 1:
        return call.writer.function(Function(block, "combined", block.inputs, block.outputs))
    pairs = (("left", block.inputs[:count]), ("right", block.inputs[count:]))
    return call.writer.function(Function(block, "combined", pairs, (block.outputs,)))


@printer("reduce")
def _reduced_by(call: PrimitiveCall) -> Expr:
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
def _windows(call: PrimitiveCall) -> Expr:
    by, start = _WINDOWS[call.step.primitive]
    initial = _start(call) if start is None else f"{dtype_text(call.out.dtype)}(0)".replace("jnp.float32", "np.float32")
    return call.result(f"lax.reduce_window({call.array(0).text}, {initial}, {by}, {_window_options(call)})")


def _start(call: PrimitiveCall) -> str:
    """What a running maximum or minimum starts from."""
    is_max, dtype = call.step.primitive.endswith("max"), call.out.dtype
    if dtype == np.bool_:
        return str(not is_max)
    if np.issubdtype(dtype, np.integer):
        return f"jnp.iinfo({dtype_text(dtype)}).{'min' if is_max else 'max'}"
    return "-jnp.inf" if is_max else "jnp.inf"


def _window_options(call: PrimitiveCall) -> str:
    p, rank = call.params, len(call.out.shape)
    padding = tuple(tuple(map(int, pair)) for pair in p["padding"])
    texts = [shape_text(p["window_dimensions"]), shape_text(p["window_strides"]), str(padding)]
    for name in ("base_dilation", "window_dilation"):
        if tuple(p[name]) != (1,) * rank:
            texts.append(f"{name}={shape_text(p[name])}")
    return ", ".join(texts)


@printer("reduce_window")
def _windows_by(call: PrimitiveCall) -> Expr:
    count, name = len(call.inputs) // 2, _combining(call)
    if count == 1:
        return call.result(f"lax.reduce_window({call.arrays()}, {name}, {_window_options(call)})")
    operands = [call.array(i).text for i in range(count)]
    initial = [call.array(i).text for i in range(count, 2 * count)]
    return call.many(
        f"lax.reduce_window({tuple_text(operands)}, {tuple_text(initial)}, {name}, {_window_options(call)})"
    )


@printer("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _running(call: PrimitiveCall) -> Expr:
    options = "".join(f", {name}={param_text(call.params[name])}" for name in ("reverse",) if call.params[name])
    return call.result(f"lax.{call.step.primitive}({call.array(0).text}, axis={call.params['axis']}{options})")


# Collectives of lax, and where a device is.


@printer("axis_index")
def _device_position(call: PrimitiveCall) -> Expr:
    return call.result(f"lax.axis_index({names_text(call.params['axis_name'])})")


@printer("psum", "pmax", "pmin")
def _reduced_over_axes(call: PrimitiveCall) -> Expr:
    options = f"{names_text(call.params['axes'])}{_groups(call)}"
    if len(call.inputs) == 1:
        return call.result(f"lax.{call.step.primitive}({call.array(0).text}, {options})")
    return call.many(f"lax.{call.step.primitive}(({call.arrays()}), {options})")


@printer("all_gather")
def _gathered(call: PrimitiveCall) -> Expr:
    return _moved(call, "all_gather", axis=call.params["all_gather_dimension"])


@printer("reduce_scatter")
def _scattered(call: PrimitiveCall) -> Expr:
    return _moved(call, "psum_scatter", scatter_dimension=call.params["scatter_dimension"])


@printer("all_to_all")
def _exchanged(call: PrimitiveCall) -> Expr:
    return _moved(call, "all_to_all", split_axis=call.params["split_axis"], concat_axis=call.params["concat_axis"])


@printer("ragged_all_to_all")
def _exchanged_rows(call: PrimitiveCall) -> Expr:
    axes = f"axis_name={names_text(call.params['axis_name'])}{_groups(call)}"
    return call.result(f"lax.ragged_all_to_all({call.arrays()}, {axes})")


def _moved(call: PrimitiveCall, function: str, **dimensions: int) -> Expr:
    """A collective of lax along axes, with the dimensions that it says."""
    options = "".join(f"{name}={dimension}, " for name, dimension in dimensions.items())
    axes = f"{names_text(call.params['axis_name'])}{_groups(call)}"
    return call.result(f"lax.{function}({call.array(0).text}, {axes}, {options}tiled={call.params['tiled']})")


@printer("ppermute")
def _permuted(call: PrimitiveCall) -> Expr:
    p = call.params
    return call.result(f"lax.ppermute({call.array(0).text}, {names_text(p['axis_name'])}, {pairs_text(p['perm'])})")


def pairs_text(pairs: Sequence[tuple[int, int]]) -> str:
    """Senders and receivers, as a formula where they are shifted by as much."""
    pairs = [(int(a), int(b)) for a, b in pairs]
    count = len(pairs)
    senders = [a for a, _ in pairs]
    if count > 3 and senders == list(range(senders[0], senders[0] + count)):
        shift = pairs[0][1] - pairs[0][0]
        span = f"range({count})" if senders[0] == 0 else f"range({senders[0]}, {senders[0] + count})"
        if all(b == a + shift for a, b in pairs):
            return f"[(i, i {'+' if shift >= 0 else '-'} {abs(shift)}) for i in {span}]"
        if all(b == (a + shift) % count for a, b in pairs):
            return f"[(i, (i + {shift % count}) % {count}) for i in {span}]"
    return str(pairs)


def _groups(call: PrimitiveCall) -> str:
    groups: Any = call.params.get("axis_index_groups")
    return f", axis_index_groups={[list(map(int, group)) for group in groups]}" if groups else ""
