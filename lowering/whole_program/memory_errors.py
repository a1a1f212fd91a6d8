"""What is said where a program cannot keep within a limit of memory: what is largest, and where it comes from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from sdy_jax.errors import MemoryLimitError
from sdy_jax.ir.graph import Graph, Value
from sdy_jax.lowering.memory.peak import Peak
from sdy_jax.lowering.proposal.proposal import ProposedLayouts
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.representation.type_text import bytes_text, type_text

_LISTED = 5
"""Values that an error lists. Chosen: for a reader."""


class GivenUp(Exception):
    """A program that does not fit as it is written costs more, where it does, than what is known to fit."""


def too_large(peak: Peak, limit: float) -> MemoryLimitError:
    """The error for a program that holds more than the limit however it is planned; `peak`: of what holds least."""
    largest = "; ".join(
        f"{bytes_text(live.bytes)} of {_type(live.value)} at {live.source}" for live in peak.live[:_LISTED]
    )
    error = MemoryLimitError(
        f"memory={bytes_text(limit)} is not enough: the least that was found is {bytes_text(peak.total)} per device "
        f"({bytes_text(peak.arguments)} of arguments, {bytes_text(peak.results)} of results, {bytes_text(peak.bytes)} "
        f"in between). The largest values at the peak: {largest}; to fix: split these, or compute them again "
        "(jax.checkpoint)"
    )
    error.least = peak.total
    return error


def border_too_large(
    graph: Graph, layouts: ProposedLayouts, held: float, inputs: Sequence[str], mesh: Mesh, limit: float
) -> MemoryLimitError:
    """The error for a program whose arguments and results alone hold more than the limit.

    Args:
        graph, layouts: the program, and its layouts.
        held: the bytes that it holds per device in all.
        inputs: what the user calls the arguments.
        mesh: the mesh of the layouts.
        limit: bytes per device.
    """
    arguments = dict(_sizes(inputs or _numbered("argument", graph.arguments), graph.arguments, layouts.arguments, mesh))
    results = dict(_sizes(_numbered("result", graph.outputs), graph.outputs, layouts.results, mesh))
    both = sorted({**arguments, **results}.items(), key=lambda item: -item[1])[:_LISTED]
    error = MemoryLimitError(
        f"memory={bytes_text(limit)} is not enough: arguments take {bytes_text(sum(arguments.values()))} and results "
        f"{bytes_text(sum(results.values()))} per device. The largest: "
        f"{', '.join(f'`{name}` ({bytes_text(size)})' for name, size in both)}; to fix: split them further, by "
        "in_shardings and out_shardings, or leave them to the planner (AUTO)"
    )
    error.least = held
    return error


def _type(value: Value) -> str:
    return type_text(value.dtype, value.shape, value.sharding)


def _numbered(what: str, values: Sequence[Value]) -> list[str]:
    return [f"{what} {number}" for number in range(len(values))]


def _sizes(
    names: Sequence[str], values: Sequence[Value], shardings: Sequence[TensorSharding], mesh: Mesh
) -> Iterator[tuple[str, float]]:
    """The bytes of each on a device."""
    for name, value, sharding in zip(names, values, shardings, strict=True):
        if value.shape is not None:
            yield name, math.prod(sharding.local_shape(value.shape, mesh)) * value.itemsize
