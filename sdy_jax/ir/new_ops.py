"""Ops that passes make, with the shardings of their results: meshes, constants, reshapes, parts of stacks, loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax.extend.mlir import ir

from sdy_jax.ir.attributes import mesh_to_attribute
from sdy_jax.ir.graph import Op, Value
from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.operations import body_of, module_meshes
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.stored_shardings import set_list, store_results


class Place(NamedTuple):
    """Where ops are made, and the location that they get."""

    point: ir.InsertionPoint
    location: ir.Location

    @classmethod
    def before(cls, op: ir.Operation) -> Place:
        """Just before an op, whose location ops get."""
        return cls(ir.InsertionPoint(op), op.location)

    @property
    def context(self) -> ir.Context:
        return self.location.context


def declare_mesh(module: ir.Operation, mesh: Mesh, symbols: ir.SymbolTable | None = None) -> str:
    """The symbol of a mesh in a module; an `sdy.mesh` at its beginning is added if there is none for it.

    Args:
        module: the module.
        mesh: the mesh.
        symbols: the module's symbol table, where someone keeps one, so that it learns of the new name.
    """
    known = next((name for name, own in module_meshes(module).items() if own == mesh), None)
    if known is not None:
        return known
    context = module.context
    symbols = symbols or ir.SymbolTable(module)  # before the new op is there, so that it gives way
    attributes = {"sym_name": ir.StringAttr.get("mesh", context), "mesh": mesh_to_attribute(mesh, context)}
    op = ir.Operation.create(
        "sdy.mesh",
        attributes=attributes,
        loc=ir.Location.unknown(context),
        ip=ir.InsertionPoint.at_block_begin(body_of(module)),
    )
    name = symbols.insert(op)
    return str(ir.StringAttr(name).value)


def created(
    name: str,
    type_: ir.Type,
    operands: Sequence[ir.Value],
    place: Place,
    sharding: TensorSharding | None = None,
    attributes: Mapping[str, ir.Attribute] | None = None,
) -> ir.Value:
    """The result of a new op."""
    made = ir.Operation.create(
        name, [type_], list(operands), dict(attributes or {}), loc=place.location, ip=place.point
    )
    store_results(made, [sharding])
    return made.results[0]


def tensor_type(shape: Sequence[int], like: ir.Value, element: ir.Type | None = None) -> ir.Type:
    """That of an array of this shape, of elements like those of a value or of another type."""
    element = element or ir.RankedTensorType(like.type).element_type
    return ir.RankedTensorType.get(list(shape), element, loc=ir.Location.unknown(like.context))


def shape_of(value: ir.Value) -> list[int]:
    return list(ir.RankedTensorType(value.type).shape)


def reshaped(value: ir.Value, shape: Sequence[int], place: Place, sharding: TensorSharding | None) -> ir.Value:
    """A value in another shape."""
    if shape_of(value) == list(shape):
        return value
    return created("stablehlo.reshape", tensor_type(shape, value), [value], place, sharding)


def converted(value: ir.Value, type_: ir.Type, place: Place) -> ir.Value:
    """A scalar in another type."""
    return value if value.type == type_ else created("stablehlo.convert", type_, [value], place)


# Stacks.


def entry_of(stack: ir.Value, at: ir.Value, dim: int, place: Place, sharding: TensorSharding | None) -> ir.Value:
    """What a stack holds at a position along a dimension, which has size one then."""
    shape = _entry_shape(stack, dim)
    operands = [stack, *_starts(at, dim, len(shape), place)]
    sizes = {"slice_sizes": ir.DenseI64ArrayAttr.get(shape, place.context)}
    return created("stablehlo.dynamic_slice", tensor_type(shape, stack), operands, place, sharding, sizes)


def with_entry(
    stack: ir.Value, entry: ir.Value, at: ir.Value, dim: int, place: Place, sharding: TensorSharding | None
) -> ir.Value:
    """A stack with a sharding, into which an entry of any shape is written at a position along a dimension."""
    shape = _entry_shape(stack, dim)
    operands = [stack, reshaped(entry, shape, place, sharding), *_starts(at, dim, len(shape), place)]
    return created("stablehlo.dynamic_update_slice", stack.type, operands, place, sharding)


def _entry_shape(stack: ir.Value, dim: int) -> list[int]:
    shape = shape_of(stack)
    shape[dim] = 1
    return shape


def _starts(at: ir.Value, dim: int, rank: int, place: Place) -> list[ir.Value]:
    """Where an entry begins: at a position along a dimension."""
    zero = at if rank == 1 else any_number(at.type, place.point, place.location)
    return [at if other == dim else zero for other in range(rank)]


# Constants.


def integer(number: int, place: Place) -> ir.Value:
    """A scalar of 32 bits, as jax counts trips."""
    type_ = ir.RankedTensorType.get([], ir.IntegerType.get_signless(32, place.context), loc=place.location)
    return filled_array(np.asarray(number, np.int32), type_, place)


def filled_array(number: np.ndarray, type_: ir.Type, place: Place, sharding: TensorSharding | None = None) -> ir.Value:
    """An array of one number."""
    constant = _constant(_text(number), type_, place.point, place.location)
    store_results(constant, [sharding])
    return constant.results[0]


def unwritten(type_: ir.Type, place: Place, sharding: TensorSharding | None) -> ir.Value:
    """An array, all elements of which will be written."""
    made = any_number(type_, place.point, place.location)
    store_results(made.owner, [sharding])
    return made


def any_number(type_: ir.Type, point: ir.InsertionPoint, location: ir.Location | None = None) -> ir.Value:
    """A constant array of this type, all of one number: zeros, where the element type has a zero that all know."""
    return _constant(_number(str(ir.RankedTensorType(type_).element_type)), type_, point, location).results[0]


def _constant(number: str, type_: ir.Type, point: ir.InsertionPoint, location: ir.Location | None) -> ir.Operation:
    # As text: the bindings do not take all element types.
    text = f'"stablehlo.constant"() <{{value = dense<{number}> : {type_}}}> : () -> {type_}'
    constant = ir.Operation.parse(text, context=type_.context).operation
    point.insert(constant)
    if location is not None:
        constant.location = location
    return constant


def _text(number: np.ndarray) -> str:
    if number.dtype.kind == "c":
        return f"({float(number.real)}, {float(number.imag)})"
    if number.dtype.kind == "b":
        return str(bool(number)).lower()
    if number.dtype.kind in "iu":
        return str(int(number))
    return f"0x{number.tobytes()[::-1].hex().upper()}"


def _number(element: str) -> str:
    """The text of any number of an element type."""
    if element.startswith("complex"):
        return "(0.0, 0.0)"
    if element == "i1":
        return "false"
    return "0" if element.lstrip("su").startswith("i") else "1.0"


# Loops.


def new_loop(
    starts: Sequence[ir.Value],
    shardings: Sequence[TensorSharding | None],
    place: Place,
    attributes: Mapping[str, ir.Attribute] | None = None,
) -> ir.Operation:
    """A loop that carries some values, without blocks."""
    types, more = [start.type for start in starts], dict(attributes or {})
    loop = ir.Operation.create(
        "stablehlo.while", types, list(starts), more, regions=2, loc=place.location, ip=place.point
    )
    set_list(loop, "sdy.sharding", shardings)
    return loop


def sharding_as_carried(value: Value) -> TensorSharding | None:
    """The sharding of a value; what a loop carries has that of its result."""
    if isinstance(value.owner, Op) or value.owner.parent.name != "stablehlo.while":
        return value.sharding
    return value.owner.parent.results[value.index].sharding
