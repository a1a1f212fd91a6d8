"""Ops that make arrays out of nothing: constants, iota, random bits. Every device makes its own block."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.mlir import ir

from sdy_jax.ir.graph import Op
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.emission.re_emission import numpy_dtype, re_emit
from sdy_jax.lowering.strategies.registry import rematerializable
from sdy_jax.lowering.strategies.shards import offset, own_block

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
