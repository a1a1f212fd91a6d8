"""What happens to shardings after propagation: divisible at the border of the program, then closed everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile

from jax.extend.mlir import ir

from sdy_jax.ir.operations import body_of, functions, main_function, manual_axes, module_meshes, named, terminator_of
from sdy_jax.ir.stored_shardings import (
    function_shardings,
    list_of,
    map_shardings,
    mesh_of,
    set_function_shardings,
    set_list,
)
from sdy_jax.representation.manual_axes import manual_prefix
from sdy_jax.representation.mesh import AxisRef, Mesh
from sdy_jax.representation.sharding import DimensionSharding, TensorSharding


def close_shardings(module: ir.Operation) -> None:
    """Closes every dimension of every sharding and drops explicit replication."""
    map_shardings(module, TensorSharding.closed_like)


def remove_sub_axes(module: ir.Operation) -> None:
    """In main's open dimensions, drops the first sub-axis and all axes after it."""

    def whole(sharding: TensorSharding, _: ir.Value) -> TensorSharding:
        dimensions = (
            d if d.is_closed else replace(d, axes=tuple(takewhile(lambda a: a.sub_axis is None, d.axes)))
            for d in sharding.dimensions
        )
        return replace(sharding, dimensions=tuple(dimensions))

    _change_boundary(main_function(module), whole)


def make_boundary_divisible(module: ir.Operation) -> None:
    """Shortens shardings that do not divide their dimension: of functions, calls and manual computations."""
    meshes = module_meshes(module)

    def divisible(sharding: TensorSharding, value: ir.Value) -> TensorSharding:
        return divisible_sharding(sharding, _shape(value), mesh_of(meshes, sharding))

    for function in functions(module).values():
        _change_boundary(function, divisible)
    for op in named(module, "func.call", "sdy.manual_computation"):
        if op.name != "func.call":
            _change_manual(op, meshes)
            continue
        known = zip(list_of(op, "sdy.sharding"), op.results, strict=True)
        set_list(op, "sdy.sharding", [s and divisible(s, v) for s, v in known])


def _shape(value: ir.Value) -> Sequence[int]:
    return tuple(value.type.shape) if isinstance(value.type, ir.RankedTensorType) else ()


def _change_boundary(function: ir.Operation, change: Callable[[TensorSharding, ir.Value], TensorSharding]) -> None:
    block = body_of(function)
    for name, values in (("arg_attrs", block.arguments), ("res_attrs", terminator_of(block).operands)):
        changed = {}
        for index, (old, value) in enumerate(zip(function_shardings(function, name), values, strict=True)):
            new = old and change(old, value)
            if new != old:
                changed[index] = new
        set_function_shardings(function, name, changed)


def _change_manual(op: ir.Operation, meshes: dict[str, Mesh]) -> None:
    manual = manual_axes(op)
    inner = list(body_of(op).arguments)
    free = [
        s and _divisible_inside(s, _shape(v), mesh_of(meshes, s), manual)
        for s, v in zip(list_of(op, "in_shardings"), inner, strict=True)
    ]
    set_list(op, "in_shardings", free)
    outer = [
        s and divisible_sharding(s, _shape(v), mesh_of(meshes, s))
        for s, v in zip(list_of(op, "out_shardings"), op.results, strict=True)
    ]
    set_list(op, "out_shardings", outer)


def _divisible_inside(
    sharding: TensorSharding, shape: Sequence[int], mesh: Mesh, manual: Sequence[str]
) -> TensorSharding:
    """Shortens the free axes against the shape inside; the manual axes in front of them stay."""
    prefixes = [manual_prefix(d.axes, manual) for d in sharding.dimensions]
    free = replace(
        sharding,
        dimensions=tuple(replace(d, axes=d.axes[len(p) :]) for d, p in zip(sharding.dimensions, prefixes, strict=True)),
    )
    shortened = divisible_sharding(free, shape, mesh)
    return replace(
        shortened,
        dimensions=tuple(replace(d, axes=p + d.axes) for d, p in zip(shortened.dimensions, prefixes, strict=True)),
    )


def divisible_sharding(sharding: TensorSharding, shape: Sequence[int], mesh: Mesh) -> TensorSharding:
    """Each dimension with the largest prefix of its axes that divides its size evenly."""
    dimensions = tuple(_divisible(d, n, mesh) for d, n in zip(sharding.dimensions, shape, strict=False))
    return replace(sharding, dimensions=dimensions) if dimensions != sharding.dimensions else sharding


def _divisible(dimension: DimensionSharding, size: int, mesh: Mesh) -> DimensionSharding:
    """6 split by `"c"` of size 4 becomes 6 split by `"c":(1)2`."""
    if size % math.prod(a.size(mesh) for a in dimension.axes) == 0:
        return dimension
    kept: list[AxisRef] = []
    for axis in dimension.axes:
        common = math.gcd(axis.size(mesh), size)
        if common == 1:
            break
        if common != axis.size(mesh):
            kept.append(AxisRef.sub(axis.name, axis.pre_size, common))
            break
        kept.append(axis)
        size //= common
    return DimensionSharding(tuple(kept), dimension.is_closed)
