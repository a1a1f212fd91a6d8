"""The nodes and values of a program's model.

A node takes values (*ports*) in the layouts of its candidate and makes values in others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sdy_jax.lowering.model.enumeration import Candidate
from sdy_jax.lowering.model.layout_table import ValueClass

Chosen = list[int]
"""Per node, the number of the chosen candidate."""


Layouts = Sequence[tuple[int, ...]] | Mapping[int, tuple[int, ...]]
"""By node, the layouts of its slots."""


class Port(NamedTuple):
    """A node's slot: the position of a value in its candidates' layouts."""

    node: int
    slot: int


@dataclass(slots=True)
class Node:
    """An op, an edge of control flow, or the border: `candidates` in the order in which ties are decided, and how often
    it runs. `values`: per slot, the number of its value; -1 where a slot costs nothing in any layout. The first `takes`
    slots are those of values that it takes."""

    candidates: list[Candidate]
    times: float
    values: list[int]
    takes: int

    @property
    def made(self) -> list[int]:
        """The numbers of the values that the node makes."""
        return [value for value in self.values[self.takes :] if value >= 0]


@dataclass(slots=True)
class ModelValue:
    """A value: its class, how often it is made, where it is made and taken.

    Where holding has a price, or copies are recomputed, `place_uses` has said the rest:
    `born`: the node from which on it is there. `needed`: per use, the first and the last node for which it must be.
    `is_at_hand`: it takes no memory of its own in the layout in which it is made: it is an argument, or its users
    compute it. `is_held_rounded`: a device holds it, and its copies, as products alone take it.
    """

    shape: ValueClass
    times: float
    maker: Port | None = None
    uses: list[Port] = field(default_factory=list)
    born: int = field(default=0, init=False)
    needed: list[tuple[int, int]] = field(default_factory=list, init=False)
    is_at_hand: bool = field(default=False, init=False)
    is_held_rounded: bool = field(default=False, init=False)


class CopyInLayout(NamedTuple):
    """A copy of a value in another layout: its uses in order of time, its bytes on a device, and what it costs to make
    it again."""

    uses: list[Port]
    bytes: float
    cost: float
