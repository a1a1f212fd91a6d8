"""Ops that are made for a loop over parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax.extend.mlir import ir

from sdy_jax.ir.custom_ops import ROUNDED
from sdy_jax.ir.graph import Op, Value
from sdy_jax.ir.operations import any_number
from sdy_jax.ir.stored_shardings import store_results
from sdy_jax.representation.sharding import TensorSharding


class Place(NamedTuple):
    """Where ops are made, and the location that they get."""

    point: ir.InsertionPoint
    location: ir.Location

    @property
    def context(self) -> ir.Context:
        return self.location.context


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


def rounded(value: ir.Value, type_: ir.Type, place: Place, sharding: TensorSharding | None) -> ir.Value:
    """A sum in another type."""
    target = {"call_target_name": ir.StringAttr.get(ROUNDED, place.context)}
    return created("stablehlo.custom_call", type_, [value], place, sharding, target)


def integer(number: int, place: Place) -> ir.Value:
    """A scalar of 32 bits, as jax counts trips."""
    return filled(np.asarray(number, np.int32), ir.RankedTensorType.get([], _int32(place), loc=place.location), place)


def _int32(place: Place) -> ir.Type:
    return ir.IntegerType.get_signless(32, place.context)


def filled(number: np.ndarray, type_: ir.Type, place: Place, sharding: TensorSharding | None = None) -> ir.Value:
    """An array of one number."""
    # As text: the bindings do not take all element types.
    text = f'"stablehlo.constant"() <{{value = dense<{_text(number)}> : {type_}}}> : () -> {type_}'
    constant = ir.Operation.parse(text, context=place.context).operation
    place.point.insert(constant)
    constant.location = place.location
    store_results(constant, [sharding])
    return constant.results[0]


def _text(number: np.ndarray) -> str:
    if number.dtype.kind == "c":
        return f"({float(number.real)}, {float(number.imag)})"
    if number.dtype.kind == "b":
        return str(bool(number)).lower()
    if number.dtype.kind in "iu":
        return str(int(number))
    return f"0x{number.tobytes()[::-1].hex().upper()}"


def unwritten(type_: ir.Type, place: Place, sharding: TensorSharding | None) -> ir.Value:
    """An array, all elements of which will be written."""
    made = any_number(type_, place.point, place.location)
    store_results(made.owner, [sharding])
    return made


def declared(value: Value) -> TensorSharding | None:
    """The sharding of a value; what a loop carries has that of its result."""
    if isinstance(value.owner, Op) or value.owner.parent.name != "stablehlo.while":
        return value.sharding
    return value.owner.parent.results[value.index].sharding
