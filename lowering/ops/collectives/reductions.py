"""The collectives that combine blocks: reductions of all kinds, and shapes in which a scatter fills the lanes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sdy_jax.base.errors import ShardingError
from sdy_jax.ir.meshes import axes_size
from sdy_jax.ir.shardings import REDUCTION_KINDS
from sdy_jax.lowering.ops.collectives.movement import (
    FOUR_BITS,
    TWO_BITS,
    AxesPerDim,
    AxisSequence,
    all_gather,
    as_bytes,
    chunk,
    chunks_of,
    cut_dims,
    far_first,
    partials_of_chunk,
    stacked,
)
from sdy_jax.lowering.targets.rates import LANES, SUBLANES
from sdy_jax.lowering.targets.target import where_forms
from sdy_jax.runtime.meshes import Forms, RefinedMesh, ReplicaGroups

# Shapes in which what is scattered fills the lanes of tiles, and is sent as it is made.
#
# An array lies in tiles, with one of its dimensions in their 128 lanes, and a scatter sends it with the scattered
# dimension before the others. The gradient of a weight with heads, such as [512, 3, 8, 64] that is scattered along
# its first dimension, would fill half of the lanes with its last one. So XLA for TPUs has a product make it with the
# first dimension in lanes, and copies all of it before it is sent; or it sends more: an all-reduce of [512, 8, 64],
# of which each device keeps a part. As matrices, [512, 1536] and [512, 512], both are made as they are sent. On v5e
# that is 55 us, not 76, for the first one with its product and the update of a weight (libtpu 0.0.52, 2026-11).
#
# It scatters the first dimension, as it is, where rows are whole tiles that fall into pieces. Where they do not, as of
# the 1002 = 6 * 167 tiles of a vocabulary of 128,256, the parts are a dimension of their own: bfloat16[4096, 128256] in
# 8 and 8 parts takes 35 ms so, and 64 as an all-reduce, [512, 64] in 4 and 4 parts 11.3 us and 18.6 (libtpu 0.0.52).
# Of others that takes as long, or 0.88 of it where XLA would have padded them; but an 8B step on 256 chips takes 1.02,
# as products are fused with other ops (2026-11).
#
# Of a sum that is scattered along another dimension it often makes an all-reduce, of which each device keeps a part:
# where parts are no whole tiles, or where it puts another dimension in lanes than the last. With a part, and all that
# is behind it, as one last dimension it never does: it sends halves of a part around both ways of a ring, in whole
# lanes, so a part has to be a number of tiles, of two bytes an even one. Where it is not, the parts are a dimension of
# their own. In 8 parts, with the product that makes it, bfloat16[64, 8, 128, 4] along its second dimension takes 20.6
# us, and 26.5 as it is; [4096, 1024] along its last one 181, not 274; [16, 32, 8, 64] along its third 22.5, not 37.
# What has up to four rows in front stays a scatter with the parts a dimension of their own and nothing joined:
# float32[4, 64, 64] takes 10.8 us so, and 16.1 with all behind as one. Where the last dimension fills lanes, and rows
# of it the tiles of a part, rows are not moved: [64, 8, 16, 128] along its second one takes 25 us so, and 39 with all
# behind it as one (`scripts/bench_collectives`, libtpu 0.0.51, v5e:4x4).

LEAST_BYTES = 2**20
"""What is scattered as a matrix at least: half of the bytes of an all-reduce are saved, and a latency is lost where XLA
would have made one of several. Measured (2026-11, by the compiler for v5e): scanned layers whose products have 256 KiB
take 1.01 of the time so."""

LEAST_MOVED = 2**16
"""What is sent in another form at least. Measured (2026-11, libtpu 0.0.51, v5e:2x4, `scripts/bench_collectives`): with
the product that makes it, a sum of 64 to 512 KiB takes 0.6 to 1.1 of its time as it is, and half of the bytes where
that is an all-reduce; one of 4 to 8 KiB 1.0 to 1.8."""

_COMPACT = SUBLANES // 2
"""Rows that lie in tiles of fewer sublanes. Measured (2026-11, as above): XLA scatters matrices of 6 rows along their
columns, and all-reduces those of 4."""


def as_rows(shape: Sequence[int], itemsize: int, dim: int, parts: int, forms: Forms) -> bool:
    """Whether an array that is scattered in so many parts along a dimension is sent as rows of all that is behind it,
    which is a form where there are lanes: the last dimension fills none, a part is no number of them, and rows make
    tiles."""
    part, behind = shape[dim] // parts, [size for size in shape[dim + 1 :] if size > 1]
    if not forms.in_lanes or len(behind) < 2 or math.prod(shape) * itemsize < LEAST_BYTES:
        return False
    return bool(behind[-1] % LANES and part % _lanes(itemsize)) and part % SUBLANES == 0


_MOST_TILES = 152
"""The tiles of a row in a piece of it. Measured (2026-11, libtpu 0.0.52, v5e:8x8): XLA scatters rows of 151, 302, and
1000 tiles, and all-reduces those of 157, 314, and 1002 = 6 * 167."""


class ScatterForm(NamedTuple):
    """How an array is scattered: in which shape, along which dimension, and whether that is in parts (`is_tiled`), or
    has one element per part."""

    shape: tuple[int, ...]
    dim: int
    is_tiled: bool = True


def scattered_as(shape: Sequence[int], itemsize: int, dim: int, parts: int, forms: Forms) -> ScatterForm:
    """How an array without dimensions of size 1 is sent that is scattered in so many parts along a dimension."""
    as_it_is = ScatterForm(tuple(shape), dim)
    if not forms.in_lanes:
        return as_it_is
    if as_rows(shape, itemsize, dim, parts, forms):
        shape = (*shape[: dim + 1], math.prod(shape[dim + 1 :]))
        if dim:
            return ScatterForm(shape, dim)
    if dim == 0:
        is_tiled = len(shape) == 1 or _falls_into_pieces(shape[-1])
        return ScatterForm(tuple(shape) if is_tiled else (parts, shape[0] // parts, *shape[1:]), 0, is_tiled)
    before, rows = math.prod(shape[:dim]), math.prod(shape[dim:-1])
    if dim < len(shape) - 1 and shape[-1] % LANES == 0 and rows // parts % _packed(itemsize) == 0:
        return ScatterForm((before, rows, shape[-1]), 1)
    part = math.prod(shape[dim:]) // parts
    # XLA makes kernels of convolutions with another dimension in front: a resnet's step takes 1.02 so (libtpu 0.0.51).
    is_kernel = dim == len(shape) - 1 > 1
    if is_kernel or math.prod(shape) * itemsize < LEAST_MOVED:
        return as_it_is
    if before <= _COMPACT:
        return ScatterForm((*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :]), dim, is_tiled=False)
    if part % _lanes(itemsize) == 0:
        return ScatterForm((before, parts * part), 1)
    return ScatterForm((before, parts, part), 1, is_tiled=False)


def _falls_into_pieces(lanes: int) -> bool:
    """Whether a row of so many elements is a number of tiles without a prime factor above those of a piece."""
    tiles, rest = divmod(lanes, LANES)
    for factor in range(2, _MOST_TILES):
        while tiles and tiles % factor == 0:
            tiles //= factor
    return not rest and tiles == 1


def _lanes(itemsize: int) -> int:
    """The lanes of which parts are made: those of two bytes fill them in pairs."""
    return max(4 // itemsize, 1) * LANES


def _packed(itemsize: int) -> int:
    """The rows of a tile: elements of two bytes share a sublane."""
    return 4 * SUBLANES // itemsize


# The collectives that combine blocks: reductions of all kinds, natively or by all devices exchanging theirs.

_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lax.add,
    "max": lax.max,
    "min": lax.min,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "product": lax.mul,
}

_NATIVE: dict[str, Callable[..., jax.Array]] = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}

# What TPUs have no 64-bit registers for, their compiler splits into 32-bit halves, but not in every collective
# (libtpu 0.0.52): extremes of integers, and sums of floats and complex numbers where each device keeps a part.
_REDUCED_BY_PARTS = frozenset(map(np.dtype, (jnp.int64, jnp.uint64)))
_SCATTERED_BY_PARTS = frozenset(map(np.dtype, (jnp.float64, jnp.complex64, jnp.complex128)))

# Sums of unsigned integers of 64 bits travel as signed ones, which wrap alike: libtpu takes no others (0.0.51).
_SUMMED_AS = {np.dtype(jnp.uint64): jnp.int64}

# Booleans travel as uint8, whose lowest bit is the answer: sums wrap at 256, which keeps it.
_BOOL_AS_UINT8 = {
    "sum": "max",
    "or": "max",
    "max": "max",
    "product": "min",
    "and": "min",
    "min": "min",
    "xor": "sum",
}


@as_bytes(TWO_BITS | FOUR_BITS)
def all_reduce(x: jax.Array, axes: AxisSequence, kind: str, mesh: RefinedMesh) -> jax.Array:
    """The reduction of `x` over the devices along `axes`, on each of them."""
    _check_kind(kind, x.dtype)
    if not axes:
        return x
    if x.dtype == jnp.bool_:
        return _bool_from(all_reduce(x.astype(jnp.uint8), axes, _BOOL_AS_UINT8[kind], mesh))
    if kind == "sum" and x.dtype in _SUMMED_AS:
        return all_reduce(x.astype(_SUMMED_AS[x.dtype]), axes, kind, mesh).astype(x.dtype)
    if not has_native_all_reduce(kind, x.dtype):
        return _generic_all_reduce(x, axes, kind, mesh)
    if kind == "sum":
        return lax.psum(x, **mesh.group(axes))
    extreme = _extreme_of_integers if jnp.issubdtype(x.dtype, jnp.integer) else _extreme_of_floats
    return extreme(x, axes, kind, mesh)


def has_native_all_reduce(kind: str, dtype: Any) -> bool:
    """Whether an `all_reduce` of a kind is one collective, not one made of moves; booleans travel as integers."""
    dtype = np.dtype(dtype)
    if kind == "sum" or dtype == np.bool_:
        return True
    return kind in _NATIVE and (jnp.issubdtype(dtype, jnp.integer) or dtype in _KEYS)


@as_bytes(TWO_BITS | FOUR_BITS)
def reduce_scatter(x: jax.Array, axes_per_dim: AxesPerDim, kind: str, mesh: RefinedMesh) -> jax.Array:
    """The reduction of `x` over all the given axes, of which each device keeps its part as in `all_slice`."""
    _check_kind(kind, x.dtype)
    if x.dtype == jnp.bool_:
        return _bool_from(reduce_scatter(x.astype(jnp.uint8), axes_per_dim, _BOOL_AS_UINT8[kind], mesh))
    if kind == "sum" and x.dtype in _SUMMED_AS:
        return reduce_scatter(x.astype(_SUMMED_AS[x.dtype]), axes_per_dim, kind, mesh).astype(x.dtype)
    dims = cut_dims(axes_per_dim)
    if len(dims) > 1 and kind == "sum" and mesh.forms.at_once:
        return _scattered_at_once(x, axes_per_dim, dims, mesh)
    for dim in reversed(far_first(axes_per_dim, mesh)):
        axes = axes_per_dim[dim]
        chunk(x, dim, axes_size(axes, mesh.mesh))
        generic = functools.partial(_generic_reduce_scatter, axes=axes, dim=dim, kind=kind, mesh=mesh)
        if kind == "sum":
            parts = axes_size(axes, mesh.mesh)
            native = functools.partial(_sum_scattered, dim=dim, parts=parts, group=mesh.group(axes), forms=mesh.forms)
            x = _native_unless(_SCATTERED_BY_PARTS, x, native, generic)
        else:
            x = generic(x)
    return x


def _sum_scattered(x: jax.Array, dim: int, parts: int, group: ReplicaGroups, forms: Forms) -> jax.Array:
    """The sum of `x` over a group, of which each of so many members keeps its part of `dim`.

    Other dimensions of size 1, such as that of a device's only head, are left out meanwhile: libtpu does not
    compile some reduce-scatters that have one (2026-11, `AllReduceScatterFusion not implemented for 2nd-minor
    compaction`).
    """
    before = [size for size in x.shape[:dim] if size != 1]
    shape = [*before, x.shape[dim], *(size for size in x.shape[dim + 1 :] if size != 1)]
    scattered = [*x.shape[:dim], x.shape[dim] // parts, *x.shape[dim + 1 :]]
    sent = scattered_as(shape, x.dtype.itemsize, len(before), parts, forms)
    found = lax.psum_scatter(x.reshape(sent.shape), **group, scatter_dimension=sent.dim, tiled=sent.is_tiled)
    return found.reshape(scattered)


def _scattered_at_once(x: jax.Array, axes_per_dim: AxesPerDim, dims: Sequence[int], mesh: RefinedMesh) -> jax.Array:
    chunks = chunks_of(x, dims, [axes_size(axes_per_dim[dim], mesh.mesh) for dim in dims])
    group = mesh.group([axis for dim in dims for axis in axes_per_dim[dim]])
    return lax.psum_scatter(chunks, **group, scatter_dimension=0, tiled=False)


def replicated_to_unreduced(x: jax.Array, axes: AxisSequence, kind: str, mesh: RefinedMesh) -> jax.Array:
    """`x` on the first device along `axes`, the identity of `kind` on the others; nothing is sent."""
    _check_kind(kind, x.dtype)
    if not axes:
        return x
    return jnp.where(mesh.index(axes) == 0, x, identity(kind, x.dtype))


def sharded_to_unreduced(x: jax.Array, axes_per_dim: AxesPerDim, kind: str, mesh: RefinedMesh) -> jax.Array:
    """Each block in its place among identities of `kind`, which joins them over the given axes; nothing is sent."""
    _check_kind(kind, x.dtype)
    for dim, axes in enumerate(axes_per_dim):
        if not axes:
            continue
        size = x.shape[dim]
        shape = (*x.shape[:dim], size * axes_size(axes, mesh.mesh), *x.shape[dim + 1 :])
        start = mesh.index(axes) * size
        x = lax.dynamic_update_slice_in_dim(jnp.full(shape, identity(kind, x.dtype), x.dtype), x, start, axis=dim)
    return x


def combined(kind: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Two arrays, or a scalar and an array, element by element."""
    _check_kind(kind, y.dtype)
    return _COMBINE[kind](jnp.broadcast_to(x, y.shape), y)


def identity(kind: str, dtype: Any) -> np.ndarray:
    """The scalar of `dtype` that changes nothing when combined by `kind`."""
    dtype = np.dtype(dtype)
    _check_kind(kind, dtype)
    if kind in ("sum", "or", "xor"):
        return np.zeros((), dtype)
    if kind == "product":
        return np.ones((), dtype)
    if dtype == np.bool_:
        return np.array(kind != "max")
    if kind == "and":
        return np.invert(np.zeros((), dtype)).astype(dtype)  # four-bit integers become bytes
    return _lowest(dtype) if kind == "max" else _highest(dtype)


def _lowest(dtype: np.dtype[Any]) -> np.ndarray:
    if jnp.issubdtype(dtype, jnp.integer):
        return np.array(jnp.iinfo(dtype).min, dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.array(complex(-math.inf, -math.inf), dtype)
    infinite = np.array(-math.inf).astype(dtype)
    # Some eight-bit floats have no infinity.
    return infinite if np.isinf(infinite.astype(np.float32)) else np.array(jnp.finfo(dtype).min).astype(dtype)


def _highest(dtype: np.dtype[Any]) -> np.ndarray:
    if jnp.issubdtype(dtype, jnp.integer):
        return np.array(jnp.iinfo(dtype).max, dtype)
    return np.negative(_lowest(dtype))


Combine = Callable[[Sequence[jax.Array]], Sequence[jax.Array]]
"""Reduces dimension 0 of several arrays together, in its order."""


def all_reduce_by(
    parts: Sequence[jax.Array], axes: AxisSequence, combine: Combine, mesh: RefinedMesh
) -> list[jax.Array]:
    """Reduces several arrays of one shape together over the devices along `axes`, in their order, by any function.

    Gathers all partial results, or (less to send) reduces one chunk per device and gathers those.
    """
    shape, size, count = parts[0].shape, parts[0].size, axes_size(axes, mesh.mesh)
    if not axes:
        return list(parts)
    if gathers_partials(size, count):
        return list(combine([stacked(x, axes, mesh) for x in parts]))
    flat = [jnp.pad(x.reshape(-1), (0, -size % count)) for x in parts]
    chunks = combine([partials_of_chunk(x, axes, 0, mesh) for x in flat])
    return [all_gather(x, [axes], mesh)[:size].reshape(shape) for x in chunks]


_FEW = 256
"""Guessed: that many elements are received sooner than a second collective begins: 2 KiB at most, which a v5e receives
in 0.05 us, where a collective takes 1 us or more. The greedy tokens of a batch are so few."""


def gathers_partials(size: int, count: int) -> bool:
    """Whether `all_reduce_by` gathers all partial results, of so many elements, on each of so many devices."""
    return count == 2 or size < count or (count - 1) * size <= _FEW


def _generic_all_reduce(x: jax.Array, axes: AxisSequence, kind: str, mesh: RefinedMesh) -> jax.Array:
    """Any kind from moves alone."""
    return all_reduce_by([x], axes, lambda partials: [_reduce(partials[0], 0, kind)], mesh)[0]


def _generic_reduce_scatter(x: jax.Array, axes: AxisSequence, dim: int, kind: str, mesh: RefinedMesh) -> jax.Array:
    """As many bytes as a reduce-scatter sends."""
    return _reduce(partials_of_chunk(x, axes, dim, mesh), dim, kind)


def _reduce(partials: jax.Array, dim: int, kind: str) -> jax.Array:
    return lax.reduce(partials, identity(kind, partials.dtype), _COMBINE[kind], (dim,))


# The integer type whose order is that of the floats' bits. Backends differ on NaN in an all-reduce of floats (the CPU's
# drops it, jax 0.10 and 0.12), while `max` and `min` propagate it; as integers it is the extreme of the order.
_KEYS = {
    np.dtype(jnp.float16): jnp.int16,
    np.dtype(jnp.bfloat16): jnp.int16,
    np.dtype(jnp.float32): jnp.int32,
    np.dtype(jnp.float64): jnp.int64,
}


def _native_unless(
    lacking: frozenset[np.dtype[Any]],
    x: jax.Array,
    native: Callable[[jax.Array], jax.Array],
    of_moves: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """By lax's collective; for some types by one made of moves, where 64 bits are halves."""
    if x.dtype not in lacking:
        return native(x)
    return where_forms(lambda forms: forms.in_halves, x, then=of_moves, otherwise=native)


def _extreme_of_integers(x: jax.Array, axes: AxisSequence, kind: str, mesh: RefinedMesh) -> jax.Array:
    generic = functools.partial(_generic_all_reduce, axes=axes, kind=kind, mesh=mesh)
    return _native_unless(_REDUCED_BY_PARTS, x, functools.partial(_NATIVE[kind], **mesh.group(axes)), generic)


def _extreme_of_floats(x: jax.Array, axes: AxisSequence, kind: str, mesh: RefinedMesh) -> jax.Array:
    key = _KEYS[x.dtype]
    limits = jnp.iinfo(key)
    nan = np.array(limits.max if kind == "max" else limits.min, key)
    ordered = jnp.where(jnp.isnan(x), nan, _swap_negatives(lax.bitcast_convert_type(x, key)))
    return lax.bitcast_convert_type(_swap_negatives(_extreme_of_integers(ordered, axes, kind, mesh)), x.dtype)


def _swap_negatives(bits: jax.Array) -> jax.Array:
    """Sign and magnitude to two's complement order, and back: the bits of negative numbers below the sign flip."""
    return jnp.where(bits < 0, bits ^ np.array(jnp.iinfo(bits.dtype).max, bits.dtype), bits)


def _bool_from(x: jax.Array) -> jax.Array:
    return (x & 1).astype(jnp.bool_)


def _check_kind(kind: str, dtype: Any) -> None:
    if kind not in REDUCTION_KINDS:
        raise ShardingError(f"unknown reduction {kind!r}; it is one of {', '.join(REDUCTION_KINDS)}")
    if kind in ("and", "or", "xor") and not (dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.integer)):
        raise ShardingError(
            f"reduction {kind!r} of {np.dtype(dtype).name}; it works on the bits of integers and booleans"
        )
