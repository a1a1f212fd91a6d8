"""Reading and writing the shardings of an MLIR module, wherever the dialect stores them.

Storage: functions keep them in dictionaries per argument and result; most ops in `sdy.sharding`, one entry per result;
sdy's own ops in `sharding` or `out_sharding`; manual and named computations in `in_shardings` and `out_shardings`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from jax.extend.mlir import ir

from sdy_jax.ir.attributes import (
    sharding_attributes,
    sharding_from_attribute,
    sharding_to_attribute,
    shardings_from_attribute,
    shardings_to_attribute,
    with_reduction,
    write_reduction,
)
from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.operations import COMPUTATIONS, function_type, manual_axes, owning_op, pre_order, rank
from sdy_jax.ir.shardings import TensorSharding, add_free_axes, erase_manual_axes

SINGLE = ("sharding", "out_sharding")
"""Attributes of one sharding, on sdy's own ops."""
LISTS = ("sdy.sharding", "in_shardings", "out_shardings")
"""Attributes with one sharding per value; `sdy.sharding` is also the name in a function's dictionaries."""
_HAVE_SHARDING = ("sdy.sharding_constraint", "sdy.reshard", "sdy.data_flow_edge")
"""Ops that keep the sharding of their result in `sharding`, if they have one."""

Change = Callable[[TensorSharding], TensorSharding]


def map_shardings(module: ir.Operation, change: Change) -> None:
    """Replaces every sharding in the module, in pre-order: arguments, results, then ops."""
    memo: dict[ir.Attribute, ir.Attribute] = {}

    def changed(name: str, attribute: ir.Attribute) -> ir.Attribute:
        if attribute not in memo:
            memo[attribute] = _map_attribute(name, attribute, change, module.context)
        return memo[attribute]

    _map_attributes(module, changed)


def used_meshes(module: ir.Operation) -> list[str | Mesh]:
    """The meshes of the shardings in a module, by their symbols or inline, in the order in which they come first."""
    used: dict[str | Mesh, None] = {}

    def seen(name: str, attribute: ir.Attribute) -> ir.Attribute:
        read = [sharding_from_attribute(attribute)] if name in SINGLE else shardings_from_attribute(attribute)
        used.update(dict.fromkeys(sharding.mesh for sharding in read))
        return attribute

    _map_attributes(module, seen)
    return list(used)


def _map_attributes(module: ir.Operation, changed: Callable[[str, ir.Attribute], ir.Attribute]) -> None:
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
    for side in SIDES:
        if side in function.attributes:
            entries = entries_of(function, side)
            for entry in entries:
                if "sdy.sharding" in entry:
                    entry["sdy.sharding"] = changed("sharding", entry["sdy.sharding"])
            set_entries(function, side, entries)


# Arguments and results of functions.

SIDES = ("arg_attrs", "res_attrs")
"""Where a function keeps the attributes of its arguments, and those of its results."""


def entries_of(function: ir.Operation, side: str) -> list[dict[str, ir.Attribute]]:
    """The attributes of each argument (`arg_attrs`) or result (`res_attrs`) of a function, as copies."""
    if side in function.attributes:
        return [{n.name: n.attr for n in ir.DictAttr(entry)} for entry in ir.ArrayAttr(function.attributes[side])]
    return [{} for _ in range(_count(function, side))]


def set_entries(function: ir.Operation, side: str, entries: Iterable[dict[str, ir.Attribute]]) -> None:
    """Stores the attributes of all arguments (`arg_attrs`) or results (`res_attrs`) of a function."""
    made = [ir.DictAttr.get(entry, function.context) for entry in entries]
    function.attributes[side] = ir.ArrayAttr.get(made, function.context)


def set_entry(function: ir.Operation, side: str, index: int, key: str, attribute: ir.Attribute) -> None:
    """Stores an attribute of one argument (`arg_attrs`) or result (`res_attrs`) of a function."""
    entries = entries_of(function, side)
    entries[index][key] = attribute
    set_entries(function, side, entries)


def _count(function: ir.Operation, side: str) -> int:
    type_ = function_type(function)
    return len(type_.inputs if side == "arg_attrs" else type_.results)


def function_shardings(function: ir.Operation, side: str) -> list[TensorSharding | None]:
    """The sharding of each argument (`arg_attrs`) or result (`res_attrs`) of a function."""
    attributes = function.attributes
    if side not in attributes:
        return [None] * _count(function, side)
    return [_sharding_in(entry) for entry in ir.ArrayAttr(attributes[side])]


def function_sharding(function: ir.Operation, side: str, index: int) -> TensorSharding | None:
    """The sharding of one argument (`arg_attrs`) or result (`res_attrs`) of a function."""
    attributes = function.attributes
    return _sharding_in(ir.ArrayAttr(attributes[side])[index]) if side in attributes else None


def _sharding_in(entry: ir.Attribute) -> TensorSharding | None:
    known = ir.DictAttr(entry)
    return sharding_from_attribute(known["sdy.sharding"]) if "sdy.sharding" in known else None


def set_function_shardings(function: ir.Operation, side: str, shardings: Mapping[int, TensorSharding | None]) -> None:
    """Stores the shardings of some arguments (`arg_attrs`) or results (`res_attrs`) of a function, by number.

    Costs time in proportion to all of them: to set many, call it once.
    """
    old = function_shardings(function, side)
    if all(old[number] == sharding for number, sharding in shardings.items()):
        return
    entries = entries_of(function, side)
    for number, sharding in shardings.items():
        entries[number].pop("sdy.sharding", None)
        if sharding is not None:
            entries[number]["sdy.sharding"] = sharding_to_attribute(sharding, function.context)
    set_entries(function, side, entries)


# Values.


def sharding_of(value: ir.Value) -> TensorSharding | None:
    """The sharding stored at an argument of a function or computation, or at an op result."""
    owner = owning_op(value)
    if not isinstance(value, ir.BlockArgument):
        found = stored_results(owner.name, owner.attributes, result_attribute(owner))
        return found[value.result_number] if found else None
    if owner.name in COMPUTATIONS:
        given = list_of(owner, "in_shardings")[value.arg_number]
        return given and erase_manual_axes(given, manual_axes(owner))
    return function_sharding(owner, "arg_attrs", value.arg_number) if owner.name == "func.func" else None


def result_attribute(op: ir.Operation) -> str:
    """Where an op, if it has no `SINGLE` one, keeps the shardings of its results."""
    return "out_shardings" if op.name in COMPUTATIONS else "sdy.sharding"


def stored_results(
    op: str, attributes: Mapping[str, ir.Attribute], name: str = "sdy.sharding"
) -> Sequence[TensorSharding]:
    """The shardings of an op's results, from its attributes; empty if it has none.

    Args:
      op: the op's name.
      attributes: the op's.
      name: the attribute that lists shardings where the op has no `SINGLE` one.
    """
    if name in attributes:
        return [with_reduction(s, attributes) for s in shardings_from_attribute(attributes[name])]
    if op.startswith("sdy."):
        for single in SINGLE:
            if single in attributes:
                return (with_reduction(sharding_from_attribute(attributes[single]), attributes),)
    return ()


def set_sharding(value: ir.Value, sharding: TensorSharding) -> None:
    """Stores a sharding where `sharding_of` reads it; other results become fully open on the same mesh."""
    owner = owning_op(value)
    if not isinstance(value, ir.BlockArgument):
        found = [sharding_of(r) for r in owner.results]
        found[value.result_number] = sharding
        store_results(owner, found, result_attribute(owner))
    elif owner.name in COMPUTATIONS:
        _set_body_argument(owner, value.arg_number, sharding)
    else:
        set_function_shardings(owner, "arg_attrs", {value.arg_number: sharding})


def store_results(op: ir.Operation, found: Sequence[TensorSharding | None], name: str = "sdy.sharding") -> None:
    """Stores the shardings of an op's results where `stored_results` reads them, as `set_list` does."""
    single = _single_of(op)
    if not single:
        set_list(op, name, found)
    elif found[0] is not None:
        op.attributes[single] = sharding_to_attribute(found[0], op.context)
        write_reduction(op, [found[0]])


def _single_of(op: ir.Operation) -> str:
    """The `SINGLE` attribute of an op; empty if it can have none."""
    if not op.name.startswith("sdy."):
        return ""
    if "out_sharding" in op.attributes:
        return "out_sharding"
    return "sharding" if op.name in _HAVE_SHARDING else ""


def stating(
    name: str, value: ir.Value, sharding: TensorSharding, location: ir.Location, ip: ir.InsertionPoint
) -> ir.Operation:
    """A new op (`sdy.reshard`, `sdy.sharding_constraint`) whose result is the value, with a sharding."""
    attributes = sharding_attributes("sharding", sharding, value.context)
    return ir.Operation.create(name, results=[value.type], operands=[value], attributes=attributes, loc=location, ip=ip)


def _set_body_argument(computation: ir.Operation, number: int, sharding: TensorSharding) -> None:
    found = list_of(computation, "in_shardings")
    outer, is_manual = found[number], computation.name == "sdy.manual_computation"
    found[number] = add_free_axes(outer, sharding, manual_axes(computation)) if outer and is_manual else sharding
    set_list(computation, "in_shardings", found)


def set_list(op: ir.Operation, name: str, found: Sequence[TensorSharding | None]) -> None:
    """Stores the shardings of an op's operands (`in_shardings`) or results.

    Missing ones become fully open on the mesh of the first; nothing happens if all are missing.
    """
    shardings = tuple([s for s in found if s is not None])
    if not shardings:
        return
    if len(shardings) < len(found):
        mesh, pairs = shardings[0].mesh, zip(found, _values(op, name), strict=True)
        shardings = tuple([s or TensorSharding.fully_open(mesh, rank(v)) for s, v in pairs])
    op.attributes[name] = shardings_to_attribute(shardings, op.context)
    if name != "in_shardings":
        write_reduction(op, shardings)


def _values(op: ir.Operation, name: str) -> list[ir.Value]:
    return list(op.operands if name == "in_shardings" else op.results)


def filled(
    found: Sequence[TensorSharding | None], values: Sequence[ir.Value], meshes: dict[str, Mesh]
) -> list[TensorSharding] | None:
    """One sharding per value: missing ones are open, on the first mesh that is not maximal; None: there is no such."""
    mesh = next((s.mesh for s in found if s is not None and not mesh_of(meshes, s).is_maximal), None)
    if mesh is None:
        return None
    return [s or TensorSharding.fully_open(mesh, rank(v)) for s, v in zip(found, values, strict=True)]


def list_of(op: ir.Operation, name: str) -> list[TensorSharding | None]:
    """The shardings in attribute `name` of an op's operands (`in_shardings`) or results, None for each if absent."""
    if name not in op.attributes:
        return [None] * len(_values(op, name))
    if name == "in_shardings":
        return list(shardings_from_attribute(op.attributes[name]))
    return list(stored_results(op.name, op.attributes, name))


def mesh_of(meshes: dict[str, Mesh], sharding: TensorSharding) -> Mesh:
    """The mesh that a sharding refers to by symbol or has inline."""
    return meshes[sharding.mesh] if isinstance(sharding.mesh, str) else sharding.mesh
