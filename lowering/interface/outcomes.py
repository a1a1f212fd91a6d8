"""What was chosen for a program, beside its collectives: layouts, what is computed again, what runs in parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.ir.locations import place_of
from sdy_jax.representation.sharding import TensorSharding


@dataclass(frozen=True, slots=True)
class ChangedLayout:
    """A result of an op that is made, or expected by a constraint, in another layout than op by op: the op's name and
    location, the value's element type and global shape, and the two shardings."""

    op: str
    location: ir.Location
    dtype: str
    shape: tuple[int, ...]
    chosen: TensorSharding
    proposed: TensorSharding
    stated: str = ""
    """What the user stated for the value: `[{"x"}, {?}]`, or that it is in a group."""

    @property
    def source(self) -> str:
        """The line of the user's code that made the value."""
        return place_of(self.location).line


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """The choice of layouts for a whole program: what it costs by the cost model, what it would have cost op by op
    around the propagated layouts, and where the two differ.

    `sent`, `proposed_sent`: the part of the costs that is not the devices' own work. `chosen`: the choice in the
    program's model; empty where it stayed as it was proposed. `written`: the part of `sent` that the user's own
    collectives cost, which no choice changes.

    `exposed`, `proposed_exposed`: the costs without what is hidden beside work. `proposed_held`: the bytes that a
    device would hold op by op; 0 where that would take no less.
    """

    cost: float
    proposed_cost: float
    changed: tuple[ChangedLayout, ...]
    sent: float = 0.0
    proposed_sent: float = 0.0
    chosen: tuple[int, ...] = ()
    written: float = 0.0
    exposed: float = 0.0
    proposed_exposed: float = 0.0
    proposed_held: float = 0.0


class NotHeld(NamedTuple):
    """A value that is computed again instead of being held: its element type, its global shape, the bytes that it would
    take on a device, and the location of what makes it."""

    dtype: str
    shape: tuple[int, ...]
    bytes: float
    location: ir.Location

    @property
    def source(self) -> str:
        """The line of the user's code that made it."""
        return place_of(self.location).line


class RanAgain(NamedTuple):
    """An op that runs once more: its name and location; the operations and the time of a device for that, in all
    executions."""

    op: str
    location: ir.Location
    operations: float
    seconds: float

    @property
    def source(self) -> str:
        """The line of the user's code that runs once more."""
        return place_of(self.location).line


class Recomputed(NamedTuple):
    """What a program computes again beside what it was written to: the values that it need not hold for that, the ops
    that run once more, and the bytes that a device holds less."""

    values: tuple[NotHeld, ...] = ()
    ops: tuple[RanAgain, ...] = ()
    bytes: float = 0.0


class InParts(NamedTuple):
    """The largest value of a group of ops that run part by part in a loop, so that no device holds all of its own: its
    element type and its global shape, the dimension that is cut and into how many parts, the bytes that the group's
    values would take together on a device, and the location of what makes it."""

    dtype: str
    shape: tuple[int, ...]
    dim: int
    parts: int
    bytes: float
    location: ir.Location

    @property
    def source(self) -> str:
        """The line of the user's code that makes it."""
        return place_of(self.location).line
