"""Where a factor that is worked on in parts lies in a value, and how the rule of an op carries it to other values."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sdy_jax.ir.graph import Op, Value
from sdy_jax.lowering.analysis.fusion import UPDATES, computes
from sdy_jax.lowering.insert.user_collectives import is_user_collective
from sdy_jax.lowering.strategies.monoids import is_identity
from sdy_jax.lowering.strategies.registry import PART_BY_PART, is_forwarding, pass_through_factors, strategies_of
from sdy_jax.op_rules.slicing import PADDINGS
from sdy_jax.representation.rule import OpShardingRule

RuleOf = Callable[[Op], OpShardingRule | None]
"""The rules of ops, without factors along which a part of the result is not computed of one part of each operand."""


@dataclass(frozen=True, slots=True)
class Span:
    """A factor of `size` in dimension `dim` of a value, which is `outer` x `size` x `inner`."""

    dim: int
    outer: int
    size: int
    inner: int


@dataclass(frozen=True, slots=True)
class Cut:
    """How the factor of a span is worked on: in each of `shards` equal blocks, which devices may hold, part by part."""

    shards: int
    parts: int

    def view(self, span: Span) -> tuple[int, int, int]:
        """A dimension as what is before the parts, the parts, and what is in a part.

        >>> Cut(shards=2, parts=4).view(Span(dim=0, outer=3, size=16, inner=5))
        (6, 4, 10)
        """
        return span.outer * self.shards, self.parts, span.size // (self.shards * self.parts) * span.inner

    def part(self, shape: Sequence[int], span: Span | None) -> list[int]:
        """The shape of a part of a value of some shape; all of it if it has no span."""
        return [size // self.parts if span and dim == span.dim else size for dim, size in enumerate(shape)]


class Split(NamedTuple):
    """How an op runs on parts of a factor: where that is in operands and results. `kind`: how the results of parts
    combine, if these do not have the factor; else empty."""

    operands: tuple[Span | None, ...]
    results: tuple[Span | None, ...]
    kind: str = ""


def split_along(
    op: Op, rule: OpShardingRule | None, tensor: int, span: Span, known: Container[str] = PART_BY_PART
) -> Split | None:
    """How an op runs on parts of the span of one of its tensors, operands first; None if it cannot. `known`: the names
    of ops that do."""
    if is_forwarding(op) and not is_user_collective(op) and len(op.operands) == len(op.results) == 1:
        return Split((span,), (span,))  # it says how a value lies
    found = within_factor(rule, tensor, span) if rule is not None and op.name in known else None
    if found is None or rule is None:
        return None
    factor, within = found
    spans = [placed(rule, mapping, factor, within) for mapping in rule.mappings]
    count = len(op.operands)
    split = Split(tuple(spans[:count]), tuple(spans[count:]))
    if factor in pass_through_factors(rule):
        return split if _is_computed_in_parts(op, split) else None
    kind = _kind_of_partial(op, rule, factor)
    return split._replace(kind=kind) if kind and not any(split.results) else None


def within_factor(rule: OpShardingRule, tensor: int, span: Span) -> tuple[int, Span] | None:
    """The factor that a span lies in, and where it lies there."""
    factors, outer = rule.mappings[tensor][span.dim], 1
    for number, factor in enumerate(factors):
        size = rule.factor_sizes[factor]
        inner = math.prod(rule.factor_sizes[other] for other in factors[number + 1 :])
        if size > 1 and not span.outer % outer and not span.inner % inner:
            within = Span(0, span.outer // outer, span.size, span.inner // inner)
            if within.outer * within.size * within.inner == size:
                return factor, within
        outer *= size
    return None


def placed(rule: OpShardingRule, mapping: tuple[tuple[int, ...], ...], factor: int, within: Span) -> Span | None:
    """Where a part of a factor lies in a tensor."""
    sizes = rule.factor_sizes
    for dim, factors in enumerate(mapping):
        if factor in factors:
            at = factors.index(factor)
            before, behind = (math.prod(sizes[f] for f in some) for some in (factors[:at], factors[at + 1 :]))
            return Span(dim, before * within.outer, within.size, within.inner * behind)
    return None


def _is_computed_in_parts(op: Op, split: Split) -> bool:
    """Whether all results have the factor, with its elements where they are in the operands; and, if an op puts one
    value into another, both of these."""
    if not all(split.results) or _shifts(op, split.operands[0]):
        return False
    return op.name not in UPDATES or sum(map(bool, split.operands)) > len(op.results)


def _shifts(op: Op, span: Span | None) -> bool:
    """Whether an op cuts off as many elements of a dimension as it adds."""
    return op.name == "stablehlo.pad" and span is not None and any(op.ints(name)[span.dim] for name in PADDINGS)


def _kind_of_partial(op: Op, rule: OpShardingRule, factor: int) -> str:
    """How partial results along a factor that an op reduces combine; empty where that is not known."""
    strategy = strategies_of(op, rule)[0]
    if not computes(op) or factor not in strategy.partial:
        return ""
    starts = (value for value in op.operands if not value.rank)
    return strategy.reduction if all(is_identity(value, strategy.reduction) for value in starts) else ""


def spans_of(value: Value) -> Iterator[Span]:
    """The whole dimensions of a value."""
    for dim, size in enumerate(value.shape or ()):
        if size > 1:
            yield Span(dim, 1, size, 1)
