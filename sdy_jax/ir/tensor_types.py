"""The shapes and element types of values, read off their MLIR types."""

from __future__ import annotations

import re
from functools import lru_cache

from jax.extend.mlir import ir

from sdy_jax.representation.context_cache import cached_in_context


def shape_and_dtype(type_: ir.Type) -> tuple[tuple[int, ...] | None, str]:
    """`Value.shape` and `Value.dtype` of values of a type."""
    return tensor_type(type_)[1:]


@cached_in_context
def tensor_type(type_: ir.Type) -> tuple[ir.Type, tuple[int, ...] | None, str]:
    """The type (one object for all equal ones), its shape and its element type's text."""
    if isinstance(type_, ir.RankedTensorType) and type_.has_static_shape:
        return type_, tuple(type_.shape), str(type_.element_type)
    return type_, None, str(type_)


_BITS = re.compile(r"\d+")


@lru_cache(maxsize=256)
def itemsize(dtype: str) -> float:
    """Bytes per element of an MLIR element type (`f32`: 4, `complex<f64>`: 16, `i1`: 1); 0 for what holds no data."""
    match = _BITS.search(dtype)
    if match is None:
        return 0.0
    size = max(1.0, int(match[0]) / 8)
    return 2 * size if dtype.startswith("complex") else size
