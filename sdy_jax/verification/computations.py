"""What manual and named computations have to keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import dropwhile

from jax.extend.mlir import ir

from sdy_jax.representation.attributes import manual_axes_from_attribute
from sdy_jax.representation.dialect_rules import fail
from sdy_jax.representation.mesh import Mesh, axes_size
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.verification import strict
from sdy_jax.verification.values import Scope, shape_of, verify_shardings


def check_named_computation(op: ir.Operation, scope: Scope) -> None:
    for name, what, outer, inner in _sides(op):
        if name in op.attributes:
            verify_shardings(op, name, outer, "O3", scope, what)
        if outer != inner:
            fail("O3", op.name, f"the {what}s have types {_listed(outer)}, inside {_listed(inner)}")


def check_manual_computation(op: ir.Operation, scope: Scope) -> None:
    manual = manual_axes_from_attribute(op.attributes["manual_axes"])
    values: list[_ManualValue] = []
    for name, what, outer, inner in _sides(op):
        if len(outer) != len(inner):
            fail("O2b", op.name, f"{len(outer)} {what}s, but {len(inner)} inside")
        shardings = verify_shardings(op, name, outer, "O2b", scope, what)
        for i, (sharding, *types) in enumerate(zip(shardings, outer, inner, strict=True)):
            values.append(_ManualValue(f"{op.name}, {what} {i}", sharding, scope.mesh(sharding), *types))
    again = [axis for axis in manual if axis in scope.manual]
    if again:
        fail("O2h", op.name, f'axis "{again[0]}" is manual already in a computation around it')
    _verify_common_mesh(op, manual, values)
    for value in values:
        _verify_local(value, manual)
    if scope.rules.strict:
        _verify_documented(op, manual, values)


def _verify_documented(op: ir.Operation, manual: Sequence[str], values: Sequence[_ManualValue]) -> None:
    mesh = next((value.mesh for value in values if value.mesh.axes), None)
    if mesh is not None:
        strict.check_manual_axes(manual, mesh, op.name)
    for value in values:
        if isinstance(value.outer, ir.ShapedType):  # others name no axes
            strict.check_manual_value(value.sharding, manual, value.where)


def _sides(op: ir.Operation) -> Iterator[tuple[str, str, list[ir.Type], list[ir.Type]]]:
    """Per side of a computation: its shardings' name, what its values are called, their types outside and inside."""
    body = op.regions[0].blocks[0]
    returned = body.operations[len(body.operations) - 1].operands
    yield "in_shardings", "operand", [v.type for v in op.operands], [v.type for v in body.arguments]
    yield "out_shardings", "result", [v.type for v in op.results], [v.type for v in returned]


@dataclass(frozen=True, slots=True)
class _ManualValue:
    """An operand or result of a manual computation."""

    where: str
    sharding: TensorSharding
    mesh: Mesh
    outer: ir.Type
    inner: ir.Type


def _verify_common_mesh(op: ir.Operation, manual: Sequence[str], values: Sequence[_ManualValue]) -> None:
    for value in values:
        if value.mesh.is_maximal and _has_dimensions(value.outer):
            fail("O2a", value.where, f"its sharding <{value.sharding}> is on a single device")
    meshes = [value.mesh for value in values if not value.mesh.is_empty]
    if not manual or not values:
        return
    if any(mesh != meshes[0] for mesh in meshes):
        fail("O2f", op.name, "its shardings have different meshes")
    known = meshes[0].sizes if meshes else {}
    unknown = [axis for axis in manual if axis not in known]
    if unknown:
        remedy = f"the axes of the mesh are: {', '.join(known) or 'none'}"
        fail("O2g", op.name, f'unknown manual axis "{unknown[0]}"', remedy)


def _has_dimensions(type_: ir.Type) -> bool:
    return isinstance(type_, ir.ShapedType) and type_.has_rank and type_.rank > 0


def _verify_local(value: _ManualValue, manual: Sequence[str]) -> None:
    """The manual axes lead each dimension and divide it, and the inner type is what they leave."""
    where, shape = value.where, list(shape_of(value.outer, value.where) or ())
    for dim, axes in enumerate(value.sharding.axes):
        place = f"{where}, dimension {dim}"
        late = [a for a in dropwhile(lambda a: a.name in manual, axes) if a.name in manual]
        if late:
            fail("O2c", place, f"manual axis {late[0]} comes after a free axis")
        size = axes_size((a for a in axes if a.name in manual), value.mesh)
        if shape[dim] >= 0 and shape[dim] % size:
            fail("O2d", place, f"its size {shape[dim]} is not divisible by its manual axes of size {size}")
        shape[dim] = shape[dim] // size if shape[dim] >= 0 else shape[dim]
    right = _local_type(value.outer, shape)
    if right != value.inner:
        fail("O2e", where, f"{value.outer} is {value.inner} inside", f"divided by the manual axes it is {right}")


def _local_type(outer: ir.Type, shape: Sequence[int]) -> ir.Type:
    if not isinstance(outer, ir.RankedTensorType):
        return outer
    sizes = [n if n >= 0 else ir.ShapedType.get_dynamic_size() for n in shape]
    return ir.RankedTensorType.get(sizes, outer.element_type, outer.encoding, loc=ir.Location.unknown(outer.context))


def _listed(types: Sequence[ir.Type]) -> str:
    return f"({', '.join(map(str, types))})"
