"""Buffers of arrays: reading, writing and adding at a place that is known when they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from sdy_jax.pipelines.explicit_types import zeros_of
from sdy_jax.pipelines.layer_passes import Leaves
from sdy_jax.pipelines.slices import slice_of, with_slice


def at(buffer: Any, *place: Any) -> Any:
    """The part at a place; that at slot 0 where the place is -1, none."""
    return lax.squeeze(_part(buffer, place), range(len(place)))


def put(buffers: Leaves, values: Leaves, is_meant: Any, *place: Any) -> Leaves:
    """Buffers with values at a place, where they are meant."""
    found = []
    for buffer, value in zip(buffers, values, strict=True):
        old = _part(buffer, place)
        found.append(_updated(buffer, jnp.where(is_meant, lax.expand_dims(value, range(len(place))), old), place))
    return found


def added(sums: Leaves, values: Leaves, is_meant: Any, *place: Any) -> Leaves:
    """Sums with values added at a place of them, where they are meant."""
    found = []
    for total, value in zip(sums, values, strict=True):
        old = _part(total, place)
        new = jnp.where(is_meant, value, zeros_of(value)).astype(total.dtype)
        found.append(_updated(total, old + lax.expand_dims(new, range(len(place))), place))
    return found


def stacked(types: Sequence[Any], *counts: int) -> Leaves:
    """Zeros for as many of each type as the counts say."""
    return [zeros_of(each, *counts) for each in types]


def sum_type(dtype: Any) -> Any:
    """The type to sum many arrays of a type in: in types of 16 bits or fewer each sum would round what is added."""
    least = jnp.dtype(jnp.float32)
    return least if dtype.itemsize < least.itemsize else dtype


def sum_of(x: Any) -> Any:
    """Zeros to sum many arrays like `x` in."""
    return zeros_of(x, dtype=sum_type(x.dtype))


def _starts(buffer: Any, place: Sequence[Any]) -> Any:
    """Where a part begins: known along dimensions of size one."""
    own = (jnp.maximum(i, 0) if size > 1 else np.int32(0) for i, size in zip(place, buffer.shape, strict=False))
    return (*own, *[np.int32(0)] * (buffer.ndim - len(place)))


def _is_whole(buffer: Any, place: Sequence[Any]) -> bool:
    return all(size == 1 for size in buffer.shape[: len(place)])


def _part(buffer: Any, place: Sequence[Any]) -> Any:
    if _is_whole(buffer, place):
        return buffer
    sizes = (*[1] * len(place), *buffer.shape[len(place) :])
    return slice_of(buffer, _starts(buffer, place), sizes)


def _updated(buffer: Any, part: Any, place: Sequence[Any]) -> Any:
    return part if _is_whole(buffer, place) else with_slice(buffer, part, _starts(buffer, place))
