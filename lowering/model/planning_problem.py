"""A program as the planner sees it: its model, and what of the program the numbers of nodes and values stand for.

See docs/explanation/planner.md#the-problem.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.lowering.analysis.fusion import is_sum
from sdy_jax.lowering.model.layout_table import LayoutTable
from sdy_jax.lowering.model.nodes import Chosen, Port
from sdy_jax.lowering.model.program_model import ProgramModel
from sdy_jax.lowering.proposal.free_border import FreeEnd
from sdy_jax.lowering.proposal.proposal import ProposedLayouts
from sdy_jax.representation.mesh import AxisRef

FREE = -1
"""In place of a value's number: it costs nothing in any layout."""


class Part(NamedTuple):
    """The part of a program that a node stands for.

    `slots`: what it takes, as operands of ops; `users`: per slot, the op for which that is taken. `makes`: the values
    that it makes. `block`: where it is. `until`: the number of its op, or of the last op before it.
    """

    slots: tuple[tuple[Op, int], ...]
    users: tuple[Op, ...]
    makes: tuple[Value, ...]
    block: Block
    until: int

    @property
    def op(self) -> Op | None:
        """The op that the node is, or to which it belongs; None for an argument of the program."""
        return self.slots[0][0] if self.slots else self.makes[0].defining_op if self.makes else None


@dataclass(eq=False, slots=True)
class PlanningProblem:
    """A program, the layouts that were proposed for it, and the planner's model of both.

    `atoms`: the parts of mesh axes that are somewhere in a layout. `parts`: per node, what it stands for. `values`: the
    numbers of values, `FREE` where one has no price; `recomputed`: per use of what is made for each user alone, the
    number of its value; `unrounded`: of values that are rounded for products, the numbers of what sums take;
    `free_uses`: where values without a price are taken.

    The nodes of ops by the ops' numbers: `decided`, those with a rule; `constraints`, those that state a layout; and
    `edges`, by the index of the edge, too. The last layout of the edges in `made_outside` is that outside of a
    computation; of others the first one is. `free_ends`: arguments and results that may have any layout. `extents`: of
    data-flow ops, their first and last node. `most_operations`: those that one device may perform.
    """

    graph: Graph
    proposed: ProposedLayouts
    table: LayoutTable
    atoms: tuple[AxisRef, ...]
    model: ProgramModel
    parts: list[Part] = field(default_factory=list)
    values: dict[Value, int] = field(default_factory=dict)
    recomputed: dict[tuple[Op, int], int] = field(default_factory=dict)
    unrounded: dict[Value, int] = field(default_factory=dict)
    free_uses: dict[Value, list[Port]] = field(default_factory=dict)
    decided: dict[int, int] = field(default_factory=dict)
    constraints: dict[int, int] = field(default_factory=dict)
    edges: dict[tuple[int, int], int] = field(default_factory=dict)
    made_outside: set[int] = field(default_factory=set)
    free_ends: list[FreeEnd] = field(default_factory=list)
    extents: dict[Op, tuple[int, int]] = field(default_factory=dict)
    most_operations: float = math.inf
    numbers: dict[Op, int] = field(init=False)

    def __post_init__(self) -> None:
        self.numbers = {op: number for number, op in enumerate(self.graph.ops)}

    @property
    def start(self) -> Chosen:
        """The walk's own choices."""
        return [0] * len(self.model.nodes)

    def saved(self, chosen: Chosen) -> float:
        """What a choice saves of what the walk's costs."""
        return self.model.cost(self.start) - self.model.cost(chosen) if chosen != self.start else 0.0

    def number(self, value: Value) -> int:
        """The number of a value; one that no node makes costs nothing in any layout."""
        return self.values.setdefault(value, FREE)

    def taken(self, op: Op, index: int) -> int:
        """The number of the value that an operand is."""
        value, use = op.operands[index], (op, index)
        if use in self.recomputed:
            return self.recomputed[use]
        return self.unrounded[value] if value in self.unrounded and is_sum(op) else self.number(value)

    def maker(self, number: int) -> int:
        """The node that makes a value; -1 if none does."""
        maker = self.model.values[number].maker
        return maker.node if maker is not None else -1

    def charge_holding(self, prices: Sequence[float]) -> None:
        """Sets what it costs to hold a byte while an op runs, per op by its number; at each node, the most of the ops
        since the node before."""
        before, found = -1, list[float]()
        for part in self.parts:
            found.append(max(prices[min(before + 1, part.until) : part.until + 1], default=0.0))
            before = part.until
        self.model.charge_holding(found)
        for end in self.free_ends:
            self._charge_border(end)

    def _charge_border(self, end: FreeEnd) -> None:
        """Sets what it costs to hold an argument and a result all the time."""
        model, node = self.model, self.model.nodes[end.node]
        always = model.holding(0, len(model.nodes) - 1) if model.holding_costs else 0.0
        sizes = [model.values[number].shape for number in node.values if number >= 0]
        if sizes:
            held = (
                [model.prices.local_bytes(sizes[0], layout) for layout in candidate.layouts]
                for candidate in node.candidates
            )
            node.candidates = [
                candidate._replace(cost=always * sum(each))
                for candidate, each in zip(node.candidates, held, strict=True)
            ]
