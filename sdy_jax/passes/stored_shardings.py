"""Reading and writing the shardings of an MLIR module, wherever the dialect stores them.

Storage: functions keep them in dictionaries per argument and result; most ops in `sdy.sharding`, one entry per result;
sdy's own ops in `sharding` or `out_sharding`; manual and named computations in `in_shardings` and `out_shardings`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from jax.extend.mlir import ir

from sdy_jax.ir import graph
from sdy_jax.ir.graph import pre_order
from sdy_jax.passes.walk import body_of, rank, terminator_of
from sdy_jax.propagation.edges import add_free_axes, erase_manual_axes, manual_axes
from sdy_jax.representation.attributes import (
    sharding_from_attribute,
    sharding_to_attribute,
    shardings_from_attribute,
    shardings_to_attribute,
    with_reduction,
    write_reduction,
)
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.sharding import TensorSharding

SINGLE = ("sharding", "out_sharding")
"""Attributes of one sharding, on sdy's own ops."""
LISTS = ("sdy.sharding", "in_shardings", "out_shardings")
"""Attributes with one sharding per value; `sdy.sharding` is also the name in a function's dictionaries."""
COMPUTATIONS = ("sdy.manual_computation", "sdy.named_computation")

Change = Callable[[TensorSharding], TensorSharding]


def map_shardings(module: ir.Operation, change: Change) -> None:
    """Replaces every sharding in the module, in pre-order: arguments, results, then ops."""
    memo: dict[ir.Attribute, ir.Attribute] = {}

    def changed(name: str, attribute: ir.Attribute) -> ir.Attribute:
        if attribute not in memo:
            memo[attribute] = _map_attribute(name, attribute, change, module.context)
        return memo[attribute]

    for op in pre_order(module):
        if op.name == "func.func":
            _map_function(op, changed)
            continue
        attributes = op.attributes
        for name in LISTS + (SINGLE if op.name.startswith("sdy.") else ()):
            if name in attributes:
                attributes[name] = changed(name, attributes[name])


def _map_attribute(name: str, attribute: ir.Attribute, change: Change, context: ir.Context) -> ir.Attribute:
    if name in SINGLE:
        return sharding_to_attribute(change(sharding_from_attribute(attribute)), context)
    return shardings_to_attribute(tuple(map(change, shardings_from_attribute(attribute))), context)


def _map_function(function: ir.Operation, changed: Callable[[str, ir.Attribute], ir.Attribute]) -> None:
    for name in ("arg_attrs", "res_attrs"):
        if name not in function.attributes:
            continue
        entries = []
        for dictionary in ir.ArrayAttr(function.attributes[name]):
            entry = {n.name: n.attr for n in ir.DictAttr(dictionary)}
            if "sdy.sharding" in entry:
                entry["sdy.sharding"] = changed("sharding", entry["sdy.sharding"])
            entries.append(ir.DictAttr.get(entry, function.context))
        function.attributes[name] = ir.ArrayAttr.get(entries, function.context)


def function_shardings(function: ir.Operation, name: str) -> list[TensorSharding | None]:
    """The sharding of each argument (`arg_attrs`) or result (`res_attrs`) of a function."""
    return graph.function_shardings(function, name, _count(function, name))


def set_function_sharding(function: ir.Operation, name: str, index: int, sharding: TensorSharding | None) -> None:
    set_function_shardings(function, name, {index: sharding})


def set_function_shardings(function: ir.Operation, name: str, shardings: Mapping[int, TensorSharding | None]) -> None:
    """Stores the shardings of some arguments (`arg_attrs`) or results (`res_attrs`) of a function, by number."""
    if shardings:
        graph.set_function_shardings(function, name, _count(function, name), shardings)


def _count(function: ir.Operation, name: str) -> int:
    block = body_of(function)
    return len(block.arguments) if name == "arg_attrs" else len(terminator_of(block).operands)


def sharding_of(value: ir.Value) -> TensorSharding | None:
    """The sharding stored at an argument of a function or computation, or at an op result."""
    if isinstance(value, ir.BlockArgument):
        owner = value.owner.owner.operation
        if owner.name in COMPUTATIONS:
            given = list_of(owner, "in_shardings", len(owner.operands))[value.arg_number]
            return given and erase_manual_axes(given, manual_axes(owner))
        is_argument = owner.name == "func.func"
        return graph.function_sharding(owner, "arg_attrs", value.arg_number) if is_argument else None
    op, attributes = value.owner.operation, value.owner.attributes
    for name in SINGLE:
        if op.name.startswith("sdy.") and name in attributes:
            return with_reduction(sharding_from_attribute(attributes[name]), attributes)
    name = "out_shardings" if op.name in COMPUTATIONS else "sdy.sharding"
    if name not in attributes:
        return None
    return with_reduction(shardings_from_attribute(attributes[name])[value.result_number], attributes)


def set_sharding(value: ir.Value, sharding: TensorSharding) -> None:
    """Stores a sharding where `sharding_of` reads it; other results become fully open on the same mesh."""
    if isinstance(value, ir.BlockArgument):
        owner = value.owner.owner.operation
        if owner.name in COMPUTATIONS:
            _set_body_argument(owner, value.arg_number, sharding)
        else:
            set_function_sharding(owner, "arg_attrs", value.arg_number, sharding)
        return
    op = value.owner.operation
    if op.name in ("sdy.sharding_constraint", "sdy.reshard", "sdy.data_flow_edge"):
        op.attributes["sharding"] = sharding_to_attribute(sharding, op.context)
        write_reduction(op, [sharding])
        return
    found = [sharding_of(r) for r in op.results]
    found[value.result_number] = sharding
    set_list(op, "out_shardings" if op.name in COMPUTATIONS else "sdy.sharding", found, list(op.results))


def _set_body_argument(computation: ir.Operation, number: int, sharding: TensorSharding) -> None:
    found = list_of(computation, "in_shardings", len(computation.operands))
    outer, is_manual = found[number], computation.name == "sdy.manual_computation"
    found[number] = add_free_axes(outer, sharding, manual_axes(computation)) if outer and is_manual else sharding
    set_list(computation, "in_shardings", found, list(computation.operands))


def set_list(op: ir.Operation, name: str, found: Sequence[TensorSharding | None], values: Sequence[ir.Value]) -> None:
    """Stores one sharding per value; missing ones become fully open on the mesh of the first. All missing: nothing."""
    meshes = [s.mesh for s in found if s is not None]
    if not meshes:
        return
    full = (s or TensorSharding.fully_open(meshes[0], rank(v)) for s, v in zip(found, values, strict=True))
    shardings = tuple(full)
    op.attributes[name] = shardings_to_attribute(shardings, op.context)
    if name != "in_shardings":
        write_reduction(op, shardings)


def filled(
    found: Sequence[TensorSharding | None], values: Sequence[ir.Value], meshes: dict[str, Mesh]
) -> list[TensorSharding] | None:
    """One sharding per value: missing ones are open, on the first mesh that is not maximal; None: there is no such."""
    mesh = next((s.mesh for s in found if s is not None and not mesh_of(meshes, s).is_maximal), None)
    if mesh is None:
        return None
    return [s or TensorSharding.fully_open(mesh, rank(v)) for s, v in zip(found, values, strict=True)]


def list_of(op: ir.Operation, name: str, count: int) -> list[TensorSharding | None]:
    """The shardings in attribute `name`, None for each of `count` values where it is absent."""
    if name not in op.attributes:
        return [None] * count
    found = shardings_from_attribute(op.attributes[name])
    return list(found) if name == "in_shardings" else [with_reduction(s, op.attributes) for s in found]


def mesh_of(meshes: dict[str, Mesh], sharding: TensorSharding) -> Mesh:
    """The mesh that a sharding refers to by symbol or has inline."""
    return meshes[sharding.mesh] if isinstance(sharding.mesh, str) else sharding.mesh
