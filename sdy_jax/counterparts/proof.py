"""Whether a reference is the same function on blocks: it is traced for these, too, and compared op by op."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from math import prod
from typing import Any

import jax

from sdy_jax.counterparts.factor_flow import FactorFlow, ProgramRules
from sdy_jax.counterparts.factors import Factor, Reasons, Types, block_shape, block_types, overlap
from sdy_jax.counterparts.local_form import difference
from sdy_jax.counterparts.reference import ReferenceProgram, traced
from sdy_jax.ir.graph import Value
from sdy_jax.lowering.blocking.spans import Span

_MOST_LENDINGS = 32
"""How many ways are tried in which arguments that are not used may have a factor. Chosen: five with two dimensions."""


class Proof:
    """Of one reference on arguments of some types, traced as `program`."""

    def __init__(self, reference: Callable[..., Sequence[Any]], types: Types, program: ReferenceProgram):
        self._reference, self._types, self._program = reference, types, program

    def proved(self, factors: Sequence[Factor], reasons: Reasons) -> list[Factor]:
        """The factors along which it is the same on blocks: all at once, if they are; else one by one.

        Blocks of single elements may be written otherwise, as matrix products leave such batches out: there arguments
        are taken for blocks of what is twice as large.
        """
        large = [factor for factor in factors if _least_parts(factor) < factor.size]
        known = large if len(large) > 1 and not self._difference_in_blocks(large) else []
        found = list[Factor]()
        for factor in factors:
            one = factor if factor in known else self._proved(factor, found, reasons)
            found += [one] if one is not None else []
        return found

    def _proved(self, factor: Factor, others: Sequence[Factor], reasons: Reasons) -> Factor | None:
        """A factor by itself, or with such shapes that it needs of arguments which no result depends on."""
        problem = self._difference(factor)
        if not problem:
            return factor
        for lent in self._lendings(factor, others):
            whole = replace(factor, lent=lent)
            if not self._difference(whole):
                return whole
        factor.refuse(problem, reasons)
        return None

    def _lendings(self, factor: Factor, others: Sequence[Factor]) -> Iterator[Mapping[Value, Span]]:
        """Where a factor may be in arguments that are not used, and as large as it is: in most of them first."""
        forms = {(1, factor.size, 1)} | {(s.outer, s.size, s.inner) for s in factor.arguments if s is not None}
        choices = list[list[tuple[Value, Span] | None]]()
        for value in self._program.arguments:
            taken = [span for other in others if (span := other.span_of(value)) is not None]
            dims = [(d, form) for d, n in enumerate(value.shape or ()) for form in sorted(forms) if prod(form) == n]
            spans = [Span(dim, *form) for dim, form in dims]
            free = [span for span in spans if not value.uses and not any(overlap(span, other) for other in taken)]
            choices += [[*((value, span) for span in free), None]] if free else []
        chosen = (dict(filter(None, each)) for each in product(*choices) if any(each))
        yield from sorted(islice(chosen, _MOST_LENDINGS), key=len, reverse=True)

    def _difference(self, factor: Factor) -> str:
        """What is different along one factor; empty if nothing is."""
        has_blocks = _least_parts(factor) < factor.size
        return self._difference_in_blocks([factor]) if has_blocks else self._difference_as_block(factor)

    def _difference_in_blocks(self, factors: Sequence[Factor]) -> str:
        """What is different where these factors are in as few parts as they can be; empty if nothing is."""
        parts = {factor: _least_parts(factor) for factor in factors}
        blocks = self._traced(block_types(self._types, parts))
        if isinstance(blocks, str):
            return f"the reference refuses blocks of it: {blocks}"
        return str(difference(self._program, blocks, lambda value: block_shape(value, parts)) or "")

    def _difference_as_block(self, factor: Factor) -> str:
        """What is different where the arguments are blocks themselves, of twice as many elements of a factor."""
        pairs = zip(self._types, factor.arguments, strict=True)
        larger = self._traced([type_ if span is None else _twice(type_, span.dim) for type_, span in pairs])
        if isinstance(larger, str):
            return f"the reference refuses more of it: {larger}"
        states = enumerate(map(factor.flow.states.get, self._program.arguments))
        index, span = next((i, state) for i, state in states if isinstance(state, Span))
        twice = Span(span.dim, span.outer, 2 * span.size, span.inner)
        flow = FactorFlow(ProgramRules(larger.graph), larger.arguments[index], twice, frozenset(larger.closed_over))
        if flow.refusal is not None:
            return str(flow.refusal)
        lent = {
            larger.arguments[self._program.arguments.index(value)]: Span(s.dim, s.outer, 2 * s.size, s.inner)
            for value, s in factor.lent.items()
        }
        halves = {Factor(flow, larger, twice.size, lent): 2}
        return str(difference(larger, self._program, lambda value: block_shape(value, halves)) or "")

    def _traced(self, types: Types) -> ReferenceProgram | str:
        """The reference on arguments of other types, or its error."""
        try:
            return traced(self._reference, types)
        except Exception as error:  # the user's function says by any error that it does not take them
            return said(error)


def _twice(type_: jax.ShapeDtypeStruct, dim: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct([2 * size if d == dim else size for d, size in enumerate(type_.shape)], type_.dtype)


def said(error: Exception) -> str:
    """The first line of an error, or its class."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _least_parts(factor: Factor) -> int:
    """The smallest number of equal parts of a factor: its smallest prime."""
    return next(n for n in range(2, factor.size + 1) if not factor.size % n)
