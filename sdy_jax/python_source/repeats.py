"""Where a program does the same again and again, as layers do: equal runs of steps that follow each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from sdy_jax.python_source.literals import param_text
from sdy_jax.python_source.steps import Block, Step, Value

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


def best_repeat(block: Block, tokens: Sequence[Hashable]) -> Repeat | None:
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

    def __init__(self, block: Block):
        self._steps = block.steps
        self._made = {value: i for i, step in enumerate(block.steps) for value in step.outputs}
        self._last: dict[Value, int] = {}
        for i, step in enumerate(block.steps):
            self._last.update(dict.fromkeys([*step.inputs, *step.captured], i))
        self._last.update(dict.fromkeys(block.outputs, len(block.steps)))

    def passed(self, first: int, end: int) -> int:
        """How many values steps take from outside and give to others."""
        steps = self._steps[first:end]
        taken = {v for step in steps for v in step.inputs if v.constant is None and self._made.get(v, -1) < first}
        given = sum(self._last.get(v, -1) >= end for step in steps for v in step.outputs)
        return len(taken) + given
