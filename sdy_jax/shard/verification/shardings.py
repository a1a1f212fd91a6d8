"""The rules about shardings, and about tensors that have one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from jax.extend.mlir import ir

from sdy_jax.shard.meshes import DeviceMesh
from sdy_jax.shard.stated_shardings import Size, StatedSharding, defining, stated_sharding
from sdy_jax.shard.verification.devices import check_device_rank, check_halo_sizes
from sdy_jax.shard.verification.scope import Scope, Shape, check_axis_range, element_type, shape_of
from sdy_jax.shard.verification.tensors import check_kind
from sdy_jax.shard.view import DialectOp


def sharding(op: DialectOp, scope: Scope) -> None:
    """What a sharding says by itself."""
    stated = stated_sharding(op.result)
    assert stated is not None
    on = scope.mesh(op)
    if not stated.split:
        op.fail("split_axes needs at least one, possibly empty, list")
    _check_axes_of_sharding(op, stated, on)
    _check_partial(op, stated)
    if stated.halos and stated.offsets:
        op.fail("halo_sizes and sharded_dims_offsets exclude each other")
    check_halo_sizes(op, stated.halos, len(stated.split_dimensions))
    if stated.offsets:
        _check_offsets(op, stated, on)


def _check_axes_of_sharding(op: DialectOp, stated: StatedSharding, on: DeviceMesh) -> None:
    split = [*chain.from_iterable(stated.split)]
    check_axis_range(op, "split_axes", split, on)
    check_axis_range(op, "partial_axes", stated.partial_axes, on)
    used = [*split, *stated.partial_axes]
    for axis in used:
        if used.count(axis) > 1:
            op.fail(f"{op.noun} axis {axis} is used twice")


def _check_partial(op: DialectOp, stated: StatedSharding) -> None:
    if stated.partial == "generic":
        op.fail("partial = generic is not allowed")
    if (stated.partial is None) != (not stated.partial_axes):
        op.fail("partial needs a kind and at least one axis")


def _check_offsets(op: DialectOp, stated: StatedSharding, on: DeviceMesh) -> None:
    if None in on.shape:
        op.fail(f"sharded_dims_offsets need a {op.noun} without ?")
    expected = sum((on.group_size(stated.split[d]) or 0) + 1 for d in stated.split_dimensions)
    if len(stated.offsets) != expected:
        op.fail(f"{len(stated.offsets)} offsets, expected {expected}")
    for dimension, offsets in stated.offsets_of(on).items():
        _check_ascending(op, dimension, offsets)


def _check_ascending(op: DialectOp, dimension: int, offsets: Sequence[Size]) -> None:
    if isinstance(offsets[0], int) and offsets[0] != 0:
        op.fail(f"offsets of dimension {dimension} start at {offsets[0]}, expected 0")
    reached = 0
    for position, offset in enumerate(offsets):
        if not isinstance(offset, int):
            continue
        if offset < reached:
            op.fail(f"offsets of dimension {dimension} decrease at position {position}")
        reached = offset


def shard(op: DialectOp, scope: Scope) -> None:
    """A sharding fits the tensor that it is for."""
    shape, stated = shape_of(op, op["src"]), stated_sharding(op["sharding"])
    if stated is None:
        return
    if stated.partial is not None:
        check_kind(op, "partial", stated.partial, element_type(op["src"]))
    on = scope.meshes.get((stated.dialect, stated.mesh))
    if on is None:  # said of the sharding itself
        return
    _check_rank(op, stated, len(shape))
    _check_ends(op, stated, shape, on)
    _check_halos(op, stated, shape, on)


def _check_rank(op: DialectOp, stated: StatedSharding, rank: int) -> None:
    if len(stated.lists) > rank:
        op.fail(f"split_axes has {len(stated.lists)} lists, the tensor {rank} dimensions")


def _check_ends(op: DialectOp, stated: StatedSharding, shape: Sequence[int | None], on: DeviceMesh) -> None:
    for dimension, offsets in stated.offsets_of(on).items():
        end, size = offsets[-1], shape[dimension]
        if isinstance(end, int) and size is not None and end != size:
            op.fail(f"offsets of dimension {dimension} end at {end}, the dimension has size {size}")


def _check_halos(op: DialectOp, stated: StatedSharding, shape: Shape, on: DeviceMesh) -> None:
    for dimension in stated.split_dimensions:
        size, count = shape[dimension], on.group_size(stated.split[dimension])
        if size is None or count is None:
            continue
        for halo in stated.halo_of(dimension):
            if isinstance(halo, int) and halo > size // count:
                op.fail(f"halo size {halo} exceeds the shard size {size // count} of dimension {dimension}")


def known_sharding(op: DialectOp, scope: Scope) -> None:
    """Of a value that a shard op makes, or that has a sharding of the SDY dialect."""
    source: ir.Value = op["source"]
    shape_of(op, source)
    if defining(source, "shard") is None and not _has_sdy_sharding(source):
        op.fail(f"the sharding of {source.get_name()} is not known here; annotate it with {op.dialect}.shard", source)


def _has_sdy_sharding(value: ir.Value) -> bool:
    if not isinstance(value, ir.BlockArgument):
        return "sdy.sharding" in value.owner.operation.attributes
    function = value.owner.owner.operation
    if function.name != "func.func" or "arg_attrs" not in function.attributes:
        return False
    return "sdy.sharding" in ir.ArrayAttr(function.attributes["arg_attrs"])[value.arg_number]


def shape_of_a_shard(op: DialectOp, scope: Scope) -> None:
    sizes = op["shape"] if op.dialect == "mesh" else op["dims"]
    given = len(op.operation.results)
    if given != len(sizes):
        op.fail(f"{given} results, expected {len(sizes)}")
    stated = stated_sharding(op["sharding"])
    on = scope.meshes.get((stated.dialect, stated.mesh)) if stated else None
    if stated is None or on is None:
        return
    _check_rank(op, stated, len(sizes))
    for dimension, size in enumerate(sizes):
        if size is None and not (stated.offsets and dimension in stated.split_dimensions):
            op.fail(f"size of dimension {dimension} is unknown")
    _check_ends(op, stated, [size if isinstance(size, int) else None for size in sizes], on)
    if op.dialect == "shard":
        _check_device(op, on)


def _check_device(op: DialectOp, on: DeviceMesh) -> None:
    """A device is given by its coordinates, or by its number."""
    device: Sequence[Size] = op["device"]
    if len(device) != 1:
        check_device_rank(op, len(device), on)
    linear = on.group_size(range(on.rank))
    for coordinate, size in zip(device, on.shape if len(device) == on.rank else (linear,), strict=True):
        if isinstance(coordinate, int) and (coordinate < 0 or (size is not None and coordinate >= size)):
            op.fail(f"device {coordinate} is outside 0..{'?' if size is None else size - 1}")
