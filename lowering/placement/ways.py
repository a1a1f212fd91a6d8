"""The ways to run the ops of a program, the one that a walk chose first.

See docs/explanation/planner.md#ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sdy_jax.ir.graph import Op, Value
from sdy_jax.lowering.placement.decisions import Decision
from sdy_jax.lowering.placement.kinds import Kind, operations_done, work_time
from sdy_jax.lowering.planning.choice import OpProblem, Tensor
from sdy_jax.lowering.planning.enumerated import Way, every_way
from sdy_jax.lowering.planning.layout_table import LayoutTable
from sdy_jax.lowering.reshard.cost import CostModel
from sdy_jax.lowering.strategies.linearity import carries
from sdy_jax.lowering.strategies.registry import SENT, sent_by
from sdy_jax.representation.mesh import AxisRef
from sdy_jax.representation.sharding import TensorSharding

_PADDED_WORK = 1.02
"""The work that a way may do with its padding, beside that of the walk's way. Guessed between two facts: 197 tokens
over eight devices are 1.015, and work that is repeated is twice as much or more."""


class Ways:
    """The ways of ops; those of one kind share a list."""

    def __init__(self, table: LayoutTable, atoms: Sequence[AxisRef], costs: CostModel, pads: bool):
        self._table, self._atoms, self._costs, self._pads = table, atoms, costs, pads
        self._mesh_name, self._mesh = table.mesh_name, table.mesh
        self._ways: dict[object, list[Way]] = {}

    def of(self, op: Op, decision: Decision) -> list[Way]:
        """The ways of an op, the walk's own first; only that may be on another mesh."""
        kind, layouts = decision.kind, tuple(map(self._table.number, decision.shardings))
        carried = tuple(self._carried(op))
        sends = op.signature if op.name in SENT else None
        key = kind, layouts, decision.choice.inside, carried, sends
        if key not in self._ways:
            own = self._own_way(kind, decision, layouts)
            found = _ordered(own, self._every_way(kind, carried), kind.multiplies and not self._costs.repeat_work)
            self._ways[key] = [self._with_sent(op, way) for way in found] if sends else found
        return self._ways[key]

    def sent(self, op: Op, shardings: Sequence[TensorSharding]) -> float:
        """The time of the collectives that an op is by itself, with its tensors in these shardings."""
        found = sent_by(op, self._mesh, shardings[: len(op.operands)])
        return sum(
            self._costs.sending_time(sent.summary.kind, sent.summary.axes, self._mesh, sent.wire_bytes)
            for sent in found
            if op.results[sent.result].uses
        )

    def _with_sent(self, op: Op, way: Way) -> Way:
        shardings = [self._table.shardings[layout] for layout in way.layouts]
        return way._replace(cost=way.cost + self.sent(op, shardings))

    def _every_way(self, kind: Kind, carried: tuple[frozenset[int], ...]) -> list[Way]:
        key = kind, carried
        if key not in self._ways:
            self._ways[key] = every_way(self._problem(kind), self._atoms, carried, self._table, self._pads)
        return self._ways[key]

    def _problem(self, kind: Kind) -> OpProblem:
        whole = [TensorSharding.replicated(self._mesh_name, len(shape)) for shape, _ in kind.tensors]
        tensors = tuple([Tensor(*shaped, s) for shaped, s in zip(kind.tensors, whole, strict=True)])
        problem = OpProblem(kind.rule, kind.strategies, tensors, self._mesh_name, self._mesh, self._costs)
        return problem._replace(touched=kind.touched)

    def _own_way(self, kind: Kind, decision: Decision, layouts: tuple[int, ...]) -> Way:
        inside = decision.choice.inside
        operations = operations_done(kind, decision.shardings, self._mesh)
        work = work_time(kind, operations, decision.shardings, self._costs, self._mesh)
        return Way(layouts, work + sum(c.time for c in inside), operations, inside, work=work)

    def _carried(self, op: Op) -> Iterator[frozenset[int]]:
        """The sets of operands that may be partial sums together, so that the results are."""
        if not all(map(is_inexact, op.results)):
            return
        sets = (carries(op, "sum", frozenset([i])) for i in range(len(op.operands)))
        yield from dict.fromkeys(found for found in sets if found)


def _ordered(own: Way, every: Sequence[Way], capped: bool) -> list[Way]:
    """The walk's way first; without those that do more work than it, for ops whose work may not be repeated: padding
    may add a little."""
    alike = next((way for way in every if way.layouts == own.layouts), own)
    first = alike if alike.cost < own.cost else own
    most = max(first.operations, own.operations)
    others = (way for way in every if way.layouts != own.layouts)
    return [first, *(way for way in others if not capped or way.operations <= most * _PADDED_WORK)]


def is_inexact(value: Value) -> bool:
    """Whether a value's elements are floating-point numbers, whose sums may be taken in any order."""
    return value.dtype.startswith(("f", "bf", "complex"))
