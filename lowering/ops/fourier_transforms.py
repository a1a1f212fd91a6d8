"""Fourier transforms whose dimensions are split: steps that make each dimension whole in turn, and the emitter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sdy_jax.ir.graph import Op
from sdy_jax.ir.meshes import Axes, axes_size
from sdy_jax.ir.shardings import OpShardingRule
from sdy_jax.lowering.ops.collectives import movement
from sdy_jax.lowering.ops.collectives.movement import row_major
from sdy_jax.lowering.ops.re_emission import scope_name
from sdy_jax.lowering.ops.registry import Inside, LocalOp, Shards, Strategy, emitter, pass_through_factors, strategies
from sdy_jax.lowering.ops.shards import lengthened, offset, shards_of_dims

# Which steps compute a Fourier transform whose dimensions are split: integers only, no arrays.
#
# A dimension can be transformed where it is whole. Its axes move to another dimension by an all_to_all, one after the
# other for several, and back to theirs in the end. Dimensions that are whole are transformed before, so that the
# others' axes may stay where they went. The real transforms are bound to an order: RFFT begins with the last
# dimension, IRFFT ends with it.
#
# Example: a two-dimensional transform of c64[64@x,32] over eight devices
#
#     Transform((1,))  Move(of=0, source=0, target=1)  Transform((0,))  Move(of=0, source=1, target=0)
#
# sends 7/8 of a block twice. Two alternatives are considered, and the one that sends least is taken: all split
# dimensions gathered, and, for a transform of one split dimension, the four-step algorithm (Bailey 1990,
# https://doi.org/10.1007/BF00162341), which sends 7/8 of a block three times and needs no other dimension. Real
# numbers are transformed so as half as many complex ones, of which each meets the one mirrored at the middle.


class Transform(NamedTuple):
    """One-dimensional transforms along whole dimensions, by XLA's `kind`."""

    dims: tuple[int, ...]
    kind: str


class MoveAxes(NamedTuple):
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


class CutDimension(NamedTuple):
    """Of a whole dimension, each device keeps its block."""

    dim: int


Step = Transform | MoveAxes | FourSteps | Halves | Gather | CutDimension


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
class TransformSchedule:
    """The steps, and the bytes that a device sends in those of each dimension's axes."""

    steps: tuple[Step, ...]
    sent: tuple[float, ...]

    def count(self, dim: int) -> int:
        """How many collectives run along a dimension's axes, but for what mirror images take beside the four steps."""
        return sum([_count_along(step, dim) for step in self.steps])


def _count_along(step: Step, dim: int) -> int:
    if isinstance(step, MoveAxes):
        return int(step.of == dim)
    if isinstance(step, FourSteps | Halves):
        return 3 * (step.dim == dim)
    return int(isinstance(step, Gather) and step.dim == dim)


@lru_cache(maxsize=1024)
def schedule(problem: Problem) -> TransformSchedule:
    """The steps that send least."""
    return min(schedules(problem), key=lambda way: sum(way.sent))


def schedules(problem: Problem) -> list[TransformSchedule]:
    """All that are considered."""
    ways = moved(problem), four_steps(problem), halves(problem), gathered(problem)
    return [way for way in ways if way is not None]


class _Progress:
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

    def finished(self) -> TransformSchedule:
        return TransformSchedule(tuple(self.steps), tuple(self.sent))

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
        self.steps.append(MoveAxes(of, source, target, length))
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


def moved(problem: Problem) -> TransformSchedule | None:
    """Dimension after dimension becomes whole; None where there is no other dimension, or no order of the ways back."""
    run = _Progress(problem)
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


def _return(run: _Progress) -> bool:
    """Brings all axes back to their dimensions."""
    while any(of != d for d, carried in enumerate(run.on) for of, _ in carried):
        tops = [(d, carried[-1][0]) for d, carried in enumerate(run.on) if carried]
        back = next(((d, of) for d, of in tops if of != d and not run.on[of]), None)
        if back is None:
            return False
        run.move(*back)
    return True


def four_steps(problem: Problem) -> TransformSchedule | None:
    """The four-step algorithm along the only split dimension; None where it cannot be."""
    if len(problem.split) != 1 or problem.kind not in ("FFT", "IFFT"):
        return None
    [dim] = problem.split
    count, run = problem.shards[dim], _Progress(problem)
    if problem.shape[dim] % count**2:
        return None
    whole = [d for d in problem.dims if d != dim]
    if whole:
        run.transform(whole)
    run.steps.append(FourSteps(dim))
    run.sent[dim] = 3 * (count - 1) / count * math.prod(run.sizes) * run.itemsize
    return run.finished()


def halves(problem: Problem) -> TransformSchedule | None:
    """A real transform whose only split dimension is the last one; None where it cannot be.

    Beyond the four steps every device sends its block to its mirror image, one element more, or two, and a row of
    elements to its neighbour, as blocks of the complex numbers are longer by one.
    """
    last, is_inverse = problem.dims[-1], problem.kind == "IRFFT"
    complex_, real = (problem.shape, problem.result) if is_inverse else (problem.result, problem.shape)
    count, size = problem.shards[last], real[last]
    if "R" not in problem.kind or problem.split != [last] or size % (2 * count**2) or complex_[last] != size // 2 + 1:
        return None
    run, block, others = _Progress(problem), size // 2 // count, list(problem.dims[:-1])
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


def gathered(problem: Problem) -> TransformSchedule:
    """Every device transforms all of the split dimensions."""
    run = _Progress(problem)
    for d in problem.split:
        run.steps.append(Gather(d))
        run.sent[d] = (problem.shards[d] - 1) * math.prod(run.sizes) * run.itemsize
        run.sizes[d] = problem.shape[d]
    run.transform(list(problem.dims))
    return replace(run.finished(), steps=(*run.steps, *(CutDimension(d) for d in problem.split)))


# Fourier transforms: split dimensions become whole one after the other, by the steps above.


@strategies("stablehlo.fft")
def _fft_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    mapping, rank = rule.mappings[0], op.operands[0].rank
    factors = {d: mapping[d] for d in range(rank - len(op.ints("fft_length")), rank)}

    def steps(shards: Shards) -> TransformSchedule:
        return schedule(_problem(op, shards_of_dims(mapping, shards)))

    def sent_along(dim: int, kind: str) -> Inside:
        def sent(shards: Shards) -> float:
            found = steps(shards)
            is_gathered = any(isinstance(step, Gather) for step in found.steps)
            return found.sent[dim] / op.results[0].itemsize if is_gathered == (kind == "all_gather") else 0

        return Inside(kind, frozenset(factors[dim]), 1, sent, lambda shards: steps(shards).count(dim))

    inside = tuple(sent_along(dim, kind) for dim in factors for kind in ("all_to_all", "all_gather"))
    splittable = pass_through_factors(rule).union(*factors.values())
    return [Strategy("transposes", splittable, inside=inside, work=rule.factors_of[0])]


def _problem(op: Op, shards: tuple[int, ...]) -> Problem:
    operand, result = op.operands[0], op.results[0]
    shapes = operand.shape or (), result.shape or ()
    kind = op.text("fft_type")
    return Problem(kind, *shapes, len(op.ints("fft_length")), shards, (operand.itemsize, result.itemsize))


@emitter("stablehlo.fft")
def _fft(local: LocalOp, operand: jax.Array) -> jax.Array:
    axes = [local.operand_axes(0, d) for d in range(operand.ndim)]
    problem = _problem(local.op, tuple(axes_size(along, local.mesh.mesh) for along in axes))
    run, x = _Run(local, problem, axes), operand
    for step in schedule(problem).steps:
        x = run.step(x, step)
    return x


class _Run:
    """One run of the steps on the running device."""

    def __init__(self, local: LocalOp, problem: Problem, axes: Sequence[Axes]):
        self._local, self._problem, self._axes = local, problem, axes

    def step(self, x: jax.Array, step: Step) -> jax.Array:
        if isinstance(step, Transform):
            return self._transform(x, step)
        dim = step.of if isinstance(step, MoveAxes) else step.dim
        with jax.named_scope(scope_name(self._local.op.name, self._axes[dim], self._local.op.source)):
            if isinstance(step, MoveAxes):
                return self._move(x, step)
            if isinstance(step, Gather | CutDimension):
                return self._change(x, step)
            run = self._halves if isinstance(step, Halves) else self._all
            return jnp.moveaxis(run(jnp.moveaxis(x, dim, -1), self._axes[dim]), -1, dim)

    def _transform(self, x: jax.Array, step: Transform) -> jax.Array:
        last = self._problem.dims[-1]
        lengths = [self._problem.result[d] if d == last and step.kind == "IRFFT" else x.shape[d] for d in step.dims]
        return _transformed(x, step.dims, step.kind, lengths)

    def _move(self, x: jax.Array, step: MoveAxes) -> jax.Array:
        axes = self._axes[step.of]
        x = lengthened(x, step.target, -x.shape[step.target] % self._count(step.of))
        x = movement.all_to_all(x, [(axes, step.source, step.target)], self._local.mesh)
        return lax.slice_in_dim(x, 0, step.length, axis=step.source)

    def _change(self, x: jax.Array, step: Gather | CutDimension) -> jax.Array:
        dim = step.dim
        axes, count = self._axes[dim], self._count(dim)
        if isinstance(step, Gather):
            x = movement.all_gather(x, movement.along(x, dim, axes), self._local.mesh)
            return lax.slice_in_dim(x, 0, self._problem.shape[dim], axis=dim)
        x = lengthened(x, dim, -x.shape[dim] % count)
        block = x.shape[dim] // count
        return lax.dynamic_slice_in_dim(x, offset(self._local, axes, block), block, dim)

    def _four_steps(self, x: jax.Array, axes: Axes, kind: str) -> jax.Array:
        """Element n = n1 m + n2 of g m ones, over g shards of m, contributes to element k = k1 + g k2 of the result: it
        is transformed along n1, turned by exp(-2 pi i k1 n2 / g m), and transformed along n2."""
        mesh, rank = self._local.mesh, x.ndim
        count = axes_size(axes, mesh.mesh)
        batch, m = x.shape[:-1], x.shape[-1]

        def exchanged(x: jax.Array, source: int, target: int) -> jax.Array:
            return movement.all_to_all(x, [(axes, source, target)], mesh)

        x = exchanged(x.reshape(*batch, 1, m), rank - 1, rank)  # n1 whole, a block of n2
        x = _transformed(x, (rank - 1,), kind, [count])
        k1 = lax.broadcasted_iota(jnp.int32, (count, m // count), 0)
        n2 = lax.broadcasted_iota(jnp.int32, (count, m // count), 1) + offset(self._local, axes, m // count)
        x *= _turn(k1 * n2, count * m, kind, x.dtype)
        x = exchanged(x, rank, rank - 1)  # a block of k1, n2 whole
        x = exchanged(_transformed(x, (rank,), kind, [m]), rank - 1, rank)  # k1 whole, a block of k2
        return jnp.swapaxes(x, -1, -2).reshape(*batch, m)

    def _all(self, x: jax.Array, axes: Axes) -> jax.Array:
        """A complex transform of the last dimension."""
        return self._four_steps(x, axes, self._problem.kind)

    def _halves(self, x: jax.Array, axes: Axes) -> jax.Array:
        """A real transform of the last dimension, or its inverse, of n elements.

        Even and odd elements are real and imaginary parts of n/2 complex ones, with the transform z; for z' mirrored,
        element n/2 - k in place k, element k of the result is (z + conj z')/2 - i exp(-2 pi i k / n) (z - conj z')/2.
        """
        of_kind = self._of_halves if self._problem.kind == "IRFFT" else self._by_halves
        return of_kind(x, axes, axes_size(axes, self._local.mesh.mesh))

    def _by_halves(self, x: jax.Array, axes: Axes, count: int) -> jax.Array:
        me = self._local.block_index(axes)
        z = self._four_steps(lax.complex(x[..., 0::2], x[..., 1::2]), axes, "FFT")
        block, k = z.shape[-1], self._elements(z, axes)
        mirrored = self._mirrored(z, axes).conj()
        even, odd = (z + mirrored) / 2, _times_i((mirrored - z) / 2)
        found = even + _turn(k, 2 * block * count, "FFT", z.dtype) * odd
        # Blocks of the result have one element more: block t begins with element t of this one.
        middle = jnp.concatenate([(even - odd)[..., :1], found[..., 1:count]], -1)
        begins = jnp.where(me == 0, middle, found[..., :count])
        pairs = [(t, (t - 1) % count) for t in range(count)]
        following = movement.permuted(begins, axes, pairs, self._local.mesh)
        return lax.dynamic_slice_in_dim(jnp.concatenate([found, following], -1), me, block + 1, -1)

    def _of_halves(self, x: jax.Array, axes: Axes, count: int) -> jax.Array:
        me, block = self._local.block_index(axes), x.shape[-1] - 1
        pairs = [(t, (t + 1) % count) for t in range(count)]
        before = movement.permuted(x[..., -count:], axes, pairs, self._local.mesh)
        middle = x[..., block + 1 - count : block + 2 - count]
        middle = movement.permuted(middle, axes, [(count - 1, 0)], self._local.mesh)
        x = lax.dynamic_slice_in_dim(jnp.concatenate([before, x], -1), count - me, block, -1)
        # What is its own mirror image counts as real.
        k, mirrored = self._elements(x, axes), self._mirrored(x, axes).conj()
        x = jnp.where(k == 0, x.real.astype(x.dtype), x)
        mirrored = jnp.where(k == 0, middle.real.astype(x.dtype), mirrored)
        odd = _turn(k, 2 * block * count, "IFFT", x.dtype) * (x - mirrored) / 2
        z = self._four_steps((x + mirrored) / 2 + _times_i(odd), axes, "IFFT")
        return jnp.stack([z.real, z.imag], -1).reshape(*z.shape[:-1], 2 * block)

    def _elements(self, x: jax.Array, axes: Axes) -> jax.Array:
        """The indices of this device's elements of the last dimension."""
        return lax.broadcasted_iota(jnp.int32, x.shape[-1:], 0) + offset(self._local, axes, x.shape[-1])

    def _mirrored(self, z: jax.Array, axes: Axes) -> jax.Array:
        """This device's block of elements 0, n - 1, n - 2, ..., 1 of n."""
        count, mesh = axes_size(axes, self._local.mesh.mesh), self._local.mesh
        other = movement.permuted(z, axes, [(t, count - 1 - t) for t in range(count)], mesh)
        first = movement.permuted(z[..., :1], axes, [(t, -t % count) for t in range(count)], mesh)
        return jnp.concatenate([first, jnp.flip(other, -1)[..., :-1]], -1)

    def _count(self, dim: int) -> int:
        return self._problem.shards[dim]


def _times_i(x: jax.Array) -> jax.Array:
    return lax.complex(-x.imag, x.real)


def _turn(part: jax.Array, of: int, kind: str, dtype: Any) -> jax.Array:
    """exp(-2 pi i part / of), conjugated for an inverse, for 0 <= part < of."""
    real = jnp.finfo(dtype).dtype
    # Around zero, where the quotient is exact to the type's precision.
    fraction = jnp.where(2 * part > of, part - of, part).astype(real) / np.array(of, real)
    angle = fraction * np.array(2 * math.pi if kind == "IFFT" else -2 * math.pi, real)
    return lax.complex(jnp.cos(angle), jnp.sin(angle))


def _transformed(x: jax.Array, dims: Sequence[int], kind: str, lengths: Sequence[int]) -> jax.Array:
    """One-dimensional transforms along dimensions in any place."""
    trailing = range(x.ndim - len(dims), x.ndim)
    # `lax.fft` is a function under jit, whose name profilers would show.
    x = lax.fft_p.bind(jnp.moveaxis(x, dims, trailing), fft_type=lax.FftType[kind], fft_lengths=tuple(lengths))
    return jnp.moveaxis(row_major(x), trailing, dims)
