"""Whether a reference is the same function on blocks, op by op, and whether its kernel returns such arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product, zip_longest
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir

from sdy_jax.annotate.arguments import match_prefix
from sdy_jax.errors import ShardingError
from sdy_jax.ir.graph import Block, Op, Value
from sdy_jax.lowering.ops.registry import PART_BY_PART
from sdy_jax.lowering.planner.references.factors import (
    Factor,
    FactorFlow,
    ProgramRules,
    Reasons,
    Refusal,
    Types,
    block_shape,
    block_types,
    overlap,
)
from sdy_jax.lowering.planner.references.reference import ReferenceProgram, traced
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


# Whether a kernel and its reference return the same arrays, as their types say.


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
