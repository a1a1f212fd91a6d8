"""What a compiled program takes by its own compiler's estimate."""

from __future__ import annotations

from dataclasses import dataclass

from jax.sharding import Mesh

from sdy_jax import CostModel
from sdy_jax.lowering.reshard.cost import Link, rate
from sdy_jax.plan.hlo import HloCollective, collectives_in_hlo, estimated_cycles

CLOCK = 1.5e9
"""Cycles per second of a TPU v5e: 197 TFLOP/s are what its four units of 128 x 128 multiply-adds do in so many."""


@dataclass(frozen=True, slots=True)
class CompilerTime:
    """Seconds of a program on a TPU: of its ops by the cycles that its compiler states, and of its collectives."""

    work: float
    sent: float

    @property
    def total(self) -> float:
        return self.work + self.sent


def compiler_time(hlo: str, costs: CostModel, mesh: Mesh) -> CompilerTime:
    """The time of a compiled program.

    Args:
        hlo: its text.
        costs: how fast the links are along the mesh's axes, all of which have to be equally fast.
        mesh: the axes.
    """
    name = mesh.axis_names[0]
    link = Link(1, costs.bandwidth_of(name), *(of[0][1] for of in (costs.latency,)), costs.start, name in costs.torus)
    sent = sum(found.count * _seconds(found, link) for found in collectives_in_hlo(hlo))
    return CompilerTime(estimated_cycles(hlo) / CLOCK, sent)


def _seconds(found: HloCollective, link: Link) -> float:
    kind = found.kind.replace("-", "_")
    return rate(kind, [link._replace(size=max(found.group_size, 2))]).time(found.wire_bytes)
