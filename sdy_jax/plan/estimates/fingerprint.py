"""What has to be equal in all processes that run a program together: the collectives of its plan, in their order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from sdy_jax.lowering.interface.collective_record import CollectiveRecord
from sdy_jax.representation.axes import braces
from sdy_jax.representation.mesh import Mesh

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
