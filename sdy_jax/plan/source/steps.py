"""A traced program as steps: jaxprs without nested calls, each value an object, each region a block; and what is
known of integers in it before it runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

CALLBACKS = frozenset({"sdy_host_call", "debug_callback", "debug_print", "pure_callback", "io_callback"})
"""Primitives that call Python back, whether anything uses their results or not."""


@dataclass(eq=False, slots=True)
class LocalValue:
    """A local array: shape, dtype, and what it is where that is known. Values are equal if they are the same object."""

    shape: tuple[int, ...]
    dtype: Any
    constant: np.ndarray | None = None

    @property
    def is_scalar_literal(self) -> bool:
        return self.constant is not None and self.shape == ()


@dataclass(eq=False, slots=True)
class StepBlock:
    """The body of a function: what it takes, what it does, what it returns. It may use values from outside."""

    inputs: list[LocalValue]
    steps: list[Step]
    outputs: list[LocalValue]

    def walk(self) -> Iterator[Step]:
        """All steps, those of regions after the step that has them."""
        for step in self.steps:
            yield step
            for block in step.blocks:
                yield from block.walk()


@dataclass(eq=False, slots=True)
class Step:
    """One primitive. `op` is the index of the op of the partitioned program that it belongs to, if that is known."""

    primitive: str
    params: Mapping[str, Any]
    inputs: list[LocalValue]
    outputs: list[LocalValue]
    op: int | None = None
    blocks: list[StepBlock] = field(default_factory=list)

    @property
    def calls_back(self) -> bool:
        """Whether it, or a step in its regions, calls Python back."""
        inner = (step for block in self.blocks for step in block.walk())
        return self.primitive in CALLBACKS or any(step.primitive in CALLBACKS for step in inner)

    @property
    def captured(self) -> set[LocalValue]:
        """The values from outside that its regions use."""
        return {value for block in self.blocks for value in captured_by(block)}


def captured_by(block: StepBlock) -> set[LocalValue]:
    """The values from outside that a block uses; constants are not counted."""
    made, used = set(block.inputs), set(block.outputs)
    for step in block.steps:
        used.update(step.inputs, step.captured)
        made.update(step.outputs)
    return {value for value in used - made if value.constant is None}


def without_dead_steps(block: StepBlock) -> StepBlock:
    """The block with the steps that its results need, and those with effects."""
    wanted: set[LocalValue] = set(block.outputs)
    kept: list[Step] = []
    for step in reversed(block.steps):
        if wanted.isdisjoint(step.outputs) and not step.calls_back:
            continue
        step.blocks = [without_dead_steps(inner) for inner in step.blocks]
        wanted.update(step.inputs, step.captured)
        kept.append(step)
    return StepBlock(block.inputs, kept[::-1], block.outputs)


def use_counts(block: StepBlock, outputs: Sequence[LocalValue]) -> dict[LocalValue, int]:
    """How often each value is an operand in a block, or one of its results; a use in a region counts twice."""
    counts: dict[LocalValue, int] = {}
    for value in outputs:
        counts[value] = counts.get(value, 0) + 1
    for step in block.steps:
        for value in step.inputs:
            counts[value] = counts.get(value, 0) + 1
        for value in step.captured:
            counts[value] = counts.get(value, 0) + 2
    return counts


# What is known of integers before a program runs: constants, and the least and the largest that a value can be.

LOOKUP = "lookup"
"""A primitive of ours: an element of a known list, by its index."""

_KEEP_SIGN = frozenset(
    {"add", "mul", "max", "squeeze", "reshape", "dynamic_slice", "slice", "broadcast_in_dim", "rem", LOOKUP}
)
"""Primitives of numbers that are not negative whose results are not, either, if they do not overflow."""

Made = Mapping[LocalValue, Step]
"""The steps that make the values of a block."""


def is_integer(value: LocalValue) -> bool:
    return value.dtype == np.bool_ or bool(np.issubdtype(value.dtype, np.integer))


def is_zero(value: LocalValue, made: Made) -> bool:
    """Whether a value is an integer 0, or an array of them."""
    step = made.get(value)
    if step is not None and step.primitive == "broadcast_in_dim":
        value = step.inputs[0]
    return is_integer(value) and value.constant is not None and not value.constant.any()


def is_one(value: LocalValue) -> bool:
    """Whether a value is the integer 1."""
    return value.is_scalar_literal and bool(np.issubdtype(value.dtype, np.integer)) and value.constant == 1


def is_natural(value: LocalValue, made: Made) -> bool:
    """Whether an integer is known not to be negative."""
    if not np.issubdtype(value.dtype, np.integer):
        return False
    if value.constant is not None:
        return bool((value.constant >= 0).all())
    step = made.get(value)
    if step is None:
        return False
    if step.primitive == "axis_index" or np.issubdtype(value.dtype, np.unsignedinteger):
        return True
    operands = step.inputs[:1] if step.primitive in ("dynamic_slice", LOOKUP) else step.inputs
    return step.primitive in _KEEP_SIGN and all(is_natural(operand, made) for operand in operands)


def is_within(value: LocalValue, low: LocalValue, high: LocalValue, made: Made) -> bool:
    """Whether an integer is known to be between two numbers."""
    if low.constant is None or high.constant is None or not is_integer(value):
        return False
    found = _range(value, made)
    return found is not None and int(low.constant.max()) <= found[0] and found[1] <= int(high.constant.min())


def _range(value: LocalValue, made: Made) -> tuple[int, int] | None:
    if value.constant is not None:
        return (int(value.constant.min()), int(value.constant.max())) if value.constant.size else None
    step = made.get(value)
    if step is None:
        return None
    if step.primitive == "convert_element_type" and step.inputs[0].dtype == np.bool_:
        return 0, 1
    if step.primitive == "clamp":
        low, _, high = (x.constant for x in step.inputs)
        return (int(low.min()), int(high.max())) if low is not None and high is not None else None
    return None


_OF_NUMBERS: Mapping[str, Callable[..., int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
    "and": operator.and_,
    "or": operator.or_,
    "clamp": lambda low, x, high: min(max(x, low), high),
    "select_n": lambda which, *cases: cases[which],
    "convert_element_type": lambda x: x,
}
"""Primitives on integers that are known."""


def folded(step: Step) -> LocalValue | None:
    """The result of a step on known integers, where it is simple; what a condition is beside one that always holds."""
    (result,) = step.outputs
    if step.primitive == "and" and result.dtype == np.bool_:
        first, second = step.inputs
        if first.constant is not None and bool(first.constant.all()) and second.shape == result.shape:
            return second
    known = [int(v.constant) for v in step.inputs if v.constant is not None and v.shape == () and is_integer(v)]
    if result.shape or step.primitive not in _OF_NUMBERS or len(known) != len(step.inputs):
        return None
    number = np.asarray(_OF_NUMBERS[step.primitive](*known))
    folded_number = number.astype(result.dtype)
    is_exact = not is_integer(result) or int(folded_number) == int(number)
    return LocalValue((), result.dtype, folded_number) if is_exact else None
