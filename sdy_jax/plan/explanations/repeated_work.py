"""What a program would save if its devices might do more work than op by op."""

from __future__ import annotations

from collections.abc import Iterable

from sdy_jax.lowering.solve.certificate import Certificate, certified
from sdy_jax.lowering.solve.clusters import Term, compared
from sdy_jax.lowering.whole_program.reconstruction import Reconsidered
from sdy_jax.plan.explanations.layout_prices import Prices
from sdy_jax.representation.type_text import flops_text

_WORTH_REPEATING = 0.01
"""The share of the program's cost that repeated work has to save to be mentioned. Chosen: a note should be worth a
change."""


def saved_by_repeating(seen: Reconsidered, capped: Certificate, free: Reconsidered, prices: Prices) -> str:
    """What products and convolutions would save if they might do more work than op by op; empty where that is little,
    or nothing.

    Args:
        seen: the program's model.
        capped: its best choice.
        free: its model where they may.
        prices: of the program.
    """
    model = seen.model
    if all(len(a.candidates) == len(b.candidates) for a, b in zip(model.nodes, free.model.nodes, strict=True)):
        return _in_all(seen, capped, prices)
    kept = [
        next(i for i, candidate in enumerate(after.candidates) if candidate.layouts == before.candidates[now].layouts)
        for before, after, now in zip(model.nodes, free.model.nodes, capped.choice, strict=True)
    ]
    best = certified(free.model, kept)
    if capped.cost - best.cost < _WORTH_REPEATING * capped.cost:
        return _in_all(seen, capped, prices)
    return _lifted("no product or convolution does more work", compared(free.model, best.choice, kept), prices)


def _in_all(seen: Reconsidered, capped: Certificate, prices: Prices) -> str:
    """As `saved_by_repeating`, where products and convolutions would repeat nothing, but other ops too much in all."""
    model, chosen, best = seen.model, seen.chosen, capped.choice
    is_too_much = model.operations(best) > seen.program.most_operations
    if not is_too_much or model.cost(chosen) - model.cost(best) < _WORTH_REPEATING * model.cost(chosen):
        return ""
    return _lifted("the program does no more work in all", compared(model, best, chosen), prices)


def _lifted(capped: str, changes: Iterable[Term], prices: Prices) -> str:
    saved, paid = _total(changes)
    return (
        f"{capped} than op by op; with CostModel(repeat_work=True) the program would send {prices.sent(saved)} less "
        f"for {flops_text(paid)} more"
    )


def _total(terms: Iterable[Term]) -> tuple[float, float]:
    """The communication of all terms, and how many operations fewer."""
    terms = list(terms)
    sent = sum(term.change for term in terms if not term.operations)
    return sent, -sum(term.operations for term in terms)
