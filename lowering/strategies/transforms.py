"""Fourier transforms: split dimensions become whole one after the other, by the steps of `transform_steps.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sdy_jax.ir.graph import Op
from sdy_jax.lowering.collectives import data_movement
from sdy_jax.lowering.collectives.compiler_forms import row_major
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.emission.names import scope_name
from sdy_jax.lowering.strategies.registry import Inside, Shards, Strategy, pass_through_factors, strategies
from sdy_jax.lowering.strategies.shards import lengthened, offset
from sdy_jax.lowering.strategies.transform_steps import (
    Cut,
    Gather,
    Halves,
    Move,
    Problem,
    Schedule,
    Step,
    Transform,
    schedule,
)
from sdy_jax.representation.mesh import Axes, axes_size
from sdy_jax.representation.rule import OpShardingRule


@strategies("stablehlo.fft")
def _fft_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    mapping, rank = rule.mappings[0], op.operands[0].rank
    factors = {d: mapping[d] for d in range(rank - len(op.ints("fft_length")), rank)}

    def steps(shards: Shards) -> Schedule:
        return schedule(_problem(op, tuple([math.prod([shards[f] for f in fs]) for fs in mapping])))

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
        dim = step.of if isinstance(step, Move) else step.dim
        with jax.named_scope(scope_name(self._local.op.name, self._axes[dim], self._local.op.source)):
            if isinstance(step, Move):
                return self._move(x, step)
            if isinstance(step, Gather | Cut):
                return self._change(x, step)
            run = self._halves if isinstance(step, Halves) else self._all
            return jnp.moveaxis(run(jnp.moveaxis(x, dim, -1), self._axes[dim]), -1, dim)

    def _transform(self, x: jax.Array, step: Transform) -> jax.Array:
        last = self._problem.dims[-1]
        lengths = [self._problem.result[d] if d == last and step.kind == "IRFFT" else x.shape[d] for d in step.dims]
        return _transformed(x, step.dims, step.kind, lengths)

    def _move(self, x: jax.Array, step: Move) -> jax.Array:
        axes = self._axes[step.of]
        x = lengthened(x, step.target, -x.shape[step.target] % self._count(step.of))
        x = data_movement.all_to_all(x, [(axes, step.source, step.target)], self._local.mesh)
        return lax.slice_in_dim(x, 0, step.length, axis=step.source)

    def _change(self, x: jax.Array, step: Gather | Cut) -> jax.Array:
        dim = step.dim
        axes, count = self._axes[dim], self._count(dim)
        if isinstance(step, Gather):
            x = data_movement.all_gather(x, [axes if d == dim else () for d in range(x.ndim)], self._local.mesh)
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
            return data_movement.all_to_all(x, [(axes, source, target)], mesh)

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
        following = data_movement.permuted(begins, axes, pairs, self._local.mesh)
        return lax.dynamic_slice_in_dim(jnp.concatenate([found, following], -1), me, block + 1, -1)

    def _of_halves(self, x: jax.Array, axes: Axes, count: int) -> jax.Array:
        me, block = self._local.block_index(axes), x.shape[-1] - 1
        pairs = [(t, (t + 1) % count) for t in range(count)]
        before = data_movement.permuted(x[..., -count:], axes, pairs, self._local.mesh)
        middle = x[..., block + 1 - count : block + 2 - count]
        middle = data_movement.permuted(middle, axes, [(count - 1, 0)], self._local.mesh)
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
        other = data_movement.permuted(z, axes, [(t, count - 1 - t) for t in range(count)], mesh)
        first = data_movement.permuted(z[..., :1], axes, [(t, -t % count) for t in range(count)], mesh)
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
