"""Whether a function traced for blocks is, op by op, what the same function traced for whole arrays is on blocks.

That the ops of the whole program run on blocks is not enough: a mean divides by the number of all elements, on a block
by that of the block's. So ops, what they take, and all that they state has to be the same, but for the sizes of what is
split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import zip_longest

from jax.extend.mlir import ir

from sdy_jax.counterparts.factor_flow import Refusal
from sdy_jax.counterparts.reference import ReferenceProgram
from sdy_jax.ir.graph import Block, Op, Value
from sdy_jax.lowering.strategies.registry import PART_BY_PART

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
