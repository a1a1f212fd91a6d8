"""Copies of values in other layouts that follow each other: each is recomputed for some of the uses, and freed after.

    %w1 = sdy.all_gather %w            for the forward pass
    %y  = dot %x, %w1
    ...
    %w2 = sdy_jax.after %w, %dy        for the backward pass: not %w1, which need not live until here,
    %w3 = sdy.all_gather %w2           and not before %dy is there
    %dx = dot %dy, %w3

The plan says which copy serves a use. A copy starts from the layout in which the value is made, and waits for what the
op takes that uses it first: else compilers take two gathers of a value for one, or run both at the start.
See docs/explanation/memory.md#when-the-cheapest-program-does-not-fit.
"""

from __future__ import annotations

from collections.abc import Mapping

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.lowering.proposal.layout_plan import PlannedUse
from sdy_jax.lowering.schedule.after_ops import create_after
from sdy_jax.representation.sharding import TensorSharding


class PlannedCopies:
    """The copies of a program's values, as planned."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Value, Op], int] = {}
        self._all_wait = False
        self._starts: dict[tuple[Value, int], ir.Value] = {}

    def follow(self, graph: Graph, planned: Mapping[PlannedUse, int], all_wait: bool) -> None:
        """Takes over a plan. `all_wait`: first copies wait as later ones do."""
        self._all_wait = all_wait
        for (maker, index, user), number in planned.items():
            values = graph.arguments if maker is None else graph.ops[maker].results
            self._numbers[values[index], graph.ops[user]] = number

    def number(self, value: Value, user: Op) -> int:
        """Which copy of a value an op takes, counted from 1; 0 where there is no choice."""
        return self._numbers.get((value, user), 0)

    def waits(self, number: int) -> bool:
        """Whether a copy is not to be made before it is needed."""
        return number > 1 or (number == 1 and self._all_wait)

    def start(self, value: Value, number: int, mlir: ir.Value, sharding: TensorSharding, before: Op) -> ir.Value:
        """From what a copy is made: the value in the layout in which it is made, once its users need it."""
        key = value, number
        if key not in self._starts:
            self._starts[key] = create_after([mlir], sharding, before.mlir.location, ir.InsertionPoint(before.mlir))
        return self._starts[key]
