"""The factors of a reference's arguments along which its ops run on blocks, and why it does not run along others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import jax

from sdy_jax.counterparts.factor_flow import FactorFlow, Partial, ProgramRules
from sdy_jax.counterparts.reference import ReferenceProgram
from sdy_jax.ir.graph import Value
from sdy_jax.lowering.blocking.spans import Span

Types = Sequence[jax.ShapeDtypeStruct]
"""Those of arguments or results."""

Reasons = dict[tuple[int, Span], str]
"""By argument, parts of its dimensions that are whole, with what keeps them so."""


@dataclass(frozen=True, eq=False)
class Factor:
    """A factor of some arguments and results of a program: where it flows to, in spans of `size`; and where it is in
    arguments that only lend their shapes, as those of a sum do to its backward pass."""

    flow: FactorFlow
    program: ReferenceProgram
    size: int
    lent: Mapping[Value, Span] = field(default_factory=dict)

    def span_of(self, value: Value) -> Span | None:
        """Where it is in a value, if it is."""
        state = self.flow.states.get(value)
        return state if isinstance(state, Span) else self.lent.get(value)

    @cached_property
    def arguments(self) -> tuple[Span | None, ...]:
        """Where it is in each argument."""
        return tuple(map(self.span_of, self.program.arguments))

    @cached_property
    def results(self) -> tuple[Span | Partial | None, ...]:
        """What it makes of each result."""
        return tuple(self.flow.states.get(value) for value in self.program.graph.outputs)

    @property
    def kinds(self) -> frozenset[str]:
        """How results that do not have it combine."""
        return frozenset(state.kind for state in self.results if isinstance(state, Partial))

    def refuse(self, reason: str, reasons: Reasons) -> None:
        """Notes in all its arguments that it is whole."""
        reasons.update({(i, span): reason for i, span in enumerate(self.arguments) if span is not None})


Parts = Mapping[Factor, int]
"""Into how many parts factors are cut."""


def block_shape(value: Value, parts: Parts) -> tuple[int, ...]:
    """The shape of a block of a value."""
    shape = list(value.shape or ())
    for factor, count in parts.items():
        span = factor.span_of(value)
        if span is not None:
            shape[span.dim] //= count
    return tuple(shape)


def block_types(types: Types, parts: Parts) -> list[jax.ShapeDtypeStruct]:
    """The types of blocks of arguments."""
    shapes = [list(type_.shape) for type_ in types]
    for factor, count in parts.items():
        for shape, span in zip(shapes, factor.arguments, strict=True):
            if span is not None:
                shape[span.dim] //= count
    return [type_.update(shape=tuple(shape)) for type_, shape in zip(types, shapes, strict=True)]


def factors_of(program: ReferenceProgram, reasons: Reasons) -> list[Factor]:
    """The factors of its arguments along which all ops of a program run.

    A dimension that some op sees as several is followed as these: heads that are merged into a batch.
    """
    rules, fixed, found = ProgramRules(program.graph), frozenset(program.closed_over), list[Factor]()
    waiting = [(i, span) for i, value in enumerate(program.arguments) for span in _whole_dimensions(value)]
    while waiting:
        index, span = waiting.pop(0)
        value = program.arguments[index]
        if not value.uses:
            reasons[index, span] = _UNUSED
            continue
        if any(factor.arguments[index] == span for factor in found):
            continue
        flow = FactorFlow(rules, value, span, fixed)
        if flow.refusal is None:
            found.append(Factor(flow, program, span.size))
        elif flow.refusal.parts:
            waiting[:0] = [(index, part) for part in _parts(span, flow.refusal.parts)]
        else:
            reasons[index, span] = str(flow.refusal)
    return [factor for factor in _of_one_kind(found, reasons) if _is_apart(factor, found, reasons)]


_UNUSED = "no result depends on it"


def _whole_dimensions(value: Value) -> Iterator[Span]:
    return (Span(dim, 1, size, 1) for dim, size in enumerate(value.shape or ()) if size > 1)


def _parts(span: Span, sizes: Sequence[int]) -> Iterator[Span]:
    """The factors of these sizes, major to minor, that make up a span."""
    outer, left = span.outer, span.size
    for size in sizes:
        left //= size
        yield Span(span.dim, outer, size, left * span.inner)
        outer *= size


def reduction_of(factors: Sequence[Factor]) -> str:
    """How results combine along factors: by a sum, if they do so along one."""
    kinds = [kind for factor in factors for kind in factor.kinds]
    return "sum" if "sum" in kinds or not kinds else kinds[0]


def _of_one_kind(factors: Sequence[Factor], reasons: Reasons) -> list[Factor]:
    """Those along which results combine by one kind of reduction, if they do; and that some result needs."""
    reduction, found = reduction_of(factors), list[Factor]()
    for factor in factors:
        if not any(factor.results):
            factor.refuse(_UNUSED, reasons)
        elif factor.kinds - {reduction}:
            factor.refuse(f"results combine by {min(factor.kinds)} along it, by {reduction} along others", reasons)
        elif factor.kinds and not all(factor.results):
            factor.refuse("some results are sums over it, and others are the same on all devices", reasons)
        else:
            found.append(factor)
    return found


def _is_apart(factor: Factor, factors: Sequence[Factor], reasons: Reasons) -> bool:
    """Whether a factor shares no elements of a dimension with those before it."""
    before = factors[: factors.index(factor)]
    for other in before:
        for one, two in zip((*factor.arguments, *factor.results), (*other.arguments, *other.results), strict=True):
            if isinstance(one, Span) and isinstance(two, Span) and overlap(one, two):
                factor.refuse("it is a part of another one", reasons)
                return False
    return True


def overlap(one: Span, two: Span) -> bool:
    """Whether two parts of dimensions have elements in common, so that not both can be split."""
    major, minor = sorted((one, two), key=lambda span: span.outer)
    return one.dim == two.dim and bool(minor.outer % (major.outer * major.size))
