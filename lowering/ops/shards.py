"""What emitters share: where a shard lies in its dimension, masking its padding, cutting a block out of a whole array;
and strips that devices send each other where blocks do not nest.

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

from sdy_jax.base.errors import InternalError
from sdy_jax.ir.graph import Op
from sdy_jax.ir.meshes import AxisRef, axes_size
from sdy_jax.ir.shardings import OpShardingRule, TensorMapping, TensorSharding
from sdy_jax.lowering.ops.collectives import movement
from sdy_jax.lowering.ops.re_emission import scope_name
from sdy_jax.lowering.ops.registry import LocalOp
from sdy_jax.lowering.reshard.relayouts import change
from sdy_jax.lowering.reshard.strip_reads import Reads, StridedSlice
from sdy_jax.lowering.reshard.strips import StripPlan, Strips, single
from sdy_jax.runtime.meshes import RefinedMesh


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


def shards_of_dims(mapping: TensorMapping, shards: Sequence[int]) -> tuple[int, ...]:
    """Into how many shards each dimension of a tensor is split, given the shards of each factor of its op's rule."""
    return tuple([math.prod([shards[f] for f in factors]) for factors in mapping])


def block_shape(shape: Sequence[int], mapping: TensorMapping, shards: Sequence[int]) -> tuple[int, ...]:
    """The local shape of a tensor of global `shape`, given the shards of each factor of its op's rule."""
    return tuple([-(-n // count) for n, count in zip(shape, shards_of_dims(mapping, shards), strict=True)])


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


# Plans of strips run on local arrays, inside a `shard_map` over the refined mesh.
#
# `redistribute` copies what a device holds itself and sends each round of the plan by one `ppermute`, whose operand is
# as long as the round's longest strip: `plan.wire_elements` rows leave every device in all. A device that nobody sends
# to gets zeros from a `ppermute`; it never keeps them, nor what follows a shorter strip, because results are selected
# by the received length. No number is computed, so any element type passes as it is, and NaN in the padding stays.
#
# Example: a 3-point stencil over x of f32[1024], split into blocks of 128 over the eight devices along `d`:
#
#     reads = window_reads(Window(1024, window=3, low=1, high=1), 8)
#     y = fetch(local, x, 0, (d,), reads, fill=0)  # f32[130]: the left neighbour's last, own 128, the right one's first
#     z = y[:-2] + y[1:-1] + y[2:]                 # f32[128]
#
# sends one element in each direction, 8 bytes. Several dimensions are fetched one after the other: the second fetch
# brings the corners, because what it sends includes what the first one fetched.

Axes = Sequence[AxisRef]


def redistribute(
    local: LocalOp | RefinedMesh, operands: Sequence[jax.Array], dim: int, axes: Axes, plan: StripPlan, fill: Any = 0
) -> jax.Array:
    """The result's block of `plan.length` elements along `dim`.

    Args:
        local: the op that causes it, which names the collectives; or only the mesh.
        operands: local blocks of one element type, equal in all dimensions but `dim`.
        axes: what splits `dim` of the result, and of the operands that are not whole; major to minor.
        fill: a scalar, for all that the plan leaves out; None where that may hold anything.
    """
    if isinstance(local, RefinedMesh):
        return _Blocks(local, operands, dim, axes).result(plan, fill)
    with jax.named_scope(scope_name(local.op.name, axes, local.op.source)):
        return _Blocks(local.mesh, operands, dim, axes).result(plan, fill)


def fetch(local: LocalOp | RefinedMesh, x: jax.Array, dim: int, axes: Axes, reads: Reads, fill: Any = 0) -> jax.Array:
    """The `reads.length` elements, dilated, over which a device runs its windows without padding."""
    y = redistribute(local, [x], dim, axes, reads.plan, fill)
    if reads.dilation == 1:
        return y
    return cut(local, dilated(y, dim, reads.dilation, fill), dim, axes, reads.phases, reads.length)


def dilated(x: jax.Array, dim: int, dilation: int, fill: Any) -> jax.Array:
    """Every element of a dimension followed by `dilation` - 1 fill values.

    Example: [a, b] by 3 is [a, -, -, b, -, -].
    """
    if dilation == 1 or not x.shape[dim]:
        return x
    paddings = [(0, dilation - 1, dilation - 1) if d == dim else (0, 0, 0) for d in range(x.ndim)]
    return lax.pad(x, _scalar(fill, x), paddings)


def cut(
    local: LocalOp | RefinedMesh, x: jax.Array, dim: int, axes: Axes, starts: Sequence[int], length: int
) -> jax.Array:
    """`length` elements of a dimension from a start that each shard has for itself."""
    return _Blocks(_mesh(local), [x], dim, axes).cut(x, starts, length)


def sliced(
    local: LocalOp | RefinedMesh, x: jax.Array, dim: int, axes: Axes, plan: StridedSlice, own_part: bool = False
) -> jax.Array:
    """The result's block of a slice with a stride; with `own_part` all of it, zero where others hold the elements."""
    if plan.stride > 1 and plan.count:
        length = (plan.count - 1) * plan.stride + 1
        x = cut(local, _grown(x, dim, max(plan.phases) + length, 0), dim, axes, plan.phases, length)
        x = lax.slice_in_dim(x, 0, length, plan.stride, dim)
    if own_part:
        return redistribute(local, [x], dim, axes, plan.own_part, 0)
    return redistribute(local, [x], dim, axes, plan.plan, None)


def reversed_(local: LocalOp | RefinedMesh, x: jax.Array, dim: int, axes: Axes, plan: StripPlan) -> jax.Array:
    """The result's block of a reversal."""
    return lax.rev(redistribute(local, [x], dim, axes, plan, None), (dim,))


def _mesh(local: LocalOp | RefinedMesh) -> RefinedMesh:
    return local if isinstance(local, RefinedMesh) else local.mesh


def relaid(local: LocalOp, x: jax.Array) -> jax.Array:
    """The block of a value whose dimensions change their axes, from strips of the blocks before."""
    shape = local.op.operands[0].shape or ()
    before, after = (
        [local.mesh.atoms(of(0, dim)) for dim in range(x.ndim)] for of in (local.operand_axes, local.result_axes)
    )
    atoms = list(dict.fromkeys(atom for axes in (*before, *after) for atom in axes))
    numbers = ([tuple(map(atoms.index, axes)) for axes in ends] for ends in (before, after))
    done = change(shape, tuple(axes_size([atom], local.mesh.mesh) for atom in atoms), *numbers)
    if done is None:
        raise InternalError(f"{local.op.source}: no strips lead from {before} to {after}")
    operands = [x]
    if done.other is not None and done.is_cut:
        operands = _cut_in(x, done.other, local.result_shape()[done.other], done.chunks)
    for stage in done.relayout.stages:
        axes = [atoms[i] for i in done.relayout.group]
        operands = [redistribute(local, operands, done.dim, axes, stage, None)]
    if done.other is None or done.is_cut:
        return operands[0]
    return lax.slice(_joined_in(operands[0], done.dim, done.other, done.chunks), (0,) * x.ndim, local.result_shape())


def _cut_in(x: jax.Array, dim: int, length: int, count: int) -> list[jax.Array]:
    """Parts of equal length of a dimension, which is padded to make them up."""
    x = _grown(x, dim, length * count, 0)
    return [lax.slice_in_dim(x, i * length, (i + 1) * length, axis=dim) for i in range(count)]


def _joined_in(x: jax.Array, dim: int, other: int, count: int) -> jax.Array:
    """The parts of which dimension `dim` consists, one after the other in dimension `other`."""
    length = x.shape[dim] // count
    parts = [lax.slice_in_dim(x, i * length, (i + 1) * length, axis=dim) for i in range(count)]
    return lax.concatenate(parts, other)


class _Blocks:
    """The operands of one run of a plan on the running device."""

    def __init__(self, mesh: RefinedMesh, operands: Sequence[jax.Array], dim: int, axes: Axes):
        self._mesh, self._operands, self._dim, self._axes = mesh, operands, dim, axes
        self._me = mesh.index(axes) if axes else jnp.int32(0)

    def result(self, plan: StripPlan, fill: Any) -> jax.Array:
        received = [(strips, self._sent(strips)) for strips in plan.rounds]
        copied = [(strips, self._strip(strips)) for strips in plan.copies]
        # A strip that is kept near the block's end may be followed by what only longer ones of its round fill.
        size = max([plan.length, *(max(s.starts) + s.length for s in (*plan.copies, *plan.rounds))])
        out = self._side_by_side([*copied, *received], size, fill)
        if out is None:
            out, rest = self._begun(copied, size, fill)
            for strips, part in (*rest, *received):
                out = self._kept(out, part, strips)
        return out if size == plan.length else lax.slice_in_dim(out, 0, plan.length, axis=self._dim)

    def _side_by_side(self, parts: Sequence[tuple[Strips, jax.Array]], size: int, fill: Any) -> jax.Array | None:
        """The result as one part after the other, where each has a place of its own, the same on all shards. Compilers
        read parts where they are, as rows of neighbours in a convolution, and write nothing: a U-Net of 5 x 5 on images
        of 512 x 512 by rows, 4 x 4 chips of v5e, took 1.75 of jit's time by the compiler where they were put into a
        padded block, and takes 1.03 (libtpu 0.0.52, 2026-11)."""
        found, end = list[jax.Array](), 0
        for start, number in sorted((single(strips.starts) or 0, number) for number, (strips, _) in enumerate(parts)):
            strips, part = parts[number]
            if single(strips.starts) is None or start < end:
                return None
            if not strips.is_full and fill is not None:
                part = jnp.where(self._is_received(strips), part, _scalar(fill, part))
            found += [self._filled(start - end, fill), part]
            end = start + strips.length
        found.append(self._filled(size - end, fill))
        return lax.concatenate([part for part in found if part.shape[self._dim]], self._dim) if size else None

    def _filled(self, length: int, fill: Any) -> jax.Array:
        """So many elements that the plan leaves out."""
        x, value = self._operands[0], 0 if fill is None else fill
        return jnp.full([length if d == self._dim else n for d, n in enumerate(x.shape)], _scalar(value, x))

    def _strip(self, strips: Strips) -> jax.Array:
        """What this device copies or sends, from whichever operand."""
        used = sorted(set(strips.operands))
        strip = self._strip_of(used[0], strips)
        for operand in used[1:]:
            is_from = np.array([k == operand for k in strips.operands])
            strip = jnp.where(self._entry(is_from), self._strip_of(operand, strips), strip)
        return strip

    def _strip_of(self, operand: int, strips: Strips) -> jax.Array:
        own = [offset for k, offset in zip(strips.operands, strips.offsets, strict=True) if k == operand]
        pairs = zip(strips.operands, strips.offsets, strict=True)
        offsets = [offset if k == operand else own[0] for k, offset in pairs]
        x = _grown(self._operands[operand], self._dim, max(offsets) + strips.length, 0)
        return self.cut(x, offsets, strips.length)

    def cut(self, x: jax.Array, starts: Sequence[int], length: int) -> jax.Array:
        start = single(starts)
        if start is None:
            return lax.dynamic_slice_in_dim(x, self._entry(np.array(starts)), length, self._dim)
        return lax.slice_in_dim(x, start, start + length, axis=self._dim)

    def _sent(self, strips: Strips) -> jax.Array:
        return movement.permuted(self._strip(strips), self._axes, strips.pairs, self._mesh)

    def _begun(
        self, copied: Sequence[tuple[Strips, jax.Array]], size: int, fill: Any
    ) -> tuple[jax.Array, Sequence[tuple[Strips, jax.Array]]]:
        """The result with its first copy, or without any; and the copies that are left."""
        x = self._operands[0]
        value = _scalar(0 if fill is None else fill, x)
        start = single(copied[0][0].starts) if copied else None
        if start is None:
            return self._filled(size, fill), copied
        strips, part = copied[0]
        if not strips.is_full and fill is not None:
            part = jnp.where(self._is_received(strips), part, value)
        margin = (start, size - start - strips.length, 0)
        return lax.pad(part, value, [margin if d == self._dim else (0, 0, 0) for d in range(x.ndim)]), copied[1:]

    def _kept(self, out: jax.Array, part: jax.Array, strips: Strips) -> jax.Array:
        if not strips.is_full:
            part = jnp.where(self._is_received(strips), part, self.cut(out, strips.starts, strips.length))
        start = single(strips.starts)
        begin = self._entry(np.array(strips.starts)) if start is None else _index(start)
        return lax.dynamic_update_slice_in_dim(out, part, begin, self._dim)

    def _is_received(self, strips: Strips) -> jax.Array:
        shape = [strips.length if d == self._dim else 1 for d in range(self._operands[0].ndim)]
        return lax.broadcasted_iota(jnp.int32, shape, self._dim) < self._entry(np.array(strips.lengths))

    def _entry(self, table: np.ndarray) -> jax.Array:
        """This device's number in a table with one per shard."""
        if table.dtype == np.int64:
            table = table.astype(_index(table.max()).dtype)
        return lax.dynamic_index_in_dim(jnp.asarray(table), self._me, keepdims=False)


def _index(position: int) -> np.integer[Any]:
    """A position in the type of other indices. A Python number is wider where 64-bit types are enabled, as they are
    here; jax would then clamp it in another type, if it is mapped over and lowered where they are not."""
    return np.int32(position) if position <= np.iinfo(np.int32).max else np.int64(position)


def _grown(x: jax.Array, dim: int, size: int, fill: Any) -> jax.Array:
    """`x` with at least `size` elements along `dim`."""
    missing = size - x.shape[dim]
    if missing <= 0:
        return x
    return lax.pad(x, _scalar(fill, x), [(0, missing, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)])


def _scalar(fill: Any, x: jax.Array) -> jax.Array:
    return jnp.asarray(fill, x.dtype)
