"""Digests of programs: equal where nothing but source lines differs."""

from __future__ import annotations

import hashlib
import io

from jax.extend.mlir import ir, passmanager

from sdy_jax.ir.custom_ops import keys_in, set_keys, title_of
from sdy_jax.ir.operations import body_of, copied


def program_text(module: ir.Operation) -> str:
    """The functions and meshes of a module without the lines of the source, as they read in every process. Its own
    attributes are left out: in them jax counts the devices in context."""
    return "\n".join([str(op.get_asm()) for op in body_of(_in_every_process(module)).operations])


def bytecode(module: ir.Operation, with_lines: bool) -> bytes:
    """A module as bytes, which are the same in every process; without lines also its own attributes are left out.

    The text of a step of twelve layers takes 0.06 s to write, 0.16 with lines, of the 1.6 s of a first call; the bytes
    take 0.01 (2026-11).
    """
    found, module = io.BytesIO(), _in_every_process(module)
    if not with_lines:
        module = _without_lines(module)
    module.write_bytecode(found)
    return found.getvalue()


def _without_lines(module: ir.Operation) -> ir.Operation:
    """The functions and meshes of a module in one that has no attributes."""
    found = ir.Module.create(ir.Location.unknown(module.context))
    for op in body_of(module).operations:
        found.body.append(copied(op.operation))
    with module.context:
        strip = passmanager.PassManager.parse("builtin.module(strip-debuginfo)")
        strip.enable_verifier(False)
        strip.run(found.operation)
    return found.operation


def _in_every_process(module: ir.Operation) -> ir.Operation:
    """A module whose custom ops are numbered: each process counts them for itself."""
    keys = keys_in(module)
    if keys:
        module = copied(module)
        set_keys(module, {key: f"{title_of(key)}:{number}" for number, key in enumerate(keys)})
    return module


def digest_of(data: str | bytes) -> str:
    """64 hexadecimal digits that say whether two texts, or two strings of bytes, are the same."""
    given = data if isinstance(data, bytes) else data.encode(errors="surrogateescape")
    return hashlib.sha256(given).hexdigest()
