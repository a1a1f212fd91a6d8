"""A copy of a program as a partitioner left it: what it costs, holds and sends."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sdy_jax.lowering.interface.setting import Setting
from sdy_jax.lowering.memory.peak import Peak, peak_of
from sdy_jax.lowering.proposal.layout_plan import LayoutPlan
from sdy_jax.lowering.proposal.proposal import Proposal
from sdy_jax.lowering.schedule.collective_times import CollectiveTimes
from sdy_jax.lowering.schedule.overlap import Overlap, overlap_of

_SAME = 1 + 1e-9
"""Given: times and bytes are sums of floats, whose rounding is no difference."""

_BYTES_FOR_TIME = 0.5
"""The share of its bytes that a program may send more, where that saves it twice this share of its time. Guessed: with
none, steps of an ODE's solver on 2 x 4 chips of v5e kept a state of 4097 numbers split, for 8 percent fewer bytes and
2.2 of the time that libtpu states (2026-11); with much, bytes are paid for latencies that others hide."""

PerOp = NDArray[np.float64]
"""A number per op of the program before it is partitioned."""


@dataclass(eq=False)
class PartitionedProgram:
    """A copy of the program as a partitioner left it, by a plan where there was one, with what it was planned with. One
    that will not be chosen may be forgotten: its figures stay, its copy of the program goes."""

    proposal: Proposal
    setting: Setting
    plan: LayoutPlan | None = None
    limit: Callable[[], float] = lambda: math.inf
    """Says the bytes that a device may hold."""

    @cached_property
    def cost(self) -> float:
        """What collectives and each device's own work cost."""
        return self.proposal.report.work + self.sending

    @cached_property
    def exposed(self) -> float:
        """What it costs but for what is saved as collectives run beside work."""
        return self.cost - self.overlap.saved

    @cached_property
    def overlap(self) -> Overlap:
        """Which collectives run beside work."""
        return overlap_of(self.proposal, self.setting, lambda: self.limit() - self.peak.total)

    @cached_property
    def peak(self) -> Peak:
        """What a device holds at most."""
        return peak_of(self.proposal.partitioned, self.setting.target)

    @property
    def sends(self) -> bool:
        """Whether anything is sent that the program does not send itself."""
        records = self.proposal.report.collectives
        return any(record.wire_bytes and record.origin == "partitioner" for record in records)

    @cached_property
    def sending(self) -> float:
        """What collectives cost: those that were inserted, and those that the program holds itself."""
        return self.sending_of(("partitioner", "user"))

    def sending_of(self, origins: Collection[str]) -> float:
        """What the collectives of some origins cost."""
        records = self.proposal.report.collectives
        return self._times.of(record for record in records if record.origin in origins)

    @cached_property
    def _times(self) -> CollectiveTimes:
        proposal = self.proposal
        return CollectiveTimes(proposal.partitioned, proposal.inserted, self.setting.costs, proposal.mesh)

    @cached_property
    def sent(self) -> float:
        """The bytes that a device sends."""
        return sum([record.wire_bytes * record.estimated_times for record in self.proposal.report.collectives])

    def sends_too_much_beside(self, other: PartitionedProgram) -> bool:
        """Whether a device sends more bytes than by another plan, and more than the time that this saves is worth."""
        if self.sent <= other.sent * _SAME:
            return False
        saved = max(0.0, 1 - self.exposed / other.exposed) if other.exposed else 0.0
        return self.sent > other.sent * (1 + _BYTES_FOR_TIME * saved) * _SAME

    def forget(self) -> None:
        """Keeps what it costs and holds, and lets the copy of the program go."""
        if hasattr(self, "proposal"):
            _ = self.cost, self.exposed, self.sending, self.sent, self.live
            self.peak = replace(self.peak, live=(), at=())
            for graph in (self.proposal.graph, self.proposal.partitioned):
                graph.take_apart()
            del self.proposal, self._times
            self.__dict__.pop("overlap", None)

    @cached_property
    def live(self) -> PerOp:
        """The bytes that are live while an op runs, or what was inserted before it, arguments and results included."""
        found, most = np.zeros(len(self.proposal.graph.ops)), 0.0
        numbers = self.proposal.remaining
        for op, live in self.peak.at:
            most = max(most, live)
            if op in numbers:
                found[numbers[op]], most = max(found[numbers[op]], most), 0.0
        return found + self.peak.border
