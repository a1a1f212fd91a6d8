"""What one choice of layouts for a program saves beside another one, and what it costs, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sdy_jax.ir.locations import place_of, short_source
from sdy_jax.lowering.interface.report import PartitionReport
from sdy_jax.lowering.solve.clusters import Term, compared
from sdy_jax.lowering.whole_program.reconstruction import Reconsidered
from sdy_jax.plan.explanations.layout_reason import LayoutPrice, listed, sent_text
from sdy_jax.representation.type_text import flops_text

_LARGEST = 3
"""Parts of a price that are named. Chosen: for a reader."""


class Prices:
    """Compares choices for one program.

    Args:
        seen: the program's model.
        names: what the user calls its values.
    """

    def __init__(self, seen: Reconsidered, names: PartitionReport):
        self._seen, self._names = seen, names

    def name(self, number: int) -> str:
        """What the user calls a value of the model."""
        return self._names.name(self._seen.values[number])

    def difference(self, one: Sequence[int], other: Sequence[int]) -> tuple[LayoutPrice, LayoutPrice]:
        """What one choice saves beside another, and what it costs beside it."""
        terms = compared(self._seen.model, one, other)
        more, less = [t for t in terms if t.change > 0], [t for t in terms if t.change < 0]
        return self._side(more, other), self._side(less, one)

    def _side(self, terms: Sequence[Term], paying: Sequence[int]) -> LayoutPrice:
        """Terms that all rise, or all fall; `paying` is the choice that pays them."""
        cost = sum(abs(term.change) for term in terms)
        sent = sum(abs(term.change) for term in terms if not term.operations)
        operations = sum(abs(term.operations) for term in terms)
        parts = [*([self.sent(sent)] if sent else []), *([f"{flops_text(operations)} of work"] if operations else [])]
        text = (" and ".join(parts) or "nothing") + (f" in {len(terms)} places" if len(terms) > 1 else "")
        return LayoutPrice(cost, sent, operations, len(terms), tuple(self._largest(terms, paying)), text)

    def _largest(self, terms: Sequence[Term], paying: Sequence[int]) -> Iterator[str]:
        """The largest terms, those that read alike together."""
        found: dict[str, list[Term]] = {}
        for term in terms:
            found.setdefault(self._term(term, paying), []).append(term)
        by_change = sorted(found.items(), key=lambda item: -sum(abs(term.change) for term in item[1]))
        for text, alike in by_change[:_LARGEST]:
            work = sum(abs(term.operations) for term in alike)
            price = flops_text(work) if work else self.sent(sum(abs(term.change) for term in alike))
            yield f"{text} ({price}{f' in {len(alike)}' if len(alike) > 1 else ''})"

    def _term(self, term: Term, paying: Sequence[int]) -> str:
        if term.operations:
            return f"work of {self._place(term.node)}"
        if term.value is None:
            return f"inside of {self._place(term.node)}"
        kinds = listed(self._seen.collectives(term.value, paying)) or "reshards"
        return f"{kinds} of {self.name(term.value)}"

    def _place(self, node: int) -> str:
        op = self._seen.op(node)
        assert op is not None
        place = place_of(op.mlir.location)
        return f"{place.primitive or op.name} at {short_source(place.line)}"

    def sent(self, amount: float) -> str:
        return sent_text(self._seen.costs, amount)
