"""Element-wise ops: shardings change nothing but the shapes. The table of them is `rules.elementwise_table`."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.emission.re_emission import numpy_dtype, re_emit
from sdy_jax.lowering.strategies.registry import runs_part_by_part
from sdy_jax.op_rules.elementwise_table import ELEMENTWISE, NUMBERS

runs_part_by_part(*ELEMENTWISE)


@emitter(*(name for name, known in ELEMENTWISE.items() if known.lax))
def _by_table(local: LocalOp, *operands: jax.Array) -> Any:
    op, known = local.op, ELEMENTWISE[local.op.name]
    dtype = op.results[0].dtype if op.name == "stablehlo.select" else op.operands[-1].dtype
    if known.lax is None or dtype not in known.exact or _wants_accuracy(local):
        return re_emit(local, *operands)
    return known.lax(*operands)


def _wants_accuracy(local: LocalOp) -> bool:
    """Whether the op has a `result_accuracy` other than the default, which lax functions do not take here."""
    accuracy = local.op.attributes.get("result_accuracy")
    return accuracy is not None and "DEFAULT" not in str(accuracy)


@emitter("stablehlo.convert")
def _convert(local: LocalOp, operand: jax.Array) -> Any:
    source, target = local.op.operands[0].dtype, local.op.results[0].dtype
    if source not in NUMBERS or target not in NUMBERS:
        return re_emit(local, operand)
    converted = lax.convert_element_type(operand, numpy_dtype(target))
    # JAX without 64-bit mode would silently give 32 bits.
    return converted if converted.dtype == numpy_dtype(target) else re_emit(local, operand)


_COMPARISONS = {"EQ": lax.eq, "NE": lax.ne, "GE": lax.ge, "GT": lax.gt, "LE": lax.le, "LT": lax.lt}


@emitter("stablehlo.compare")
def _compare(local: LocalOp, lhs: jax.Array, rhs: jax.Array) -> Any:
    if local.op.text("compare_type") == "TOTALORDER" or local.op.operands[0].dtype not in NUMBERS:
        return re_emit(local, lhs, rhs)
    return _COMPARISONS[local.op.text("comparison_direction")](lhs, rhs)


@emitter("stablehlo.reduce_precision")
def _reduce_precision(local: LocalOp, operand: jax.Array) -> jax.Array:
    return lax.reduce_precision(operand, local.op.int("exponent_bits"), local.op.int("mantissa_bits"))
