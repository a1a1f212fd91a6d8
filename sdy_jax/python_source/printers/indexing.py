"""Slices, gathers, scatters and sorts whose positions are computed."""

from __future__ import annotations

import numpy as np

from sdy_jax.python_source.expressions import Expr, tuple_text
from sdy_jax.python_source.known_numbers import LOOKUP
from sdy_jax.python_source.literals import number_text, param_text, shape_text
from sdy_jax.python_source.printers.registry import Call, printer


def _starts(call: Call, first: int) -> tuple[str, str]:
    """Start indices, and what says that negative ones do not count from the end: XLA clamps them."""
    values = call.inputs[first:]
    known = [number_text(v.constant) if v.is_scalar_literal and v.constant is not None else None for v in values]
    are_fixed = all(text is not None and not text.startswith("-") for text in known)
    if not are_fixed and (call.writer.is_wide or values[0].dtype != np.int32):  # numbers would have another dtype
        known = [None] * len(values)
    texts = [text or call.array(first + i).text for i, text in enumerate(known)]
    return tuple_text(texts), "" if are_fixed else ", allow_negative_indices=False"


@printer("dynamic_slice")
def _sliced(call: Call) -> Expr:
    starts, options = _starts(call, 1)
    sizes = shape_text(call.params["slice_sizes"])
    return call.result(f"lax.dynamic_slice({call.array(0).text}, {starts}, {sizes}{options})")


@printer(LOOKUP)
def _looked_up(call: Call) -> Expr:
    """`jnp.array([0, 2, 1], jnp.int32)[index]`."""
    table = call.array(0).text
    listed = "j" + table if table.startswith("np.array(") else f"jnp.asarray({table})"
    return call.result(f"{listed}[{call.array(1).text}]")


@printer("dynamic_update_slice")
def _updated(call: Call) -> Expr:
    starts, options = _starts(call, 2)
    return call.result(f"lax.dynamic_update_slice({call.arrays(0, 2)}, {starts}{options})")


@printer("gather")
def _gathered(call: Call) -> Expr:
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
def _scattered(call: Call) -> Expr:
    numbers = param_text(call.params["dimension_numbers"])
    options = _keywords(call, ["indices_are_sorted", "unique_indices", "mode"])
    return call.result(f"lax.{_SCATTERS[call.step.primitive]}({call.arrays()}, {numbers}, {options})")


def _keywords(call: Call, names: list[str]) -> str:
    texts = {name: param_text(call.params[name]) for name in names}
    return ", ".join(f"{name}={text}" for name, text in texts.items() if text not in ("False", "None"))


@printer("sort")
def _sorted(call: Call) -> Expr:
    p = call.params
    options = f"dimension={p['dimension']}, is_stable={p['is_stable']}, num_keys={p['num_keys']}"
    if len(call.inputs) == 1:
        return call.result(f"lax.sort({call.array(0).text}, {options})")
    return call.many(f"lax.sort(({call.arrays()}), {options})")


@printer("top_k")
def _largest(call: Call) -> Expr:
    axis = call.params.get("axis", call.params.get("operand_axis", -1))
    return call.many(f"lax.top_k({call.array(0).text}, {call.params['k']}, axis={axis})")
