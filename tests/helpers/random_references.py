"""Random functions of a few arrays, written for any sizes: what a kernel's reference may do, right or wrong on blocks.

Each is a list of steps that are drawn for example shapes. A step says dimensions, not sizes, so that the function can
be called on blocks; where sizes then do not fit, it raises, as users' functions do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Pool = list[Any]
Step = Callable[[Pool], Any]

SIZES = (2, 3, 4, 6, 8)


@dataclass(frozen=True)
class RandomReference:
    """A function of arrays of `shapes`."""

    shapes: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]

    def __call__(self, *xs: Any) -> list[Any]:
        pool = list(xs)
        for step in self.steps:
            pool.append(step(pool))
        return [pool[i] for i in self.results]


def random_reference(seed: int) -> RandomReference:
    rng = np.random.default_rng(seed)
    sizes = rng.choice(SIZES, 3)
    shapes = tuple(tuple(int(n) for n in rng.choice(sizes, rng.integers(1, 4))) for _ in range(rng.integers(1, 4)))
    known, steps = list(shapes), list[Step]()
    while len(steps) < rng.integers(2, 7):
        step = _drawn(rng, known)
        if step is None:
            continue
        shape = jax.eval_shape(step, [jax.ShapeDtypeStruct(s, jnp.float32) for s in known]).shape
        if 0 < np.prod(shape, dtype=int) <= 512 and len(shape) < 5:
            steps.append(step)
            known.append(shape)
    last = len(known) - 1
    more = int(rng.integers(len(shapes), last + 1))
    return RandomReference(shapes, tuple(steps), (last,) if more == last else (last, more))


def _drawn(rng: np.random.Generator, shapes: Sequence[tuple[int, ...]]) -> Step | None:
    """A step on values of these shapes; None where the one that is drawn does not fit."""
    i = len(shapes) - 1 if rng.random() < 0.7 else int(rng.integers(len(shapes)))
    alike = [n for n, shape in enumerate(shapes) if shape == shapes[i]]
    j = int(rng.choice(alike)) if rng.random() < 0.5 else int(rng.integers(len(shapes)))
    rank = len(shapes[i])
    if not rank:
        return lambda pool: pool[i] * 2 + 1
    d = int(rng.integers(rank))
    steps = [step for step in (_of_one(rng, i, d, rank), _of_two(rng, i, j, shapes)) if step is not None]
    return steps[int(rng.integers(len(steps)))]


def _of_one(rng: np.random.Generator, i: int, d: int, rank: int) -> Step:
    e = (d + 1) % rank
    perm = tuple(int(n) for n in rng.permutation(rank))
    number = float(rng.choice([0.5, 2.0]))
    choices: list[Step] = [
        lambda pool: jnp.tanh(pool[i]) * number,
        lambda pool: pool[i].sum(d),
        lambda pool: pool[i].sum(d) * number,
        lambda pool: pool[i].max(d),
        lambda pool: pool[i].mean(d),
        lambda pool: pool[i] - pool[i].mean(d, keepdims=True),
        lambda pool: jax.nn.softmax(pool[i], d),
        lambda pool: jnp.cumsum(pool[i], d),
        lambda pool: jnp.sort(pool[i], d),
        lambda pool: jnp.flip(pool[i], d),
        lambda pool: jnp.roll(pool[i], 1, d),
        lambda pool: jnp.transpose(pool[i], perm),
        lambda pool: jnp.concatenate([pool[i], pool[i] * 2], d),
        lambda pool: jax.lax.slice_in_dim(pool[i], 0, 2, axis=d),
        lambda pool: jnp.repeat(pool[i], 2, d),
        lambda pool: jax.lax.pad(pool[i], 0.0, [(1, -1, 0) if n == d else (0, 0, 0) for n in range(rank)]),
        lambda pool: pool[i] * jax.lax.broadcasted_iota(jnp.float32, pool[i].shape, d),
        lambda pool: jnp.where(jax.lax.broadcasted_iota(jnp.int32, pool[i].shape, d) > 0, pool[i], 0.0),
        lambda pool: pool[i] / pool[i].shape[d],
        lambda pool: jnp.take(pool[i], jnp.array([1, 0]), axis=d),
        lambda pool: jax.lax.scan(lambda c, x: (c * 0.5 + x, c), jnp.zeros(pool[i].shape[1:]), pool[i])[1],
        lambda pool: jax.lax.scan(lambda c, x: (c + x.sum(), x * c), 0.0, pool[i])[1],
        lambda pool: jax.lax.map(lambda x: jnp.exp(-x * x), pool[i]),
        lambda pool: jax.lax.fori_loop(0, 3, lambda k, x: x * 0.5 + k, pool[i]),
        lambda pool: jax.lax.cond(pool[i].ndim > 1, jnp.sin, jnp.cos, pool[i]),
        lambda pool: _merged(pool[i], d) if d < rank - 1 else jnp.expand_dims(pool[i], d),
        lambda pool: (
            pool[i].reshape(*pool[i].shape[:d], -1, 2, *pool[i].shape[d + 1 :])
            if pool[i].shape[d] % 2 == 0
            else pool[i] * 3
        ),
        lambda pool: (
            pool[i].reshape(*pool[i].shape[:d], 2, -1, *pool[i].shape[d + 1 :])
            if pool[i].shape[d] % 2 == 0
            else -pool[i]
        ),
        lambda pool: (pool[i] > 0).astype(jnp.float32),
        lambda pool: jnp.square(pool[i]).sum((d, e) if rank > 1 else d),
        lambda pool: jnp.asarray(jnp.argmax(pool[i], d), jnp.float32),
    ]
    return choices[int(rng.integers(len(choices)))]


def _merged(x: Any, d: int) -> Any:
    return x.reshape(*x.shape[:d], -1, *x.shape[d + 2 :])


def _of_two(rng: np.random.Generator, i: int, j: int, shapes: Sequence[tuple[int, ...]]) -> Step | None:
    a, b = shapes[i], shapes[j]
    if a == b:
        return [lambda pool: pool[i] + pool[j], lambda pool: pool[i] * pool[j] - pool[j]][int(rng.integers(2))]
    pairs = [(m, n) for m in range(len(a)) for n in range(len(b)) if a[m] == b[n]]
    if not pairs:
        return lambda pool: pool[i] * pool[j].sum()
    m, n = pairs[int(rng.integers(len(pairs)))]
    return lambda pool: jnp.tensordot(pool[i], pool[j], axes=((m,), (n,)))
