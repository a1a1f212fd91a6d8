"""Digests of programs: equal where nothing but source lines differs."""

from __future__ import annotations

import hashlib

from jax.extend.mlir import ir

from sdy_jax.ir.custom_ops import keys_in, set_keys, title_of
from sdy_jax.ir.operations import body_of, copied


def program_text(module: ir.Operation, with_lines: bool = False) -> str:
    """The functions and meshes of a module, as they read in every process. Its own attributes are left out: in them jax
    counts the devices in context.

    Args:
        module: a `builtin.module`.
        with_lines: with the lines of the source, which two programs may have different.
    """
    keys = keys_in(module)
    if keys:  # each process counts them for itself
        module = copied(module)
        set_keys(module, {key: f"{title_of(key)}:{number}" for number, key in enumerate(keys)})
    return "\n".join([str(op.get_asm(enable_debug_info=with_lines)) for op in body_of(module).operations])


def digest_of(text: str) -> str:
    """64 hexadecimal digits that say whether two texts are the same."""
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
