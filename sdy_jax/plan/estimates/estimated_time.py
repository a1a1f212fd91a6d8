"""What a plan's program takes, by the cost model."""

from __future__ import annotations

from dataclasses import dataclass

from sdy_jax.representation.type_text import bytes_text, seconds_text


@dataclass(frozen=True, slots=True)
class EstimatedTime:
    """What a program takes by a cost model: each device's own work, and its collectives, of which so much is `hidden`
    behind work; `unit`: seconds or bytes."""

    compute: float
    communication: float
    unit: str
    hidden: float = 0.0

    @property
    def total(self) -> float:
        """Both, one after the other but for what is hidden."""
        return self.compute + self.communication - self.hidden

    def __str__(self) -> str:
        text = seconds_text if self.unit == "seconds" else bytes_text
        hidden = f", {text(self.hidden)} of it hidden" if self.hidden else ""
        return f"{text(self.total)} ({text(self.compute)} compute, {text(self.communication)} communication{hidden})"
