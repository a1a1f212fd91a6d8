"""Equal runs of steps as calls of one function."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from sdy_jax.python_source.loops import renamed
from sdy_jax.python_source.repeats import Repeat, best_repeat, token_of
from sdy_jax.python_source.steps import Block, Step, Value

CALL = "call"
"""A call of a function that stands for equal runs of steps. The first call has the function's block."""

_ROUNDS = 8
"""So many functions at most: forward and backward passes of two kinds of layers are four. Guessed, a guard: each round
reads the whole program."""


@dataclass(slots=True)
class Layer:
    """A function that is called several times: its name, and what it calls its results, once it is written."""

    count: int
    name: str = ""
    fields: tuple[str, ...] = ()


@dataclass(slots=True)
class _Copy:
    """One of the runs: what it has in place of the values of the first one."""

    values: dict[Value, Value] = field(default_factory=dict)
    outer: dict[Value, Value] = field(default_factory=dict)

    def matches(self, first: Sequence[Step], other: Sequence[Step]) -> bool:
        """Whether steps whose tokens are equal are also connected alike."""
        return all(self._matches_step(a, b) for a, b in zip(first, other, strict=True))

    def _matches_step(self, a: Step, b: Step) -> bool:
        if not all(self._is(v, w) for v, w in zip(a.inputs, b.inputs, strict=True)):
            return False
        for inner, others in zip(a.blocks, b.blocks, strict=True):
            self.values.update(zip(inner.inputs, others.inputs, strict=True))
            if not self.matches(inner.steps, others.steps):
                return False
            if not all(self._is(v, w) for v, w in zip(inner.outputs, others.outputs, strict=True)):
                return False
        self.values.update(zip(a.outputs, b.outputs, strict=True))
        return True

    def _is(self, v: Value, w: Value) -> bool:
        if v.constant is not None or w.constant is not None:
            return v.constant is not None and w.constant is not None and v.constant.tobytes() == w.constant.tobytes()
        known = self.values.get(v)
        return known is w if known is not None else self.outer.setdefault(v, w) is w


def with_layers(block: Block, line: Callable[[Step], str]) -> Block:
    """The block with equal runs of steps as calls; `line` is the source line of a step."""
    tokens: list[Hashable] = [token_of(step, line(step)) for step in block.steps]
    for _ in range(_ROUNDS):
        found = best_repeat(block, tokens)
        if found is None:
            break
        calls = _calls(block, found)
        if len(calls) < 2:
            break
        place = slice(found.first, found.first + len(calls) * found.length)
        block = Block(block.inputs, [*block.steps[: place.start], *calls, *block.steps[place.stop :]], block.outputs)
        tokens[place] = [object() for _ in calls]
    return block


def _calls(block: Block, found: Repeat) -> list[Step]:
    """The calls for the runs that are connected like the first one, up to the first that is not."""
    runs = [
        block.steps[start : start + found.length]
        for start in range(found.first, found.first + found.count * found.length, found.length)
    ]
    copies: list[_Copy] = []
    for run in runs:
        copy = _Copy()
        if not copy.matches(runs[0], run):
            break
        copies.append(copy)
    taken = [v for v in copies[0].outer if any(copy.outer[v] is not v for copy in copies)]
    given = _given(block, runs[: len(copies)], copies)
    inner = {v: Value(v.shape, v.dtype) for v in taken}
    body = renamed(Block([inner[v] for v in taken], runs[0], given), inner)
    layer, calls = Layer(len(copies)), list[Step]()
    for copy in copies:
        blocks = [] if calls else [body]
        outputs = [copy.values[v] for v in given]
        calls.append(Step(CALL, {"layer": layer}, [copy.outer[v] for v in taken], outputs, None, blocks))
    return calls


def _given(block: Block, runs: Sequence[Sequence[Step]], copies: Sequence[_Copy]) -> list[Value]:
    """The values of the first run that it, or another one in its place, gives to steps outside of itself."""
    used_by: dict[Value, set[int]] = {}
    for number, run in enumerate(runs):
        for step in run:
            for value in (*step.inputs, *step.captured):
                used_by.setdefault(value, set()).add(number)
    inside = {step for run in runs for step in run}
    outside = {v for step in block.steps if step not in inside for v in (*step.inputs, *step.captured)}
    outside.update(block.outputs)

    def is_given(value: Value) -> bool:
        others = ((number, copy.values[value]) for number, copy in enumerate(copies))
        return any(v in outside or used_by.get(v, set()) - {number} for number, v in others)

    return [value for step in runs[0] for value in step.outputs if is_given(value)]
