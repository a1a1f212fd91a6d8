"""Digests of programs: equal where nothing but source lines differs."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence

from jax.extend.mlir import ir, passmanager

from sdy_jax.ir.custom_ops import keys_in, set_keys, title_of
from sdy_jax.ir.operations import body_of, copied


def program_text(module: ir.Operation) -> str:
    """The functions and meshes of a module without the lines of the source, as they read in every process. Its own
    attributes are left out: in them jax counts the devices in context."""
    module = in_every_process(module, keys_in(module))
    return "\n".join([str(op.get_asm()) for op in body_of(module).operations])


def bytecode(module: ir.Operation, with_lines: bool) -> bytes:
    """A module `in_every_process` as bytes; without lines also its own attributes are left out.

    The text of a step of twelve layers takes 0.06 s to write, 0.16 with lines, of the 1.6 s of a first call; the bytes
    take 0.01 (2026-11).
    """
    found = io.BytesIO()
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


def in_every_process(module: ir.Operation, keys: Sequence[str]) -> ir.Operation:
    """A module that is the same in every process: the `keys_in` it, by which each finds functions of its own, are
    numbered."""
    if keys:
        module = copied(module)
        set_keys(module, {key: f"{title_of(key)}:{number}" for number, key in enumerate(keys)})
    return module


def digest_of(data: str | bytes) -> str:
    """64 hexadecimal digits that say whether two texts, or two strings of bytes, are the same."""
    given = data if isinstance(data, bytes) else data.encode(errors="surrogateescape")
    return hashlib.sha256(given).hexdigest()
