"""The shardings that are attached to the values of an op."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jax.extend.mlir import ir

from sdy_jax.ir.operations import function_type, owning_op
from sdy_jax.ir.stored_shardings import sharding_of as stored_sharding_of
from sdy_jax.representation.attributes import sharding_from_attribute, shardings_from_attribute
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.sharding import TensorSharding

Meshes = Mapping[str, Mesh]
"""The meshes of a module by symbol."""


def mesh_of(sharding: TensorSharding, meshes: Meshes) -> Mesh | None:
    """The mesh of a sharding, None if the module has none of this name."""
    return sharding.mesh if isinstance(sharding.mesh, Mesh) else meshes.get(sharding.mesh)


@dataclass(frozen=True, slots=True)
class AttachedSharding:
    """A sharding, the type of its value, and what to call that."""

    where: str
    sharding: TensorSharding
    type: ir.Type


def attached_shardings(op: ir.Operation) -> Iterator[AttachedSharding]:
    """The shardings that an op attaches to its operands and results, or a function to its arguments and results.

    What is no sharding at all is left out.
    """
    for attribute, types, where in _lists(op):
        try:
            shardings = shardings_from_attribute(attribute)
        except ValueError:
            continue
        for i, (sharding, type_) in enumerate(zip(shardings, types, strict=False)):
            yield AttachedSharding(f"{op.name}, {where} {i}", sharding, type_)
    for attribute, type_, where in _singles(op):
        try:
            sharding = sharding_from_attribute(attribute)
        except ValueError:
            continue
        yield AttachedSharding(where, sharding, type_)


def _lists(op: ir.Operation) -> Iterator[tuple[ir.Attribute, list[ir.Type], str]]:
    for name, values, where in (
        ("in_shardings", op.operands, "operand"),
        ("out_shardings", op.results, "result"),
        ("sdy.sharding", op.results, "result"),
    ):
        if name in op.attributes:
            yield op.attributes[name], [value.type for value in values], where


def _singles(op: ir.Operation) -> Iterator[tuple[ir.Attribute, ir.Type, str]]:
    if op.name == "func.func":
        yield from _of_function(op)
    if op.name.startswith("sdy."):
        for name in ("sharding", "out_sharding"):
            if name in op.attributes:
                yield op.attributes[name], op.results[0].type, op.name


def _of_function(op: ir.Operation) -> Iterator[tuple[ir.Attribute, ir.Type, str]]:
    name = ir.StringAttr(op.attributes["sym_name"]).value
    function = function_type(op)
    for key, what, types in (("arg_attrs", "argument", function.inputs), ("res_attrs", "result", function.results)):
        entries = ir.ArrayAttr(op.attributes[key]) if key in op.attributes else ()
        for i, (attributes, type_) in enumerate(zip(entries, types, strict=False)):
            if "sdy.sharding" in attributes:
                yield attributes["sdy.sharding"], type_, f"func.func @{name}, {what} {i}"


def shape_of(type_: ir.Type) -> tuple[int, ...] | None:
    """The shape of a value, with -1 for unknown sizes; None for what is no tensor."""
    if isinstance(type_, ir.TupleType) and type_.num_types == 1:
        type_ = type_.get_type(0)
    return tuple(max(n, -1) for n in type_.shape) if isinstance(type_, ir.ShapedType) and type_.has_rank else None


def sharding_of(value: ir.Value) -> TensorSharding | None:
    """The sharding that is written for a value, as it is seen where the value is used; None if there is none."""
    maker = owning_op(value)
    if isinstance(value, ir.BlockArgument) and maker.name == "stablehlo.while":
        value = maker.results[value.arg_number]
    return stored_sharding_of(value)


def location_text(location: ir.Location) -> str | None:
    """A location as MLIR writes it; None where nothing is known."""
    text = str(location).removeprefix("loc(").removesuffix(")")
    return None if text == "unknown" else text
