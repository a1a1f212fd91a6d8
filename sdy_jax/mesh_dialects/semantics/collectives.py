"""Collectives on local arrays: reductions, data movement in a group, send and recv, and halos of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sdy_jax.base.errors import ShardingError
from sdy_jax.ir.meshes import AxisRef, axes_size
from sdy_jax.lowering.ops.collectives import movement, reductions
from sdy_jax.lowering.ops.re_emission import mlir_name
from sdy_jax.mesh_dialects.semantics.grid import (
    AxisIndices,
    Coordinate,
    Grid,
    check_axes,
    check_device,
    check_dimension_of,
    check_element,
    check_halos,
    check_shift_axis,
    group_device,
    only_on,
    op,
    peers,
    permute,
    piece_size,
    shifted,
)
from sdy_jax.runtime.meshes import RefinedMesh

# Reductions over a replica group. The inputs are converted to the result's element type, then reduced.
#
# Integers wrap. Of booleans, sum, max and bitwise_or are "or"; product, min and bitwise_and are "and"; bitwise_xor is
# the parity. Of floats, max and min are NaN if one input is.

# The dialect's reduction kinds, and the kind of the collective that computes each; an average is a sum, divided.
KINDS = {
    "sum": "sum",
    "max": "max",
    "min": "min",
    "product": "product",
    "average": "sum",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
}


@op
def all_reduce(grid: Grid, x: jax.Array, axes: AxisIndices, reduction: str = "sum", dtype: Any = None) -> jax.Array:
    """The reduction of the group's inputs, on every device of the group."""
    check_axes(grid, axes)
    return combined(grid, x, grid.refs(axes), reduction, dtype)


@op
def reduce(
    grid: Grid, x: jax.Array, axes: AxisIndices, root: Sequence[Coordinate], reduction: str = "sum", dtype: Any = None
) -> jax.Array:
    """The reduction of the group's inputs on the root; zeros on the other devices."""
    check_axes(grid, axes)
    check_device(grid, axes, root, "root")
    return only_on(grid, axes, root, combined(grid, x, grid.refs(axes), reduction, dtype))


@op
def reduce_scatter(
    grid: Grid, x: jax.Array, axes: AxisIndices, scatter_axis: int, reduction: str = "sum", dtype: Any = None
) -> jax.Array:
    """The device's piece, along `scatter_axis`, of the reduction of the group's inputs: `n -> n/g`."""
    check_axes(grid, axes)
    check_dimension_of(x, scatter_axis, "scatter_axis")
    piece_size(grid, x, scatter_axis, axes)
    return combined_pieces(grid, x, movement.along(x, scatter_axis, grid.refs(axes)), reduction, dtype)


def combined(grid: Grid, x: jax.Array, axes: tuple[AxisRef, ...], reduction: str, dtype: Any = None) -> jax.Array:
    """`all_reduce` without the checks: `axes` must be axes of the mesh, each once."""
    x = converted(x, reduction, dtype)
    kind = KINDS[reduction]
    if kind in ("max", "min") and jnp.issubdtype(x.dtype, jnp.floating):
        return _extreme(x, axes, kind, grid.mesh)
    return _finished(reductions.all_reduce(x, axes, kind, grid.mesh), reduction, axes_size(axes, grid.mesh.mesh))


def combined_pieces(
    grid: Grid, x: jax.Array, axes_per_dim: movement.AxesPerDim, reduction: str, dtype: Any = None
) -> jax.Array:
    """`reduce_scatter` without the checks: the axes of each dimension must divide it."""
    x = converted(x, reduction, dtype)
    pieces = reductions.reduce_scatter(x, axes_per_dim, KINDS[reduction], grid.mesh)
    return _finished(pieces, reduction, axes_size(chain.from_iterable(axes_per_dim), grid.mesh.mesh))


def converted(x: jax.Array, reduction: str, dtype: Any) -> jax.Array:
    """The input in the element type of the result, in which the reduction computes.

    Raises:
        ShardingError: an unknown kind, a type that the kind does not work on, or one that jax would make smaller.
    """
    check_kind(reduction)
    wanted = np.dtype(x.dtype if dtype is None else dtype)
    if jax.dtypes.canonicalize_dtype(wanted) != wanted:
        raise ShardingError(f"result element type {mlir_name(wanted)} needs jax_enable_x64")
    if jnp.iscomplexobj(x) and not jnp.issubdtype(wanted, jnp.complexfloating):
        raise ShardingError(f"input element type {mlir_name(x.dtype)} does not convert to {mlir_name(wanted)}")
    check_element("reduction", reduction, mlir_name(wanted))
    return x.astype(wanted)


def check_kind(reduction: str) -> None:
    """Raises `ShardingError` unless `reduction` is a kind that has a computation."""
    if reduction == "generic":
        raise ShardingError("reduction = generic names no computation that can be run")
    if reduction not in KINDS:
        raise ShardingError(f"attribute reduction must be one of {', '.join(KINDS)}; got {reduction!r}")


_WIDE = 32
"""Given: bits of an integer that counts the devices of any group."""


def _finished(x: jax.Array, reduction: str, group: int) -> jax.Array:
    """An average from its sum; integers are divided truncating toward zero."""
    if reduction != "average":
        return x
    if jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits < _WIDE:  # which the group may be too large for
        return lax.div(x.astype(jnp.int32), jnp.int32(group)).astype(x.dtype)
    return lax.div(x, jnp.full_like(x, group))


@partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _extreme(x: jax.Array, axes: tuple[AxisRef, ...], kind: str, mesh: RefinedMesh) -> jax.Array:
    """The maximum or minimum over the group, of floats. Its derivative is our own: jax has none of this collective."""
    return reductions.all_reduce(x, axes, kind, mesh)


@_extreme.defjvp
def _extreme_jvp(
    axes: tuple[AxisRef, ...],
    kind: str,
    mesh: RefinedMesh,
    primals: tuple[jax.Array],
    tangents: tuple[jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Inputs that equal the extreme value share its derivative evenly, as in a local maximum."""
    (x,), (tangent,) = primals, tangents
    found = _extreme(x, axes, kind, mesh)
    chosen = (x == found).astype(x.dtype)
    count = reductions.all_reduce(chosen, axes, "sum", mesh)
    return found, reductions.all_reduce(chosen / count * tangent, axes, "sum", mesh)


# Ops that move data between the devices of a group: gathers, slices, exchanges, broadcasts, shifts.


@op
def all_gather(grid: Grid, x: jax.Array, axes: AxisIndices, gather_axis: int) -> jax.Array:
    """The inputs of the group joined along `gather_axis`: `n -> n*g`."""
    check_axes(grid, axes)
    check_dimension_of(x, gather_axis, "gather_axis")
    return movement.all_gather(x, movement.along(x, gather_axis, grid.refs(axes)), grid.mesh)


@op
def all_slice(grid: Grid, x: jax.Array, axes: AxisIndices, slice_axis: int) -> jax.Array:
    """The device's piece of its own input along `slice_axis`: `n -> n/g`. Nothing is sent."""
    check_axes(grid, axes)
    check_dimension_of(x, slice_axis, "slice_axis")
    piece_size(grid, x, slice_axis, axes)
    return movement.all_slice(x, movement.along(x, slice_axis, grid.refs(axes)), grid.mesh)


@op
def all_to_all(grid: Grid, x: jax.Array, axes: AxisIndices, split_axis: int, concat_axis: int) -> jax.Array:
    """Piece j along `split_axis` of device i becomes piece i along `concat_axis` of device j."""
    check_axes(grid, axes)
    check_dimension_of(x, split_axis, "split_axis")
    check_dimension_of(x, concat_axis, "concat_axis")
    piece_size(grid, x, split_axis, axes)
    if not axes:
        return x
    return movement.all_to_all(x, [(grid.refs(axes), concat_axis, split_axis)], grid.mesh)


@op
def broadcast(grid: Grid, x: jax.Array, axes: AxisIndices, root: Sequence[Coordinate]) -> jax.Array:
    """The root's input, on every device of the group.

    A sum in which the inputs of all others are zero: it can be differentiated, and only turns -0.0 into 0.0.
    """
    check_axes(grid, axes)
    check_device(grid, axes, root, "root")
    return reductions.all_reduce(only_on(grid, axes, root, x), grid.refs(axes), "sum", grid.mesh)


@op
def gather(grid: Grid, x: jax.Array, axes: AxisIndices, gather_axis: int, root: Sequence[Coordinate]) -> jax.Array:
    """On the root, the inputs of the group joined along `gather_axis`; zeros elsewhere."""
    check_axes(grid, axes)
    check_dimension_of(x, gather_axis, "gather_axis")
    check_device(grid, axes, root, "root")
    joined = movement.all_gather(x, movement.along(x, gather_axis, grid.refs(axes)), grid.mesh)
    return only_on(grid, axes, root, joined)


@op
def scatter(grid: Grid, x: jax.Array, axes: AxisIndices, scatter_axis: int, root: Sequence[Coordinate]) -> jax.Array:
    """Each device's piece along `scatter_axis` of the root's input: `n -> n/g`.

    All devices send pieces and keep the root's, which moves 1/g of what a broadcast would.
    """
    check_axes(grid, axes)
    check_dimension_of(x, scatter_axis, "scatter_axis")
    check_device(grid, axes, root, "root")
    piece = piece_size(grid, x, scatter_axis, axes)
    if not axes:
        return x
    group = grid.group_size(axes)
    pieces = x.reshape(*x.shape[:scatter_axis], group, piece, *x.shape[scatter_axis + 1 :])
    pieces = jnp.moveaxis(pieces, scatter_axis, 0)
    received = movement.all_to_all(pieces, [(grid.refs(axes), 0, 0)], grid.mesh)
    return entry(received, group_device(grid, axes, root))


@op
def shift(grid: Grid, x: jax.Array, axes: AxisIndices, shift_axis: int, offset: int, rotate: bool = False) -> jax.Array:
    """The input of the device `offset` coordinates lower along `shift_axis`; zeros where there is none.

    With `rotate` the coordinates are those of a ring. Other axes of the list have no influence.
    """
    check_axes(grid, axes)
    check_shift_axis(grid, axes, shift_axis)
    if not rotate:
        return shifted(grid, x, (shift_axis,), offset)
    size = grid.sizes[shift_axis]
    return permute(grid, x, (shift_axis,), [(i, (i + offset) % size) for i in range(size)])


def entry(stack: jax.Array, index: int | jax.Array) -> jax.Array:
    """Entry `index` of dimension 0; zeros if it is -1."""
    found = lax.dynamic_index_in_dim(stack, jnp.maximum(index, 0), 0, keepdims=False)
    return jnp.where(index >= 0, found, jnp.zeros_like(found))


# send and recv, which are one op on a device: what it sends, to whom, and from whom it receives.


@op
def send_recv(
    grid: Grid,
    x: jax.Array,
    axes: AxisIndices,
    source: Sequence[Coordinate] | None,
    destination: Sequence[Coordinate],
) -> jax.Array:
    """The input of the device `source`, if that one's `destination` is this device; else zeros.

    Coordinates may differ from device to device. Unless they are known for each before the run, all inputs of the group
    are gathered. Without a source, a device receives from the one whose destination it is; that must be known.
    """
    check_axes(grid, axes)
    check_device(grid, axes, destination, "destination")
    if source is None:
        return _received(grid, x, axes, group_device(grid, axes, destination) if axes else 0)
    check_device(grid, axes, source, "source")
    if not axes:
        return x
    sender, receiver = group_device(grid, axes, source), group_device(grid, axes, destination)
    if isinstance(sender, int) and isinstance(receiver, int):
        return permute(grid, x, axes, [(sender, receiver)])
    if not isinstance(sender, jax.Array) and not isinstance(receiver, jax.Array):
        return permute(grid, x, range(grid.rank), known_pairs(grid, axes, sender, receiver))
    return _exchanged(grid, x, axes, _here(grid, sender), _here(grid, receiver))


def _received(grid: Grid, x: jax.Array, axes: AxisIndices, receiver: int | np.ndarray | jax.Array) -> jax.Array:
    """What each device gets of what is sent to it.

    Raises:
        ShardingError: it is not known before the run who sends to a device, or several do.
    """
    if grid.group_size(axes) == 1:
        return x
    if isinstance(receiver, jax.Array):
        raise ShardingError("recv needs a source: destinations that are computed in the run do not say who sends")
    devices = peers(grid, axes)
    pairs = [(device, int(devices[device, to])) for device, to in _known_pairs(grid, receiver) if to >= 0]
    receivers = [number for _, number in pairs]
    doubly = next((number for number in receivers if receivers.count(number) > 1), None)
    if doubly is not None:
        senders = [sender for sender, number in pairs if number == doubly]
        raise ShardingError(f"recv needs a source: devices {', '.join(map(str, senders))} all send to device {doubly}")
    return permute(grid, x, range(grid.rank), pairs)


def _known_pairs(grid: Grid, index: int | np.ndarray) -> Iterable[tuple[int, int]]:
    """A group index that is known before the run, for each device."""
    return enumerate(np.broadcast_to(index, grid.group_size(range(grid.rank))).tolist())


def known_pairs(
    grid: Grid, axes: AxisIndices, senders: int | np.ndarray, receivers: int | np.ndarray
) -> list[tuple[int, int]]:
    """Who sends to whom, by linear index, of group indices that are known for each device."""
    devices, meant = peers(grid, axes), dict(_known_pairs(grid, receivers))
    named = [(int(devices[device, by]), device) for device, by in _known_pairs(grid, senders) if by >= 0]
    return [(by, device) for by, device in named if meant[by] >= 0 and devices[by, meant[by]] == device]


def _here(grid: Grid, index: int | np.ndarray | jax.Array) -> int | jax.Array:
    """The entry of the device that runs this."""
    return jnp.asarray(index)[grid.group_index(range(grid.rank))] if isinstance(index, np.ndarray) else index


def _exchanged(
    grid: Grid, x: jax.Array, axes: AxisIndices, sender: int | jax.Array, receiver: int | jax.Array
) -> jax.Array:
    sent = (x, jnp.asarray(receiver, jnp.int32))
    inputs, receivers = (movement.stacked(each, grid.refs(axes), grid.mesh) for each in sent)
    chosen = receivers[jnp.maximum(sender, 0)]
    meant = (sender >= 0) & (chosen == grid.group_index(axes))
    found = entry(inputs, sender)
    return jnp.where(meant, found, jnp.zeros_like(found))


# update_halo: the borders of blocks, which repeat what the neighbouring devices own.
#
# Along a split dimension a buffer is `lo + core + hi` long; the cells `[lo, lo + core)` are the device's own. The
# halo cells get what the devices before and after it own, also over corners. Where there is no such device, they keep
# what they hold. Sizes of halos may be computed in the run, where they are the same on all devices: whole buffers are
# sent then, instead of strips.

Halo = tuple[int, int]
Size = int | jax.Array
"""The size of a halo that may be known in the run only."""
S = TypeVar("S", int, Size)


@op
def update_halo(grid: Grid, x: jax.Array, split_axes: Sequence[AxisIndices], halo_sizes: Sequence[Size]) -> jax.Array:
    """Fills the halos; `halo_sizes` has two numbers per dimension whose list of axes is not empty."""
    check_halos(grid, x.shape, split_axes, halo_sizes)
    split = [dim for dim, axes in enumerate(split_axes) if axes]
    if not halo_sizes:
        return x
    return exchanged(grid, x, split_axes, dict(zip(split, paired(halo_sizes), strict=True)))


def paired(halo_sizes: Sequence[S]) -> list[tuple[S, S]]:
    """The two sizes of each split dimension."""
    return list(zip(halo_sizes[::2], halo_sizes[1::2], strict=True))


def exchanged(
    grid: Grid, x: jax.Array, split_axes: Sequence[AxisIndices], halos: Mapping[int, tuple[Size, Size]]
) -> jax.Array:
    """The buffer with its halos filled; `halos` by dimension."""
    filled = x
    # A strip spans the other dimensions with the halos that they have by now, so later strips carry corners along.
    for dim in sorted(halos, reverse=True):
        filled = _with_strips(grid, filled, split_axes[dim], dim, halos[dim])
    known = jnp.ones((1,) * x.ndim, bool)
    for dim, halo in halos.items():
        known = known & _known_borders(grid, x, split_axes[dim], dim, halo)
    return jnp.where(known, filled, x)


def _with_strips(grid: Grid, x: jax.Array, axes: AxisIndices, dim: int, halo: tuple[Size, Size]) -> jax.Array:
    lo, hi = halo
    if not isinstance(lo, int) or not isinstance(hi, int):
        return _with_parts_of_buffers(grid, x, axes, dim, halo)
    end = x.shape[dim] - hi
    parts = [lax.slice_in_dim(x, lo, end, axis=dim)]
    if lo:
        strip = lax.slice_in_dim(x, end - lo, end, axis=dim)
        parts.insert(0, shifted(grid, strip, axes, 1))
    if hi:
        strip = lax.slice_in_dim(x, lo, lo + hi, axis=dim)
        parts.append(shifted(grid, strip, axes, -1))
    return jnp.concatenate(parts, axis=dim)


def _with_parts_of_buffers(grid: Grid, x: jax.Array, axes: AxisIndices, dim: int, halo: tuple[Size, Size]) -> jax.Array:
    """The same for halos of any size, of which the neighbours' cells lie one core further on."""
    lo, hi = halo
    length, cell = x.shape[dim], _cells(x, dim)
    core, before, after = length - lo - hi, shifted(grid, x, axes, 1), shifted(grid, x, axes, -1)
    filled = jnp.where(cell < lo, jnp.roll(before, -core, dim), x)
    return jnp.where(cell >= length - hi, jnp.roll(after, core, dim), filled)


def _cells(x: jax.Array, dim: int) -> jax.Array:
    """The number of each cell along a dimension."""
    return lax.broadcasted_iota(jnp.int32, tuple(size if d == dim else 1 for d, size in enumerate(x.shape)), dim)


def _known_borders(grid: Grid, x: jax.Array, axes: AxisIndices, dim: int, halo: tuple[Size, Size]) -> jax.Array:
    """Which cells along a dimension some device owns."""
    length, position = x.shape[dim], grid.group_index(axes)
    cell = _cells(x, dim)
    below = (cell >= halo[0]) | (position > 0)
    above = (cell < length - halo[1]) | (position < grid.group_size(axes) - 1)
    return below & above
