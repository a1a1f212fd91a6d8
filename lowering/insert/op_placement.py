"""The placement of plain ops: their operands are brought to the layouts that were decided, their results settled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sdy_jax.ir.graph import Op
from sdy_jax.lowering.candidates.op_problem import Decision
from sdy_jax.lowering.insert.common_subexpressions import CommonSubexpressions
from sdy_jax.lowering.insert.decisions import Decisions
from sdy_jax.lowering.insert.op_reports import OpReports
from sdy_jax.lowering.insert.placement import Placement
from sdy_jax.lowering.interface.setting import Setting
from sdy_jax.lowering.proposal.proposal import ProposedLayouts
from sdy_jax.lowering.strategies.registry import Refused, Taken, taken_by
from sdy_jax.op_rules import has_no_rule_silently
from sdy_jax.representation.sharding import TensorSharding


class OpPlacement:
    """Places the ops of a program, in order.

    `repeated`: the numbers of those that an op before computes, too. `taken`: the decisions of those that run in other
    layouts than were chosen, by number.
    """

    def __init__(self, placement: Placement, setting: Setting, reports: OpReports, layouts: ProposedLayouts):
        self._placement, self._reports, self._layouts = placement, reports, layouts
        self._decisions, self._mesh = Decisions(placement, setting), placement.meshes.base
        self._known = CommonSubexpressions(placement.origin)
        self.repeated: set[int] = set()
        self.taken: dict[int, Decision] = {}

    def place(self, op: Op, number: int, planned: Decision | None, following: Op) -> bool:
        """Places an op, as planned where it is, and says whether the results of an op before stand for its own."""
        decision = self._decisions.of(op, planned)
        if decision is None:
            self._place_unruled(op, number, following)
            return False
        taken = self._taken(op, decision.shardings)
        if taken is not None and taken.shardings != decision.shardings:
            self._place_taken(op, number, decision, taken, following)
            return False
        self._layouts.decided[number] = decision
        if taken is not None and not decision.at_rest:
            self._note_refusal(op, decision)
        if decision.at_rest:
            self._placement.rest(op)
            if self._is_repeated(op, number, decision):
                return True
            self._reports.sent(op, decision.shardings)
            return False
        self._require_operands(op, decision.shardings)
        if self._is_repeated(op, number, decision):
            return True
        self._reports.decided(op, decision)
        self._reports.sent(op, decision.shardings)
        self._settle_results(op, decision.shardings, following)
        return False

    def _taken(self, op: Op, shardings: Sequence[TensorSharding]) -> Taken | None:
        """The layouts in which an op runs that has a say of its own in them; those with nothing split where it refuses
        these. None for other ops.

        Raises:
            ShardingError: it refuses those too.
        """
        taken = taken_by(op, self._mesh, shardings)
        if isinstance(taken, Refused):
            self._reports.replication.add_refused(op, taken)
            taken = taken_by(op, self._mesh, [self._placement.replicated(v) for v in (*op.operands, *op.results)])
        if isinstance(taken, Refused):
            raise taken.failure()
        return taken

    def _note_refusal(self, op: Op, decision: Decision) -> None:
        """Notes why an op that is asked is not split as its operands are, where no other note says that."""
        around = [*self._placement.of(op.operands), *map(self._placement.declared, op.results)]
        asks = (strategy.ask for strategy in decision.kind.strategies if strategy.ask is not None)
        refused = [answer for ask in asks if isinstance(answer := ask(self._mesh, around), Refused)]
        if refused and not decision.gathered:
            self._reports.replication.add_refused(op, refused[0])

    def _place_taken(self, op: Op, number: int, decision: Decision | None, taken: Taken, following: Op) -> None:
        """An op that runs in other layouts than any that it could be asked for by a rule: it has no choice."""
        self._layouts.fixed[number] = taken.shardings
        if decision is not None:
            self.taken[number] = decision._replace(shardings=taken.shardings)
        if decision is not None and decision.gathered:
            self._reports.replication.add(op, decision)
        self._require_operands(op, taken.shardings)
        self._reports.taken(op, taken)
        self._settle_results(op, taken.shardings, following)

    def _require_operands(self, op: Op, shardings: Sequence[TensorSharding]) -> None:
        for index, sharding in enumerate(shardings[: len(op.operands)]):
            self._placement.require(op, index, sharding)

    def _settle_results(self, op: Op, shardings: Sequence[TensorSharding], following: Op) -> None:
        for result, sharding in zip(op.results, shardings[len(op.operands) :], strict=True):
            self._placement.settle(op, result, sharding, following)

    def _is_repeated(self, op: Op, number: int, decision: Decision) -> bool:
        """Whether an op before computes the same; then the results of that one stand for its own."""
        twin = self._known.of(op, decision)
        if twin is None:
            return False
        for result, other in zip(op.results, twin.results, strict=True):
            self._placement.stand_in(result, other)
        self.repeated.add(number)
        return True

    def _place_unruled(self, op: Op, number: int, following: Op) -> None:
        """No rule: free-standing producers take their declared sharding, everything else is computed replicated."""
        placement = self._placement
        here = (*placement.of(op.operands), *map(placement.declared, op.results))
        taken = self._taken(op, here)
        if taken is not None:
            self._place_taken(op, number, None, taken, following)
            return
        silent = has_no_rule_silently(op.name, op.text("call_target_name"))
        free = silent and not op.operands
        for index, value in enumerate(op.operands):
            placement.require(op, index, placement.replicated(value))
        self._reports.sent(op, [placement.replicated(value) for value in (*op.operands, *op.results)])
        has_elements = any(value.shape and 0 not in value.shape for value in (*op.operands, *op.results))
        if has_elements and not (silent and all(placement[v].is_fully_replicated for v in op.operands)):
            self._reports.replication.add_unruled(op)
        made = [placement.declared(result) if free else placement.replicated(result) for result in op.results]
        # Every device computes the whole value, so it is not unreduced, even where it is declared to be.
        made = [replace(each, unreduced_axes=()) if each.unreduced_axes else each for each in made]
        self._layouts.fixed[number] = (*map(placement.replicated, op.operands), *made)
        for result, whole in zip(op.results, made, strict=True):
            placement.settle(op, result, whole, following)
