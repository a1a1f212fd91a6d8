"""Whether a reference is the same function on blocks: it is traced for these, too, and compared op by op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from sdy_jax.counterparts.factor_flow import FactorFlow, ProgramRules
from sdy_jax.counterparts.factors import Factor, Reasons, Types, block_shape, block_types
from sdy_jax.counterparts.local_form import difference
from sdy_jax.counterparts.reference import ReferenceProgram, traced
from sdy_jax.lowering.blocking.spans import Span


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
        return [factor for factor in factors if factor in known or self._is_proved(factor, reasons)]

    def _is_proved(self, factor: Factor, reasons: Reasons) -> bool:
        has_blocks = _least_parts(factor) < factor.size
        found = self._difference_in_blocks([factor]) if has_blocks else self._difference_as_block(factor)
        if found:
            factor.refuse(found, reasons)
        return not found

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
        index, span = next((i, span) for i, span in enumerate(factor.arguments) if span is not None)
        twice = Span(span.dim, span.outer, 2 * span.size, span.inner)
        flow = FactorFlow(ProgramRules(larger.graph), larger.arguments[index], twice, frozenset(larger.closed_over))
        if flow.refusal is not None:
            return str(flow.refusal)
        halves = {Factor(flow, larger, twice.size): 2}
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
