"""The plans of a partitioned function's calls, and of the functions that compute their derivatives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sdy_jax.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class CallPlan:
    """The plan for calls of one signature. Iterating over it gives it and all plans below.

    Attributes:
        plan: the plan; its name says which function it is of: `mlp`, `mlp (forward of the derivative)`,
            `mlp (backward)`, `mlp (tangents)`, `mlp (with tangents)`.
        derivatives: those of the functions that calls of this signature run where they are differentiated, as far as
            they have been planned. They have derivatives in turn.
    """

    plan: Plan
    derivatives: tuple[CallPlan, ...] = ()

    @property
    def signature(self) -> str:
        """The arguments with their types: `x: f32[64@data,128], w: f32[128,512@model]`."""
        return ", ".join(f"{value.path}: {value.type}" for value in self.plan.arguments)

    def __iter__(self) -> Iterator[Plan]:
        yield self.plan
        for call in self.derivatives:
            yield from call

    def __str__(self) -> str:
        """One line per plan, those of derivatives indented."""
        lines = [self.plan.headline, *(line for call in self.derivatives for line in str(call).splitlines())]
        return "\n  ".join(lines)
