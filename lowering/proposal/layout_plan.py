"""The plan that a walk over a program follows: layouts by the number of the op in the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sdy_jax.lowering.candidates.op_problem import Decision
from sdy_jax.lowering.proposal.free_border import BorderLayouts
from sdy_jax.representation.sharding import TensorSharding

PlannedUse = tuple[int | None, int, int]
"""A use of a value: the number of the op that makes the value (None: an argument of the program), the index of its
result or of the argument, and the number of the op that uses it."""


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """What a walk is to follow: how ops run, the layouts of data-flow edges, and which copy of a value serves a use,
    where copies are freed and recomputed. `shared`: per result of an op, the layout in which several users expect it.
    `chosen`: the choice in the model of the program that says so.
    `user_collectives`: from which layout of its operand each of them runs. `border`: the layouts of arguments and
    results that may have any."""

    ops: Mapping[int, Decision]
    shared: Mapping[tuple[int, int], TensorSharding]
    edges: Mapping[int, list[TensorSharding]]
    copies: Mapping[PlannedUse, int] = field(default_factory=dict)
    chosen: tuple[int, ...] = ()
    user_collectives: Mapping[int, TensorSharding] = field(default_factory=dict)
    border: BorderLayouts = BorderLayouts()  # noqa: RUF009 - immutable
