"""The sharding rule of a kernel, from the ops of its reference and from the blocks that the kernel takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import jax

from sdy_jax.annotate.jaxprs import all_equations
from sdy_jax.base.jax_pallas import pallas_call_p
from sdy_jax.errors import SdyError
from sdy_jax.ir.custom_ops import StatedWork
from sdy_jax.ir.rules import OpShardingRule, TensorMapping
from sdy_jax.lowering.planner.references.factors import (
    Factor,
    Parts,
    Reasons,
    Types,
    block_types,
    factors_of,
    reduction_of,
)
from sdy_jax.lowering.planner.references.proof import Proof, said
from sdy_jax.lowering.planner.references.reference import Flat, side_by_side, traced, work_of
from sdy_jax.lowering.planner.rewrites.blocking_groups import Span

# Of which blocks a kernel makes blocks of its results: it may take multiples of some size only, or refuse.

_MOST_TRIED = 16
"""How many sizes of blocks a kernel is asked for along a factor. Chosen: powers of two up to 32768."""

Units = Mapping[Factor, int]
"""Per factor the elements that stay together: blocks are multiples of that."""


@dataclass(frozen=True)
class KernelBlocks:
    """Which blocks a kernel and its reference take.

    Attributes:
        kernel, reference: functions of the same arrays.
        arguments, results: their types.
    """

    kernel: Flat
    reference: Flat
    arguments: Types
    results: Types

    def units(self, factors: Sequence[Factor], reasons: Reasons) -> dict[Factor, int]:
        """The factors along which they take blocks, with the least that they take; reasons for all others are added."""
        found = dict[Factor, int]()
        for factor in factors:
            problem = ""
            for unit in _units(factor.size):
                problem = self._problem({**found, factor: unit})
                if not problem:
                    found[factor] = unit
                    break
            else:
                factor.refuse(problem, reasons)
        return found

    @cached_property
    def _steps(self) -> list[int]:
        return _made(self.kernel, self.arguments)[1]

    def _problem(self, units: Units) -> str:
        """What is wrong with what both make of the smallest blocks; empty if nothing is."""
        parts = {factor: factor.size // unit for factor, unit in units.items()}
        given = block_types(self.arguments, parts)
        wanted = [_result_shape(index, type_.shape, parts) for index, type_ in enumerate(self.results)]
        blocks, steps = _listed(type_.shape for type_ in given), list[list[int]]()
        for name, fun in (("the kernel", self.kernel), ("its reference", self.reference)):
            try:
                made, grids = _made(fun, given)
            except Exception as error:  # the user's function says by any error that it does not take them
                return f"{name} refuses blocks of {blocks}: {said(error)}"
            if made != wanted:
                return f"{name} makes {_listed(made)} of blocks of {blocks}, where blocks are {_listed(wanted)}"
            steps.append(grids)
        if not _covers(steps[0], self._steps, prod(parts.values())):
            return f"the kernel's grids leave out some of blocks of {blocks}"
        return ""


def _units(size: int) -> list[int]:
    """Sizes of blocks, the smallest first."""
    return [n for n in range(1, size // 2 + 1) if not size % n][:_MOST_TRIED]


def _made(fun: Flat, types: Types) -> tuple[list[tuple[int, ...]], list[int]]:
    """The shapes of a function's results, and the steps of the grids of the Pallas kernels that it calls."""
    jaxpr, made = jax.make_jaxpr(fun, return_shape=True)(*types)
    calls = [eqn for eqn in all_equations(jaxpr) if eqn.primitive is pallas_call_p]
    grids = [eqn.params["grid_mapping"].grid for eqn in calls]
    return [tuple(type_.shape) for type_ in made], [prod([n for n in grid if isinstance(n, int)]) for grid in grids]


def _covers(on_block: Sequence[int], on_whole: Sequence[int], blocks: int) -> bool:
    """Whether grids of as many blocks have no fewer steps than those of the whole: `n // 16` has none for 8 rows."""
    if len(on_block) != len(on_whole):
        return sum(on_block) * blocks >= sum(on_whole)
    return all(one * blocks >= all_ for one, all_ in zip(on_block, on_whole, strict=True))


def _result_shape(index: int, shape: Sequence[int], parts: Parts) -> tuple[int, ...]:
    sizes = list(shape)
    for factor, count in parts.items():
        state = factor.results[index]
        if isinstance(state, Span):
            sizes[state.dim] //= count
    return tuple(sizes)


def _listed(shapes: Iterable[Sequence[int]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)


# The sharding rule of a kernel, from the ops of its reference.
#
# attention(q, k, v) of [8, 64, 4, 32] each; the reference is split by batch, by heads, and by the columns of v:
#
# ([i, m, j, n], [i, o, j, p], [i, q, j, k])->([i, r, j, k]) {i=8, j=4, k=32, ...} need_replication={m, n, o, p, ...}


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
