"""The sharding rule of a kernel, from its reference, with the proof that the reference is the same on blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, product, zip_longest
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir

from sdy_jax.annotate.arguments import match_prefix
from sdy_jax.annotate.jaxprs import all_equations
from sdy_jax.base.errors import SdyError, ShardingError
from sdy_jax.base.jax_primitives import pallas_call_p
from sdy_jax.ir.custom_ops import StatedWork
from sdy_jax.ir.graph import Block, Op, Value
from sdy_jax.ir.shardings import OpShardingRule, TensorMapping
from sdy_jax.lowering.ops.registry import PART_BY_PART
from sdy_jax.lowering.planner.references.factors import (
    Factor,
    FactorFlow,
    Parts,
    ProgramRules,
    Reasons,
    Refusal,
    Types,
    block_shape,
    block_types,
    factors_of,
    overlap,
    reduction_of,
)
from sdy_jax.lowering.planner.references.reference import Flat, ReferenceProgram, side_by_side, traced, work_of
from sdy_jax.lowering.planner.rewrites.blocking_groups import Span

# Whether a function traced for blocks is, op by op, what the same function traced for whole arrays is on blocks.
#
# That the ops of the whole program run on blocks is not enough: a mean divides by the number of all elements, on a
# block by that of the block's. So ops, what they take, and all that they state has to be the same, but for the sizes
# of what is split.

BlockShape = Callable[[Value], tuple[int, ...]]
"""The shape of a block of a value of the whole program."""


def difference(whole: ReferenceProgram, blocks: ReferenceProgram, block_shape: BlockShape) -> Refusal | None:
    """The first op of the whole program that another one stands for on blocks; None if there is none."""
    if not _hold_the_same(whole, blocks):
        return Refusal(None, "the reference closes over arrays that depend on its size")
    comparison = _Comparison(block_shape)
    return next(comparison.of_blocks(whole.graph.main.blocks[0], blocks.graph.main.blocks[0]), None)


def _hold_the_same(whole: ReferenceProgram, blocks: ReferenceProgram) -> bool:
    pairs = zip_longest(whole.captured, blocks.captured)
    return all(
        a is not None and b is not None and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in pairs
    )


class _Comparison:
    def __init__(self, block_shape: BlockShape):
        self._block_shape = block_shape
        self._numbers: dict[Value, int] = {}
        """Of values of both programs: those that correspond have the same one."""

    def of_blocks(self, whole: Block, local: Block) -> Iterator[Refusal]:
        """The ops that differ, in order."""
        yield from self._values(whole.parent, whole.arguments, local.arguments)
        for op, other in zip_longest(whole.ops, local.ops):
            if op is None or other is None:
                yield Refusal(op or whole.parent, "is not all that runs on blocks")
                return
            yield from self._ops(op, other)

    def _ops(self, op: Op, other: Op) -> Iterator[Refusal]:
        taken = ([self._numbers.get(value) for value in each.operands] for each in (op, other))
        if op.key != other.key or next(taken) != next(taken) or len(op.blocks) != len(other.blocks):
            yield Refusal(op, f"is {other.title} on blocks")
        yield from self._values(op, op.results, other.results)
        for name in dict.fromkeys((*op.attributes, *other.attributes)):
            if not name.startswith("sdy.") and not self._states_the_same(op, other, name):
                yield _stated_otherwise(op, other, name)
        for inner, local in zip(op.blocks, other.blocks, strict=False):
            yield from self.of_blocks(inner, local)

    def _values(self, op: Op, whole: list[Value], local: list[Value]) -> Iterator[Refusal]:
        for value, other in zip_longest(whole, local):
            if value is None or other is None or value.dtype != other.dtype:
                yield Refusal(op, "makes other types on blocks")
                return
            self._numbers[value] = self._numbers[other] = len(self._numbers)
            if value.shape is not None and self._block_shape(value) != other.shape:
                yield Refusal(
                    op,
                    f"makes {list(other.shape or ())} on blocks, where the block is {list(self._block_shape(value))}",
                )

    def _states_the_same(self, op: Op, other: Op, name: str) -> bool:
        mine, theirs = op.attributes.get(name), other.attributes.get(name)
        if mine is None or theirs is None:
            return False
        if name == PART_BY_PART.get(op.key):
            shape, block = op.operands[0].shape or (), self._block_shape(op.operands[0])
            sizes = zip(op.ints(name), shape, block, strict=True)
            return tuple(part if size == n else size for size, n, part in sizes) == other.ints(name)
        if _is_splat(mine) and _is_splat(theirs):
            return _number(mine) == _number(theirs)
        return str(mine) == str(theirs)


def _is_splat(attribute: ir.Attribute) -> bool:
    return isinstance(attribute, ir.DenseElementsAttr) and attribute.is_splat


def _number(attribute: ir.Attribute) -> str:
    return str(ir.DenseElementsAttr(attribute).get_splat_value())


def _stated_otherwise(op: Op, other: Op, name: str) -> Refusal:
    """Of a constant, what takes it: that has the line."""
    mine, theirs = op.attributes.get(name), other.attributes.get(name)
    if op.operands or mine is None or theirs is None or not (_is_splat(mine) and _is_splat(theirs)):
        return Refusal(op, f"has {name} = {mine}, on blocks {theirs}")
    user = next((user for user, _ in op.results[0].uses), op)
    number, on_blocks = (_number(each).partition(" :")[0] for each in (mine, theirs))
    return Refusal(user, f"takes {_short(number)}, on blocks {_short(on_blocks)}")


def _short(number: str) -> str:
    """`128` for `1.280000e+02`; what is no such number as it is."""
    try:
        return f"{float(number):g}"
    except ValueError:
        return number


# Whether a reference is the same function on blocks: it is traced for these, too, and compared op by op.

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


def check_results(title: str, made: Any, reference_title: str, reference: Callable[..., Any], types: Types) -> None:
    """
    Args:
        title: what the kernel is called.
        made: the types of its results, in their tree.
        reference_title: what the reference is called.
        reference: a function of arrays.
        types: theirs.

    Raises:
        ShardingError: the reference fails, or returns others.
    """
    where = f"partition_like of `{title}`"
    try:
        plain = jax.eval_shape(reference, *types)
    except Exception as error:  # whatever the user's function raises
        raise ShardingError(
            f"{where}: the reference `{reference_title}` does not take its arguments: {said(error)}"
        ) from error
    ours, theirs = _by_path(made), _by_path(plain)
    for path in [*ours, *theirs]:
        if path not in ours or path not in theirs:
            has, lacks = (title, reference_title) if path in ours else (reference_title, title)
            raise ShardingError(f"{where}: `{has}` returns `{path}`, and `{lacks}` does not; both return the same tree")
        if not _are_alike(ours[path], theirs[path]):
            raise ShardingError(
                f"{where}: `{path}` is {_text(ours[path])} by `{title}`, {_text(theirs[path])} by `{reference_title}`; "
                "they have the same shapes, and floating-point numbers of any precision or else the same types"
            )


def _by_path(result: Any) -> Mapping[str, Any]:
    return {leaf.path: leaf.value for leaf in match_prefix(None, result, "result", "out_shardings")}


def _are_alike(one: Any, other: Any) -> bool:
    kinds = (jnp.floating, jnp.complexfloating)
    is_rounded = any(all(jnp.issubdtype(x.dtype, kind) for x in (one, other)) for kind in kinds)
    return one.shape == other.shape and (is_rounded or one.dtype == other.dtype)


def _text(type_: Any) -> str:
    return f"{type_.dtype}{list(type_.shape)}"


# Of which blocks a kernel makes blocks of its results: it may take multiples of some size only, or refuse.

_MOST_TRIED = 16
"""How many sizes of blocks a kernel is asked for along a factor. Chosen: powers of two up to 32768."""

Units = Mapping[Factor, int]
"""Per factor the elements that stay together: blocks are multiples of that."""


@dataclass(frozen=True)
class BlocksOfBoth:
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
    units = BlocksOfBoth(kernel, plain, arguments, results).units(factors, reasons)
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
