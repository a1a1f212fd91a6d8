"""The sharding rule of a kernel, from the ops of its reference.

attention(q, k, v) of [8, 64, 4, 32] each; the reference is split by batch, by heads, and by the columns of v:

([i, m, j, n], [i, o, j, p], [i, q, j, k])->([i, r, j, k]) {i=8, j=4, k=32, ...} need_replication={m, n, o, p, ...}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sdy_jax.counterparts.backward import Flat
from sdy_jax.counterparts.factors import Factor, Reasons, Types, factors_of, reduction_of
from sdy_jax.counterparts.kernel_blocks import KernelBlocks, Units
from sdy_jax.counterparts.proof import Proof, said
from sdy_jax.counterparts.reference import side_by_side, traced
from sdy_jax.counterparts.work import work_of
from sdy_jax.errors import SdyError
from sdy_jax.ir.stated_work import StatedWork
from sdy_jax.lowering.blocking.spans import Span
from sdy_jax.representation.rule import OpShardingRule, TensorMapping


@dataclass(frozen=True)
class DerivedRule:
    """The rule of a kernel.

    Attributes:
        rule: of its arguments and results.
        reduction: how results combine along reduction factors, and along those that are `partial`.
        partial: the other factors along which results that do not have them are terms.
        whole: per factor that is whole, why it is, as far as that is known.
        work: what the reference performs.
    """

    rule: OpShardingRule
    reduction: str
    partial: frozenset[int]
    whole: Mapping[int, str]
    work: StatedWork | None


def derived_rule(kernel: Flat, reference: Flat, arguments: Types, results: Types) -> DerivedRule:
    """The rule of a kernel that computes what its reference does, whatever its blocks.

    Raises:
        SdyError: the reference closes over traced arrays.
    """
    plain, reasons = side_by_side(reference), Reasons()
    try:
        program = traced(plain, arguments)
    except SdyError:
        raise
    except Exception as error:  # it calls the host, for one, or names axes of a mesh
        return whole_rule(arguments, results, f"its reference is not lowered: {said(error)}")
    factors = Proof(plain, arguments, program).proved(factors_of(program, reasons), reasons)
    units = KernelBlocks(kernel, plain, arguments, results).units(factors, reasons)
    return _Writing(units, reasons).rule(arguments, results, work_of(program))


def whole_rule(arguments: Types, results: Types, reason: str) -> DerivedRule:
    """The rule of a kernel that is split along nothing, for a reason; of its work nothing is known."""
    reasons = {(i, Span(d, 1, n, 1)): reason for i, type_ in enumerate(arguments) for d, n in enumerate(type_.shape)}
    return _Writing({}, reasons).rule(arguments, results, None)


class _Writing:
    """A rule while it is written: its factors are those that are split, then all else."""

    def __init__(self, units: Units, reasons: Reasons):
        self._units, self._reasons = units, reasons
        self._factors = list(units)
        self._sizes = [factor.size // unit for factor, unit in units.items()]
        self._whole, self._together = dict[int, str](), dict[Factor, int]()

    def rule(self, arguments: Types, results: Types, work: StatedWork | None) -> DerivedRule:
        taken = tuple(self._argument(i, type_.shape) for i, type_ in enumerate(arguments))
        made = tuple(self._result(i, type_.shape) for i, type_ in enumerate(results))
        combining = [i for i, factor in enumerate(self._factors) if factor.kinds]
        reduced = frozenset(i for i in combining if not any(isinstance(s, Span) for s in self._factors[i].results))
        whole = frozenset(i for i in range(len(self._factors), len(self._sizes)) if self._sizes[i] > 1)
        rule = OpShardingRule(
            tuple(self._sizes), taken, made, reduction=reduced, need_replication=whole, is_custom=True
        )
        return DerivedRule(rule, reduction_of(self._factors), frozenset(combining) - reduced, self._whole, work)

    def _argument(self, index: int, shape: Sequence[int]) -> TensorMapping:
        refused = [(span, reason) for (i, span), reason in self._reasons.items() if i == index]
        spans = {factor: span for factor in self._factors if (span := factor.arguments[index]) is not None}
        return tuple(self._dimension(dim, size, spans, refused) for dim, size in enumerate(shape))

    def _result(self, index: int, shape: Sequence[int]) -> TensorMapping:
        spans = {factor: s for factor in self._factors if isinstance(s := factor.results[index], Span)}
        return tuple(self._dimension(dim, size, spans, []) for dim, size in enumerate(shape))

    def _dimension(
        self, dim: int, size: int, spans: Mapping[Factor, Span], refused: Sequence[tuple[Span, str]]
    ) -> tuple[int, ...]:
        """The factors of a dimension, major to minor; what is between those that are split is whole."""
        here = {number: spans[factor] for number, factor in enumerate(self._factors) if factor in spans}
        own = sorted((span.outer, number) for number, span in here.items() if span.dim == dim)
        reasons = [(span, reason) for span, reason in refused if span.dim == dim]
        found, done = list[int](), 1
        for outer, number in own:
            if outer > done:
                found.append(self._rest(outer // done, done, reasons))
            factor = self._factors[number]
            found += [number, *self._unit(factor)]
            done = outer * factor.size
        if size > done or not found:
            found.append(self._rest(size // done, done, reasons))
        return tuple(found)

    def _unit(self, factor: Factor) -> list[int]:
        """What stays together in blocks of a factor: the same in all tensors."""
        unit = self._units[factor]
        if unit > 1 and factor not in self._together:
            self._together[factor] = self._add(unit)
        return [self._together[factor]] if unit > 1 else []

    def _rest(self, size: int, outer: int, reasons: Sequence[tuple[Span, str]]) -> int:
        number = self._add(size)
        inside = [reason for span, reason in reasons if outer <= span.outer < outer * max(size, 2)]
        if inside:
            self._whole[number] = inside[0]
        return number

    def _add(self, size: int) -> int:
        self._sizes.append(size)
        return len(self._sizes) - 1
