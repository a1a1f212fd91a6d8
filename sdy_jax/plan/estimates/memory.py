"""What a device holds while it runs a plan's program: by estimate, and by what its compiler says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax

from sdy_jax.ir.graph import Graph, Value
from sdy_jax.lowering.emission.emit import value_shardings
from sdy_jax.lowering.memory.peak import peak_of
from sdy_jax.lowering.targets.target import Target
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.representation.type_text import type_text


class HeldValue(NamedTuple):
    """A temporary: its type with axes, the line that makes it, and its bytes on a device."""

    type: str
    source: str
    bytes: float


class MemoryUse(NamedTuple):
    """Bytes that a device holds.

    Attributes:
        arguments, results: of the program's arguments, closed-over arrays included, and results.
        temporaries: of values made in between, when most is live.
        largest: the temporaries that are live then, largest first.
        shared: of results that lie in the memory of donated arguments.
        available: what a device has for the program: `memory=`, else its own memory; 0 where neither is known.
    """

    arguments: float
    results: float
    temporaries: float
    largest: tuple[HeldValue, ...]
    shared: float = 0.0
    available: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether a device has as much, or it is not known how much it has."""
        return not self.available or self.peak <= self.available

    @property
    def border(self) -> float:
        """Arguments and results together."""
        return self.arguments + self.results - self.shared

    @property
    def peak(self) -> float:
        """All that a device holds at most."""
        return self.border + self.temporaries


def compiled_memory(compiled: jax.stages.Compiled) -> MemoryUse | None:
    """What a device holds by the compiler, which names no values; None where it says nothing."""
    found = compiled.memory_analysis()
    if found is None:
        return None
    arguments, results, temporaries, shared = (
        getattr(found, f"{name}_size_in_bytes") for name in ("argument", "output", "temp", "alias")
    )
    return MemoryUse(arguments, results, temporaries, (), shared)


def memory_of(graph: Graph, target: Target = Target(), available: float = 0.0) -> MemoryUse:  # noqa: B008
    """What a device holds for a partitioned program, of what it has; `target`: which device that is."""
    peak, shardings = peak_of(graph, target), value_shardings(graph)
    held = [HeldValue(_type(live.value, shardings), live.source, live.bytes) for live in peak.live]
    return MemoryUse(peak.arguments, peak.results, peak.bytes, tuple(held), peak.shared, available)


def _type(value: Value, shardings: Mapping[Value, TensorSharding]) -> str:
    return type_text(value.dtype, value.shape, shardings.get(value))
