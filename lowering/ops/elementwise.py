"""Ops whose shards need nothing of other devices: element-wise, constants, iotas, random bits, `after`, `rounded`."""

from __future__ import annotations

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.mlir import ir

from sdy_jax.ir.custom_ops import AFTER, ROUNDED
from sdy_jax.ir.graph import Op
from sdy_jax.lowering.ops.collectives.movement import not_before
from sdy_jax.lowering.ops.emission.re_emission import numpy_dtype, re_emit
from sdy_jax.lowering.ops.registry import AWAITED, LocalOp, emitter, rematerializable, runs_part_by_part
from sdy_jax.lowering.ops.shards import offset, own_block
from sdy_jax.shardy.rules.elementwise import ELEMENTWISE, NUMBERS

# Element-wise ops: shardings change nothing but the shapes. The table of them is that of their rules.

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


# Ops that make arrays out of nothing: constants, iota, random bits. Every device makes its own block.

rematerializable("stablehlo.constant", "sdy.constant", "stablehlo.iota")


@emitter("stablehlo.constant", "sdy.constant")
def _constant(local: LocalOp) -> jax.Array:
    value, shape = constant_value(local.op), local.result_shape()
    if value is None or not _is_whole(value.dtype):
        whole = re_emit(local, result_shapes=[local.op.results[0].shape or ()])[0]
        return own_block(local, whole, local.result_shardings[0])
    if value.ndim == 0 or value.size == 1:
        return lax.full(shape, value.reshape(()), value.dtype)
    return own_block(local, jnp.asarray(value), local.result_shardings[0])


def _is_whole(dtype: np.dtype) -> bool:
    """Whether JAX keeps the element type: without 64-bit mode it truncates 64-bit numbers; these are re-emitted."""
    return jax.dtypes.canonicalize_dtype(dtype) == dtype


def constant_value(op: Op) -> np.ndarray | None:
    """A constant's value, a scalar for a splat; None for element types that MLIR's bindings cannot read."""
    attribute = op.attributes.get("value")
    dtype = op.results[0].dtype
    try:
        if isinstance(attribute, ir.DenseElementsAttr) and attribute.is_splat:
            scalar = attribute.get_splat_value()
            return np.asarray(scalar.value).astype(numpy_dtype(dtype))
        value = np.array(attribute)
    except (TypeError, ValueError, AttributeError):
        return None
    return value if value.dtype == numpy_dtype(dtype) and value.shape == op.results[0].shape else None


@emitter("stablehlo.iota")
def _iota(local: LocalOp) -> Any:
    dim = local.op.int("iota_dimension")
    axes, shape = local.result_axes(0, dim), local.result_shape()
    if not axes:
        dtype = numpy_dtype(local.op.results[0].dtype)
        plain = np.issubdtype(dtype, np.integer) and _is_whole(dtype)
        return lax.broadcasted_iota(dtype, shape, dim) if plain else re_emit(local)
    # Counted in integers and converted once, as the op does: small floats would round twice.
    counted = lax.broadcasted_iota(jnp.int32, shape, dim) + offset(local, axes, shape[dim])
    return counted.astype(numpy_dtype(local.op.results[0].dtype))


@emitter("stablehlo.rng_bit_generator", "stablehlo.rng")
def _random(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
    """Every device generates the whole value and keeps its block: the same bits as on one device."""
    wholes = _bits(local.op, *operands) or re_emit(
        local, *operands, result_shapes=[value.shape or () for value in local.op.results]
    )
    return [own_block(local, x, s) for x, s in zip(wholes, local.result_shardings, strict=True)]


def _bits(op: Op, *operands: jax.Array) -> list[jax.Array]:
    """The new state and the bits by jax's own op, which has its rule under `jax.vmap`: all bits are those of the first
    state, and only that changes. Nothing for what this op does not make."""
    if op.name != "stablehlo.rng_bit_generator" or op.operands[0].dtype != "ui64" or op.operands[0].shape != (2,):
        return []
    bits = op.results[1]
    if bits.dtype not in ("ui8", "ui16", "ui32", "ui64"):
        return []
    algorithm = lax.RandomAlgorithm[f"RNG_{op.text('rng_algorithm')}"]
    return list(lax.rng_bit_generator(operands[0], bits.shape or (), numpy_dtype(bits.dtype), algorithm))


# `sdy_jax.rounded`: a sum in another floating-point type, also where it is partial.
#
#     %0 = stablehlo.custom_call @sdy_jax.rounded(%sum) : (tensor<64x64xf32>) -> tensor<64x64xbf16>
#
# A conversion of partial sums rounds each of them, so they are reduced before it. A product in a narrow type does so,
# too: this takes the place of one whose terms are made one after the other, and added up in a wide type.


@emitter(ROUNDED)
def _rounded(local: LocalOp, x: jax.Array) -> jax.Array:
    return x.astype(numpy_dtype(local.op.results[0].dtype))


# `sdy_jax.after`: a value as it is, once another one is there.
#
#     %0 = stablehlo.custom_call @sdy_jax.after(%w, %a) : (tensor<64x64xf32>, tensor<8x64xf32>) -> tensor<64x64xf32>
#
# What is computed of the result is not taken for the same as what was computed of the operand, and does not run
# before the other value is there. Some compilers take XLA's own barrier for the former (`compiler_forms.not_before`).
# Where the order is what matters (`sdy_jax.in_order`), and of other compilers, which drop barriers earlier, the
# result depends on an element of the other value: a comparison that never holds, which nobody knows. That may take as
# long as any other op for each value.

IN_ORDER = "sdy_jax.in_order"
"""The attribute of those that are there for the order of ops."""

AGAIN = "sdy_jax.again"
"""The attribute of those with which something begins to be computed again."""


AWAITED[AFTER] = 1


@emitter(AFTER)
def _after(local: LocalOp, x: jax.Array, *awaited: jax.Array) -> jax.Array:
    if IN_ORDER in local.op.attributes:
        return _selected(x, *awaited)
    return not_before(x, *awaited, otherwise=_selected)


def _selected(x: jax.Array, *awaited: jax.Array) -> jax.Array:
    nevers = [_never(other) for other in awaited if other.size]
    return jnp.where(reduce(jnp.logical_or, nevers), jnp.zeros((), x.dtype), x) if nevers else x


def _never(other: jax.Array) -> jax.Array:
    """A condition that does not hold, and is known once the array is there."""
    first = lax.squeeze(lax.slice(other, (0,) * other.ndim, (1,) * other.ndim), range(other.ndim))
    return jnp.real(first).astype(jnp.float32) < -jnp.inf
