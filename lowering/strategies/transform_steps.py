"""Which steps compute a Fourier transform whose dimensions are split: integers only, no arrays.

A dimension can be transformed where it is whole. Its axes move to another dimension by an all_to_all, one after the
other for several, and back to theirs in the end. Dimensions that are whole are transformed before, so that the
others' axes may stay where they went. The real transforms are bound to an order: RFFT begins with the last dimension,
IRFFT ends with it.

Example: a two-dimensional transform of c64[64@x,32] over eight devices

    Transform((1,))  Move(of=0, source=0, target=1)  Transform((0,))  Move(of=0, source=1, target=0)

sends 7/8 of a block twice. Two alternatives are considered, and the one that sends least is taken: all split dimensions
gathered, and, for a transform of one split dimension, the four-step algorithm (Bailey 1990,
https://doi.org/10.1007/BF00162341), which sends 7/8 of a block three times and needs no other dimension. Real numbers
are transformed so as half as many complex ones, of which each meets the one mirrored at the middle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple


class Transform(NamedTuple):
    """One-dimensional transforms along whole dimensions, by XLA's `kind`."""

    dims: tuple[int, ...]
    kind: str


class Move(NamedTuple):
    """The axes of dimension `of` move from `source`, of which `length` elements are left, to `target`."""

    of: int
    source: int
    target: int
    length: int


class FourSteps(NamedTuple):
    """A complex transform along a split dimension."""

    dim: int


class Halves(NamedTuple):
    """A real transform along a split dimension: a complex one of half the length, by four steps."""

    dim: int


class Gather(NamedTuple):
    """A dimension becomes whole."""

    dim: int


class Cut(NamedTuple):
    """Of a whole dimension, each device keeps its block."""

    dim: int


Step = Transform | Move | FourSteps | Halves | Gather | Cut


@dataclass(frozen=True, slots=True)
class Problem:
    """A transform: of which kind, from which shape to which, of how many trailing dimensions, in how many shards each
    dimension is, and the bytes of an element before and after."""

    kind: str
    shape: tuple[int, ...]
    result: tuple[int, ...]
    rank: int
    shards: tuple[int, ...]
    itemsizes: tuple[float, float]

    @property
    def dims(self) -> range:
        """The transformed dimensions."""
        return range(len(self.shape) - self.rank, len(self.shape))

    @property
    def split(self) -> list[int]:
        return [d for d in self.dims if self.shards[d] > 1]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps, and the bytes that a device sends in those of each dimension's axes."""

    steps: tuple[Step, ...]
    sent: tuple[float, ...]

    def count(self, dim: int) -> int:
        """How many collectives run along a dimension's axes, but for what mirror images take beside the four steps."""
        return sum([_count_along(step, dim) for step in self.steps])


def _count_along(step: Step, dim: int) -> int:
    if isinstance(step, Move):
        return int(step.of == dim)
    if isinstance(step, FourSteps | Halves):
        return 3 * (step.dim == dim)
    return int(isinstance(step, Gather) and step.dim == dim)


@lru_cache(maxsize=1024)
def schedule(problem: Problem) -> Schedule:
    """The steps that send least."""
    return min(schedules(problem), key=lambda way: sum(way.sent))


def schedules(problem: Problem) -> list[Schedule]:
    """All that are considered."""
    ways = moved(problem), four_steps(problem), halves(problem), gathered(problem)
    return [way for way in ways if way is not None]


class _Run:
    """What lies where while steps are listed: the local size of every dimension, whose axes it carries (major to minor,
    with the size that each leaves behind), and which dimensions are still to be transformed."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.sizes = [-(-n // g) for n, g in zip(problem.shape, problem.shards, strict=True)]
        self.on: list[list[tuple[int, int]]] = [[] for _ in problem.shape]
        for d in problem.split:
            self.on[d] = [(d, problem.shape[d])]
        self.pending = list(problem.dims)
        self.itemsize = problem.itemsizes[0]
        self.steps: list[Step] = []
        self.sent = [0.0] * len(problem.shape)

    def finished(self) -> Schedule:
        return Schedule(tuple(self.steps), tuple(self.sent))

    def transform(self, dims: Sequence[int]) -> None:
        problem, last = self.problem, self.problem.dims[-1]
        kind = problem.kind if last in dims else problem.kind.replace("R", "")
        self.steps.append(Transform(tuple(dims), kind))
        self.pending = [d for d in self.pending if d not in dims]
        if last in dims:
            self.itemsize, self.sizes[last] = problem.itemsizes[1], problem.result[last]

    def eligible(self) -> list[int]:
        """The dimensions that may be transformed next, or, being whole, in one step with those."""
        last, pending = self.problem.dims[-1], self.pending
        if self.problem.kind == "RFFT" and last in pending and self.on[last]:
            return [last]
        if self.problem.kind == "IRFFT" and any(self.on[d] for d in pending if d != last):
            return [d for d in pending if d != last]
        return pending

    def move(self, source: int, target: int) -> None:
        """Moves the minor axes of a dimension, which some dimension has brought there."""
        of, length = self.on[source].pop()
        count, before = self.problem.shards[of], self.sizes[target]
        self.sizes[target] = -(-before // count)
        moving = math.prod(self.sizes) * count
        self.sizes[source] = length
        self.on[target].append((of, before))
        self.steps.append(Move(of, source, target, length))
        self.sent[of] += (count - 1) / count * moving * self.itemsize

    def target(self, source: int) -> int | None:
        """Where the minor axes of a dimension go: rather to one that is done, and that they divide."""
        home = self.on[source][-1][0]
        count = self.problem.shards[home]

        def cost(d: int) -> tuple[float, bool, int]:
            waste = -(-self.sizes[d] // count) * count / self.sizes[d]
            return waste * (2 if d in self.pending else 1), d != home, d

        others = [d for d in range(len(self.sizes)) if d != source and self.sizes[d] > 1]
        return min((d for d in others if d != home or not self.on[d]), key=cost, default=None)


def moved(problem: Problem) -> Schedule | None:
    """Dimension after dimension becomes whole; None where there is no other dimension, or no order of the ways back."""
    run = _Run(problem)
    while run.pending:
        eligible = run.eligible()
        whole = [d for d in eligible if not run.on[d]]
        if whole:
            run.transform(whole)
            continue
        # Axes of other dimensions first: they may go home, where those of a third one would be in their way.
        source = min(eligible, key=lambda d: run.on[d][-1][0] == d)
        while run.on[source]:
            target = run.target(source)
            if target is None:
                return None
            run.move(source, target)
    return run.finished() if _return(run) else None


def _return(run: _Run) -> bool:
    """Brings all axes back to their dimensions."""
    while any(of != d for d, carried in enumerate(run.on) for of, _ in carried):
        tops = [(d, carried[-1][0]) for d, carried in enumerate(run.on) if carried]
        back = next(((d, of) for d, of in tops if of != d and not run.on[of]), None)
        if back is None:
            return False
        run.move(*back)
    return True


def four_steps(problem: Problem) -> Schedule | None:
    """The four-step algorithm along the only split dimension; None where it cannot be."""
    if len(problem.split) != 1 or problem.kind not in ("FFT", "IFFT"):
        return None
    [dim] = problem.split
    count, run = problem.shards[dim], _Run(problem)
    if problem.shape[dim] % count**2:
        return None
    whole = [d for d in problem.dims if d != dim]
    if whole:
        run.transform(whole)
    run.steps.append(FourSteps(dim))
    run.sent[dim] = 3 * (count - 1) / count * math.prod(run.sizes) * run.itemsize
    return run.finished()


def halves(problem: Problem) -> Schedule | None:
    """A real transform whose only split dimension is the last one; None where it cannot be.

    Beyond the four steps every device sends its block to its mirror image, one element more, or two, and a row of
    elements to its neighbour, as blocks of the complex numbers are longer by one.
    """
    last, is_inverse = problem.dims[-1], problem.kind == "IRFFT"
    complex_, real = (problem.shape, problem.result) if is_inverse else (problem.result, problem.shape)
    count, size = problem.shards[last], real[last]
    if "R" not in problem.kind or problem.split != [last] or size % (2 * count**2) or complex_[last] != size // 2 + 1:
        return None
    run, block, others = _Run(problem), size // 2 // count, list(problem.dims[:-1])
    if others and is_inverse:
        run.transform(others)
    run.steps.append(Halves(last))
    rows = math.prod(n for d, n in enumerate(run.sizes) if d != last) * max(problem.itemsizes)
    run.sent[last] = (3 * (count - 1) / count * block + block + 1 + is_inverse + count) * rows
    run.sizes[last], run.itemsize = 2 * block if is_inverse else block + 1, problem.itemsizes[1]
    run.pending.remove(last)
    if others and not is_inverse:
        run.transform(others)
    return run.finished()


def gathered(problem: Problem) -> Schedule:
    """Every device transforms all of the split dimensions."""
    run = _Run(problem)
    for d in problem.split:
        run.steps.append(Gather(d))
        run.sent[d] = (problem.shards[d] - 1) * math.prod(run.sizes) * run.itemsize
        run.sizes[d] = problem.shape[d]
    run.transform(list(problem.dims))
    return replace(run.finished(), steps=(*run.steps, *(Cut(d) for d in problem.split)))
