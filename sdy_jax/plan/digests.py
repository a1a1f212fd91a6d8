"""Digests of programs and of their collectives, the same in every process: programs that differ in source lines
alone have the same one; processes that run a program together compare the collectives' fingerprint.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator, Sequence

from jax.extend.mlir import ir, passmanager

from sdy_jax.ir.custom_ops import keys_in, set_keys, title_of
from sdy_jax.ir.meshes import Mesh, braces
from sdy_jax.ir.operations import body_of, copied
from sdy_jax.lowering.planner.report import CollectiveRecord

# Digests of programs: equal where nothing but source lines differs.


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


# What has to be equal in all processes that run a program together: the collectives of its plan, in their order.

_DIGITS = 32
"""Given: 128 bits, of which two programs have the same by no accident."""


def fingerprint_of(mesh: Mesh, collectives: Iterable[CollectiveRecord]) -> str:
    """32 hexadecimal digits that depend on the mesh and on `collective_lines` alone."""
    return digest([str(mesh), *collective_lines(collectives)])


def digest(lines: Iterable[str]) -> str:
    """32 hexadecimal digits, the same in every process and run."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:_DIGITS]


def collective_lines(collectives: Iterable[CollectiveRecord]) -> Iterator[str]:
    """What each collective is: kind, axes (which on a mesh are groups), types, and the loops and branches around it.
    Where its source stands, and what it costs, is not part of that."""
    for record in collectives:
        yield _line(record)
        yield from (f"in bucket {record.bucket}: {line}" for line in collective_lines(record.members))


def _line(record: CollectiveRecord) -> str:
    said = [record.kind, *filter(None, [record.moved.reduction]), record.detail or f"over {braces(record.axes)}"]
    said.append(f"of {record.dtype}[{','.join(map(str, record.shape))}] to <{record.result}>")
    if record.depth:
        said.append(f"in {record.depth} loops, {record.times}{'' if record.times_known else ' or more'} times")
    said += [f"in branch {number} of conditional {conditional}" for conditional, number in record.branches]
    said += ["one trip ahead"] * record.is_ahead + ["again"] * record.again
    return " ".join(said)
