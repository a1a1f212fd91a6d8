"""A reshard as a plan: its collectives in order, what they send, and their time."""

from __future__ import annotations

from dataclasses import dataclass

from sdy_jax.representation.sdy_collectives import SdyCollective
from sdy_jax.representation.sharding import TensorSharding


@dataclass(frozen=True, slots=True)
class Collective:
    """One step of a plan.

    `op` is what the op says that it becomes; `result` is the closed, canonical sharding after the step; `wire_bytes` is
    per device; `reduction` is the kind of an all_reduce or reduce_scatter.
    """

    op: SdyCollective
    result: TensorSharding
    wire_bytes: float
    reduction: str = "sum"

    def __str__(self) -> str:
        """The attribute of the op as the dialect prints it; nothing for a permute."""
        return str(self.op)

    @property
    def kind(self) -> str:
        return self.op.kind


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """The steps in order, the bytes that each device sends in all of them, and their time by the cost model."""

    steps: tuple[Collective, ...]
    wire_bytes: float
    cost: float
