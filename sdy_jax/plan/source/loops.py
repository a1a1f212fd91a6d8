"""Loops as people write them, and equal runs of steps, as layers are, as calls of one function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import numpy as np

from sdy_jax.plan.source.expressions import param_text
from sdy_jax.plan.source.steps import LocalValue, Step, StepBlock, is_one

# Loops as people write them: values that no trip changes are taken from outside, and counted loops are `fori_loop`.

FOR = "fori_loop"
"""A counted loop: its inputs are the first index, the limit, and what is carried; its block takes the index first."""


def with_plain_loops(block: StepBlock) -> StepBlock:
    """The block with its loops simplified, from the outermost in."""
    same: dict[LocalValue, LocalValue] = {}
    for number, step in enumerate(block.steps):
        if step.primitive == "while":
            same.update({result: same.get(value, value) for result, value in _drop_invariants(step).items()})
            block.steps[number] = step = _counted(step) or step
        step.blocks = [with_plain_loops(inner) for inner in step.blocks]
    _rename(block, same)
    return block


def _drop_invariants(step: Step) -> dict[LocalValue, LocalValue]:
    """Takes what a loop carries without changing it from outside of the loop; returns the loop's results that are such
    a value, with that value."""
    condition, body = step.blocks
    unchanged = [i for i, value in enumerate(body.inputs) if body.outputs[i] is value]
    if not unchanged or len(unchanged) == len(body.inputs):
        return {}
    kept = [i for i in range(len(body.inputs)) if i not in unchanged]
    renamed = {block.inputs[i]: step.inputs[i] for block in (condition, body) for i in unchanged}
    same = {step.outputs[i]: step.inputs[i] for i in unchanged}
    for block in (condition, body):
        _rename(block, renamed)
        block.inputs = [block.inputs[i] for i in kept]
    body.outputs = [body.outputs[i] for i in kept]
    step.inputs, step.outputs = [step.inputs[i] for i in kept], [step.outputs[i] for i in kept]
    return same


def renamed(block: StepBlock, names: Mapping[LocalValue, LocalValue]) -> StepBlock:
    """The block, with other values in place of some that it uses."""
    _rename(block, names)
    return block


def _rename(block: StepBlock, names: Mapping[LocalValue, LocalValue]) -> None:
    for step in block.steps:
        step.inputs = [names.get(value, value) for value in step.inputs]
        for inner in step.blocks:
            _rename(inner, names)
    block.outputs = [names.get(value, value) for value in block.outputs]


def _counted(step: Step) -> Step | None:
    """The loop as one that counts up by one to a limit, if that is all that ends it."""
    condition, body = step.blocks
    if len(condition.steps) != 1 or condition.steps[0].primitive != "lt" or len(body.inputs) < 2:
        return None
    index, limit = condition.steps[0].inputs
    if index not in condition.inputs or limit in condition.inputs or limit.dtype not in (np.int32, np.int64):
        return None
    number = condition.inputs.index(index)
    ending, final = body.outputs[number], _final(step.inputs[number], limit)
    added = next((s for s in body.steps if s.outputs == [ending] and s.primitive == "add"), None)
    if final is None or added is None or added.inputs[0] is not body.inputs[number] or not is_one(added.inputs[1]):
        return None
    alike = _alike(step, number)
    for i in alike:
        step.outputs[i].constant = final
    _rename(body, {body.inputs[i]: body.inputs[number] for i in alike})
    others = [i for i in range(len(body.inputs)) if i not in alike]
    outputs = [body.outputs[i] for i in others]
    inner = StepBlock([body.inputs[number], *(body.inputs[i] for i in others)], body.steps, outputs)
    inputs = [step.inputs[number], limit, *(step.inputs[i] for i in others)]
    return Step(FOR, step.params, inputs, [step.outputs[i] for i in others], step.op, [inner])


def _alike(step: Step, number: int) -> list[int]:
    """The carried values that count as a counter does, itself among them."""
    body, first = step.blocks[1], step.inputs[number]
    made = {s.outputs[0]: s for s in body.steps if s.primitive == "add"}

    def counts(i: int) -> bool:
        added, start = made.get(body.outputs[i]), step.inputs[i]
        if added is None or added.inputs[0] is not body.inputs[i] or not is_one(added.inputs[1]):
            return False
        return start is first or (
            start.is_scalar_literal
            and first.is_scalar_literal
            and start.dtype == first.dtype
            and start.constant == first.constant
        )

    return [i for i in range(len(body.inputs)) if i == number or counts(i)]


def _final(first: LocalValue, limit: LocalValue) -> np.ndarray | None:
    """What the counter is in the end."""
    if first.constant is None or limit.constant is None:
        return None
    return np.asarray(max(first.constant, limit.constant))


# Where a program does the same again and again, as layers do: equal runs of steps that follow each other.

LEAST = 12
"""A shorter run of steps is read faster than a call. Chosen: for a reader."""

_PERIODS = 6
"""So many lengths of a run are tried, the most frequent ones first. Guessed, a guard: layers are among the first
ones."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """Equal runs of `length` steps, `count` of them, from the step `first` on."""

    first: int
    length: int
    count: int
    saved: int
    """Steps that need not be written, less the values that calls pass and return: each takes a line, or part of one."""


def token_of(step: Step, line: str) -> Hashable:
    """Equal for steps that do the same on values of the same types, for the same line of source."""
    params = tuple((name, param_text(value)) for name, value in sorted(step.params.items()))
    types = tuple((v.shape, v.dtype.name, None if v.constant is None else v.constant.tobytes()) for v in step.inputs)
    made = tuple((v.shape, v.dtype.name) for v in step.outputs)
    inner = tuple(tuple(token_of(s, "") for s in block.steps) for block in step.blocks)
    return step.primitive, params, types, made, inner, line


def best_repeat(block: StepBlock, tokens: Sequence[Hashable]) -> Repeat | None:
    """The repeat that saves most, if one does."""
    ends = _Ends(block)
    found = (
        best for length in _periods(tokens) for start, stop in _runs(tokens, length)
        if (best := _rotated(ends, start, stop, length)) is not None
    )  # fmt: skip
    best = max(found, key=lambda repeat: repeat.saved, default=None)
    return best if best is not None and best.saved > 0 else None


def _periods(tokens: Sequence[Hashable]) -> list[int]:
    """Distances between equal steps, the most frequent ones first."""
    places: dict[Hashable, list[int]] = {}
    for number, token in enumerate(tokens):
        places.setdefault(token, []).append(number)
    votes = Counter(b - a for found in places.values() for a, b in pairwise(found) if b - a >= LEAST)
    return [length for length, _ in votes.most_common(_PERIODS)]


def _runs(tokens: Sequence[Hashable], length: int) -> Iterator[tuple[int, int]]:
    """Where steps equal those `length` before them, from the first of these on, for at least one whole run."""
    same = ((i, tokens[i] == tokens[i + length]) for i in range(len(tokens) - length))
    for is_same, group in groupby(same, lambda pair: pair[1]):
        found = [i for i, _ in group]
        if is_same and len(found) >= length:
            yield found[0], found[-1] + 1 + length


def _rotated(ends: _Ends, start: int, stop: int, length: int) -> Repeat | None:
    """The repeat that begins where the fewest values go from one run to the next."""
    found = []
    for first in range(start, min(start + length, stop - 2 * length + 1)):
        count = (stop - first) // length
        passed = ends.passed(first, first + length)
        found.append(Repeat(first, length, count, (count - 1) * length - count * passed))
    return max(found, key=lambda repeat: repeat.saved, default=None)


class _Ends:
    """Where the values of a block are made, and where they are used last."""

    def __init__(self, block: StepBlock):
        self._steps = block.steps
        self._made = {value: i for i, step in enumerate(block.steps) for value in step.outputs}
        self._last: dict[LocalValue, int] = {}
        for i, step in enumerate(block.steps):
            self._last.update(dict.fromkeys([*step.inputs, *step.captured], i))
        self._last.update(dict.fromkeys(block.outputs, len(block.steps)))

    def passed(self, first: int, end: int) -> int:
        """How many values steps take from outside and give to others."""
        steps = self._steps[first:end]
        taken = {v for step in steps for v in step.inputs if v.constant is None and self._made.get(v, -1) < first}
        given = sum(self._last.get(v, -1) >= end for step in steps for v in step.outputs)
        return len(taken) + given


# Equal runs of steps as calls of one function.

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

    values: dict[LocalValue, LocalValue] = field(default_factory=dict)
    outer: dict[LocalValue, LocalValue] = field(default_factory=dict)

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

    def _is(self, v: LocalValue, w: LocalValue) -> bool:
        if v.constant is not None or w.constant is not None:
            return v.constant is not None and w.constant is not None and v.constant.tobytes() == w.constant.tobytes()
        known = self.values.get(v)
        return known is w if known is not None else self.outer.setdefault(v, w) is w


def with_layers(block: StepBlock, line: Callable[[Step], str]) -> StepBlock:
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
        block = StepBlock(
            block.inputs, [*block.steps[: place.start], *calls, *block.steps[place.stop :]], block.outputs
        )
        tokens[place] = [object() for _ in calls]
    return block


def _calls(block: StepBlock, found: Repeat) -> list[Step]:
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
    inner = {v: LocalValue(v.shape, v.dtype) for v in taken}
    body = renamed(StepBlock([inner[v] for v in taken], runs[0], given), inner)
    layer, calls = Layer(len(copies)), list[Step]()
    for copy in copies:
        blocks = [] if calls else [body]
        outputs = [copy.values[v] for v in given]
        calls.append(Step(CALL, {"layer": layer}, [copy.outer[v] for v in taken], outputs, None, blocks))
    return calls


def _given(block: StepBlock, runs: Sequence[Sequence[Step]], copies: Sequence[_Copy]) -> list[LocalValue]:
    """The values of the first run that it, or another one in its place, gives to steps outside of itself."""
    used_by: dict[LocalValue, set[int]] = {}
    for number, run in enumerate(runs):
        for step in run:
            for value in (*step.inputs, *step.captured):
                used_by.setdefault(value, set()).add(number)
    inside = {step for run in runs for step in run}
    outside = {v for step in block.steps if step not in inside for v in (*step.inputs, *step.captured)}
    outside.update(block.outputs)

    def is_given(value: LocalValue) -> bool:
        others = ((number, copy.values[value]) for number, copy in enumerate(copies))
        return any(v in outside or used_by.get(v, set()) - {number} for number, v in others)

    return [value for step in runs[0] for value in step.outputs if is_given(value)]
