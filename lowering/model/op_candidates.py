"""The candidates to run the ops of a program, the one that a walk chose first.

See docs/explanation/planner.md#candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sdy_jax.ir.graph import Op, Value
from sdy_jax.lowering.candidates.op_problem import Decision, Kind, OpProblem, Tensor
from sdy_jax.lowering.candidates.op_work import work_done, work_time_in
from sdy_jax.lowering.costs.cost_model import CostModel
from sdy_jax.lowering.interface.memo import Memo
from sdy_jax.lowering.model.axes_lists import AxesLists
from sdy_jax.lowering.model.enumeration import Candidate, every_candidate
from sdy_jax.lowering.model.layout_table import LayoutTable
from sdy_jax.lowering.strategies.linearity import carries
from sdy_jax.lowering.strategies.registry import SENT, sent_by
from sdy_jax.representation.mesh import AxisRef
from sdy_jax.representation.sharding import TensorSharding

_PADDED_WORK = 1.02
"""The work that a candidate may do with its padding, beside that of the proposal. Guessed between two facts: 197 tokens
over eight devices are 1.015, and work that is repeated is twice as much or more."""


class OpCandidates:
    """The candidates of ops; those of one kind share a list. `memo`: what is known of ops alone."""

    def __init__(self, table: LayoutTable, atoms: Sequence[AxisRef], costs: CostModel, pads: bool, memo: Memo):
        self._table, self._atoms, self._costs, self._pads, self._memo = table, tuple(atoms), costs, pads, memo
        self._mesh_name, self._mesh = table.mesh_name, table.mesh
        self._mesh_atoms = "lists of axes", self._atoms, table.inverted
        self._lists = memo.once(self._mesh_atoms, self._new_lists)
        self._candidates: dict[object, list[Candidate]] = {}

    def _new_lists(self) -> AxesLists:
        return AxesLists(self._atoms, LayoutTable(self._mesh_name, self._mesh, self._table.inverted))

    def of(self, op: Op, decision: Decision) -> list[Candidate]:
        """The candidates of an op, the walk's own first; only that may be on another mesh."""
        kind, layouts = decision.kind, tuple(map(self._table.number, decision.shardings))
        carried = tuple(self._carried(op))
        sends = op.signature if op.key in SENT else None
        key = kind, layouts, decision.inside, carried, sends
        if key not in self._candidates:
            own = self._own_candidate(kind, decision, layouts)
            found = _ordered(own, self._every_candidate(kind, carried), kind.multiplies and not self._costs.repeat_work)
            self._candidates[key] = [self._with_sent(op, candidate) for candidate in found] if sends else found
        return self._candidates[key]

    def sent(self, op: Op, shardings: Sequence[TensorSharding]) -> float:
        """The time of the collectives that an op is by itself, with its tensors in these shardings."""
        found = sent_by(op, self._mesh, shardings[: len(op.operands)])
        return sum(
            self._costs.sending_time(sent.summary.kind, sent.summary.axes, self._mesh, sent.wire_bytes)
            for sent in found
            if op.results[sent.result].uses
        )

    def _with_sent(self, op: Op, candidate: Candidate) -> Candidate:
        shardings = [self._table.shardings[layout] for layout in candidate.layouts]
        return candidate._replace(cost=candidate.cost + self.sent(op, shardings))

    def _every_candidate(self, kind: Kind, carried: tuple[frozenset[int], ...]) -> list[Candidate]:
        key = kind, carried
        if key not in self._candidates:
            own = kind.rule, kind.strategies, kind.tensors, kind.touched
            known = "candidates", own, carried, self._pads, self._mesh_atoms
            found, layouts = self._memo.once(known, lambda: self._enumerated(kind, carried))
            numbers = {layout: self._table.number(self._lists.table.shardings[layout]) for layout in layouts}
            self._candidates[key] = [Candidate(tuple([numbers[n] for n in c[0]]), *c[1:]) for c in found]
        return self._candidates[key]

    def _enumerated(self, kind: Kind, carried: tuple[frozenset[int], ...]) -> tuple[list[Candidate], list[int]]:
        """The candidates, and the layouts in which they are, in numbers that no order may depend on: they say when a
        layout was first seen by any of the programs that share them."""
        return every_candidate(self._problem(kind), len(self._atoms), carried, self._lists, self._pads)

    def _problem(self, kind: Kind) -> OpProblem:
        whole = [TensorSharding.replicated(self._mesh_name, len(shape)) for shape, _ in kind.tensors]
        tensors = tuple([Tensor(*shaped, s) for shaped, s in zip(kind.tensors, whole, strict=True)])
        return OpProblem(kind, tensors, self._mesh, self._costs)

    def _own_candidate(self, kind: Kind, decision: Decision, layouts: tuple[int, ...]) -> Candidate:
        inside = decision.inside
        done = work_done(kind, decision.shardings, self._mesh)
        work = work_time_in(kind, done, decision.shardings, self._costs, self._mesh)
        return Candidate(layouts, work + sum(c.time for c in inside), done.operations, inside, work=work)

    def _carried(self, op: Op) -> Iterator[frozenset[int]]:
        """The sets of operands that may be partial sums together, so that the results are."""
        if not all(map(is_inexact, op.results)):
            return
        sets = (carries(op, "sum", frozenset([i])) for i in range(len(op.operands)))
        yield from dict.fromkeys(found for found in sets if found)


def _ordered(own: Candidate, every: Sequence[Candidate], capped: bool) -> list[Candidate]:
    """The walk's candidate first; without those that do more work than it, for ops whose work may not be repeated:
    padding may add a little."""
    alike = next((candidate for candidate in every if candidate.layouts == own.layouts), own)
    first = alike if alike.cost < own.cost else own
    most = max(first.operations, own.operations)
    others = (candidate for candidate in every if candidate.layouts != own.layouts)
    return [first, *(candidate for candidate in others if not capped or candidate.operations <= most * _PADDED_WORK)]


def is_inexact(value: Value) -> bool:
    """Whether a value's elements are floating-point numbers, whose sums may be taken in any order."""
    return value.dtype.startswith(("f", "bf", "complex"))
