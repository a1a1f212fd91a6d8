"""Modules of files as programs: where a program begins in one, and shardings and constants that it keeps elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping

from jax.extend.mlir import ir

from sdy_jax.base.errors import UnsupportedError, did_you_mean
from sdy_jax.ir.locations import source_line
from sdy_jax.ir.operations import (
    body_of,
    check_bodies,
    copied,
    functions,
    main_function,
    module_meshes,
    named,
    pre_order,
    references,
    replace_op,
    returned_by,
    symbol,
    top_level,
)
from sdy_jax.ir.stored_shardings import SIDES, entries_of, set_entries
from sdy_jax.ir.text.modules import SEPARATOR, SourceError, split_modules

# Where a program begins, in a text with several modules or a module with several functions, and what it reaches.

_DEFINED = re.compile(
    r'^[^\n/"]*\bfunc\.func\s+(?:(?:public|private|nested)\s+)?@(?:"([^"]*)"|([\w$.-]+))', re.MULTILINE
)


def part_with(text: str, function: str | None) -> str:
    """The part of a text between lines `// -----` that defines a function, with all lines before it empty; the whole
    text where no function is named, or where it has one part.

    Raises:
        UnsupportedError: no part defines it, or several do.
    """
    parts = list(split_modules(text))
    if function is None or len(parts) < 2:
        return text
    names = [[quoted or bare for quoted, bare in _DEFINED.findall(part)] for part in parts]
    defining = [part for part, known in zip(parts, names, strict=True) if function in known]
    if not defining:
        raise _unknown(function, [name for known in names for name in known])
    if len(defining) > 1:
        raise UnsupportedError(
            f"{len(defining)} of the parts between lines `{SEPARATOR}` define a function @{function}, and a program is "
            "one; to fix: give one part"
        )
    return defining[0]


def parted(error: SourceError, text: str) -> SourceError:
    """An error about a text that was read as one module, said of its parts where these are modules of their own."""
    parts = [part for part in split_modules(text) if re.sub(r"//.*", "", part).strip()]
    if len(parts) < 2 or not error.message.startswith("redefinition of symbol"):
        return error
    return SourceError(
        f"the lines `{SEPARATOR}` part this text into {len(parts)} modules, and a program is one; to fix: give one of "
        "them, or name a function that one of them defines: function= (--function)",
        error.file,
        error.position,
    )


def program_module(module: ir.Operation, function: str | None) -> ir.Operation:
    """A copy of a module with what a program is: the function that it begins at, and those that this one calls.

    Args:
        module: a `builtin.module`, which may have modules in it.
        function: where the program begins; None: the only function, or the one named `main`.

    Raises:
        UnsupportedError: it is not known where the program begins, or a function that it calls is declared only.
    """
    found = copied(_module_of(module, function))
    start = main_function(found) if function is None else functions(found)[function]
    _keep_reached(found, start)
    check_bodies(functions(found).values())
    _call_main(found, start)
    return found


def _module_of(module: ir.Operation, function: str | None) -> ir.Operation:
    """The module, of those in one another, in which the program is."""
    if function is None:
        while not functions(module) and len(inner := top_level(module, "builtin.module")) == 1:
            module = inner[0]
        return module
    modules = [op for op in pre_order(module) if op.name == "builtin.module"]
    defining = [each for each in modules if function in functions(each)]
    if not defining:
        raise _unknown(function, [name for each in modules for name in functions(each)])
    if len(defining) > 1:
        lines = ", ".join(source_line(functions(each)[function].location) for each in defining)
        raise UnsupportedError(
            f"{len(defining)} modules of the text define a function @{function}, at {lines}, and a program is one; "
            "to fix: give one of them"
        )
    return defining[0]


def _unknown(function: str, known: list[str]) -> UnsupportedError:
    listed = ", ".join(f"@{name}" for name in dict.fromkeys(known)) or "none"
    return UnsupportedError(f"no function is called @{function}; {did_you_mean(function, known)}there are {listed}")


def _keep_reached(module: ir.Operation, start: ir.Operation) -> None:
    """Erases the functions that a function does not call, directly or through others."""
    known, waiting = functions(module), [start]
    reached = {start}
    while waiting:
        called = {known[name] for name in references(waiting.pop()) if name in known} - reached
        reached |= called
        waiting += called
    for function in known.values():
        if function not in reached:
            function.erase()


def _call_main(module: ir.Operation, start: ir.Operation) -> None:
    """Lets the function that a program begins at be found: it is the only one, or called `main`."""
    known = functions(module)
    if len(known) == 1 or symbol(start) == "main":
        return
    table = ir.SymbolTable(module)
    if "main" in known:
        others = {
            symbol(op) for op in (op.operation for op in body_of(module).operations) if "sym_name" in op.attributes
        }
        free = next(name for name in map("main_{}".format, range(len(others) + 1)) if name not in others)
        ir.SymbolTable.replace_all_symbol_uses("main", free, module)
        table.set_symbol_name(known["main"], free)
    table.set_symbol_name(start, "main")


# Meshes and shardings of SDY as frontend attributes, in which programs carry them through HLO.

_FRONTEND, _SHARDING = "mhlo.frontend_attributes", "xla.sdy.sharding"
_OF_RESULT = "xla.sdy.FuncResultSharding"
"""The target of calls that state how a function's result is sharded, and compute nothing."""

# Torch/XLA and JAX's round trip write them so, with quotes that are escaped once, or not.


def settle_frontend_shardings(module: ir.Operation) -> None:
    """Gives a module the meshes and shardings that its frontend attributes state, in SDY's own attributes; nothing
    where it has meshes, or states none.

    Args:
        module: a `builtin.module`, which is changed.
    """
    meshes = _stated(module.attributes, "xla.sdy.meshes")
    if meshes is None or module_meshes(module):
        return
    with module.context, ir.Location.unknown(module.context):
        with ir.InsertionPoint.at_block_begin(body_of(module)):
            for mesh in ir.DictAttr(meshes):
                ir.Operation.create(
                    "sdy.mesh", attributes={"sym_name": ir.StringAttr.get(mesh.name), "mesh": mesh.attr}
                )
        for function in functions(module).values():
            for side in SIDES:
                _settle_side(function, side)
        for op in pre_order(module):
            sharding = _stated(op.attributes, _SHARDING)
            if sharding is not None and op.name != "func.func":
                op.attributes["sdy.sharding"] = sharding
        for call in named(module, "stablehlo.custom_call"):
            if ir.StringAttr(call.attributes["call_target_name"]).value == _OF_RESULT:
                _settle_result(call)


def _stated(attributes: Mapping[str, ir.Attribute], name: str) -> ir.Attribute | None:
    """What the frontend attribute of a name holds as text."""
    if _FRONTEND not in attributes:
        return None
    said = ir.DictAttr(attributes[_FRONTEND])
    if name not in said:
        return None
    text = str(ir.StringAttr(said[name]).value).replace('\\"', '"')
    return ir.Attribute.parse(text, said.context)


def _settle_side(function: ir.Operation, side: str) -> None:
    entries, changed = entries_of(function, side), False
    for entry in entries:
        sharding = _stated(entry, _SHARDING)
        if sharding is not None:
            entry["sdy.sharding"], changed = sharding, True
    if changed:
        set_entries(function, side, entries)


def _settle_result(call: ir.Operation) -> None:
    function = call.parent
    (result,) = call.results
    if "sdy.sharding" in call.attributes and function is not None and function.operation.name == "func.func":
        sharding = str(call.attributes["sdy.sharding"]).removeprefix("#sdy.sharding_per_value<[").removesuffix("]>")
        entries = entries_of(function.operation, "res_attrs")
        for entry, value in zip(entries, returned_by(function.operation), strict=True):
            if value == result:
                entry["sdy.sharding"] = ir.Attribute.parse(f"#sdy.sharding{sharding}")
        set_entries(function.operation, "res_attrs", entries)
    replace_op(call, call.operands)


# Constants whose elements are in the resources of a file.

_RESOURCE = re.compile(r"dense_resource<(?P<name>.*?)> : (?P<type>.*)", re.DOTALL)
_SECTION = "dialect_resources:"
_BLOB = re.compile(r'(?P<name>"[^"]*"|[\w.$-]+): "0x[0-9A-Fa-f]{8}(?P<elements>[0-9A-Fa-f]*)"')
"""A resource: its name, four bytes that say how it is aligned, and those of its elements."""


def settle_constants(module: ir.Operation) -> None:
    """Puts the elements of constants that are resources of a file into the constants: XLA reads no others.

    Constants whose resource is not there, such as `dense_resource<__elided__>`, stay: a program is planned without.

    Args:
        module: the outermost module, with which its resources are printed.

    Raises:
        UnsupportedError: a resource has not the elements of the constant's type.
    """
    constants = [op for op in named(module, "stablehlo.constant", "sdy.constant") if not _is_dense(op)]
    blobs = _blobs(module) if constants else {}
    for op in constants:
        found = _RESOURCE.fullmatch(str(op.attributes["value"]))
        if found is None or found["name"] not in blobs:
            continue
        try:
            elements = f'dense<"0x{blobs[found["name"]]}"> : {found["type"]}'
            op.attributes["value"] = ir.Attribute.parse(elements, module.context)
        except ir.MLIRError:
            raise UnsupportedError(
                f"{source_line(op.location)}: dense_resource<{found['name']}> has not the elements of a {found['type']}"
            ) from None


def _is_dense(constant: ir.Operation) -> bool:
    try:
        value = constant.attributes["value"].maybe_downcast()
    except TypeError:  # jaxlib has no class for those of complex numbers
        return True
    return isinstance(value, ir.DenseElementsAttr)


def _blobs(module: ir.Operation) -> dict[str, str]:
    """The resources of a module by their names, as the digits of their elements' bytes."""
    _, is_there, section = module.get_asm().rpartition(_SECTION)
    return {match["name"]: match["elements"] for match in _BLOB.finditer(section)} if is_there else {}
