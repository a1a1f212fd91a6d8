"""What emitters share: where a shard lies in its dimension, masking its padding, cutting a block out of a whole array.

A dimension of size N over g shards has blocks of n = ceil(N / g) elements; elements with a global index of N or more
are padding and hold anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sdy_jax.ir.graph import Op
from sdy_jax.ir.meshes import AxisRef, axes_size
from sdy_jax.ir.shardings import OpShardingRule, TensorMapping, TensorSharding
from sdy_jax.lowering.ops.registry import LocalOp


def padding_value(dtype: Any) -> jax.Array:
    """What padding is made of. Any value would do: nothing that is seen depends on it."""
    return jnp.zeros((), dtype)


def lengthened(x: jax.Array, dim: int, count: int) -> jax.Array:
    """An array with padding of `count` elements at the end of a dimension."""
    return lax.pad(x, padding_value(x.dtype), [(0, count if d == dim else 0, 0) for d in range(x.ndim)])


def factors_of_dims(mapping: TensorMapping, dims: Iterable[int]) -> frozenset[int]:
    """The factors of some dimensions of a tensor."""
    return frozenset(f for d in dims for f in mapping[d])


def resized_factors(op: Op, rule: OpShardingRule) -> frozenset[int]:
    """The factors of dimensions along which the result is only a part of the operand, or more than that."""
    sizes = zip(op.operands[0].shape or (), op.results[0].shape or (), strict=True)
    return factors_of_dims(rule.operand_mappings[0], [d for d, (n, m) in enumerate(sizes) if n != m])


def block_shape(shape: Sequence[int], mapping: TensorMapping, shards: Sequence[int]) -> tuple[int, ...]:
    """The local shape of a tensor of global `shape`, given the shards of each factor of its op's rule."""
    counts = (math.prod([shards[f] for f in factors]) for factors in mapping)
    return tuple([-(-n // count) for n, count in zip(shape, counts, strict=True)])


def offset(local: LocalOp, axes: Sequence[AxisRef], block: int) -> jax.Array:
    """The global index at which this device's block of `block` elements starts, an int32 scalar."""
    return local.block_index(axes) * np.int32(block)


def is_leader(local: LocalOp, axes: Sequence[AxisRef]) -> jax.Array:
    """True on the first device along `axes`."""
    return local.block_index(axes) == 0


def has_padding(local: LocalOp, size: int, axes: Sequence[AxisRef]) -> bool:
    return size % axes_size(axes, local.mesh.mesh) != 0


def mask_padding(
    local: LocalOp, operand: int, x: jax.Array, dims: Sequence[int], value: jax.typing.ArrayLike
) -> jax.Array:
    """Local operand `x` with `value` in the padding of `dims`."""
    for dim in dims:
        size, axes = local.op.operands[operand].shape[dim], local.operand_axes(operand, dim)  # type: ignore[index]
        if has_padding(local, size, axes):
            position = lax.broadcasted_iota(jnp.int32, x.shape, dim) + offset(local, axes, x.shape[dim])
            x = jnp.where(position < size, x, value)
    return x


def own_block(local: LocalOp, x: jax.Array, sharding: TensorSharding | None) -> jax.Array:
    """This device's block of an array that every device holds whole."""
    if sharding is None:
        return x
    for dim, axes in enumerate(sharding.axes):
        count = axes_size(axes, local.mesh.mesh)
        if count == 1:
            continue
        block = -(-x.shape[dim] // count)
        short = block * count - x.shape[dim]
        if short:
            x = lengthened(x, dim, short)
        x = lax.dynamic_slice_in_dim(x, offset(local, axes, block), block, dim)
    return x


def clamped(index: jax.Array, highest: int) -> jax.Array:
    """An index of any integer type clamped to [0, highest], as int32 (int64 where the bound needs it).

    Clamped in its own type first: a large unsigned index must not turn negative.
    """
    wide = jnp.int32 if highest <= np.iinfo(np.int32).max else jnp.int64
    bound = min(highest, jnp.iinfo(index.dtype).max)
    return lax.clamp(lax.full_like(index, 0), index, lax.full_like(index, bound)).astype(wide)
