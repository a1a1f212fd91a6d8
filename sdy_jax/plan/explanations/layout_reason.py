"""Reasons for layouts that were chosen for a whole program, as a plan says them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sdy_jax.lowering.costs.cost_model import CostModel
from sdy_jax.representation.type_text import bytes_text, seconds_text


def sent_text(costs: CostModel, amount: float) -> str:
    """What communication costs by a cost model: bytes where that is its unit, else time."""
    return bytes_text(amount) if costs.unit == "bytes" else seconds_text(amount)


@dataclass(frozen=True, slots=True)
class LayoutPrice:
    """What a choice saves, or costs.

    Attributes:
        cost: by the cost model, in all.
        sent: the part of it that is communication: bytes per device, unless the model says how fast these are sent.
        operations: of one device.
        places: how many values or ops that concerns.
        largest: the largest parts in words.
        text: `sent` and `operations` in words.
    """

    cost: float
    sent: float
    operations: float
    places: int
    largest: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return ": ".join([self.text, *([", ".join(self.largest)] if self.largest else [])])


@dataclass(frozen=True, slots=True)
class ChosenLayout:
    """The layout of some values of one line of the source, and the one that they have op by op, as types."""

    values: str
    chosen: str
    proposed: str

    def __str__(self) -> str:
        return f"{self.chosen} instead of {self.proposed}: {self.values}"


@dataclass(frozen=True, slots=True)
class LayoutReason:
    """Why some values have another layout than op by op: one choice for all of them.

    Attributes:
        changed: the values that were asked for.
        others: how many other values changed with them.
        times: how many such choices there are, as in layers that are alike.
        saves, costs: what the program would pay more, and less, if they and the others were as op by op, and what is
            around them made the best of that. By the planner's model, which does not know that a value may be computed
            again instead of sent: op by op the program may pay less than that.
        origins: the annotations from which propagation gave them the layouts that they do not have.
    """

    changed: tuple[ChosenLayout, ...]
    others: int
    saves: LayoutPrice
    costs: LayoutPrice
    origins: tuple[str, ...] = ()
    times: int = 1

    def __str__(self) -> str:
        with_others = f", with {self.others} other value{'s' if self.others > 1 else ''}" if self.others else ""
        alike = f"{self.times} times " if self.times > 1 else ""
        lines = [f"{alike}chosen for the whole program{with_others}", *(f"  {changed}" for changed in self.changed)]
        lines += [f"  propagation had it from {origin}" for origin in self.origins]
        if self.saves.cost <= self.costs.cost:
            return "\n".join([*lines, "  by itself it saves nothing"])
        return "\n".join([*lines, f"  saves {self.saves}", f"  costs {self.costs}"])


def listed(words: Sequence[str]) -> str:
    """`a, b and c`."""
    *others, last = words or [""]
    return f"{', '.join(others)} and {last}" if others else last
