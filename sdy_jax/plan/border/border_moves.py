"""Moves at the border: arguments whose layout is not the one the program takes. XLA moves them before it starts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from sdy_jax.annotate.arguments import Leaf
from sdy_jax.annotate.specs import resolve
from sdy_jax.representation.named import AnyMesh, mesh_from_jax
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.representation.type_text import array_text, bytes_text, type_text
from sdy_jax.runtime.function_mesh import is_whole_elsewhere
from sdy_jax.runtime.layouts import as_specification, layout_of, named


@dataclass(frozen=True, slots=True)
class BorderMove:
    """An argument that is moved on entry: its path, its types before and after, and the bytes that a device receives
    (the most that one device has not yet; XLA, which moves it, may send more). They are no part of `Plan.wire_bytes`,
    which counts our own collectives."""

    path: str
    before: str
    after: str
    bytes: int
    is_elsewhere: bool = False
    """Whether it lies on other devices than the mesh's, so that it has to be moved."""

    def message(self, function: str) -> str:
        """A warning with the move and how to avoid it."""
        remedy = "" if self.is_elsewhere else ", or leave its entry of in_shardings None to take it as it lies"
        return (
            f"`{self.path}` lies as {self.before}, {function} takes it as {self.after}: each call moves it first "
            f"({bytes_text(self.bytes)} to a device, at least); to fix: pass it as it is taken, by jax.device_put"
            f"{remedy}"
        )


def moves_at_border(
    leaves: Iterable[Leaf], entering: Iterable[TensorSharding], mesh: AnyMesh
) -> tuple[BorderMove, ...]:
    """The moves of a call.

    Args:
        leaves: the arguments' leaves as they were given.
        entering: the shardings in which the program takes them, on `mesh`.
    """
    found = (_move(leaf, sharding, mesh) for leaf, sharding in zip(leaves, entering, strict=True))
    return tuple(move for move in found if move is not None)


def _move(leaf: Leaf, entering: TensorSharding, mesh: AnyMesh) -> BorderMove | None:
    if leaf.spec is not None and is_whole_elsewhere(leaf.value, mesh):
        return _from_elsewhere(leaf, entering, mesh)
    own = layout_of(leaf.value)
    if own is None or not isinstance(own.mesh, jax.sharding.Mesh) or own.device_set != {*mesh.devices.flat}:
        return None  # nothing is known, or jit will not take it
    # The layout of an unreduced value is that of its partial sums; memory of the host is in no plan.
    own = NamedSharding(own.mesh, PartitionSpec(*own.spec.partitions))
    shape, dtype = leaf.value.shape, leaf.value.dtype
    if not _divides(own, shape):
        return None  # no array is split unevenly
    target = _named(entering, shape, mesh)
    if own.is_equivalent_to(target, len(shape)):
        return None
    plain = array_text(leaf.value)
    return BorderMove(
        leaf.path,
        _type(plain, leaf, own, mesh),
        _with_axes(plain, shape, entering),
        _received(own, target, shape) * dtype.itemsize,
    )


def _named(entering: TensorSharding, shape: Sequence[int], mesh: AnyMesh) -> NamedSharding:
    return named(TensorSharding(entering.mesh, entering.dimensions[: len(shape)]), mesh)


def _from_elsewhere(leaf: Leaf, entering: TensorSharding, mesh: AnyMesh) -> BorderMove:
    """The move of an array that other devices than the mesh's have, all of it each."""
    plain, shape, count = array_text(leaf.value), leaf.value.shape, leaf.value.sharding.num_devices
    where = "a single device" if count == 1 else f"{count} other devices"
    received = math.prod(_named(entering, shape, mesh).shard_shape(shape)) * leaf.value.dtype.itemsize
    after = _with_axes(plain, shape, entering)
    return BorderMove(leaf.path, f"{plain} on {where}", after, received, is_elsewhere=True)


def _type(plain: str, leaf: Leaf, own: NamedSharding, mesh: AnyMesh) -> str:
    spec = as_specification(own, mesh)
    if spec is None:
        return f"{plain} as {own.spec} on {mesh_from_jax(own.mesh)}"
    base = mesh_from_jax(mesh)
    rank = len(leaf.value.shape)
    return _with_axes(plain, leaf.value.shape, resolve(Leaf(leaf.path, None, spec), rank, base, "", "arguments", mesh))


def _with_axes(plain: str, shape: Sequence[int], sharding: TensorSharding | None) -> str:
    """The type `f32[8,4]` with axes."""
    if sharding is None:
        return plain
    return type_text(plain.partition("[")[0], shape, TensorSharding("", sharding.dimensions[: len(shape)]))


def _divides(sharding: NamedSharding, shape: tuple[int, ...]) -> bool:
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return False
    return True


def _received(own: NamedSharding, target: NamedSharding, shape: tuple[int, ...]) -> int:
    """The most elements that one device receives: those of its block after the move that it did not have before."""
    before, after = own.devices_indices_map(shape), target.devices_indices_map(shape)
    return max(_missing(before[device], block, shape) for device, block in after.items())


def _missing(held: Any, wanted: Any, shape: tuple[int, ...]) -> int:
    bounds = [(w.indices(n)[:2], h.indices(n)[:2]) for w, h, n in zip(wanted, held, shape, strict=True)]
    size = math.prod(stop - start for (start, stop), _ in bounds)
    kept = math.prod(max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in bounds)
    return int(size - kept)
