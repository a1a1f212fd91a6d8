"""Each sdy collective as lax calls on local arrays, inside a `shard_map` over the refined mesh.

Conventions. `x` is one device's block of a tensor; `axes_per_dim` has one list of axes, major to minor, per dimension;
`mesh` must cut every axis used here (`RefinedMesh.of`). Lists of axes may be in any order and may hold sub-axes. A
local dimension that a collective splits must be divisible by the group: where it is not, the caller pads it first. A
group of devices is numbered by its axes in the order given, first one major, in permutations (`sent`) too. On a mesh
whose devices are in another order than those of the `shard_map`, `mesh` is that order's view (`RefinedMesh.on`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from sdy_jax.errors import InternalError, ShardingError
from sdy_jax.lowering.collectives.on_cpus import computed_apart
from sdy_jax.lowering.collectives.on_tpus import reduced, scattered, scattered_as
from sdy_jax.representation.mesh import AxisRef, axes_size
from sdy_jax.representation.sdy_collectives import SdyCollective
from sdy_jax.representation.sharding import REDUCTION_KINDS, TensorSharding
from sdy_jax.runtime.forms import Forms
from sdy_jax.runtime.mesh import Group, RefinedMesh

AxisSequence = Sequence[AxisRef]
AxesPerDim = Sequence[AxisSequence]


_Collective = Callable[..., jax.Array]

_TWO_BITS = {np.dtype(ml_dtypes.int2): jnp.int8, np.dtype(ml_dtypes.uint2): jnp.uint8}
_FOUR_BITS = {np.dtype(ml_dtypes.int4): jnp.int8, np.dtype(ml_dtypes.uint4): jnp.uint8}


def _as_bytes(carriers: dict[np.dtype[Any], Any]) -> Callable[[_Collective], _Collective]:
    """Lets small integers travel as bytes, of which their bits are the lowest.

    The CPU's collectives of two-bit integers give other numbers and corrupt memory (jax 0.10 and 0.12); lax reduces
    four-bit integers by some kinds only.
    """

    def wrap(collective: _Collective) -> _Collective:
        @functools.wraps(collective)
        def run(x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
            carrier = carriers.get(np.dtype(x.dtype))
            if carrier is None:
                return collective(x, *args, **kwargs)
            return collective(x.astype(carrier), *args, **kwargs).astype(x.dtype)

        return run

    return wrap


# Moving data.


@_as_bytes(_TWO_BITS)
def all_gather(x: jax.Array, axes_per_dim: AxesPerDim, mesh: RefinedMesh) -> jax.Array:
    """Joins the blocks along the given minor axes of each dimension."""
    dims = _cut_dims(axes_per_dim)
    if len(dims) > 1 and mesh.forms.at_once:
        return _gathered_at_once(x, axes_per_dim, dims, mesh)
    for dim in dims:
        x = lax.all_gather(x, **mesh.group(axes_per_dim[dim]), axis=dim, tiled=True)
    return x


def _cut_dims(axes_per_dim: AxesPerDim) -> list[int]:
    return [dim for dim, axes in enumerate(axes_per_dim) if axes]


def _gathered_at_once(x: jax.Array, axes_per_dim: AxesPerDim, dims: Sequence[int], mesh: RefinedMesh) -> jax.Array:
    sizes = [axes_size(axes_per_dim[dim], mesh.mesh) for dim in dims]
    blocks = stacked(x, [axis for dim in dims for axis in axes_per_dim[dim]], mesh)
    return _merge_before(blocks.reshape(*sizes, *x.shape), dims)


@_as_bytes(_TWO_BITS)
def stacked(x: jax.Array, axes: AxisSequence, mesh: RefinedMesh) -> jax.Array:
    """What the devices of the group have, along a new dimension 0."""
    return lax.all_gather(x, **mesh.group(axes), axis=0, tiled=False) if axes else x[None]


@_as_bytes(_TWO_BITS)
def partials_of_chunk(x: jax.Array, axes: AxisSequence, dim: int, mesh: RefinedMesh) -> jax.Array:
    """Along a new dimension `dim`, what each device of the group has of this device's chunk of that dimension."""
    parts = _split(x, dim, axes_size(axes, mesh.mesh))
    return _exchanged(parts, axes, split=dim, concat=dim, mesh=mesh)


def along(x: jax.Array, dim: int, axes: AxisSequence) -> list[AxisSequence]:
    """One list of axes per dimension of `x`: `axes` for `dim`."""
    return [axes if d == dim else () for d in range(x.ndim)]


def all_slice(x: jax.Array, axes_per_dim: AxesPerDim, mesh: RefinedMesh) -> jax.Array:
    """Keeps this device's part along axes appended to each dimension; nothing is sent."""
    for dim, axes in enumerate(axes_per_dim):
        if axes:
            size = _chunk(x, dim, axes_size(axes, mesh.mesh))
            start = lax.mul(mesh.index(axes), np.int32(size))
            starts = [start if d == dim else np.int32(0) for d in range(x.ndim)]
            sizes = [size if d == dim else n for d, n in enumerate(x.shape)]
            x = lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)
    return x


@_as_bytes(_TWO_BITS)
def all_to_all(x: jax.Array, params: Sequence[tuple[AxisSequence, int, int]], mesh: RefinedMesh) -> jax.Array:
    """Moves axes between dimensions: each of `params` is (axes, source dimension, target dimension).

    No dimension occurs twice. The axes are the minor ones of their source and become the minor ones of their target.
    Several moves are one collective over the product of their axes, which sends less than one after the other.
    """
    if len(params) != 1:
        return _combined_all_to_all(x, params, mesh)
    axes, source, target = params[0]
    _chunk(x, target, axes_size(axes, mesh.mesh))
    return _exchanged(x, axes, split=target, concat=source, mesh=mesh)


def _combined_all_to_all(x: jax.Array, params: Sequence[tuple[AxisSequence, int, int]], mesh: RefinedMesh) -> jax.Array:
    # The chunks of all targets are numbered by one leading dimension. After the exchange the digits of that number say
    # where a chunk came from, and each belongs directly before its source dimension.
    if not params:
        return x
    groups = [axes_size(axes, mesh.mesh) for axes, _, _ in params]
    group = [axis for axes, _, _ in params for axis in axes]
    chunks = _chunks(x, [target for _, _, target in params], groups)
    x = _exchanged(chunks, group, split=0, concat=0, mesh=mesh)
    return _merge_before(x.reshape(*groups, *chunks.shape[1:]), [source for _, source, _ in params])


def _chunks(x: jax.Array, dims: Sequence[int], groups: Sequence[int]) -> jax.Array:
    """The chunks of dimensions that are cut into so many each, along one new leading dimension, first one major."""
    for number, (target, count) in enumerate(zip(dims, groups, strict=True)):
        dim = target + number
        x = jnp.moveaxis(_split(x, dim, count), dim, number)
    return x.reshape(math.prod(groups), *x.shape[len(groups) :])


def _exchanged(x: jax.Array, axes: AxisSequence, split: int, concat: int, mesh: RefinedMesh) -> jax.Array:
    return lax.all_to_all(
        computed_apart(x, mesh.forms), **mesh.group(axes), split_axis=split, concat_axis=concat, tiled=True
    )


def _merge_before(x: jax.Array, sources: Sequence[int]) -> jax.Array:
    """Makes leading dimension `i` the major part of dimension `sources[i]` of the others."""
    count = len(sources)
    leading = {source: number for number, source in enumerate(sources)}
    parts = [[leading[dim], count + dim] if dim in leading else [count + dim] for dim in range(x.ndim - count)]
    shape = [math.prod(x.shape[i] for i in part) for part in parts]
    return x.transpose([i for part in parts for i in part]).reshape(shape)


def collective_permute(x: jax.Array, source: TensorSharding, target: TensorSharding, mesh: RefinedMesh) -> jax.Array:
    """Sends every block to the devices that own it under `target`, which splits each dimension as often as `source`."""
    return sent(x, mesh.axis_names, permutation_pairs(source, target, mesh))


def permutation_pairs(source: TensorSharding, target: TensorSharding, mesh: RefinedMesh) -> list[tuple[int, int]]:
    """(sender, receiver) mesh positions, all of them; devices that own their block already keep it."""
    have, want = _owners(source, mesh), _owners(target, mesh)
    if have.keys() != want.keys():
        raise InternalError(f"a permutation from <{source}> to <{target}> changes the number of blocks")
    return sorted(pair for block, owners in have.items() for pair in _match(owners, want[block]))


def _owners(sharding: TensorSharding, mesh: RefinedMesh) -> dict[tuple[int, ...], list[int]]:
    """The mesh positions that hold each block; each term of an unreduced value is a block of its own."""
    lists = (*sharding.axes, *((axis,) for axis in mesh.atoms(sharding.unreduced_axes)))
    blocks = [mesh.on(sharding.mesh).block_indices(axes) for axes in lists]
    owners: dict[tuple[int, ...], list[int]] = {}
    for position, block in enumerate(zip(*blocks, strict=True)):
        owners.setdefault(tuple(map(int, block)), []).append(position)
    return owners or {(): list(range(mesh.mesh.size))}


def _match(senders: list[int], receivers: list[int]) -> list[tuple[int, int]]:
    stay = set(senders) & set(receivers)
    moved = zip((p for p in senders if p not in stay), (p for p in receivers if p not in stay), strict=True)
    return [*((p, p) for p in sorted(stay)), *moved]


@_as_bytes(_TWO_BITS)
def sent(x: jax.Array, names: Sequence[str], pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """`x` sent from device to device; `pairs` are (sender, receiver), numbered along `names`, the first one major.

    Devices that nobody sends to get zeros. `lax.ppermute` numbers devices in the order of the surrounding mesh,
    whatever the order of the names that it is given, so the numbers are translated.
    """
    if not pairs:
        return jnp.zeros_like(x)
    around = jax.sharding.get_abstract_mesh().axis_names
    order = tuple(sorted(names, key=around.index))
    sizes = {name: lax.axis_size(name) for name in names}
    if all(sender == receiver for sender, receiver in pairs) and len(pairs) == math.prod(sizes.values()):
        return x
    numbers = np.arange(math.prod(sizes.values())).reshape([sizes[name] for name in order])
    along = numbers.transpose([order.index(name) for name in names]).ravel().tolist()
    return lax.ppermute(x, order, [(along[sender], along[receiver]) for sender, receiver in pairs])


def permuted(x: jax.Array, axes: AxisSequence, pairs: Sequence[tuple[int, int]], mesh: RefinedMesh) -> jax.Array:
    """`sent` among the devices along `axes`, of which `pairs` are positions; on every mesh."""
    if not mesh.device_permutation:
        return sent(x, mesh.names(axes), pairs)
    groups = mesh.group(axes)["axis_index_groups"] or []
    return sent(x, mesh.axis_names, [(group[u], group[t]) for group in groups for u, t in pairs])


# Reducing data.


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


@_as_bytes(_TWO_BITS | _FOUR_BITS)
def all_reduce(x: jax.Array, axes: AxisSequence, kind: str, mesh: RefinedMesh) -> jax.Array:
    """The reduction of `x` over the devices along `axes`, on each of them."""
    _check_kind(kind, x.dtype)
    if not axes:
        return x
    if x.dtype == jnp.bool_:
        return _bool_from(all_reduce(x.astype(jnp.uint8), axes, _BOOL_AS_UINT8[kind], mesh))
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


@_as_bytes(_TWO_BITS | _FOUR_BITS)
def reduce_scatter(x: jax.Array, axes_per_dim: AxesPerDim, kind: str, mesh: RefinedMesh) -> jax.Array:
    """The reduction of `x` over all the given axes, of which each device keeps its part as in `all_slice`."""
    _check_kind(kind, x.dtype)
    if x.dtype == jnp.bool_:
        return _bool_from(reduce_scatter(x.astype(jnp.uint8), axes_per_dim, _BOOL_AS_UINT8[kind], mesh))
    dims = _cut_dims(axes_per_dim)
    if len(dims) > 1 and kind == "sum" and mesh.forms.at_once:
        return _scattered_at_once(x, axes_per_dim, dims, mesh)
    for dim in dims:
        axes = axes_per_dim[dim]
        _chunk(x, dim, axes_size(axes, mesh.mesh))
        generic = functools.partial(_generic_reduce_scatter, axes=axes, dim=dim, kind=kind, mesh=mesh)
        if kind == "sum":
            parts = axes_size(axes, mesh.mesh)
            native = functools.partial(_sum_scattered, dim=dim, parts=parts, group=mesh.group(axes), forms=mesh.forms)
            x = scattered(x, native, generic)
        else:
            x = generic(x)
    return x


def _sum_scattered(x: jax.Array, dim: int, parts: int, group: Group, forms: Forms) -> jax.Array:
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
    chunks = _chunks(x, dims, [axes_size(axes_per_dim[dim], mesh.mesh) for dim in dims])
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
    if count == 2 or size < count:
        return list(combine([stacked(x, axes, mesh) for x in parts]))
    flat = [jnp.pad(x.reshape(-1), (0, -size % count)) for x in parts]
    chunks = combine([partials_of_chunk(x, axes, 0, mesh) for x in flat])
    return [all_gather(x, [axes], mesh)[:size].reshape(shape) for x in chunks]


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


def _extreme_of_integers(x: jax.Array, axes: AxisSequence, kind: str, mesh: RefinedMesh) -> jax.Array:
    generic = functools.partial(_generic_all_reduce, axes=axes, kind=kind, mesh=mesh)
    return reduced(x, functools.partial(_NATIVE[kind], **mesh.group(axes)), generic)


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


# By what an op of SDY says.

_MOVING: dict[str, Callable[..., jax.Array]] = {"all_gather": all_gather, "all_slice": all_slice}

_COMBINING: dict[str, Callable[..., jax.Array]] = {
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
    "replicated_to_unreduced": replicated_to_unreduced,
    "sharded_to_unreduced": sharded_to_unreduced,
}


def run_collective(said: SdyCollective, x: jax.Array, reduction: str, mesh: RefinedMesh) -> jax.Array:
    """What an op says, done; not for a collective_permute. `reduction` is the kind by which it combines, or is to."""
    if said.kind == "all_to_all":
        return all_to_all(x, said.params, mesh)
    if said.kind in _MOVING:
        return _MOVING[said.kind](x, said.axes, mesh)
    return _COMBINING[said.kind](x, said.axes, reduction, mesh)


# Shared checks and reshapes.


def _check_kind(kind: str, dtype: Any) -> None:
    if kind not in REDUCTION_KINDS:
        raise ShardingError(f"unknown reduction {kind!r}; it is one of {', '.join(REDUCTION_KINDS)}")
    if kind in ("and", "or", "xor") and not (dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.integer)):
        raise ShardingError(
            f"reduction {kind!r} of {np.dtype(dtype).name}; it works on the bits of integers and booleans"
        )


def _chunk(x: jax.Array, dim: int, group: int) -> int:
    """The length of each of `group` parts of a dimension."""
    if x.shape[dim] % group:
        raise InternalError(
            f"dimension {dim} of a block of shape {x.shape} is split into {group} parts without padding"
        )
    return int(x.shape[dim]) // group


def _split(x: jax.Array, dim: int, group: int) -> jax.Array:
    """Dimension `dim` as two: `group` parts, and what is in them."""
    return x.reshape(*x.shape[:dim], group, _chunk(x, dim, group), *x.shape[dim + 1 :])
