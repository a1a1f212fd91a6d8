"""The rules about meshes, devices and their neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from jax.extend.mlir import ir

from sdy_jax.shard.meshes import DeviceMesh
from sdy_jax.shard.stated_shardings import Size
from sdy_jax.shard.verification.scope import Rule, Scope, check_axes, check_axis_range, first_operand, shape_of
from sdy_jax.shard.view import DialectOp
from sdy_jax.text.mesh_ops import own_name


def mesh(op: DialectOp, scope: Scope) -> None:
    """A mesh: at the top of its module, with axes, under a name that nothing else has."""
    symbol, parent = op["sym_name"], op.operation.parent
    if parent is not None and parent.operation.name != "builtin.module":
        op.fail(f"a {op.noun} stands at the top of a module, not in {parent.operation.name}")
    if not op["shape"]:
        op.fail(f"a {op.noun} needs at least one axis")
    for axis, size in enumerate(op["shape"]):
        if size is not None and size < 0:
            op.fail(f"axis {axis} has size {size}")
    if scope.symbols.get(symbol) != op.operation:
        op.fail(f"@{symbol} is already defined")
    named, declared = scope.meshes[op.dialect, symbol], scope.declared.get(symbol)
    if declared is not None and not named.has_the_sizes_of(declared):
        op.fail(f"@{symbol} is {named}, but sdy.mesh @{symbol} is {declared}; they are one mesh")


def indices_of_axes(op: DialectOp, scope: Scope) -> None:
    """One result per listed axis; no list means all axes."""
    on, axes = scope.mesh(op), op["axes"]
    check_axes(op, "axes", axes, on)
    expected, given = len(axes) or on.rank, len(op.operation.results)
    if given != expected:
        op.fail(f"{given} results, expected {expected}")


def neighbors(op: DialectOp, scope: Scope) -> None:
    on, axes = scope.mesh(op), op["split_axes"]
    check_axes(op, "split_axes", axes, on)
    if not axes:
        op.fail("split_axes is empty")
    check_device_rank(op, len(op["device"]), on)


def check_device_rank(op: DialectOp, given: int, on: DeviceMesh) -> None:
    if given != on.rank:
        op.fail(f"{given} device coordinates for a {op.noun} of rank {on.rank}")


def coordinates_of(name: str) -> Rule:
    """The rule for an attribute that names a device in each group by its coordinates along the group's axes."""

    def rule(op: DialectOp, scope: Scope) -> None:
        coordinates, axes = op[name], op.axes
        if coordinates is None:
            return
        if len(coordinates) != len(axes):
            op.fail(f"{name} has {len(coordinates)} coordinates for {len(axes)} {op.noun} axes")
        for number, (coordinate, axis) in enumerate(zip(coordinates, axes, strict=True)):
            _check_coordinate(op, f"{name}[{number}]", coordinate, axis, scope.mesh(op))

    return rule


def _check_coordinate(op: DialectOp, what: str, coordinate: Size, axis: int, on: DeviceMesh) -> None:
    size = on.shape[axis]
    if isinstance(coordinate, ir.Value) or (coordinate >= 0 and (size is None or coordinate < size)):
        return
    last = "?" if size is None else size - 1
    op.fail(f"{what} = {coordinate} is outside 0..{last}, the range of {op.noun} axis {axis}")


def shift_axis(op: DialectOp, scope: Scope) -> None:
    if op["shift_axis"] not in op.axes:
        listed = f"{own_name(op.dialect, 'mesh_axes')} = {list(op.axes)}"
        op.fail(f"shift_axis = {op['shift_axis']} is not among {listed}")


def halos(op: DialectOp, scope: Scope) -> None:
    """The halos of `update_halo`: two per split dimension, each no larger than what it is a copy of."""
    lists, sizes, shape = op["split_axes"], op["static_halo_sizes"], shape_of(op, first_operand(op), 1)
    axes = [*chain.from_iterable(lists)]
    for axis in axes:
        if axes.count(axis) > 1:
            op.fail(f"split_axes = {[list(axes) for axes in lists]} repeats axis {axis}")
    check_axis_range(op, "split_axes", axes, scope.mesh(op))
    if len(lists) > len(shape):
        op.fail(f"split_axes has {len(lists)} lists, the tensor {len(shape)} dimensions")
    split = [dimension for dimension, axes in enumerate(lists) if axes]
    check_halo_sizes(op, sizes, len(split))
    for number, dimension in enumerate(split if sizes else ()):
        _check_core(op, dimension, shape[dimension], sizes[2 * number : 2 * number + 2])


def check_halo_sizes(op: DialectOp, sizes: Sequence[Size], split: int) -> None:
    """Two sizes per split dimension, or none at all."""
    if sizes and len(sizes) != 2 * split:
        op.fail(f"{len(sizes)} halo sizes for {split} split dimensions, expected {2 * split}")
    for size in sizes:
        if isinstance(size, int) and size < 0:
            op.fail(f"halo size {size} is negative")


def _check_core(op: DialectOp, dimension: int, size: int | None, halo: Sequence[Size]) -> None:
    """What a buffer holds besides its halos is what the neighbours' halos are copies of."""
    known = [part for part in halo if isinstance(part, int)]
    if size is None or len(known) < len(halo):
        return
    core = size - sum(known)
    for part in known:
        if core < part:
            op.fail(f"dimension {dimension} of size {size} leaves a core of {core}, smaller than halo size {part}")
