"""Windows over padded operands: the pad becomes the window's own padding and base dilation.

A pad by itself makes other blocks than its operand has, and moves most of it there. jax pads before a window in the
gradients of pooling, and users do before convolutions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jax.extend.mlir import ir

from sdy_jax.ir.graph import Op, Value
from sdy_jax.lowering.strategies.monoids import identity, is_identity, known_scalar, reduction_kind
from sdy_jax.lowering.strategies.registry import folds
from sdy_jax.lowering.strategies.split_window import array_text, padding_text
from sdy_jax.lowering.strategies.window import fill_of_selected
from sdy_jax.op_rules.op_attributes import (
    WindowDimension,
    convolution_dimension_numbers,
    convolution_window,
    window,
)


class _Pad(NamedTuple):
    """A pad by a known value that takes nothing away: the op, and (low, high, interior) per dimension."""

    op: Op
    paddings: tuple[tuple[int, int, int], ...]

    @property
    def operand(self) -> ir.Value:
        """What the module says now: another fold may have replaced it."""
        return self.op.mlir.operands[0]


def _pad(value: Value, fill: np.ndarray | None) -> _Pad | None:
    """The pad by `fill` that a value is the result of."""
    op = value.defining_op
    if op is None or op.name != "stablehlo.pad" or fill is None:
        return None
    known = known_scalar(op.operands[1])
    columns = (op.ints(name) for name in ("edge_padding_low", "edge_padding_high", "interior_padding"))
    pad = _Pad(op, tuple(zip(*columns, strict=True)))
    is_fill = known is not None and known.tobytes() == np.asarray(fill, known.dtype).tobytes()
    return pad if is_fill and min(n for dim in pad.paddings for n in dim) >= 0 else None


def _over_operand(of_dim: WindowDimension, low: int, high: int, interior: int) -> WindowDimension:
    """The window over the pad's operand that is this one over its result."""
    base = of_dim.base_dilation
    return replace(
        of_dim, low=of_dim.low + low * base, high=of_dim.high + high * base, base_dilation=base * (interior + 1)
    )


def _windows(found: Sequence[WindowDimension], pad: _Pad) -> list[WindowDimension]:
    return [_over_operand(of_dim, *padding) for of_dim, padding in zip(found, pad.paddings, strict=True)]


def _edit(op: Op, operands: Mapping[int, ir.Value], attributes: Mapping[str, str]) -> None:
    for index, value in operands.items():
        op.mlir.operands[index] = value
    for name, text in attributes.items():
        op.mlir.attributes[name] = ir.Attribute.parse(text, op.mlir.context)


@folds("stablehlo.convolution")
def _fold_into_convolution(op: Op) -> bool:
    dims = convolution_dimension_numbers(op)
    pad = _pad(op.operands[0], _zero(op.operands[0].dtype))
    if pad is None or any(any(pad.paddings[d]) for d in (dims.input_batch, dims.input_feature)):
        return False
    spatial = _Pad(pad.op, tuple(pad.paddings[d] for d in dims.input_spatial))
    found = _windows(convolution_window(op), spatial)
    dilations = array_text(of_dim.base_dilation for of_dim in found)
    _edit(op, {0: pad.operand}, {"padding": _padding_text(found), "lhs_dilation": dilations})
    return True


@folds("stablehlo.reduce_window")
def _fold_into_reduce_window(op: Op) -> bool:
    kind, count = reduction_kind(op.blocks[0]), len(op.results)
    if kind is None or not all(is_identity(init, kind) for init in op.operands[count:]):
        return False
    pads = [_pad(value, identity(kind, value.dtype)) for value in op.operands[:count]]
    first = pads[0]
    if first is None or any(pad is None or pad.paddings != first.paddings for pad in pads):
        return False
    found = _windows(window(op), first)
    operands = {i: pad.operand for i, pad in enumerate(pads) if pad is not None}
    dilations = array_text(of_dim.base_dilation for of_dim in found)
    _edit(op, operands, {"padding": _padding_text(found), "base_dilations": dilations})
    return True


@folds("stablehlo.select_and_scatter")
def _fold_into_select_and_scatter(op: Op) -> bool:
    """A pad before it together with the slice behind it that takes the padding away."""
    pad, (result,) = _pad(op.operands[0], fill_of_selected(op)), op.results
    if pad is None or len(result.uses) != 1 or any(interior for _, _, interior in pad.paddings):
        return False
    slice_, found = result.uses[0][0], _windows(window(op), pad)
    starts = tuple(low for low, _, _ in pad.paddings)
    is_cut = slice_.name == "stablehlo.slice" and slice_.ints("start_indices") == starts
    if not is_cut or slice_.results[0].shape != pad.op.operands[0].shape or set(slice_.ints("strides")) - {1}:
        return False
    _edit(op, {0: pad.operand}, {"padding": _padding_text(found)})
    result.mlir.set_type(pad.operand.type)
    if "sdy.sharding" in slice_.mlir.attributes:
        op.mlir.attributes["sdy.sharding"] = slice_.mlir.attributes["sdy.sharding"]
    slice_.results[0].mlir.replace_all_uses_with(result.mlir)
    return True


def _zero(dtype: str) -> np.ndarray | None:
    return None if dtype == "i1" else identity("sum", dtype)


def _padding_text(found: Sequence[WindowDimension]) -> str:
    return padding_text((of_dim.low, of_dim.high) for of_dim in found)
