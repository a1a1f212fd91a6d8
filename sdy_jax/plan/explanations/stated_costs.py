"""What the shardings that the user states cost a program: constraints, and `out_shardings`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from sdy_jax.ir.locations import place_of
from sdy_jax.ir.operations import CONSTRAINTS
from sdy_jax.lowering.interface.notes import Note
from sdy_jax.lowering.model.enumeration import Candidate
from sdy_jax.lowering.solve.clusters import around, improved_near
from sdy_jax.lowering.whole_program.reconstruction import Reconsidered
from sdy_jax.plan.explanations.layout_prices import Prices
from sdy_jax.representation.type_text import flops_text

_DEAR = 0.05
"""The share of the program's cost above which a constraint is noted. Chosen: a note should be worth a change."""

_NEAR_CONSTRAINTS = 100
"""Nodes around the constraints of a line that may change with them. Guessed: fewer than around a cluster, as a program
has many constraints; with fewer, what one costs is overstated."""

RESULTS = "out_shardings"
"""What notes on results are at; they are not printed with a plan, whose results somebody wants where they are."""


class StatedCosts:
    """Notes on what the user says that costs more than a twentieth of the program. That is what would be saved if the
    values had any layout there, and what is around them made the best of that.

    The walk takes a value from before a constraint where that is nearer; so much as the program sends less than in the
    model may have been saved already.

    Args:
        seen: the program's model.
        prices: of the program.
        saved_already: how much less the program sends than in the model.
    """

    def __init__(self, seen: Reconsidered, prices: Prices, saved_already: float):
        self._seen, self._prices = seen, prices
        self._least = _DEAR * seen.model.cost(seen.chosen) + max(0.0, saved_already)

    def constraints(self) -> Iterator[Note]:
        """Notes on constraints, by source line."""
        seen, by_line = self._seen, dict[str, list[int]]()
        for node in range(len(seen.model.nodes)):
            op = seen.op(node)
            if op is not None and op.name in CONSTRAINTS:
                by_line.setdefault(place_of(op.mlir.location).line, []).append(node)
        for nodes in by_line.values():
            subject = "the constraint costs" if len(nodes) == 1 else f"the {len(nodes)} constraints cost"
            price = self._price(seen.constraint_candidates(nodes))
            if price:
                yield self._note("sharding_constraint", nodes[0], f"{subject} {price}")

    def results(self, stated: Iterable[tuple[int, str]]) -> Iterator[Note]:
        """Notes on the results whose layouts the user stated, given by index, with their paths."""
        seen = self._seen
        for index, name in stated:
            if seen.result_cost(index) > self._least and (price := self._price(seen.result_candidates(index))):
                yield self._note(RESULTS, len(seen.model.nodes) - 1, f"that of `{name}` costs {price}")

    def _note(self, what: str, node: int, message: str) -> Note:
        op = self._seen.op(node)
        assert op is not None
        return Note.at(what, op.mlir.location, message)

    def _price(self, candidates: Mapping[int, Sequence[Candidate]]) -> str:
        """What is saved if nodes have further candidates, if that is more than the least; beside what is saved around
        them anyhow."""
        seen, near = self._seen, around(self._seen.model, candidates, _NEAR_CONSTRAINTS)
        with seen.freed(candidates):
            before, best = seen.chosen, improved_near(seen.model, seen.chosen, {*candidates, *near}, seen.moves)
            if seen.model.cost(before) - seen.model.cost(best) > self._least and len(seen.moves) > 1:
                before = improved_near(seen.model, seen.chosen, near, seen.moves)
                best = improved_near(seen.model, before, {*candidates, *near}, seen.moves)
            saved, paid = self._prices.difference(best, before)
        if saved.cost - paid.cost <= self._least:
            return ""
        net, work = saved.sent - paid.sent, saved.operations - paid.operations
        price = f"{self._prices.sent(net)} per device" if net > 0 else f"{flops_text(work)} of work"
        return f"{price}: {', '.join(saved.largest)}"
