"""A traced program as steps: jaxprs without nested calls, each value an object, each region a block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

CALLBACKS = frozenset({"sdy_host_call", "debug_callback", "debug_print", "pure_callback", "io_callback"})
"""Primitives that call Python back, whether anything uses their results or not."""


@dataclass(eq=False, slots=True)
class Value:
    """A local array: shape, dtype, and what it is where that is known. Values are equal if they are the same object."""

    shape: tuple[int, ...]
    dtype: Any
    constant: np.ndarray | None = None

    @property
    def is_scalar_literal(self) -> bool:
        return self.constant is not None and self.shape == ()


@dataclass(eq=False, slots=True)
class Block:
    """The body of a function: what it takes, what it does, what it returns. It may use values from outside."""

    inputs: list[Value]
    steps: list[Step]
    outputs: list[Value]

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
    inputs: list[Value]
    outputs: list[Value]
    op: int | None = None
    blocks: list[Block] = field(default_factory=list)

    @property
    def calls_back(self) -> bool:
        """Whether it, or a step in its regions, calls Python back."""
        inner = (step for block in self.blocks for step in block.walk())
        return self.primitive in CALLBACKS or any(step.primitive in CALLBACKS for step in inner)

    @property
    def captured(self) -> set[Value]:
        """The values from outside that its regions use."""
        return {value for block in self.blocks for value in captured_by(block)}


def captured_by(block: Block) -> set[Value]:
    """The values from outside that a block uses; constants are not counted."""
    made, used = set(block.inputs), set(block.outputs)
    for step in block.steps:
        used.update(step.inputs, step.captured)
        made.update(step.outputs)
    return {value for value in used - made if value.constant is None}


def without_dead_steps(block: Block) -> Block:
    """The block with the steps that its results need, and those with effects."""
    wanted: set[Value] = set(block.outputs)
    kept: list[Step] = []
    for step in reversed(block.steps):
        if wanted.isdisjoint(step.outputs) and not step.calls_back:
            continue
        step.blocks = [without_dead_steps(inner) for inner in step.blocks]
        wanted.update(step.inputs, step.captured)
        kept.append(step)
    return Block(block.inputs, kept[::-1], block.outputs)


def use_counts(block: Block, outputs: Sequence[Value]) -> dict[Value, int]:
    """How often each value is an operand in a block, or one of its results; a use in a region counts twice."""
    counts: dict[Value, int] = {}
    for value in outputs:
        counts[value] = counts.get(value, 0) + 1
    for step in block.steps:
        for value in step.inputs:
            counts[value] = counts.get(value, 0) + 1
        for value in step.captured:
            counts[value] = counts.get(value, 0) + 2
    return counts
