"""Where a program begins, in a text with several modules or a module with several functions, and what it reaches."""

from __future__ import annotations

import re

from jax.extend.mlir import ir

from sdy_jax.base.call_errors import did_you_mean
from sdy_jax.base.errors import UnsupportedError
from sdy_jax.ir.locations import source_line
from sdy_jax.ir.operations import (
    body_of,
    check_bodies,
    copied,
    functions,
    main_function,
    pre_order,
    references,
    symbol,
    top_level,
)
from sdy_jax.ir.text.modules import SEPARATOR, SourceError, split_modules

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
