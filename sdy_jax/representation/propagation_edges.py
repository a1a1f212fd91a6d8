"""The dialect's records of propagation: which axis spread from which tensor of an op to which others, step by step.

Source: the SDY dialect reference, attributes `propagation_edges`, `propagation_one_step`, `axis_to_propagation_details`
and `edge_value_ref`. Text: `[{step-0 = [{"a" = operand-0 -> [operand-1, result-0]}]}]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from sdy_jax.representation.mesh import AxisRef


@dataclass(frozen=True, slots=True)
class EdgeValue:
    """An operand or a result of the op, by number."""

    side: Literal["operand", "result"]
    index: int

    def __str__(self) -> str:
        return f"{self.side}-{self.index}"


@dataclass(frozen=True, slots=True)
class AxisSpread:
    """An axis that came from `source` to all of `targets`."""

    axis: AxisRef
    source: EdgeValue
    targets: tuple[EdgeValue, ...]

    def __str__(self) -> str:
        return f"{self.axis} = {self.source} -> [{', '.join(map(str, self.targets))}]"


@dataclass(frozen=True, slots=True)
class PropagationStep:
    """What spread in one step of propagation; steps are numbered through the whole module."""

    index: int
    spreads: tuple[AxisSpread, ...]

    def __str__(self) -> str:
        return f"step-{self.index} = [{', '.join(f'{{{spread}}}' for spread in self.spreads)}]"


@dataclass(frozen=True, slots=True)
class PropagationEdges:
    """What spread through one op."""

    steps: tuple[PropagationStep, ...]

    def spreads(self) -> Iterator[AxisSpread]:
        """What spread, over all steps."""
        for step in self.steps:
            yield from step.spreads

    def __str__(self) -> str:
        """The text inside `#sdy.propagation_edges<...>`."""
        return f"[{', '.join(f'{{{step}}}' for step in self.steps)}]"
